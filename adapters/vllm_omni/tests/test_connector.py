"""Put and get by key, without the host: in one process, and between processes."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from omni_peer import PeerFailed, StagePeer, digest, store_keys, tree

from moonrelay.errors import (
    Aborted,
    CapacityError,
    ConfigError,
    IntegrityError,
    MoonrelayError,
    PluginError,
    TransferFailed,
    UnsupportedTensor,
    WireError,
)
from moonrelay_vllm_omni import receiving
from moonrelay_vllm_omni.connector import HANDLE_FIELD, ConnectorClosed, StageConnector
from moonrelay_vllm_omni.mapping import RawBuffer
from moonrelay_vllm_omni.receiving import GONE

Make = Callable[..., StageConnector]
Peer = Callable[..., StagePeer]
EDGE = ("0", "1")


def got(connector: StageConnector, key: str, metadata: object = None, within_s: float = 20.0, edge: Any = EDGE) -> Any:
    """Return a payload that must come."""
    found = connector.get_with_deadline(*edge, key, metadata, deadline=time.monotonic() + within_s)
    assert found is not None, f"{key} did not come within {within_s} s"
    return found[0]


def until(holds: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
    """Wait for something that can only be looked at."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, what
        gc.collect()
        threading.Event().wait(0.02)


def nothing_is_left(place: Path, *connectors: StageConnector) -> Callable[[], bool]:
    def look() -> bool:
        return not store_keys(place) and not any(sum(one.in_use().values()) for one in connectors)

    return look


# -- by key -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["p2p", "store", "auto"])
def test_a_payload_is_found_by_its_key_alone(make: Make, place: Path, mode: str) -> None:
    one, other = make(transfer_mode=mode), make(transfer_mode=mode)
    taken, nbytes, metadata = one.put(*EDGE, "r1_0_0", tree(1))
    assert (taken, metadata["size"]) == (True, nbytes)
    assert nbytes > 4096 * 2
    assert digest(got(other, "r1_0_0")) == digest(tree(1))
    until(nothing_is_left(place, one, other), "the payload left something behind")


def test_a_payload_is_found_by_its_metadata_without_the_directory(make: Make) -> None:
    one, other = make(), make(namespace="elsewhere")
    _, _, metadata = one.put(*EDGE, "k", tree(1))
    assert digest(got(other, "k", metadata)) == digest(tree(1))
    _, _, metadata = one.put(*EDGE, "k2", tree(2))
    assert digest(got(other, "k2", {"k2": metadata})) == digest(tree(2))


@pytest.mark.parametrize(
    "metadata",
    [{}, {"source_host": "h", "source_port": 1}, {"k": {"shm": {"name": "x"}}}, 7, "x"],
    ids=repr,
)
def test_foreign_metadata_counts_as_none(make: Make, metadata: object) -> None:
    one, other = make(), make()
    one.put(*EDGE, "k", tree(1))
    assert digest(got(other, "k", metadata)) == digest(tree(1))


@pytest.mark.parametrize("damaged", ["not a handle", "", "AAAA", None, 7])
def test_a_damaged_handle_in_the_metadata_is_refused(make: Make, damaged: object) -> None:
    one, other = make(), make()
    one.put(*EDGE, "k", tree(1))
    with pytest.raises(WireError):
        other.get(*EDGE, "k", {HANDLE_FIELD: damaged})
    assert digest(got(other, "k")) == digest(tree(1))


def test_metadata_of_another_key_is_refused_not_believed(make: Make) -> None:
    one, other = make(), make()
    _, _, metadata = one.put(*EDGE, "k1", tree(1))
    with pytest.raises(IntegrityError, match="another key"):
        other.get_with_deadline(*EDGE, "k2", metadata, deadline=time.monotonic() + 20.0)
    assert digest(got(other, "k1")) == digest(tree(1))


def test_one_instance_sends_and_receives_on_several_edges(make: Make) -> None:
    first, middle, last = make(role="sender"), make(role="sender"), make(role="receiver")
    first.put("0", "1", "k", tree(1))
    middle.put("1", "2", "k", got(middle, "k"))
    assert digest(got(last, "k", edge=("1", "2"))) == digest(tree(1))


def test_an_edge_does_not_see_anothers_payload(make: Make) -> None:
    one, other = make(), make()
    one.put("0", "1", "k", tree(1))
    assert other.get_with_deadline("0", "2", "k", deadline=time.monotonic() + 0.3) is None
    assert digest(got(other, "k")) == digest(tree(1))


def test_stage_numbers_may_be_given_as_numbers(make: Make) -> None:
    one, other = make(), make()
    one.put(0, 1, "k", tree(1))
    assert digest(got(other, "k")) == digest(tree(1))


def test_two_replicas_each_take_what_is_theirs(make: Make) -> None:
    producers, consumers = [make(), make()], [make(), make()]
    for number in range(8):
        producers[number % 2].put(*EDGE, f"r{number}_0_0", tree(number))
    for number in range(8):
        assert digest(got(consumers[(number // 2) % 2], f"r{number}_0_0")) == digest(tree(number))


def test_a_payload_is_taken_once(make: Make) -> None:
    one, other, third = make(), make(), make()
    one.put(*EDGE, "k", tree(1))
    got(other, "k")
    assert other.get(*EDGE, "k") is None
    assert other.get_with_deadline(*EDGE, "k", deadline=time.monotonic() + 0.3) is None
    assert third.get_with_deadline(*EDGE, "k", deadline=time.monotonic() + 0.3) is None


@pytest.mark.parametrize("readers", [2, 3])
def test_n_readers_each_take_a_payload_once(make: Make, place: Path, readers: int) -> None:
    one = make(readers=readers)
    others = [make() for _ in range(readers)]
    one.put(*EDGE, "k", tree(1))
    for other in others:
        assert digest(got(other, "k")) == digest(tree(1))
    until(nothing_is_left(place, one, *others), "the payload left something behind")


def test_any_number_of_readers_until_the_time_is_over(make: Make, place: Path) -> None:
    one, other = make(readers=0, lease_ttl_s=2.0), make()
    one.put(*EDGE, "k", tree(1))
    for _ in range(3):
        assert digest(got(other, "k")) == digest(tree(1))
    until(nothing_is_left(place, one, other), "the payload outlived its time")


def test_a_handle_too_large_for_a_record_is_found_too(make: Make, place: Path) -> None:
    one, other = make(), make()
    many = {f"tensor number {index}": torch.full((3,), index) for index in range(400)}
    one.put(*EDGE, "k", many)
    assert digest(got(other, "k")) == digest(many)
    until(nothing_is_left(place, one, other), "the payload left something behind")


def test_chunks_under_keys_of_their_own_come_in_order(make: Make, place: Path) -> None:
    one, other = make(), make()
    count = 30
    for number in range(count):
        one.put(*EDGE, f"r1_0_{number}", tree(number, 256))
    seen = []
    while len(seen) < count:  # as the host's receiving thread does: it polls the next chunk's key
        found = other.get(*EDGE, f"r1_0_{len(seen)}", None)
        if found is None:
            threading.Event().wait(0.001)
        else:
            seen.append(digest(found[0]))
    del found
    assert seen == [digest(tree(number, 256)) for number in range(count)]
    until(nothing_is_left(place, one, other), "the chunks left something behind")


# -- what is put ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"finished": True, "images": [torch.ones(2), None]},
        {"t": (1, (2.5, None)), "s": {1, 2}, "f": frozenset({"a"})},
        {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "bf16": torch.ones(3, dtype=torch.bfloat16)},
        torch.arange(6).reshape(2, 3),
        b"\x00\xff" * 3000,
        None,
    ],
    ids=["empty", "look-alike", "containers", "odd tensors", "bare tensor", "bytes", "none"],
)
def test_values_survive(make: Make, data: Any) -> None:
    one, other = make(), make()
    one.put(*EDGE, "k", data)
    back = got(other, "k")
    assert type(back) is type(data)
    assert digest(back) == digest(data)


def test_flat_bytes_arrive_as_a_buffer(make: Make, place: Path) -> None:
    one, other = make(), make()
    packed = torch.arange(200, dtype=torch.uint8)
    one.put(*EDGE, "kv_0_1", packed)
    buffer = got(other, "kv_0_1")
    assert isinstance(buffer, RawBuffer)
    assert torch.equal(buffer.tensor, packed)
    buffer.release()
    until(nothing_is_left(place, one, other), "a released buffer kept its memory")


@pytest.mark.parametrize(
    "value", [object(), iter(()), torch.Generator(), range(3)], ids=lambda value: type(value).__name__
)
def test_what_cannot_be_carried_is_refused_by_name(make: Make, place: Path, value: object) -> None:
    one = make()
    with pytest.raises(UnsupportedTensor) as caught:
        one.put(*EDGE, "k", {"ok": torch.ones(1), "bad": [value]})
    assert "bad" in str(caught.value.context["field"])
    assert sum(one.in_use().values()) == 0
    assert one.health()["errors"] == 1
    until(nothing_is_left(place, one), "a refusal left something behind")


def test_the_same_again_changes_nothing(make: Make, place: Path) -> None:
    one, other = make(snapshot=False), make()
    data = tree(1)
    first = one.put(*EDGE, "k", data)
    assert one.put(*EDGE, "k", data) == first
    assert one.in_use()["payloads"] == 1
    assert digest(got(other, "k")) == digest(tree(1))
    until(nothing_is_left(place, one, other), "the payload left something behind")


def test_of_two_payloads_under_a_key_the_last_one_counts(make: Make, place: Path) -> None:
    one, other = make(), make()
    _, _, old = one.put(*EDGE, "k", tree(1))
    one.put(*EDGE, "k", tree(2))
    until(lambda: one.in_use()["payloads"] == 1, "the first payload was not ended")
    # Whoever was told of the first one is led to the second one.
    assert digest(got(other, "k", old)) == digest(tree(2))
    until(nothing_is_left(place, one, other), "the payloads left something behind")


def test_another_producers_payload_under_a_key_counts_too(make: Make) -> None:
    one, other, third = make(), make(), make()
    one.put(*EDGE, "k", tree(1))
    until(lambda: one.health()["started"], "the connector did not start")
    one._jobs.flush(_soon())
    other.put(*EDGE, "k", tree(2))
    other._jobs.flush(_soon())
    assert digest(got(third, "k")) == digest(tree(2))


@pytest.mark.parametrize("count", [16, 8 << 20])
def test_after_put_the_tensors_may_be_written_to(make: Make, count: int) -> None:
    one, other = make(), make()
    buffer = torch.ones(count, dtype=torch.uint8)
    one.put(*EDGE, "k1", {"x": buffer})
    buffer.fill_(2)
    one.put(*EDGE, "k2", {"x": buffer})
    buffer.fill_(3)
    one.put(*EDGE, "k2", {"x": buffer})
    buffer.fill_(4)
    assert [int(got(other, key)["x"].amin()) for key in ("k1",)] == [1]
    one._jobs.flush(_soon())
    assert int(got(other, "k2")["x"].amin()) == 3, "the last one counts, also from the same memory"


def test_a_large_payload_arrives_without_a_snapshot(make: Make) -> None:
    one, other = make(snapshot=False, pool_bytes=256 << 20), make(pool_bytes=256 << 20)
    large = {"latents": torch.arange(64 << 18, dtype=torch.int32)}
    one.put(*EDGE, "k", large)
    assert torch.equal(got(other, "k")["latents"], large["latents"])


def test_a_payload_larger_than_the_pool_goes_through_the_store(make: Make) -> None:
    one, other = make(pool_bytes=1 << 20), make(pool_bytes=64 << 20)
    large = {"x": torch.ones(4 << 20, dtype=torch.uint8)}
    one.put(*EDGE, "k", large)
    assert torch.equal(got(other, "k")["x"], large["x"])


def test_a_pool_without_room_is_said_at_once_and_there_is_room_again(make: Make, place: Path) -> None:
    one, other = make(transfer_mode="p2p", pool_bytes=2 << 20), make(transfer_mode="p2p")
    payload = {"x": torch.ones(1 << 20, dtype=torch.uint8)}
    one.put(*EDGE, "a", payload)
    one.put(*EDGE, "b", payload)
    with pytest.raises(CapacityError, match="pool_bytes"):  # the host's engine loop calls this, and is not to wait
        one.put(*EDGE, "c", payload)
    assert one.health()["last_error"].startswith("capacity_error: ")
    del payload
    got(other, "a")
    until(lambda: one.in_use()["payloads"] == 1, "what was taken is kept")
    one.put(*EDGE, "c", {"x": torch.full((1 << 20,), 7, dtype=torch.uint8)})
    assert got(other, "c")["x"][0] == 7
    got(other, "b")
    until(nothing_is_left(place, one, other), "something is left")


def test_a_payload_that_neither_pool_nor_store_can_take_is_said_by_health(make: Make, place: Path) -> None:
    small = {"pool_bytes": 1 << 20, "store_capacity_bytes": 2 << 20}
    one, other = make(**small), make(**small)
    for number in range(6):  # more than both hold; whether the store has room shows only after `put`
        assert one.put(*EDGE, f"k{number}", {"x": torch.full((1 << 20,), number, dtype=torch.uint8)})[0]
    until(lambda: one.health()["errors"] >= 3, "nothing was said")
    assert one.health()["last_error"].startswith("capacity_error: ")
    assert "capacity_bytes" in one.health()["last_error"]
    one.cleanup("k0")
    for number in range(1, 6):
        found = other.get_with_deadline(*EDGE, f"k{number}", deadline=time.monotonic() + 0.5)
        assert found is None or found[0]["x"].eq(number).all()
        del found
    until(nothing_is_left(place, one, other), "a payload that failed left something")


# -- getting ----------------------------------------------------------------------------------------------------------


def test_a_poll_never_blocks_and_finds_what_comes_later(make: Make) -> None:
    one, other = make(), make()
    slowest = 0.0
    for _ in range(50):
        started = time.monotonic()
        assert other.get(*EDGE, "k") is None
        slowest = max(slowest, time.monotonic() - started)
    one.put(*EDGE, "k", tree(1))
    found: Any = None
    end = time.monotonic() + 20.0
    while found is None and time.monotonic() < end:
        found = other.get(*EDGE, "k")
        threading.Event().wait(0.002)
    assert digest(found[0]) == digest(tree(1))
    assert slowest < 1.0


def test_keyword_calls(make: Make) -> None:
    one, other = make(), make()
    one.put(from_stage="0", to_stage="1", put_key="k", data=tree(1))
    end = time.monotonic() + 20.0
    while (found := other.get(from_stage="0", to_stage="1", get_key="k", metadata=None)) is None:
        assert time.monotonic() < end
        threading.Event().wait(0.002)
    assert digest(found[0]) == digest(tree(1))


def test_a_fetch_that_had_no_turn_in_time_is_not_a_failure(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    # A fetch is to end within a twentieth of the caller's time, so that it is late for sure and the caller is not.
    monkeypatch.setattr(receiving, "MARGIN", 0.95)
    monkeypatch.setattr(receiving, "MARGIN_MAX_S", 100.0)
    producer, consumer = make(), make(fetchers=1)
    assert producer.put(*EDGE, "k", {"x": torch.ones(4)})[0]
    go_on = threading.Event()
    consumer._receiver._pool.submit(go_on.wait, 30.0)  # the only thread that fetches
    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(got, consumer, "k", within_s=20.0)
        threading.Event().wait(1.5)
        go_on.set()
        assert torch.equal(getting.result(30.0)["x"], torch.ones(4))


def test_a_payload_that_ends_before_put_returns_leaves_no_record(
    make: Make, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make()
    assert producer.put(*EDGE, "warm", {"x": torch.ones(4)})[0]
    producer.cleanup("warm", *EDGE)
    until(nothing_is_left(place, producer), "the first one is left")
    publish = producer._connector.publish

    def ends_at_once(*args: Any, **kwargs: Any) -> Any:
        handle = publish(*args, **kwargs)
        producer._connector.abort(handle, "the store had no room")
        return handle

    monkeypatch.setattr(producer._connector, "publish", ends_at_once)
    assert producer.put(*EDGE, "k", {"x": torch.ones(4)})[0]
    until(nothing_is_left(place, producer), "a record is left")
    assert producer.health()["payloads"] == 0


def test_a_deadline_that_passes_gives_none_in_time(make: Make) -> None:
    other = make()
    started = time.monotonic()
    assert other.get_with_deadline(*EDGE, "k", deadline=started + 0.3) is None
    took_s = time.monotonic() - started
    assert 0.3 <= took_s < 5.0
    assert other.get_with_deadline(*EDGE, "k", deadline=started) is None
    other.abandon_get("k")
    assert other.health()["waiting"] == 0


def test_a_wait_ends_when_the_payload_comes(make: Make) -> None:
    one, other = make(), make()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(got, other, "k")
        until(lambda: other.health()["waiting"] == 1, "nobody waits")
        one.put(*EDGE, "k", tree(1))
        assert digest(waiting.result(20.0)) == digest(tree(1))


def test_who_gives_up_leaves_the_payload_to_others(make: Make) -> None:
    one, other, third = make(), make(), make()
    for number in range(10):
        key = f"k{number}"
        one.put(*EDGE, key, tree(number))
        taken = other.get(*EDGE, key)  # begins a fetch, most likely
        other.abandon_get(key)
        found = taken or third.get_with_deadline(*EDGE, key, deadline=time.monotonic() + 3.0)
        if found is None:  # it was complete before it was given up: it waits where it was fetched
            found = other.get(*EDGE, key)
        assert found is not None
        assert digest(found[0]) == digest(tree(number))


def test_threads_put_and_get_at_once(make: Make, place: Path) -> None:
    one, other = make(), make()
    count = 40

    def put(number: int) -> None:
        one.put(*EDGE, f"k{number}", tree(number, 2048))

    def get(number: int) -> str:
        return digest(got(other, f"k{number}"))

    with ThreadPoolExecutor(6) as putting, ThreadPoolExecutor(6) as getting:
        puts = [putting.submit(put, number) for number in range(count)]
        gets = [getting.submit(get, number) for number in reversed(range(count))]
        for done in puts:
            done.result(60.0)
        assert [done.result(60.0) for done in reversed(gets)] == [digest(tree(number, 2048)) for number in range(count)]
    until(nothing_is_left(place, one, other), "the payloads left something behind")
    assert one.health()["puts"] == other.health()["gets"] == count


def test_one_payload_for_many_waiting_threads_goes_to_one(make: Make) -> None:
    one, other = make(), make()

    def get() -> object:
        return other.get_with_deadline(*EDGE, "k", deadline=time.monotonic() + 2.0)

    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(get) for _ in range(4)]
        one.put(*EDGE, "k", tree(1))
        found = [done.result(30.0) for done in waiting]
    assert sum(one is not None for one in found) == 1


# -- who shares a store ------------------------------------------------------------------------------------------------


def test_namespaces_keep_deployments_apart(make: Make) -> None:
    ours, theirs = make(namespace="ours"), make(namespace="theirs")
    ours.put(*EDGE, "k", tree(1))
    theirs.put(*EDGE, "k", tree(2))
    assert digest(got(make(namespace="theirs"), "k")) == digest(tree(2))
    assert digest(got(make(namespace="ours"), "k")) == digest(tree(1))


def test_another_producers_key_is_replaced_with_a_warning_that_names_the_namespace(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = make(), make()
    one.put(*EDGE, "k", tree(1))
    one.put(*EDGE, "k", tree(2))
    one._jobs.flush(_soon())
    assert "namespace" not in caplog.text
    other.put(*EDGE, "k", tree(3))
    other._jobs.flush(_soon())
    assert [record.levelname for record in caplog.records if "namespace" in record.getMessage()] == ["WARNING"]


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra_of_mode", [{"transfer_mode": "p2p"}, {"transfer_mode": "store"}, {"spill_after_s": 0}])
def test_a_payload_that_nobody_takes_is_freed(make: Make, place: Path, extra_of_mode: dict[str, Any]) -> None:
    one, other = make(lease_ttl_s=0.5, **extra_of_mode), make()
    _, _, metadata = one.put(*EDGE, "k", tree(1))
    until(nothing_is_left(place, one), "the payload outlived its lease")
    assert other.get_with_deadline(*EDGE, "k", deadline=time.monotonic() + 0.3) is None
    with pytest.raises(MoonrelayError) as caught:
        other.get_with_deadline(*EDGE, "k", metadata, deadline=time.monotonic() + 10.0)
    assert isinstance(caught.value, GONE)


@pytest.mark.parametrize("form", ["key", "key and edge", "keywords", "another process"])
def test_cleanup_drops_a_payload(make: Make, place: Path, form: str) -> None:
    one, other = make(), make()
    one.put(*EDGE, "k", tree(1))
    one.put(*EDGE, "k_longer", tree(2))
    one._jobs.flush(_soon())
    if form == "key":
        one.cleanup("k")
    elif form == "key and edge":
        one.cleanup("k", *EDGE)
    elif form == "keywords":
        one.cleanup(request_id="k", from_stage="0", to_stage="1", extra_of_the_host=1)
    else:
        other.cleanup("k", from_stage="0", to_stage="1")
    assert other.get_with_deadline(*EDGE, "k", deadline=time.monotonic() + 0.3) is None
    assert digest(got(other, "k_longer")) == digest(tree(2)), "a key is no prefix"
    one.cleanup("k")
    one.cleanup("never put")
    until(nothing_is_left(place, one, other), "the payloads left something behind")


def test_a_transfer_that_keeps_failing_is_told_and_loses_nothing(make: Make, extra: dict[str, Any]) -> None:
    one, third = make(), make()
    options = {**extra["engine_options"], "inner": "shm", "faults": ["fail"] * 64}
    other = make(engine="faulty", engine_options=options)
    one.put(*EDGE, "k", tree(1))
    with pytest.raises(TransferFailed):
        other.get_with_deadline(*EDGE, "k", deadline=time.monotonic() + 30.0)
    with pytest.raises(TransferFailed):  # a caller that polls is told too, once
        until(lambda: other.get(*EDGE, "k") is not None, "nothing was said")
    other.abandon_get("k")
    assert digest(got(third, "k")) == digest(tree(1))


def test_one_failed_transfer_is_tried_again(make: Make, extra: dict[str, Any]) -> None:
    one = make()
    options = {**extra["engine_options"], "inner": "shm", "faults": ["fail", "fail"]}
    other = make(engine="faulty", engine_options=options)
    one.put(*EDGE, "k", tree(1))
    assert digest(got(other, "k")) == digest(tree(1))


def test_cleanup_of_another_edge_leaves_this_one(make: Make) -> None:
    one, other = make(), make()
    one.put("0", "1", "k", tree(1))
    one.put("0", "2", "k", tree(2))
    one.cleanup("k", "0", "2")
    assert digest(got(other, "k")) == digest(tree(1))


def test_a_closed_connector_says_so(make: Make) -> None:
    one = make()
    one.put(*EDGE, "k", tree(1))
    one.close()
    one.close()
    for call in (
        lambda: one.put(*EDGE, "k2", tree(1)),
        lambda: one.get(*EDGE, "k"),
        lambda: one.get_with_deadline(*EDGE, "k", deadline=time.monotonic() + 1.0),
    ):
        with pytest.raises(RuntimeError, match="closed") as caught:
            call()
        assert isinstance(caught.value, ConnectorClosed)
    one.cleanup("k")
    one.abandon_get("k")
    one.reap_consumed()
    assert (one.health()["status"], one.health()["closed"]) == ("unhealthy", True)


def test_close_leaves_no_thread(make: Make) -> None:
    before = set(threading.enumerate())
    one, other = make(), make()
    one.put(*EDGE, "k", tree(1))
    got(other, "k")
    one.close()
    other.close()
    assert [thread.name for thread in set(threading.enumerate()) - before] == []


def test_close_from_another_thread_ends_a_wait(make: Make) -> None:
    other = make()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(got, other, "k")
        until(lambda: other.health()["waiting"] == 1, "nobody waits")
        other.close()
        with pytest.raises(ConnectorClosed):
            waiting.result(20.0)


@pytest.mark.parametrize("mode", ["p2p", "store", "auto"])
def test_close_in_the_middle_of_puts_and_gets(make: Make, mode: str) -> None:
    one, other = make(transfer_mode=mode), make(transfer_mode=mode)
    under_way = threading.Barrier(3)

    def puts() -> None:
        for number in range(1_000_000):
            if number == 3:
                under_way.wait(20.0)
            try:
                one.put(*EDGE, f"k{number}", tree(number, 1 << 16))
            except CapacityError:
                threading.Event().wait(0.01)  # the reader is slower

    def gets() -> None:
        for number in range(1_000_000):
            if number == 2:
                under_way.wait(20.0)
            while other.get_with_deadline(*EDGE, f"k{number}", deadline=time.monotonic() + 20.0) is None:
                pass

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(puts), pool.submit(gets)]
        under_way.wait(20.0)
        one.close()
        with pytest.raises(ConnectorClosed):
            calls[0].result(20.0)
        other.close()
        with pytest.raises(MoonrelayError) as ended:
            calls[1].result(20.0)
    assert isinstance(ended.value, (ConnectorClosed, *GONE))
    del ended, calls
    until(lambda: not any([*one.in_use().values(), *other.in_use().values()]), "something is held after close")


def test_close_keeps_what_was_put_in_the_store(make: Make, place: Path) -> None:
    one, other = make(), make()
    one.put(*EDGE, "k", tree(1))
    one.close()
    assert digest(got(other, "k")) == digest(tree(1))
    until(lambda: all("tomb" in name for name in store_keys(place)), "more than the tombstone was left")


def test_close_without_a_store_tells_readers(make: Make, place: Path) -> None:
    one, other = make(transfer_mode="p2p"), make(transfer_mode="p2p")
    _, _, metadata = one.put(*EDGE, "k", tree(1))
    one.close()
    with pytest.raises(GONE):
        other.get_with_deadline(*EDGE, "k", metadata, deadline=time.monotonic() + 10.0)
    assert store_keys(place) == []


def test_an_aborted_payload_is_a_typed_error(make: Make) -> None:
    one, other = make(), make()
    _, _, metadata = one.put(*EDGE, "k", tree(1))
    one._connector.abort(one._puts[next(iter(one._puts))].handle, "the request was cancelled")
    with pytest.raises(Aborted, match="cancelled"):
        other.get_with_deadline(*EDGE, "k", metadata, deadline=time.monotonic() + 10.0)


# -- settings and health ----------------------------------------------------------------------------------------------


def test_a_wrong_setting_is_refused_at_once(make: Make) -> None:
    with pytest.raises(ConfigError, match="engine"):
        make(engin="shm")
    with pytest.raises(PluginError):
        make(store="nothing://host:1")


def test_what_is_missing_is_said_at_the_start(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    one = make(engine="nonesuch")
    until(lambda: one.health()["last_error"] is not None, "nothing was said")
    assert one.health()["status"] == "unhealthy"
    assert "nonesuch" in caplog.text
    with pytest.raises(PluginError, match="nonesuch"):
        one.put(*EDGE, "k", tree(1))


def test_health_has_the_hosts_keys_and_ours(make: Make) -> None:
    one = make()
    health = one.health()
    documented = (
        "status host metadata_server master protocol pool_device pool_size puts gets bytes_transferred errors timeouts"
    )
    assert set(documented.split()) <= health.keys()
    assert {"engine", "transfer_mode", "payloads", "slots", "claims", "waiting", "last_error"} <= health.keys()
    assert health["status"] == "healthy"


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["p2p", "store", "auto"])
def test_two_processes(peer: Peer, place: Path, mode: str) -> None:
    one, other = peer(transfer_mode=mode), peer(transfer_mode=mode)
    for number in range(5):
        want = one.do("put", key=f"r{number}_0_0", seed=number)
        assert other.do("get", key=f"r{number}_0_0", timeout_s=30.0) == want
    until(lambda: not store_keys(place), "the payloads left something in the store")


@pytest.mark.mooncake
@pytest.mark.processes
@pytest.mark.parametrize("mode", ["p2p", "auto"])
def test_two_processes_by_mooncakes_engine(peer: Peer, place: Path, mode: str) -> None:
    settings: dict[str, Any] = {"engine": "mooncake", "engine_options": {}, "transfer_mode": mode}
    one, other = peer(**settings), peer(**settings)
    for number in range(3):
        want = one.do("put", key=f"r{number}_0_0", seed=number, count=1 << 20)
        assert other.do("get", key=f"r{number}_0_0", timeout_s=30.0) == want
    until(lambda: not store_keys(place), "the payloads left something in the store")


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["p2p", "auto"])
def test_a_producer_that_is_killed_is_a_typed_failure_within_a_bound(
    peer: Peer, make: Make, place: Path, mode: str
) -> None:
    one = peer(transfer_mode=mode, spill_after_s=600.0)
    one.do("put", key="k", seed=1)
    until(lambda: any(".keys%r%" in name for name in store_keys(place)), "there is no record")
    one.kill()
    other = make(transfer_mode=mode)
    started = time.monotonic()
    with pytest.raises(MoonrelayError) as caught:
        other.get_with_deadline(*EDGE, "k", deadline=started + 20.0)
    assert isinstance(caught.value, GONE)
    assert time.monotonic() - started < 15.0
    until(nothing_is_left(place, other), "the dead producer's record was left")
    assert other.get_with_deadline(*EDGE, "k", deadline=time.monotonic() + 0.3) is None


@pytest.mark.processes
def test_a_stage_that_is_started_again_puts_the_same_key_again(peer: Peer, make: Make, place: Path) -> None:
    first, reader = peer(), make()
    first.do("put", key="k", seed=1)
    first.kill()
    again = peer()
    again.do("put", key="k", seed=2)
    assert digest(got(reader, "k")) == digest(tree(2))
    until(lambda: not store_keys(place), "the payload of the killed one left something")


@pytest.mark.processes
def test_a_killed_producers_record_is_swept_though_nobody_reads_it(peer: Peer, make: Make, place: Path) -> None:
    one = peer(transfer_mode="p2p")
    one.do("put", key="k", seed=1)
    until(lambda: any(".keys%r%" in name for name in store_keys(place)), "there is no record")
    other = make(transfer_mode="p2p")
    until(lambda: other.health()["started"], "the connector did not start")
    assert other._directory.sweep(_soon(), lost=other._is_lost, ask_after_s=0.0) == 0, "its owner lives"
    one.kill()
    assert other._directory.sweep(_soon(), lost=other._is_lost, ask_after_s=0.0) == 1
    assert store_keys(place) == []


@pytest.mark.processes
def test_what_a_killed_producer_had_stored_is_delivered(peer: Peer, make: Make, place: Path) -> None:
    one, other = peer(transfer_mode="store"), make(transfer_mode="store")
    want = one.do("put", key="k", seed=1)
    stored = ("%end", ".keys%r%")  # payload and record, in either order
    until(lambda: all(any(part in name for name in store_keys(place)) for part in stored), "it was not stored")
    one.kill()
    assert digest(got(other, "k")) == want
    until(lambda: all("tomb" in name for name in store_keys(place)), "the record was left")


@pytest.mark.processes
def test_a_consumer_that_is_killed_takes_nothing_with_it(peer: Peer, make: Make) -> None:
    one, other = make(), peer()
    one.put(*EDGE, "k", tree(1, 4 << 20))
    other.send("get", key="k", timeout_s=20.0)
    threading.Event().wait(0.02)  # at any point of the fetch
    other.kill()
    third = make()
    found = third.get_with_deadline(*EDGE, "k", deadline=time.monotonic() + 10.0)
    # The killed one had either acknowledged it, and then it is gone, or another reader gets it.
    assert found is None or digest(found[0]) == digest(tree(1, 4 << 20))


@pytest.mark.processes
def test_a_peers_failure_is_told(peer: Peer) -> None:
    one = peer()
    one.do("close")
    with pytest.raises(PeerFailed, match="ConnectorClosed"):
        one.do("put", key="k", seed=1)


def _soon() -> Any:
    from moonrelay.clock import Deadline, SystemClock

    return Deadline(20.0, SystemClock())
