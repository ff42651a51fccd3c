"""The connector between processes that die, stop and lie: real engines, real relays, real signals."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import StoreConfig
from moonrelay.errors import (
    Aborted,
    CapacityError,
    ConfigError,
    LeaseHeld,
    LeaseLost,
    MoonrelayError,
    PeerLost,
    TransferTimeout,
)
from moonrelay.relay.cluster import MooncakeCluster
from moonrelay.relay.local import LocalRelay
from moonrelay.relay.mooncake_store import MooncakeRelay
from support.processes import PeerPool, PeerProcess
from support.segments import segments_of

pytestmark = pytest.mark.processes

CONTROL = {"claim_ttl_s": 1.5, "renew_s": 0.3, "peer_timeout_s": 2.0, "retry_s": 0.2}
ENGINES = ["shm", pytest.param("mooncake", marks=pytest.mark.mooncake)]
RELAYS = ["local", pytest.param("mooncake", marks=pytest.mark.mooncake)]
CYCLES = [
    ("shm", "p2p", "local"),
    pytest.param("mooncake", "p2p", "local", marks=pytest.mark.mooncake),
    ("shm", "store", "local"),
    pytest.param("shm", "store", "mooncake", marks=pytest.mark.mooncake),
]
SHAPE = [1, 16, 12, 32, 32]
Start = Callable[..., PeerProcess]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    with MooncakeCluster(tmp_path_factory.mktemp("mooncake"), pool_bytes=64 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def peers() -> Iterator[PeerPool]:
    pool = PeerPool()
    yield pool
    pool.close()


@pytest.fixture
def start(peers: PeerPool) -> Iterator[Start]:
    def begin(role: str, engine: str = "shm", mode: str = "p2p", **settings: Any) -> PeerProcess:
        te_config = {"engine": engine, "pool_bytes": 64 << 20, **settings.pop("te_config", {})}
        return peers.start(role=role, transfer_mode=mode, te_config=te_config, control_config=CONTROL, **settings)

    yield begin
    peers.take_back()


@pytest.fixture
def relay_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    def url(scheme: str) -> str:
        if scheme == "local":
            return f"local://{tmp_path}"
        return str(request.getfixturevalue("cluster").url)

    return url


def bounded(seconds: float, act: Callable[[], object], *expected: type[BaseException]) -> BaseException:
    """Run ``act``, which must fail as expected within ``seconds``; return the error."""
    began = time.monotonic()
    with pytest.raises(expected) as caught:
        act()
    assert time.monotonic() - began < seconds, "the wait did not end by its deadline"
    return caught.value


# Delivery between processes.


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("registered", [True, False])
def test_bytes_arrive_between_processes(start: Start, engine: str, registered: bool) -> None:
    producer, consumer = start("denoise", engine), start("decode", engine)
    sent = producer.do(
        "publish", name="r", seed=1, shape=SHAPE, dtype="bfloat16", registered=registered, chunk_dim=2, num_chunks=4
    )
    assert consumer.do("receive", handle=sent["handle"])["digest"] == sent["digest"]
    staged = [event for event in producer.do("seen") if event["name"] == "staged"]
    assert bool(staged) is not registered
    assert producer.do("held")["slots"] == 0


@pytest.mark.parametrize("relay", RELAYS)
def test_bytes_arrive_through_the_relay(start: Start, relay_url: Callable[[str], str], relay: str) -> None:
    settings = {"mode": "store", "store_config": relay_url(relay)}
    producer, consumer = start("denoise", **settings), start("decode", **settings)
    sent = producer.do("publish", name="r", seed=1, shape=SHAPE, dtype="bfloat16", chunk_dim=2, num_chunks=4)
    assert consumer.do("receive", handle=sent["handle"])["digest"] == sent["digest"]
    bounded(10, lambda: consumer.do("receive", handle=sent["handle"]), LeaseLost)


# The producer dies.


@pytest.mark.parametrize("engine", ENGINES)
def test_producer_killed_before_the_claim(start: Start, engine: str) -> None:
    producer, consumer = start("denoise", engine), start("decode", engine)
    sent = producer.do("publish", name="r", seed=1, shape=SHAPE)
    producer.kill()
    error = bounded(8, lambda: consumer.do("receive", handle=sent["handle"]), PeerLost)
    assert "relay" in str(error)
    assert consumer.do("held")["slots"] == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_producer_killed_between_two_chunks(start: Start, engine: str) -> None:
    producer, consumer = start("denoise", engine), start("decode", engine)
    sent = producer.do("publish", name="r", seed=1, shape=SHAPE, chunk_dim=2, num_chunks=3, follow=True)
    producer.do("ready", name="r", chunk=0)
    consumer.do("claim", name="c", handle=sent["handle"])
    assert consumer.do("first_chunk", name="c") == [1, 16, 4, 32, 32]
    producer.kill()
    bounded(10, lambda: consumer.do("next_chunk", name="c"), PeerLost)


@pytest.mark.mooncake
def test_producer_killed_while_it_is_read(start: Start) -> None:
    size = 128 << 20
    # Small pieces, one at a time: the read takes the better part of a second.
    slow = {"te_config": {"pool_bytes": size + (1 << 20), "piece_bytes": 64 << 10, "window": 1}}
    producer, consumer = start("denoise", "mooncake", **slow), start("decode", "mooncake", **slow)
    sent = producer.do("publish", name="r", seed=1, shape=[size], registered=True)
    consumer.do("claim", name="c", handle=sent["handle"])
    consumer.send("read", name="c")
    select.select([], [], [], 0.15)
    producer.kill()
    bounded(20, consumer.answer, PeerLost)
    consumer.do("nack", name="c")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("relay", RELAYS)
def test_producer_killed_after_spilling(start: Start, relay_url: Callable[[str], str], engine: str, relay: str) -> None:
    settings = {"mode": "auto", "store_config": relay_url(relay), "spill_after_s": 0.1}
    producer, consumer = start("denoise", engine, **settings), start("decode", engine, **settings)
    sent = producer.do("publish", name="r", seed=1, shape=SHAPE, chunk_dim=2, num_chunks=3, follow=True)
    for chunk in range(3):
        producer.do("ready", name="r", chunk=chunk)
    producer.do("wait", name="r", state="spilled", timeout_s=20)
    producer.kill()
    consumer.do("claim", name="c", handle=sent["handle"])
    assert consumer.do("read", name="c") == {"digest": sent["digest"], "path": "store"}
    consumer.do("ack", name="c")
    bounded(10, lambda: consumer.do("claim", name="d", handle=sent["handle"]), LeaseLost)


@pytest.mark.parametrize("relay", RELAYS)
def test_producer_killed_while_relaying_is_never_short(
    start: Start, relay_url: Callable[[str], str], relay: str
) -> None:
    settings = {"mode": "store", "store_config": relay_url(relay)}
    producer, consumer = start("denoise", **settings), start("decode", **settings)
    sent = producer.do("publish", name="r", seed=1, shape=SHAPE, chunk_dim=2, num_chunks=3, follow=True)
    producer.do("ready", name="r", chunk=0)
    producer.do("ready", name="r", chunk=1)
    producer.kill()
    # Two of three chunks are in the relay and there is no end record: the payload does not exist.
    bounded(10, lambda: consumer.do("receive", handle=sent["handle"]), PeerLost)


# The consumer dies.


@pytest.mark.parametrize("engine", ENGINES)
def test_consumer_killed_in_the_middle_of_a_read(start: Start, engine: str) -> None:
    producer, first, second = start("denoise", engine), start("decode", engine), start("decode", engine)
    sent = producer.do("publish", name="r", seed=1, shape=SHAPE, chunk_dim=2, num_chunks=3)
    first.do("claim", name="c", handle=sent["handle"])
    first.do("first_chunk", name="c")
    assert producer.do("status", handle=sent["handle"]) == "claimed"
    first.kill()
    # The dead reader's claim lapses, and the payload is whole for the next one.
    assert second.do("receive", handle=sent["handle"])["digest"] == sent["digest"]


@pytest.mark.parametrize("engine", ENGINES)
def test_consumer_killed_after_reading_before_ack(start: Start, engine: str) -> None:
    producer, first, second = start("denoise", engine), start("decode", engine), start("decode", engine)
    sent = producer.do("publish", name="r", seed=1, shape=SHAPE)
    first.do("claim", name="c", handle=sent["handle"])
    assert first.do("read", name="c")["digest"] == sent["digest"]
    first.kill()
    assert second.do("receive", handle=sent["handle"])["digest"] == sent["digest"]
    assert producer.do("held")["slots"] == 0


@pytest.mark.parametrize("relay", RELAYS)
def test_relayed_claim_of_a_killed_consumer_is_taken_over(
    start: Start, relay_url: Callable[[str], str], relay: str
) -> None:
    settings = {"mode": "auto", "store_config": relay_url(relay), "spill_after_s": 0.1}
    producer, first, second = (start(role, "shm", **settings) for role in ("denoise", "decode", "decode"))
    sent = producer.do("publish", name="r", seed=1, shape=SHAPE, follow=True)
    producer.do("ready", name="r", chunk=0)
    producer.do("wait", name="r", state="spilled", timeout_s=20)
    producer.kill()
    first.do("claim", name="c", handle=sent["handle"])
    bounded(10, lambda: second.do("claim", name="c", handle=sent["handle"], timeout_s=5.0), LeaseHeld)
    first.kill()
    assert second.do("receive", handle=sent["handle"])["digest"] == sent["digest"]


# Somebody stands still.


@pytest.mark.parametrize("engine", ENGINES)
def test_producer_stopped_and_continued(start: Start, engine: str) -> None:
    producer, consumer = start("denoise", engine), start("decode", engine)
    sent = producer.do("publish", name="r", seed=1, shape=SHAPE)
    producer.stop()
    consumer.send("receive", handle=sent["handle"])
    select.select([], [], [], 0.7)
    producer.go_on()
    assert consumer.answer()["digest"] == sent["digest"]


@pytest.mark.parametrize("engine", ENGINES)
def test_producer_stopped_for_good_is_lost_in_time(start: Start, engine: str) -> None:
    producer, consumer = start("denoise", engine), start("decode", engine)
    sent = producer.do("publish", name="r", seed=1, shape=SHAPE)
    producer.stop()
    bounded(8, lambda: consumer.do("receive", handle=sent["handle"], timeout_s=30.0), PeerLost)
    bounded(4, lambda: consumer.do("receive", handle=sent["handle"], timeout_s=1.0), PeerLost, TransferTimeout)
    producer.go_on()
    assert consumer.do("receive", handle=sent["handle"])["digest"] == sent["digest"]


@pytest.mark.parametrize("engine", ENGINES)
def test_consumer_stopped_past_its_claim_is_fenced(start: Start, engine: str) -> None:
    producer, first, second = start("denoise", engine), start("decode", engine), start("decode", engine)
    sent = producer.do("publish", name="r", seed=1, shape=SHAPE)
    first.do("claim", name="c", handle=sent["handle"])
    assert first.do("read", name="c")["digest"] == sent["digest"]
    first.stop()
    assert second.do("receive", handle=sent["handle"])["digest"] == sent["digest"]
    first.go_on()
    bounded(10, lambda: first.do("ack", name="c"), LeaseLost)


# Stores and keys.


def test_a_full_store_is_an_error_that_reaches_the_reader(start: Start, tmp_path: Path) -> None:
    settings = {"mode": "store", "store_config": {"url": f"local://{tmp_path}", "capacity_bytes": 1 << 20}}
    producer, consumer = start("denoise", **settings), start("decode", **settings)
    sent = producer.do("publish", name="big", seed=1, shape=[4 << 20])
    bounded(15, lambda: consumer.do("receive", handle=sent["handle"]), CapacityError)
    small = producer.do("publish", name="small", seed=2, shape=[1 << 10])
    assert consumer.do("receive", handle=small["handle"])["digest"] == small["digest"]


@pytest.mark.mooncake
def test_a_full_mooncake_store_keeps_the_payload_direct(start: Start, cluster: MooncakeCluster) -> None:
    settings = {
        "mode": "auto",
        "store_config": cluster.url,
        "spill_after_s": 0.0,
        "te_config": {"pool_bytes": 96 << 20},
    }
    producer, consumer = start("denoise", **settings), start("decode", **settings)
    sent = producer.do("publish", name="r", seed=1, shape=[80 << 20])  # the store has 64 MiB
    assert consumer.do("receive", handle=sent["handle"])["digest"] == sent["digest"]


@pytest.mark.mooncake
def test_a_killed_master_is_an_error_in_time(start: Start, tmp_path: Path) -> None:
    with MooncakeCluster(tmp_path, pool_bytes=32 << 20) as own:
        settings = {"mode": "store", "store_config": {"url": own.url, "put_timeout_s": 10.0}}
        producer, consumer = start("denoise", **settings), start("decode", **settings)
        first = producer.do("publish", name="a", seed=1, shape=SHAPE)
        assert consumer.do("receive", handle=first["handle"])["digest"] == first["digest"]
        own.kill_master()
        lost = producer.do("publish", name="b", seed=2, shape=SHAPE)
        bounded(40, lambda: consumer.do("receive", handle=lost["handle"]), MoonrelayError)
        assert producer.do("held")["slots"] == 0


def test_a_wrong_key_is_refused_and_a_right_one_is_not(start: Start) -> None:
    producer = start("denoise", auth_key="the deployment's key")
    sent = producer.do("publish", name="r", seed=1, shape=SHAPE)
    for key in ("another key", None):
        stranger = start("decode", **({"auth_key": key} if key else {}))
        bounded(10, lambda stranger=stranger: stranger.do("receive", handle=sent["handle"]), ConfigError)
    friend = start("decode", auth_key="the deployment's key")
    assert friend.do("receive", handle=sent["handle"])["digest"] == sent["digest"]


def test_a_closing_producer_tells_its_reader(start: Start) -> None:
    producer, consumer = start("denoise"), start("decode")
    sent = producer.do("publish", name="r", seed=1, shape=SHAPE, chunk_dim=2, num_chunks=3, follow=True)
    producer.do("ready", name="r", chunk=0)
    consumer.do("claim", name="c", handle=sent["handle"])
    consumer.do("first_chunk", name="c")
    consumer.send("next_chunk", name="c")
    producer.do("close")
    bounded(15, consumer.answer, Aborted, PeerLost)


# Nothing piles up.

#: Connections that Mooncake's RPC pools open when more calls than before coincide; a leak would show 300.
RPC_SOCKETS = 4


@pytest.mark.parametrize(("engine", "mode", "relay"), CYCLES)
def test_300_publish_consume_cycles_leave_the_baseline(
    start: Start, relay_url: Callable[[str], str], engine: str, mode: str, relay: str
) -> None:
    url = relay_url(relay)
    settings = {"mode": mode, "store_config": url}
    producer, consumer = start("denoise", engine, **settings), start("decode", engine, **settings)

    def cycle(number: int) -> None:
        sent = producer.do("publish", name=f"r{number}", seed=number, shape=[64, 64], chunk_dim=0, num_chunks=4)
        assert consumer.do("receive", handle=sent["handle"])["digest"] == sent["digest"]

    _leaves_the_baseline(cycle, [producer, consumer], url)


@pytest.mark.parametrize(("engine", "mode", "relay"), CYCLES)
def test_300_publish_abort_cycles_leave_the_baseline(
    start: Start, relay_url: Callable[[str], str], engine: str, mode: str, relay: str
) -> None:
    url = relay_url(relay)
    producer = start("denoise", engine, mode, store_config=url)

    def cycle(number: int) -> None:
        name = f"r{number}"
        producer.do("publish", name=name, seed=number, shape=[64, 64], chunk_dim=0, num_chunks=4, follow=True)
        producer.do("ready", name=name, chunk=number % 4)
        producer.do("abort", name=name, reason="not needed")

    _leaves_the_baseline(cycle, [producer], url)


def _leaves_the_baseline(cycle: Callable[[int], None], peers: list[PeerProcess], url: str) -> None:
    """Run 300 cycles; what processes, shared memory and store hold afterwards is what they held before."""
    spare_fds = RPC_SOCKETS if url.startswith("mooncake") else 0
    for number in range(20):
        cycle(number)
    with _store(url) as keys:

        def holds() -> tuple[list[dict[str, int]], set[str]]:
            return [peer.do("held") for peer in peers], segments_of(peer.pid for peer in peers)

        # Other tests that killed their producers may have left records in a shared store; no cycle adds any.
        _settle(lambda: not [key for key in keys() if "/c/" in key])
        before, stored = holds(), set(keys())
        for number in range(300):
            cycle(100 + number)

        def risen() -> list[str]:
            (peers_before, segments_before), (peers_now, segments_now) = before, holds()
            more = [
                f"{name}: {was[name]} -> {now[name]}"
                for was, now in zip(peers_before, peers_now, strict=True)
                for name in now
                if now[name] > was[name] + (spare_fds if name == "fds" else 0)
            ]
            return more + sorted(segments_now - segments_before) + sorted(set(keys()) - stored)

        _settle(lambda: not risen())
        assert risen() == []


@pytest.mark.alone  # another test's engine would sweep it as well
def test_a_killed_process_leaves_no_shared_memory_for_long(start: Start) -> None:
    producer = start("denoise", "shm")
    producer.do("publish", name="r", seed=1, shape=SHAPE)
    assert segments_of([producer.pid])
    producer.kill()
    assert segments_of([producer.pid])
    # The next process of this user sweeps what a dead one left.
    start("denoise", "shm").do("publish", name="r", seed=1, shape=[8])
    assert not segments_of([producer.pid])


@contextlib.contextmanager
def _store(url: str) -> Iterator[Callable[[], list[str]]]:
    """Look into a store from outside the connector."""
    relay = (LocalRelay if url.startswith("local") else MooncakeRelay)(StoreConfig(url=url))
    relay.start()
    try:
        yield lambda: relay.keys("moonrelay/", Deadline(20.0, SystemClock()))
    finally:
        relay.close()


def _settle(done: Callable[[], bool]) -> None:
    """Wait a bounded time for clean-up that runs in the background."""
    until = time.monotonic() + 15
    while not done() and time.monotonic() < until:
        select.select([], [], [], 0.05)


@pytest.mark.mooncake
def test_closing_on_a_stopped_store_takes_seconds(start: Start, tmp_path: Path) -> None:
    with MooncakeCluster(tmp_path, pool_bytes=32 << 20) as own:
        settings = {"mode": "auto", "store_config": own.url, "spill_after_s": 0.0, "drain_timeout_s": 1.0}
        producer = start("denoise", **settings)
        first = producer.do("publish", name="a", seed=1, shape=SHAPE, follow=True)
        producer.do("ready", name="a", chunk=0)
        producer.do("wait", name="a", state="spilled", timeout_s=20)
        assert first["handle"]
        client = own.pids["client"]
        os.kill(client, signal.SIGSTOP)  # puts now hang inside the native library, for up to a minute each
        try:
            producer.do("publish", name="b", seed=2, shape=SHAPE)
            began = time.monotonic()
            producer.do("close")
            assert time.monotonic() - began < 20, "close waited for the store"
        finally:
            os.kill(client, signal.SIGCONT)
