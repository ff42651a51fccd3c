"""The connector inside one process: memory engine, memory or local relay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moonrelay import (
    Aborted,
    CapacityError,
    ClosedError,
    ConfigError,
    DeleteOnConsume,
    DiffusionConnector,
    Event,
    LeaseExpired,
    LeaseHeld,
    LeaseLost,
    LeaseStatus,
    PeerLost,
    Pinned,
    PublicationState,
    RegistrationError,
    Shared,
    StageHandle,
    StagePayload,
    TransferTimeout,
    Ttl,
    UnsupportedTensor,
)
from moonrelay.clock import Deadline, SystemClock

MakeConnector = Callable[..., DiffusionConnector]
POOL_BYTES = 1 << 20


@pytest.fixture
def make() -> Iterator[MakeConnector]:
    made: list[DiffusionConnector] = []

    def build(role: str = "denoise", mode: str = "p2p", **settings: Any) -> DiffusionConnector:
        engine = {"engine": "memory", "pool_bytes": settings.pop("pool_bytes", POOL_BYTES)}
        control = {"claim_ttl_s": 1.0, "renew_s": 0.2, "peer_timeout_s": 1.0, "retry_s": 0.2}
        control |= settings.pop("control_config", {})
        made.append(DiffusionConnector(role, mode, engine, control_config=control, **settings))
        return made[-1]

    yield build
    for connector in made:
        connector.close()


@pytest.fixture
def pair(make: MakeConnector) -> tuple[DiffusionConnector, DiffusionConnector]:
    return make("denoise"), make("decode")


def latents(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape or (1, 4, 6, 8, 8), generator=torch.Generator().manual_seed(seed))


def payload(tensor: torch.Tensor, **more: Any) -> StagePayload:
    return StagePayload(request_id="r1", kind="latent", tensor=tensor, **more)


def pool(connector: DiffusionConnector) -> tuple[int, int]:
    arena = connector._runtime.data().arena
    return arena.live_slots, arena.used_bytes


# Delivery.


def test_a_tensor_comes_back_bit_for_bit(pair: tuple[DiffusionConnector, DiffusionConnector]) -> None:
    producer, consumer = pair
    sent = latents()
    got = consumer.receive(producer.publish(payload(sent)))
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got, sent)


def test_a_tree_comes_back_whole(pair: tuple[DiffusionConnector, DiffusionConnector]) -> None:
    producer, consumer = pair
    tree = {
        "embeds": [latents(2, 3), None, (latents(0, 4096), torch.tensor(7))],
        3: {"guidance": 5.0, "big": 1 << 80, "raw": b"\x00\xff", "long": b"x" * 5000, "flag": True},
        "bf16": torch.tensor(1.5, dtype=torch.bfloat16),
    }
    got = consumer.receive(producer.publish(StagePayload(request_id="r", kind="embedding", data=tree)))
    assert isinstance(got, dict)
    assert got[3] == tree[3]
    assert torch.equal(got["embeds"][0], tree["embeds"][0])  # type: ignore[index]
    assert got["embeds"][1] is None
    assert got["embeds"][2][0].shape == (0, 4096)
    assert got["embeds"][2][1].shape == ()
    assert got["bf16"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(1, 3),
        lambda t: t[:, :, ::2],
        lambda t: t[:, :1].expand(-1, 4, -1, -1, -1),
        lambda t: torch.view_as_complex(t.reshape(1, 4, 6, 8, 4, 2)).conj(),
        lambda t: t.permute(0, 2, 3, 4, 1),
    ],
    ids=["transposed", "strided", "expanded", "conjugated", "channels-last"],
)
def test_layouts_keep_their_values(
    pair: tuple[DiffusionConnector, DiffusionConnector], view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    producer, consumer = pair
    sent = view(latents())
    got = consumer.receive(producer.publish(payload(sent)))
    assert isinstance(got, torch.Tensor)
    assert got.shape == sent.shape
    assert torch.equal(got, sent.resolve_conj())


@pytest.mark.parametrize("integrity", ["full", "off"])
@pytest.mark.parametrize("mode", ["p2p", "store", "auto"])
def test_every_mode_delivers(make: MakeConnector, mode: str, integrity: str, tmp_path: Any) -> None:
    settings = {"store_config": f"local://{tmp_path}", "integrity": integrity}
    producer, consumer = make("denoise", mode, **settings), make("decode", mode, **settings)
    sent = latents()
    got = consumer.receive(producer.publish(payload(sent, chunk_dim=2, num_chunks=3)))
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got, sent)


def test_chunks_are_views_of_dst_in_order(pair: tuple[DiffusionConnector, DiffusionConnector]) -> None:
    producer, consumer = pair
    sent, dst = latents(), torch.zeros(1, 4, 6, 8, 8)
    publication = producer.open(payload(sent, chunk_dim=2, num_chunks=4))
    for chunk in (3, 0, 2, 1):
        publication.ready(chunk)
    seen = 0
    for chunk_view in consumer.consume(publication.handle, dst=dst):
        assert chunk_view.untyped_storage().data_ptr() == dst.untyped_storage().data_ptr()
        assert torch.equal(chunk_view, sent[:, :, seen : seen + chunk_view.shape[2]])
        seen += chunk_view.shape[2]
    assert seen == 6
    assert torch.equal(dst, sent)
    assert publication.wait("consumed", 5) is PublicationState.CONSUMED


def test_chunks_are_readable_while_later_ones_are_being_made(
    pair: tuple[DiffusionConnector, DiffusionConnector],
) -> None:
    producer, consumer = pair
    made = producer.empty((1, 4, 6, 8, 8), dtype=torch.float32)
    made.zero_()
    publication = producer.open(payload(made, chunk_dim=2, num_chunks=3))
    chunks = consumer.consume(publication.handle, timeout_s=5)
    for index in range(3):
        made[:, :, 2 * index : 2 * index + 2] = index + 1
        publication.ready(index)
        assert torch.all(next(chunks) == index + 1)
    assert next(chunks, None) is None


def test_a_slow_reader_holds_nobody_else_up(make: MakeConnector) -> None:
    producer, slow, quick = make("denoise"), make("decode"), make("decode")
    held = slow.claim(producer.publish(payload(latents(seed=1))))
    for seed in range(5):
        got = quick.receive(producer.publish(payload(latents(seed=seed))), timeout_s=5)
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got, latents(seed=seed))
    held.nack()


def test_dst_of_another_layout_gets_the_values(pair: tuple[DiffusionConnector, DiffusionConnector]) -> None:
    producer, consumer = pair
    sent, dst = latents(), torch.zeros(8, 8, 6, 4, 1).permute(4, 3, 2, 1, 0)
    got = consumer.receive(producer.publish(payload(sent)), dst=dst)
    assert got is dst
    assert torch.equal(dst, sent)


@pytest.mark.parametrize(
    ("dst", "field"),
    [(torch.zeros(2), "shape"), (torch.zeros(1, 4, 6, 8, 8, dtype=torch.float16), "dtype")],
)
def test_a_dst_that_does_not_fit_is_refused(
    pair: tuple[DiffusionConnector, DiffusionConnector], dst: torch.Tensor, field: str
) -> None:
    producer, consumer = pair
    handle = producer.publish(payload(latents()))
    with pytest.raises(ConfigError, match=field):
        consumer.receive(handle, dst=dst)
    assert isinstance(consumer.receive(handle), torch.Tensor)


# Zero copy.


def test_registered_memory_is_published_where_it_is(make: MakeConnector) -> None:
    events: list[Event] = []
    producer, consumer = make("denoise", observers=[events.append]), make("decode")
    own = producer.empty((64, 64), dtype=torch.float32).fill_(3)
    before = pool(producer)
    handle = producer.publish(payload(own))
    assert pool(producer) == before
    assert "staged" not in [event.name for event in events]
    got = consumer.receive(handle)
    assert torch.equal(got, own)  # type: ignore[arg-type]
    producer.publish(payload(latents()))
    assert "staged" in [event.name for event in events]


def test_own_memory_can_be_registered(make: MakeConnector) -> None:
    events: list[Event] = []
    producer, consumer = make("denoise", observers=[events.append]), make("decode")
    own = latents()
    with producer.register(own):
        handle = producer.publish(payload(own))
    # Leaving the block does not take the memory away from a payload that is still published from it.
    assert torch.equal(consumer.receive(handle), own)  # type: ignore[arg-type]
    assert [event.name for event in events].count("staged") == 0
    with pytest.raises(RegistrationError, match="gaps"):
        producer.register(own[:, :, ::2])


def test_copy_takes_a_snapshot(pair: tuple[DiffusionConnector, DiffusionConnector]) -> None:
    producer, consumer = pair
    own = producer.empty((16,), dtype=torch.float32).fill_(1)
    handle = producer.publish(payload(own), copy=True)
    own.fill_(2)
    got = consumer.receive(handle)
    assert torch.all(got == 1)  # type: ignore[arg-type]


def test_received_memory_goes_back_to_the_pool_with_the_tensor(
    pair: tuple[DiffusionConnector, DiffusionConnector],
) -> None:
    producer, consumer = pair
    got = consumer.receive(producer.publish(payload(latents())))
    assert pool(consumer)[0] == 1
    del got
    assert pool(consumer) == (0, 0)
    assert pool(producer) == (0, 0)


def test_received_tensors_outlive_the_connector(make: MakeConnector) -> None:
    producer, consumer = make("denoise"), make("decode")
    got = consumer.receive(producer.publish(payload(latents())))
    consumer.close()
    producer.close()
    assert torch.equal(got, latents())  # type: ignore[arg-type]


# Leases.


def test_a_consumed_payload_is_gone(pair: tuple[DiffusionConnector, DiffusionConnector]) -> None:
    producer, consumer = pair
    handle = producer.publish(payload(latents()))
    consumer.receive(handle)
    with pytest.raises(LeaseLost, match="consumed"):
        consumer.receive(handle)
    assert consumer.status(handle).state is LeaseStatus.CONSUMED


def test_leaving_early_gives_the_payload_back(pair: tuple[DiffusionConnector, DiffusionConnector]) -> None:
    producer, consumer = pair
    handle = producer.publish(payload(latents(), chunk_dim=2, num_chunks=3))
    chunks = consumer.consume(handle)
    next(chunks)
    assert producer.status(handle).state is LeaseStatus.CLAIMED
    chunks.close()  # type: ignore[attr-defined]
    assert producer.status(handle).state is LeaseStatus.READY
    assert torch.equal(consumer.receive(handle), latents())  # type: ignore[arg-type]


def test_a_second_claim_waits_for_its_deadline_only(make: MakeConnector) -> None:
    producer, first, second = make("denoise"), make("decode"), make("decode")
    handle = producer.publish(payload(latents()))
    with first.claim(handle), pytest.raises(LeaseHeld):
        second.claim(handle, timeout_s=0.3)
    assert isinstance(second.receive(handle, timeout_s=5), torch.Tensor)


def test_a_waiting_claim_is_granted_when_the_first_is_given_back(make: MakeConnector) -> None:
    producer, first, second = make("denoise"), make("decode"), make("decode")
    handle = producer.publish(payload(latents()))
    held = first.claim(handle)
    got: list[object] = []
    waiting = threading.Thread(target=lambda: got.append(second.receive(handle, timeout_s=20)))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    held.nack()
    waiting.join(10)
    assert not waiting.is_alive()
    assert isinstance(got[0], torch.Tensor)


def test_of_two_racing_readers_one_wins(make: MakeConnector) -> None:
    producer, readers = make("denoise"), [make("decode") for _ in range(2)]
    for _ in range(20):
        handle = producer.publish(payload(latents()))
        outcomes: list[object] = []

        def take(reader: DiffusionConnector, handle: StageHandle, outcomes: list[object]) -> None:
            try:
                outcomes.append(reader.receive(handle, timeout_s=5))
            except LeaseLost as exc:
                outcomes.append(exc)

        threads = [threading.Thread(target=take, args=(reader, handle, outcomes)) for reader in readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sorted(type(outcome) is LeaseLost for outcome in outcomes) == [False, True]


def test_shared_payloads_are_consumed_by_as_many_readers(make: MakeConnector) -> None:
    producer, readers = make("denoise"), [make("decode") for _ in range(3)]
    handle = producer.publish(payload(latents(), lease=Shared(3)))
    for reader in readers:
        assert isinstance(reader.receive(handle), torch.Tensor)
    with pytest.raises(LeaseLost):
        readers[0].receive(handle)
    assert pool(producer) == (0, 0)


def test_pinned_payloads_stay_until_released(pair: tuple[DiffusionConnector, DiffusionConnector]) -> None:
    producer, consumer = pair
    handle = producer.publish(payload(latents(), lease=Pinned()))
    for _ in range(3):
        consumer.receive(handle)
    consumer.release(handle)
    consumer.release(handle)
    with pytest.raises(LeaseLost, match="released"):
        consumer.receive(handle)
    assert pool(producer) == (0, 0)


@pytest.mark.parametrize("lease", [DeleteOnConsume(0.2), Ttl(0.2), Shared(2, 0.2)])
def test_an_expired_payload_says_so_and_frees_its_memory(
    pair: tuple[DiffusionConnector, DiffusionConnector], lease: object
) -> None:
    producer, consumer = pair
    publication = producer.open(payload(latents(), lease=lease))
    publication.ready(0)
    publication.wait("expired", 5)
    with pytest.raises(LeaseExpired):
        consumer.receive(publication.handle)
    assert pool(producer) == (0, 0)


def test_a_lease_that_ends_during_a_read_lets_the_reader_finish(
    pair: tuple[DiffusionConnector, DiffusionConnector],
) -> None:
    producer, consumer = pair
    publication = producer.open(payload(latents(), lease=DeleteOnConsume(0.3)))
    publication.ready(0)
    with consumer.claim(publication.handle) as claim:
        publication.wait("expire_pending", 5)
        assert torch.equal(claim.read(), latents())  # type: ignore[arg-type]
        claim.ack()
    assert publication.wait("consumed", 5) is PublicationState.CONSUMED


def test_abort_reaches_the_reader_with_its_reason(pair: tuple[DiffusionConnector, DiffusionConnector]) -> None:
    producer, consumer = pair
    publication = producer.open(payload(latents(), chunk_dim=2, num_chunks=3))
    publication.ready(0)
    chunks = consumer.consume(publication.handle, timeout_s=10)
    next(chunks)
    publication.abort("out of memory at step 7")
    with pytest.raises(Aborted, match="out of memory at step 7"):
        next(chunks)
    with pytest.raises(Aborted, match="step 7"):
        publication.wait("consumed", 5)
    with pytest.raises(Aborted, match="step 7"):
        consumer.receive(publication.handle)
    assert pool(producer) == (0, 0)


def test_an_exception_in_the_producer_aborts(pair: tuple[DiffusionConnector, DiffusionConnector]) -> None:
    producer, consumer = pair
    opened = producer.open(payload(latents(), chunk_dim=2, num_chunks=2))
    with pytest.raises(ZeroDivisionError), opened:
        _ = 1 / 0
    with pytest.raises(Aborted, match="ZeroDivisionError"):
        consumer.receive(opened.handle)


def test_a_chunk_that_never_comes_ends_at_the_deadline(pair: tuple[DiffusionConnector, DiffusionConnector]) -> None:
    producer, consumer = pair
    publication = producer.open(payload(latents(), chunk_dim=2, num_chunks=2))
    publication.ready(0)
    with consumer.claim(publication.handle) as claim, pytest.raises(TransferTimeout, match="1 of 2"):
        claim.read(timeout_s=0.3)


def test_chunks_are_named_once_and_must_exist(pair: tuple[DiffusionConnector, DiffusionConnector]) -> None:
    publication = pair[0].open(payload(latents(), chunk_dim=2, num_chunks=2))
    publication.ready(1)
    with pytest.raises(ConfigError, match="before"):
        publication.ready(1)
    with pytest.raises(ConfigError, match="0 to 1"):
        publication.ready(2)


# Pool and relay.


def test_a_payload_larger_than_the_pool_is_refused(make: MakeConnector) -> None:
    producer = make("denoise")
    with pytest.raises(CapacityError):
        producer.publish(payload(torch.zeros(POOL_BYTES + 1, dtype=torch.uint8)))
    assert pool(producer) == (0, 0)
    producer.publish(payload(latents()))


def test_a_full_pool_refuses_and_loses_nothing(pair: tuple[DiffusionConnector, DiffusionConnector]) -> None:
    producer, consumer = pair
    half = (1, 4, 8, 64, 64)  # 512 KiB, half the pool
    handles = [producer.publish(payload(latents(*half, seed=seed))) for seed in range(2)]
    with pytest.raises(CapacityError):
        producer.publish(payload(latents(*half)))
    for seed, handle in enumerate(handles):
        assert torch.equal(consumer.receive(handle), latents(1, 4, 8, 64, 64, seed=seed))  # type: ignore[arg-type]
    producer.publish(payload(latents(1, 4, 8, 64, 64)))


def test_a_full_pool_spills_to_the_relay(make: MakeConnector, tmp_path: Any) -> None:
    events: list[Event] = []
    settings = {"store_config": f"local://{tmp_path}", "observers": [events.append]}
    producer, consumer = make("denoise", "auto", **settings), make("decode", "auto", **settings)
    handles = [producer.publish(payload(latents(1, 4, 8, 64, 64, seed=seed))) for seed in range(12)]
    for seed, handle in enumerate(handles):
        assert torch.equal(consumer.receive(handle), latents(1, 4, 8, 64, 64, seed=seed))  # type: ignore[arg-type]
    assert {"fallback", "spilled"} <= {event.name for event in events}


def test_an_unclaimed_payload_spills_and_survives_its_producer(make: MakeConnector, tmp_path: Any) -> None:
    settings = {"store_config": f"local://{tmp_path}", "spill_after_s": 0.1}
    producer, consumer = make("denoise", "auto", **settings), make("decode", "auto", **settings)
    publication = producer.open(payload(latents(), chunk_dim=2, num_chunks=3))
    for chunk in range(3):
        publication.ready(chunk)
    publication.wait("spilled", 5)
    assert pool(producer) == (0, 0)
    with consumer.claim(publication.handle) as claim:
        assert claim.path == "store"
        assert torch.equal(claim.read(), latents())  # type: ignore[arg-type]
    producer.close()
    assert torch.equal(consumer.receive(publication.handle), latents())  # type: ignore[arg-type]
    with pytest.raises(LeaseLost):
        consumer.receive(publication.handle)


def test_close_brings_unclaimed_payloads_to_the_relay(make: MakeConnector, tmp_path: Any) -> None:
    settings = {"store_config": f"local://{tmp_path}"}
    producer, consumer = make("denoise", "auto", **settings), make("decode", "auto", **settings)
    handles = [producer.publish(payload(latents(seed=seed))) for seed in range(5)]
    producer.close()
    for seed, handle in enumerate(handles):
        assert torch.equal(consumer.receive(handle), latents(seed=seed))  # type: ignore[arg-type]


def test_close_without_a_relay_is_heard_by_the_reader(pair: tuple[DiffusionConnector, DiffusionConnector]) -> None:
    producer, consumer = pair
    handle = producer.publish(payload(latents()))
    opened = producer.open(payload(latents(), chunk_dim=2, num_chunks=2))
    chunks = consumer.claim(opened.handle)
    producer.close()
    with pytest.raises((Aborted, PeerLost)):
        chunks.read()
    with pytest.raises(PeerLost):
        consumer.receive(handle, timeout_s=5)


def test_store_mode_leaves_nothing_behind(make: MakeConnector, tmp_path: Any) -> None:
    settings = {"store_config": f"local://{tmp_path}"}
    producer, consumer = make("denoise", "store", **settings), make("decode", "store", **settings)
    publication = producer.open(payload(latents(), chunk_dim=2, num_chunks=3))
    for chunk in range(3):
        publication.ready(chunk)
    assert isinstance(consumer.receive(publication.handle), torch.Tensor)
    publication.wait("consumed", 5)
    producer.close()
    consumer.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 4096] == []


# Bad input, and the end.


def test_what_cannot_be_carried_changes_nothing(pair: tuple[DiffusionConnector, DiffusionConnector]) -> None:
    producer, consumer = pair
    with pytest.raises(UnsupportedTensor, match=r"data\['a'\]\[1\]"):
        producer.publish(StagePayload(request_id="r", kind="k", data={"a": [latents(), object()]}))
    assert pool(producer) == (0, 0)
    assert isinstance(consumer.receive(producer.publish(payload(latents()))), torch.Tensor)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"transfer_mode": "direct"}, "transfer_mode"),
        ({"te_config": {"engin": "shm"}}, "engine"),
        ({"te_config": {"pool_bytes": 0}}, "pool_bytes"),
        ({"te_config": {"window": "8"}}, "window"),
        ({"lease_ttl_s": -1}, "lease_ttl_s"),
        ({"integrity": "maybe"}, "integrity"),
        ({"role": ""}, "role"),
        ({"auth_key": ""}, "auth_key"),
        ({"spill_after_s": None}, "spill_after_s"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        DiffusionConnector(**{"role": "denoise", **settings})


def test_making_a_connector_starts_nothing() -> None:
    before = threading.active_count()
    connector = DiffusionConnector("denoise")
    assert threading.active_count() == before
    connector.close()
    connector.close()
    with pytest.raises(ClosedError):
        connector.publish(payload(latents()))


def test_different_engines_are_told_apart(make: MakeConnector) -> None:
    producer = make("denoise")
    consumer = DiffusionConnector("decode", "p2p", {"engine": "shm", "pool_bytes": 1 << 20})
    handle = producer.publish(payload(latents()))
    with pytest.raises(ConfigError, match="engine"):
        consumer.receive(handle)
    consumer.close()
    assert isinstance(make("decode").receive(handle), torch.Tensor)


def test_a_wrong_key_is_told_at_once(make: MakeConnector) -> None:
    producer, consumer = make("denoise", auth_key="one"), make("decode", auth_key="another")
    handle = producer.publish(payload(latents()))
    with pytest.raises(ConfigError, match="auth_key"):
        consumer.receive(handle, timeout_s=20)
    assert isinstance(make("decode", auth_key="one").receive(handle), torch.Tensor)


@pytest.mark.parametrize("timeout_s", [-1, None, "5", True])
def test_every_wait_has_a_deadline(pair: tuple[DiffusionConnector, DiffusionConnector], timeout_s: Any) -> None:
    handle = pair[0].publish(payload(latents()))
    with pytest.raises(ConfigError, match="timeout_s"):
        pair[1].claim(handle, timeout_s=timeout_s)


def test_handles_of_a_dead_producer_do_not_each_wait(make: MakeConnector, tmp_path: Any) -> None:
    settings = {"store_config": f"local://{tmp_path}", "control_config": {"peer_timeout_s": 10.0}}
    producer, consumer = make("denoise", "auto", **settings), make("decode", "auto", **settings)
    handles = [producer.publish(payload(latents(seed=seed))) for seed in range(4)]
    producer.close()
    consumer.receive(handles[0])
    # Whoever was found gone is not asked again: a deadline far below the second that finding out takes is enough.
    for handle in handles[1:]:
        assert isinstance(consumer.receive(handle, timeout_s=0.5), torch.Tensor)


# Beside payloads.


@pytest.mark.parametrize("mode", ["p2p", "store", "auto"])
def test_the_store_is_there_in_every_mode_and_ends_with_the_connector(
    make: MakeConnector, tmp_path: Path, mode: str
) -> None:
    clock = SystemClock()
    connector = make(mode=mode, store_config=f"local://{tmp_path / 'store'}", clock=clock)
    assert connector.clock is clock
    store = connector.store()
    assert connector.store() is store
    assert store.put_if_absent("moonrelay/mine", b"1", Deadline(5, connector.clock)) == b"1"
    connector.close()
    with pytest.raises(ClosedError):
        connector.store()
