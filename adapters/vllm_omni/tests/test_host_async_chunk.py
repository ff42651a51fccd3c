"""The host's chunk transfer between two processes, over our connector: order, ends, kills, and what is left.

A language stage's model cannot run here: the host brings no AR worker for a CPU. So what the host's adapter is fed with
is made from numbers, and its scheduler is a few queues; keys, threads, polls, structs and clean-up are the host's own.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omni_chunks import LONG_S, ChunkProducer, Consumer, adapter, content, request
from omni_peer import digest, new_place, settings_in, store_keys

from moonrelay.transfer.shm import sweep_orphans

pytestmark = [pytest.mark.vllm_omni, pytest.mark.processes, pytest.mark.timeout(600)]

#: For how long a stream may stand still; the host's own default is ten minutes.
STALL_S = 4.0

Start = Callable[..., ChunkProducer]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """One folder for all tests here: each start of a process of the host costs half a minute."""
    folder = new_place()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def extra(place: Path) -> dict[str, Any]:
    return settings_in(place)


@pytest.fixture
def start(extra: dict[str, Any], place: Path) -> Iterator[Start]:
    """Starts sending stages of a test's own; they are ended afterwards."""
    started: list[ChunkProducer] = []

    def start_one(**changes: Any) -> ChunkProducer:
        one = ChunkProducer({**extra, **changes}, host=True)
        started.append(one)
        return one

    yield start_one
    for one in started:
        one.end()
    sweep_orphans(place / "segments")


@pytest.fixture(scope="module")
def producer(extra: dict[str, Any]) -> Iterator[ChunkProducer]:
    """The sending stage of those tests that leave it as it was."""
    one = ChunkProducer(extra, host=True)
    yield one
    one.end()


@pytest.fixture
def consumer(extra: dict[str, Any]) -> Iterator[Consumer]:
    """The receiving stage, of a kind that takes what it gets as it is."""
    one = Consumer(adapter({**extra, "role": "receiver"}, 1, "generation"))
    yield one
    one.adapter.shutdown()


def expected(name: str, count: int) -> list[str]:
    return [digest(content(name, number)) for number in range(count)]


def settles(condition: Callable[[], object], what: str) -> None:
    """Wait until ``condition`` gives nothing more."""
    end = time.monotonic() + LONG_S
    while left := condition():
        assert time.monotonic() < end, f"{what}: {left}"
        threading.Event().wait(0.02)


def held(*connectors: Any) -> list[str]:
    return [f"{name}={count}" for one in connectors for name, count in one.in_use().items() if count]


def test_chunks_arrive_once_in_order_and_the_last_one_ends_the_stream(
    producer: ChunkProducer, consumer: Consumer, place: Path
) -> None:
    before = producer.do("sent")["puts"]
    consumer.add(request("a"))
    count = 12
    for number in range(count):
        producer.do("save", name="a", number=number, finished=number == count - 1)
    consumer.until(lambda: consumer.done("a"), "the stream did not end")
    assert consumer.chunks["a"] == expected("a", count)
    consumer.finish("a")
    assert producer.do("sent") == {"puts": before + count, "queued": 0, "failed": {}}
    settles(lambda: held(consumer.adapter.connector.stages), "memory of chunks was left")
    settles(lambda: [name for name, left in producer.do("in_use").items() if left], "the producer holds chunks")
    settles(lambda: store_keys(place), "records of chunks were left")


def test_streams_of_two_requests_do_not_mix(producer: ChunkProducer, consumer: Consumer) -> None:
    names, count = ("b", "c"), 8
    for name in names:
        consumer.add(request(name))
    for number in range(count):
        for name in names if number % 2 else reversed(names):
            producer.do("save", name=name, number=number, finished=number == count - 1)
    consumer.until(lambda: all(consumer.done(name) for name in names), "the streams did not end")
    for name in names:
        assert consumer.chunks[name] == expected(name, count)


def test_an_end_without_content_ends_the_stream(producer: ChunkProducer, consumer: Consumer) -> None:
    consumer.add(request("d"))
    producer.do("save", name="d", number=0)
    producer.do("save", name="d", number=None, finished=True)
    consumer.until(lambda: consumer.done("d"), "the stream did not end")
    assert consumer.chunks["d"] == expected("d", 1)


def test_waiting_for_chunks_blocks_nothing(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    # All requests share the host's one receiving thread, so a get that waits would hold every other one up.
    names = [f"r{number}" for number in range(6)]
    connector = consumer.adapter.connector
    asked: dict[str, int] = {}
    slowest = [0.0]
    get = connector.get

    def timed(from_stage: str, to_stage: str, key: str, metadata: object = None) -> Any:
        started = time.monotonic()
        found = get(from_stage, to_stage, key, metadata)
        slowest[0] = max(slowest[0], time.monotonic() - started)
        asked[key] = asked.get(key, 0) + 1
        return found

    monkeypatch.setattr(connector, "get", timed)
    for name in names:
        consumer.add(request(name))
    consumer.until(
        lambda: len(asked) == len(names) and min(asked.values()) >= 50, "the host could not poll all requests"
    )
    assert sorted(asked) == [f"{name}_0_0" for name in names]
    assert slowest[0] < 1.0
    assert consumer.slowest_s < 1.0


def test_a_killed_producers_streams_fail_by_the_hosts_own_bound_and_leave_nothing(
    start: Start, producer: ChunkProducer, consumer: Consumer, place: Path
) -> None:
    one = start(spill_after_s=600.0)
    # Of one stream some chunks were taken, of the other all lie there when their producer dies.
    offered = 5
    for number in range(offered):
        one.do("save", name="offered", number=number)
    for name in ("lost", "fine"):
        consumer.add(request(name))
    for number in range(2):
        one.do("save", name="lost", number=number)
    consumer.until(lambda: len(consumer.chunks["lost"]) == 2, "the first chunks did not come")
    settles(lambda: sum(".keys%r%" in name for name in store_keys(place)) < offered, "the records were not written")
    one.kill()
    consumer.add(request("offered"))
    sent, next_s = 0, 0.0
    timed_out: set[str] = set()

    def stalled() -> bool:
        nonlocal sent, next_s
        if time.monotonic() >= next_s:
            producer.do("save", name="fine", number=sent)
            sent, next_s = sent + 1, time.monotonic() + 0.3
        timed_out.update(consumer.adapter.collect_timed_out_request_ids(STALL_S))
        return len(timed_out) >= 2

    consumer.until(stalled, "the host's own bound did not hold")
    assert timed_out == {"internal-lost", "internal-offered"}, "a stream of a living producer failed with them"
    consumer.finish("lost", "offered", failed=True)
    assert consumer.chunks["lost"] == expected("lost", 2)
    assert consumer.chunks["offered"] == []
    producer.do("save", name="fine", number=sent, finished=True)
    consumer.until(lambda: consumer.done("fine"), "another stream did not end")
    assert consumer.chunks["fine"] == expected("fine", sent + 1)
    settles(lambda: held(consumer.adapter.connector.stages), "memory of the lost streams was left")
    settles(lambda: store_keys(place), "records of the lost streams were left")


def test_an_aborted_requests_chunks_end_with_their_lease(start: Start, place: Path) -> None:
    # On an abort the host cleans up after its own shared memory connector alone, by name.
    one = start(lease_ttl_s=6.0, spill_after_s=600.0)
    for number in range(3):
        one.do("save", name="a", number=number)
    settles(lambda: one.do("sent")["puts"] < 3, "the chunks were not put")
    assert one.do("in_use")["payloads"] == 3
    one.do("abort", name="a")
    settles(lambda: [name for name, left in one.do("in_use").items() if left], "an aborted request's chunks were left")
    settles(lambda: store_keys(place), "records of an aborted request were left")


def test_a_request_id_that_comes_again_gets_its_own_chunks(producer: ChunkProducer, consumer: Consumer) -> None:
    for count in (2, 3):
        consumer.add(request("e"))
        for number in range(count):
            producer.do("save", name="e", number=number, finished=number == count - 1)
        consumer.until(lambda: consumer.done("e"), "the stream did not end")
        assert consumer.chunks["e"] == expected("e", count)
        consumer.finish("e")
        producer.do("forget", name="e")
