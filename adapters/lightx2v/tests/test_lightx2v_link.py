"""Links of several roles in one process: what was offered by name comes whole, once, and to the right one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import ControlConfig, StoreConfig, TransferConfig
from moonrelay.errors import (
    Aborted,
    Cancelled,
    CapacityError,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    LeaseExpired,
    LeaseHeld,
    MoonrelayError,
    PeerLost,
    UnsupportedTensor,
)
from moonrelay_lightx2v.config import DECODER, ENCODER, TRANSFORMER, LinkConfig
from moonrelay_lightx2v.link import StageLink

KIB = 1024
CONTROL = ControlConfig(retry_s=0.2, claim_ttl_s=5.0, renew_s=0.2)


class Links:
    """Starts links and closes them."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.started: list[StageLink] = []
        self._pool = ThreadPoolExecutor(max_workers=8)

    def start(self, role: str, *, dials: StageLink | None = None, pool: int = 256 * KIB, **more: Any) -> StageLink:
        sends = role == ENCODER or (role == TRANSFORMER and more.pop("sends", True))
        address = () if dials is None else (dials.address,)
        given: dict[str, Any] = {"transfer_timeout_s": 20.0, "peer_timeout_s": 10.0, "control": CONTROL, **more}
        link = StageLink(
            LinkConfig(
                role=role,
                listens=("127.0.0.1", 0) if sends else None,
                dials=tuple(one for one in address if one is not None),
                transfer=TransferConfig(engine=self.engine, pool_bytes=pool),
                **given,
            )
        )
        link.start()
        self.started.append(link)
        return link

    def later(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._pool.submit(call, *args)

    def close(self) -> None:
        for link in reversed(self.started):
            link.close()
        self._pool.shutdown()


@pytest.fixture(params=["memory", "shm"])
def links(request: pytest.FixtureRequest) -> Iterator[Links]:
    made = Links(request.param)
    yield made
    made.close()


def tree(seed: float, floats: int = 64) -> dict[str, Any]:
    return {"latents": torch.full((floats,), seed), "none": None, "latent_shape": [1, 2]}


def send(link: StageLink, names: tuple[str, ...], seed: float, floats: int = 64) -> None:
    link.begin(names)
    link.send(tree(seed, floats))
    link.end()


def take(link: StageLink, names: tuple[str, ...]) -> float:
    """Receive and consume; return the seed of what came."""
    link.begin(names)
    try:
        data, _ = link.receive()
    except BaseException as exc:
        link.end(exc)
        raise
    seeds = set(data["latents"].tolist())
    link.end()
    assert len(seeds) == 1
    return float(seeds.pop())


def settle(*all_links: StageLink) -> None:
    """Wait until nothing is held."""
    clock, condition = SystemClock(), threading.Condition()
    deadline = Deadline(10.0, clock)
    while any(any(link.in_use().values()) for link in all_links):
        assert not deadline.expired, [dict(link.in_use()) for link in all_links]
        with condition:
            condition.wait(0.02)


@contextmanager
def request(link: StageLink, *names: str) -> Iterator[None]:
    link.begin(names)
    try:
        yield
    except BaseException as exc:
        link.end(exc)
        raise
    link.end()


# -- what comes -------------------------------------------------------------------------------------------------------


def test_a_tree_comes_bit_for_bit(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    sent = {
        "context": torch.randn(1, 5, 8).bfloat16(),
        "context_null": None,
        "fp32": torch.randn(2, 3, dtype=torch.float32),
        "strided": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4).transpose(0, 2),
        "scalar": torch.tensor(1.5, dtype=torch.float16),
        "images": [{"image_latents": torch.randn(1, 4, 8)}, {"image_latents": torch.randn(1, 9, 8)}],
        "info": [(32, 48), (64, 48)],
        "nothing": torch.empty(0, 3),
        "latent_shape": [16, 2, 4, 6],
        "on": True,
    }
    with request(encoder, "task:a"):
        encoder.send(sent, metadata={"auto_height": 32})
    with request(transformer, "task:a"):
        found, metadata = transformer.receive()
        assert metadata == {"auto_height": 32}
        assert list(found) == list(sent)
        assert same(found, sent)
        del found
    settle(encoder, transformer)


def same(left: Any, right: Any) -> bool:
    if isinstance(right, torch.Tensor):
        return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(left, right)  # no NaN among them
    if isinstance(right, dict):
        return type(left) is dict and left.keys() == right.keys() and all(same(left[k], right[k]) for k in right)
    if isinstance(right, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def test_the_sender_may_change_its_tensors_at_once(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    mine = torch.ones(64)
    with request(encoder, "task:a"):
        encoder.send({"latents": mine})
        mine.zero_()
    assert take(transformer, ("task:a",)) == 1.0


def test_what_was_received_may_be_sent_on_and_changed(links: Links) -> None:
    """It lies in the pool already, where nothing has to be copied to be sent."""
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder)
    decoder = links.start(DECODER, dials=transformer)
    send(encoder, ("task:a",), 1.0)
    with request(transformer, "task:a"):
        data, _ = transformer.receive()
        transformer.send({"latents": data["latents"]})
        data["latents"].fill_(9.0)
    assert take(decoder, ("task:a",)) == 1.0


def test_a_receivers_edit_in_place_changes_nobody_elses(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    send(encoder, ("task:a", "same:x"), 1.0)
    transformer.begin(("task:a",))
    data, _ = transformer.receive()
    data["latents"].fill_(9.0)
    transformer.end(RuntimeError("it goes to another one"))
    other = links.start(TRANSFORMER, dials=encoder, sends=False)
    assert take(other, ("task:a",)) == 1.0
    assert set(data["latents"].tolist()) == {9.0}, "and nobody changes the editor's"


def test_what_was_received_outlives_its_request(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    send(encoder, ("task:a",), 1.0)
    with request(transformer, "task:a"):
        kept, _ = transformer.receive()
    for number in range(20):
        send(encoder, (f"task:{number}",), 5.0, floats=KIB)
        take(transformer, (f"task:{number}",))
    assert set(kept["latents"].tolist()) == {1.0}


def test_a_receiver_may_wait_before_anything_is_sent(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    waiting = links.later(take, transformer, ("task:a",))
    send(encoder, ("task:a",), 2.0)
    assert waiting.result(20) == 2.0


def test_three_stages(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder)
    decoder = links.start(DECODER, dials=transformer)
    decoded = links.later(take, decoder, ("task:a",))
    send(encoder, ("task:a",), 2.0)
    with request(transformer, "task:a"):
        data, _ = transformer.receive()
        transformer.send({"latents": data["latents"] + 1})
        del data
    assert decoded.result(20) == 3.0
    settle(encoder, transformer, decoder)


# -- whose it is ------------------------------------------------------------------------------------------------------


def test_reordered_requests_get_their_own(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    for number in range(4):
        send(encoder, (f"task:e{number}", f"same:{number}"), float(number))
    assert [take(transformer, (f"task:t{number}", f"same:{number}")) for number in (3, 1, 0, 2)] == [3.0, 1.0, 0.0, 2.0]


def test_different_requests_are_never_mixed(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False, transfer_timeout_s=1.0)
    send(encoder, ("task:a", "same:a"), 1.0)
    with pytest.raises(DeadlineExceeded) as caught:
        take(transformer, ("task:b", "same:b"))
    assert "task:b" in str(caught.value)
    assert "data_bootstrap_room" in str(caught.value), "the remedy"
    assert take(transformer, ("task:c", "same:a")) == 1.0, "and it is still there for its own"


def test_two_identical_requests_get_one_payload_each(links: Links) -> None:
    encoder = links.start(ENCODER, control=ControlConfig(claim_ttl_s=60.0, retry_s=0.2))
    first = links.start(TRANSFORMER, dials=encoder, sends=False)
    second = links.start(TRANSFORMER, dials=encoder, sends=False)
    taken = [links.later(take, link, (f"task:{n}", "same:x")) for n, link in enumerate((first, second))]
    send(encoder, ("task:e1", "same:x"), 1.0)
    send(encoder, ("task:e2", "same:x"), 1.0)
    assert [one.result(20) for one in taken] == [1.0, 1.0]
    settle(encoder, first, second)


def test_the_second_of_two_identical_requests_waits_for_its_payload(links: Links) -> None:
    """While the first one's is at work it is no answer: it will be consumed."""
    encoder = links.start(ENCODER, control=ControlConfig(claim_ttl_s=60.0, retry_s=0.2))
    first = links.start(TRANSFORMER, dials=encoder, sends=False)
    second = links.start(TRANSFORMER, dials=encoder, sends=False)
    send(encoder, ("task:e1", "same:x"), 1.0)
    first.begin(("task:1", "same:x"))
    first.receive()
    waiting = links.later(take, second, ("task:2", "same:x"))
    first.end()
    send(encoder, ("task:e2", "same:x"), 1.0)
    assert waiting.result(20) == 1.0
    settle(encoder, first, second)


@pytest.mark.parametrize("own", ["task:1", "task:11"], ids=["one id for all roles", "each role's own id"])
def test_who_waits_for_what_another_holds_takes_the_next_that_is_the_same(links: Links, own: str) -> None:
    """Two transformers, and two requests that ask for the same: the one that is idle takes what came first."""
    encoder = links.start(ENCODER)
    idle, busy = (links.start(TRANSFORMER, dials=encoder, sends=False) for _ in range(2))
    send(encoder, ("task:1", "same:x"), 1.0)
    idle.begin(("task:2", "same:x"))
    idle.receive()
    late = links.later(take, busy, (own, "same:x"))
    with pytest.raises(TimeoutError):
        late.result(0.5)
    send(encoder, ("task:2", "same:x"), 1.0)
    assert late.result(18.0) == 1.0, "while the other one still computes"
    idle.end()


def test_a_given_up_request_fails_no_other_one_that_asks_for_the_same(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder)
    decoder = links.start(DECODER, dials=transformer)
    encoder.begin(("task:1", "same:x"))
    encoder.end(Cancelled("its client gave it up"))
    with pytest.raises(Aborted, match="gave it up") as told:
        take(transformer, ("task:1", "same:x"))  # and tells its own receivers why
    assert told.value.context["cause"] == Cancelled.code
    again = ("task:1.2", "same:x")
    received = links.later(take, decoder, again)
    send(encoder, again, 1.0)
    transformer.begin(again)
    transformer.receive()
    transformer.send(tree(2.0))
    transformer.end()
    assert received.result(15.0) == 2.0


@pytest.mark.parametrize("timeout_s", [0.1, 0.5, 1.0])
def test_who_waits_for_what_another_holds_is_told_so_at_its_deadline(links: Links, timeout_s: float) -> None:
    encoder = links.start(ENCODER, control=ControlConfig(claim_ttl_s=60.0, retry_s=0.2))
    first = links.start(TRANSFORMER, dials=encoder, sends=False)
    second = links.start(TRANSFORMER, dials=encoder, sends=False, transfer_timeout_s=timeout_s)
    send(encoder, ("task:1",), 1.0)
    first.begin(("task:1",))
    first.receive()
    second.begin(("task:1",))
    with pytest.raises(LeaseHeld):
        second.receive()
    second.end(LeaseHeld("it is held"))
    first.end()
    settle(encoder, first, second)


def test_who_came_too_late_keeps_nothing_alive(links: Links) -> None:
    """An error that is caught on the way is garbage at once: its frames would hold what the request got later."""
    encoder = links.start(ENCODER, control=ControlConfig(claim_ttl_s=60.0, retry_s=0.2))
    first = links.start(TRANSFORMER, dials=encoder, sends=False)
    second = links.start(TRANSFORMER, dials=encoder, sends=False)
    send(encoder, ("task:e1", "same:x"), 1.0)
    first.begin(("task:1", "same:x"))
    first.receive()
    gc.disable()
    try:
        waiting = links.later(take, second, ("task:2", "same:x"))
        threading.Event().wait(0.5)
        first.end()
        send(encoder, ("task:e2", "same:x"), 1.0)
        assert waiting.result(20) == 1.0
        settle(encoder, first, second)
    finally:
        gc.enable()


def test_a_request_that_is_sent_again_replaces_what_nobody_took(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    send(encoder, ("task:a",), 1.0)
    send(encoder, ("task:a",), 2.0)
    assert encoder.in_use()["payloads"] == 1
    assert take(transformer, ("task:a",)) == 2.0
    settle(encoder, transformer)


def test_what_failed_is_there_for_another_try_at_once(links: Links) -> None:
    encoder = links.start(ENCODER, control=ControlConfig(claim_ttl_s=60.0, retry_s=0.2))
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    send(encoder, ("task:a",), 1.0)
    transformer.begin(("task:a",))
    transformer.receive()
    transformer.end(RuntimeError("out of memory"))
    assert take(transformer, ("task:a",)) == 1.0
    settle(encoder, transformer)


# -- what fails -------------------------------------------------------------------------------------------------------


def test_a_failed_stage_reaches_the_one_that_waits_with_its_text(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder)
    decoder = links.start(DECODER, dials=transformer)
    waits = links.later(take, decoder, ("task:a",))
    works = links.later(take, transformer, ("task:a",))
    encoder.begin(("task:a",))
    encoder.end(RuntimeError("no tokenizer"))
    with pytest.raises(Aborted, match="encoder failed: no tokenizer"):
        works.result(10)
    with pytest.raises(Aborted, match=r"transformer failed: .*encoder failed: no tokenizer"):
        waits.result(10)


def test_a_failed_stage_tells_who_comes_later(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    encoder.begin(("task:a",))
    encoder.end(ValueError())
    with pytest.raises(Aborted, match="encoder failed: ValueError"):
        take(transformer, ("task:a",))
    send(encoder, ("task:b",), 3.0)
    assert take(transformer, ("task:b",)) == 3.0


def test_a_request_that_was_never_ended_is_given_back(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder)
    decoder = links.start(DECODER, dials=transformer)
    send(encoder, ("task:a",), 1.0)
    transformer.begin(("task:a",))
    transformer.receive()
    transformer.begin(("task:b",))
    with pytest.raises(Aborted, match="another request began"):
        take(decoder, ("task:a",))
    transformer.end()
    assert take(transformer, ("task:a",)) == 1.0


def test_nobody_takes_it_in_time(links: Links) -> None:
    encoder = links.start(ENCODER, lease_ttl_s=0.5)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    send(encoder, ("task:a",), 1.0)
    settle(encoder)
    with pytest.raises(LeaseExpired, match=r"nobody took it within lease_ttl_s=0\.5"):
        take(transformer, ("task:a",))


def test_a_full_pool_waits_for_room(links: Links) -> None:
    encoder = links.start(ENCODER, pool=64 * KIB, send_timeout_s=20.0)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    half = 8 * KIB  # floats: 32 KiB
    send(encoder, ("task:0",), 0.0, half)
    send(encoder, ("task:1",), 1.0, half)
    third = links.later(send, encoder, ("task:2",), 2.0, half)
    assert take(transformer, ("task:0",)) == 0.0
    third.result(20)
    assert [take(transformer, (f"task:{number}",)) for number in (1, 2)] == [1.0, 2.0]
    settle(encoder, transformer)


def test_what_failed_requests_gave_back_leaves_a_full_pool_first(links: Links) -> None:
    """Else an encoder's pool is full of it, and the encoder of no use until it has expired."""
    encoder = links.start(ENCODER, pool=64 * KIB, send_timeout_s=20.0)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    send(encoder, ("task:waits", "same:w"), 99.0, floats=2 * KIB)
    for number in range(12):
        names = (f"task:{number}", f"same:{number}")
        send(encoder, names, float(number), floats=4 * KIB)
        transformer.begin(names)
        transformer.receive()
        transformer.end(RuntimeError("out of memory"))
    assert take(transformer, ("task:11", "same:11")) == 11.0, "the last one is there for another try"
    assert take(transformer, ("task:waits", "same:w")) == 99.0, "what nobody had yet stays"


def test_a_pool_that_stays_full_is_refused_by_its_setting(links: Links) -> None:
    encoder = links.start(ENCODER, pool=64 * KIB, send_timeout_s=0.3)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    send(encoder, ("task:0",), 0.0, 12 * KIB)
    encoder.begin(("task:1",))
    with pytest.raises(CapacityError, match="staging_bytes") as caught:
        encoder.send(tree(1.0, 12 * KIB))
    encoder.end(caught.value)
    assert encoder.in_use()["payloads"] == 1
    with pytest.raises(Aborted, match=r"encoder failed: .*staging_bytes"):
        take(transformer, ("task:1",))
    assert take(transformer, ("task:0",)) == 0.0
    settle(encoder, transformer)


def test_what_is_larger_than_the_pool_is_refused_at_once(links: Links) -> None:
    encoder = links.start(ENCODER, pool=64 * KIB, send_timeout_s=60.0)
    send(encoder, ("task:0",), 0.0)
    encoder.begin(("task:1",))
    with pytest.raises(CapacityError, match="staging_bytes"):
        encoder.send(tree(1.0, 32 * KIB))


def test_a_receiver_without_room_says_so_and_gives_it_back(links: Links) -> None:
    encoder = links.start(ENCODER)
    small = links.start(TRANSFORMER, dials=encoder, sends=False, pool=16 * KIB)
    send(encoder, ("task:a",), 1.0, 8 * KIB)
    with pytest.raises(CapacityError, match=r"transformer's pool of 16384 now: raise disagg_config\.staging_bytes"):
        take(small, ("task:a",))
    large = links.start(TRANSFORMER, dials=encoder, sends=False)
    assert take(large, ("task:a",)) == 1.0


def test_garbage_of_an_earlier_request_makes_room(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False, pool=64 * KIB)
    send(encoder, ("task:a",), 1.0, 12 * KIB)
    send(encoder, ("task:b",), 2.0, 12 * KIB)
    with request(transformer, "task:a"):
        cycle: list[Any] = [transformer.receive()]
        cycle.append(cycle)
        del cycle
    assert take(transformer, ("task:b",)) == 2.0


def test_what_cannot_be_carried_is_named(links: Links) -> None:
    encoder = links.start(ENCODER)
    encoder.begin(("task:a",))
    with pytest.raises(UnsupportedTensor, match="image"):
        encoder.send({"image": object()})
    encoder.end()
    assert not any(encoder.in_use().values())


def test_an_encoder_that_is_not_there(links: Links) -> None:
    gone = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=gone, sends=False, peer_timeout_s=1.0)
    gone.close()
    with pytest.raises(PeerLost):
        take(transformer, ("task:a",))


def test_an_encoder_that_closes_tells_who_waits(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False, peer_timeout_s=60.0)
    waiting = links.later(take, transformer, ("task:a",))
    encoder.begin(("task:a",))
    threading.Event().wait(0.3)
    encoder.close()
    with pytest.raises(MoonrelayError) as caught:
        waiting.result(10)
    assert isinstance(caught.value, (PeerLost, Aborted))


def test_other_keys_are_other_deployments(links: Links) -> None:
    encoder = links.start(ENCODER, auth_key="one")
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False, auth_key="two", transfer_timeout_s=3.0)
    send(encoder, ("task:a",), 1.0)
    with pytest.raises(ConfigError, match="auth_key"):
        take(transformer, ("task:a",))
    right = links.start(TRANSFORMER, dials=encoder, sends=False, auth_key="one")
    assert take(right, ("task:a",)) == 1.0


def test_a_role_asks_the_role_before_it(links: Links) -> None:
    encoder = links.start(ENCODER)
    decoder = links.start(DECODER, dials=encoder)
    with pytest.raises(ConfigError, match="encoder outputs"):
        take(decoder, ("task:a",))


# -- use and life -----------------------------------------------------------------------------------------------------


def test_misuse_is_named(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    with pytest.raises(ConfigError, match="no request is under way"):
        encoder.send({})
    encoder.begin(())
    with pytest.raises(ConfigError, match="POST the same task_id or data_bootstrap_room"):
        encoder.send({})
    encoder.end()
    encoder.begin(("task:a",))
    with pytest.raises(ConfigError, match="receives nothing"):
        encoder.receive()
    transformer.begin(("task:a",))
    with pytest.raises(ConfigError, match="sends nothing"):
        transformer.send({})
    assert transformer.address is None


def test_an_address_that_is_taken(links: Links) -> None:
    encoder = links.start(ENCODER)
    second = StageLink(LinkConfig(role=ENCODER, listens=encoder.address, transfer=TransferConfig(engine=links.engine)))
    with pytest.raises(ConfigError, match="rendezvous_port"):
        second.start()
    with pytest.raises(ClosedError):
        second.begin(("task:a",))
    assert encoder.address is not None
    assert str(encoder.address[1]) in repr(encoder.address)


def test_close_ends_a_receive_under_way_and_may_be_repeated(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    waiting = links.later(take, transformer, ("task:a",))
    threading.Event().wait(0.2)
    transformer.close()
    with pytest.raises(ClosedError):
        waiting.result(10)
    transformer.close()
    transformer.end()
    with pytest.raises(ClosedError):
        transformer.begin(("task:b",))


def test_close_gives_a_claim_back(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    send(encoder, ("task:a",), 1.0)
    transformer.begin(("task:a",))
    transformer.receive()
    transformer.close()
    other = links.start(TRANSFORMER, dials=encoder, sends=False)
    assert take(other, ("task:a",)) == 1.0


def test_linger_waits_until_all_is_taken(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False)
    send(encoder, ("task:a",), 1.0)
    assert not encoder.linger(0.1)
    lingers = links.later(encoder.at_exit)
    assert take(transformer, ("task:a",)) == 1.0
    lingers.result(20)
    with pytest.raises(ClosedError):
        encoder.begin(("task:b",))


def test_linger_ends_at_its_bound(links: Links, caplog: pytest.LogCaptureFixture) -> None:
    encoder = links.start(ENCODER, linger_s=0.2)
    send(encoder, ("task:a",), 1.0)
    encoder.at_exit()
    assert "1 payloads were not taken within linger_s" in caplog.text


def test_an_interrupt_while_it_lingers_closes_all_the_same(
    links: Links, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = links.start(ENCODER)
    send(encoder, ("task:1",), 1.0)

    def interrupted() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(encoder, "linger", interrupted)
    encoder.at_exit()
    assert "interrupted; 1 payloads were not taken, and are dropped" in caplog.text
    with pytest.raises(ClosedError):
        encoder.begin(("task:2",))


def test_a_relay_keeps_what_a_closed_sender_left(links: Links, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver has found it; then its sender ends."""
    store = StoreConfig(url=f"local://{tmp_path}")
    encoder = links.start(ENCODER, store=store, transfer_mode="store")
    transformer = links.start(TRANSFORMER, dials=encoder, sends=False, store=store, transfer_mode="store")
    send(encoder, ("task:a",), 1.0)
    find = transformer._caller.find  # type: ignore[union-attr]

    def found(*args: Any, **more: Any) -> bytes:
        handle: bytes = find(*args, **more)
        encoder.close()
        return handle

    monkeypatch.setattr(transformer._caller, "find", found)
    assert take(transformer, ("task:a",)) == 1.0


def test_many_requests_leave_nothing(links: Links) -> None:
    encoder = links.start(ENCODER)
    transformer = links.start(TRANSFORMER, dials=encoder)
    decoder = links.start(DECODER, dials=transformer)

    def one(number: int) -> None:
        names = (f"task:{number}", f"same:{number % 7}")
        send(encoder, names, float(number))
        with request(transformer, *names):
            data, _ = transformer.receive()
            transformer.send({"latents": data["latents"] * 2})
            del data
        assert take(decoder, names) == number * 2

    for number in range(10):
        one(number)
    settle(encoder, transformer, decoder)
    threads, files = held()
    for number in range(10, 160):
        one(number)
    settle(encoder, transformer, decoder)
    assert held() == (threads, files)


def held() -> tuple[list[str], int]:
    """Return what this process holds; who renews claims is a pool of few threads, which start when one is due."""
    names = sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith("moonrelay-renew"))
    return names, len(list(Path("/proc/self/fd").iterdir()))
