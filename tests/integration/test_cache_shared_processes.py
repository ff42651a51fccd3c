"""The shared cache tier between processes that are killed or stopped: the bound, the leftovers, and one lead."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonrelay.cache.shared import SharedStore
from moonrelay.cache.wire import Slot, decoded
from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import StoreConfig
from moonrelay.handle import Extent
from moonrelay.relay.base import Relay
from moonrelay.relay.cluster import MooncakeCluster
from moonrelay.relay.local import LocalRelay
from moonrelay.relay.memory import MemoryRelay
from moonrelay.relay.mooncake_store import MooncakeRelay

pytestmark = pytest.mark.processes

PREFIX = "ns/cache"
CAPACITY = 160_000
MARKS = 2000
ENTRY = 2000

PRELUDE = """
import ctypes, hashlib, json, os, sys, threading
from moonrelay.cache.flight import Lead, SingleFlight
from moonrelay.cache.shared import SharedStore
from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import StoreConfig
from moonrelay.handle import Extent
from moonrelay.relay.local import LocalRelay
from moonrelay.relay.mooncake_store import MooncakeRelay
url, capacity = sys.argv[1], int(sys.argv[2])
clock = SystemClock()
made = (LocalRelay if url.startswith("local") else MooncakeRelay)(StoreConfig(url=url, capacity_bytes=1 << 30))
made.start()
def soon(): return Deadline(60.0, clock)
def digest(i): return hashlib.sha256(b"%d" % i).hexdigest()
def data(i): return (b"%06d" % i * 400)[:2000]
def put(store, i):
    raw = data(i)
    block = (ctypes.c_char * len(raw)).from_buffer_copy(raw)
    return store.put(digest(i), [Extent(ctypes.addressof(block), len(raw))], len(raw), {"i": str(i)}, soon())
def say(**what): print(json.dumps(what), flush=True)
def shared(relay): return SharedStore(relay, "ns/cache", capacity, clock)
"""

WRITER = """
first, count = int(sys.argv[3]), int(sys.argv[4])
store = shared(made)
say(ready=True)
sys.stdin.readline()
kept = wrong = 0
for i in range(first, first + count):
    kept += put(store, i)
    hit = store.get(digest(i), soon())
    wrong += hit is not None and bytes(hit.data) != data(i)
    if hit is not None and hit.ageing:
        store.promote(digest(i), hit, {}, soon())
say(kept=kept, wrong=wrong)
"""

# Stands still at the n-th call of one kind, before it or after it, so that the parent kills it there.
STANDING = """
call, nth, after, first = sys.argv[3], int(sys.argv[4]), sys.argv[5] == "after", int(sys.argv[6])
count = 0
class Standing(type(made)):
    pass
def standing(name):
    plain = getattr(type(made), name)
    def stand(self, *arguments, **options):
        global count
        here = name == call and armed
        count += here
        if here and count == nth and not after:
            say(standing=True)
            threading.Event().wait()
        answer = plain(self, *arguments, **options)
        if here and count == nth and after:
            say(standing=True)
            threading.Event().wait()
        return answer
    return stand
for name in ("put", "get_bytes", "put_if_absent", "remove"):
    setattr(Standing, name, standing(name))
made.__class__ = Standing
armed = False
store = shared(made)
store.get(digest(0), soon())
armed = True
for i in range(first, first + 200):
    put(store, i)
say(standing=False)
"""

ASKER = """
store = shared(made)
flight = SingleFlight(made, "ns/cache", clock, beat_s=0.2, dead_after_s=1.5)
say(ready=True)
for line in sys.stdin:
    order = json.loads(line)
    key, log, began = order["key"], order["log"], clock.monotonic()
    deadline, stood, epochs = Deadline(order["timeout_s"], clock), [], []
    def note(text):
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, (text + "\\n").encode())
        os.close(fd)
    while True:
        hit = store.get(digest(key), deadline)
        if hit is not None:
            raw = bytes(hit.data)
            break
        outcome = flight.enter(digest(key), deadline)
        if not isinstance(outcome, Lead):
            if outcome.finished:
                continue
            raw = b"late"
            break
        with outcome as lead:
            hit = store.get(digest(key), deadline)
            if hit is not None:
                raw = bytes(hit.data)
                break
            epochs.append(lead.epoch)
            note(f"began {os.getpid()}")
            threading.Event().wait(order["encode_s"])
            note(f"ended {os.getpid()}")
            stood.append(lead.stands())
            put(store, key)
            raw = data(key)
            break
    say(digest=hashlib.sha256(raw).hexdigest(), epochs=epochs, stood=stood, took_s=clock.monotonic() - began)
flight.close()
"""


class Child:
    """A process of a test: orders in, lines of JSON out."""

    def __init__(self, script: str, *arguments: object) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
            bufsize=1,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def hear(self, timeout_s: float = 90.0) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else ""
        assert line, f"no answer from {self.pid}, which ended with {self.process.poll()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def end(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
            self.process.kill()
            self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[Child] = []

    def one(script: str, *arguments: object) -> Child:
        children.append(Child(script, *arguments))
        return children[-1]

    yield one
    for child in children:
        child.end()


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    made = LocalRelay(StoreConfig(url=f"local://{tmp_path}/relay", capacity_bytes=1 << 30))
    with contextlib.closing(made):
        made.start()
        yield made


def soon(seconds: float = 60.0) -> Deadline:
    return Deadline(seconds, SystemClock())


def digest(i: int) -> str:
    return hashlib.sha256(b"%d" % i).hexdigest()


def data(i: int) -> bytes:
    return (b"%06d" % i * 400)[:ENTRY]


def put(store: SharedStore, i: int, raw: bytes | None = None) -> bool:
    raw = data(i) if raw is None else raw
    block = (ctypes.c_char * len(raw)).from_buffer_copy(raw)
    return store.put(digest(i), [Extent(ctypes.addressof(block), len(raw))], len(raw), {"i": str(i)}, soon())


def used(relay: Relay) -> int:
    """Return the bytes of the store's files, seen from outside."""
    folder = Path(relay.url.removeprefix("local://")) / "objects"
    total = 0
    with os.scandir(folder) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                total += file.stat().st_size
    return total


def accounted(relay: Relay) -> None:
    """Check that everything in the store is named by a log, so that it goes with its generation."""
    keys = relay.keys(f"{PREFIX}/", soon())
    slots = {}
    for key in keys:
        if "/l/" in key:
            slot = decoded(Slot, relay.get_bytes(key, soon()) or b"")
            assert slot is not None
            slots[key.split("/")[4], slot.object] = slot
    for key in keys:
        if "/o/" in key:
            assert tuple(key.split("/")[4:6]) in slots, key


def test_writers_at_once_keep_one_bound_and_read_what_was_written(relay: Relay, start: Start) -> None:
    writers = [start(WRITER, relay.url, CAPACITY, first, 150) for first in (0, 75, 150, 225)]
    for one in writers:
        one.hear()
    for one in writers:
        one.tell()
    most = 0
    while any(not select.select([one.process.stdout], [], [], 0.02)[0] for one in writers):
        most = max(most, used(relay))
    answers = [one.hear() for one in writers]
    assert [answer["wrong"] for answer in answers] == [0] * 4
    assert all(answer["kept"] >= 140 for answer in answers)
    # What a writer puts into a generation that is closed under its hands is there for a moment.
    assert most <= CAPACITY + MARKS + 4 * (ENTRY + 400)
    assert used(relay) <= CAPACITY + MARKS
    accounted(relay)
    SharedStore(relay, PREFIX, CAPACITY, SystemClock()).clear(soon())
    assert relay.keys("", soon()) == []


@pytest.mark.parametrize("after", ["before", "after"])
@pytest.mark.parametrize(
    ("call", "nth"),
    [("put", 5), ("put_if_absent", 20), ("put_if_absent", 21), ("remove", 1), ("remove", 2), ("remove", 3)],
)
def test_what_is_left_at_a_kill_goes_with_the_next_ones_work(
    relay: Relay, start: Start, call: str, nth: int, after: str
) -> None:
    child = start(STANDING, relay.url, CAPACITY, call, nth, after, 1000)
    assert child.hear()["standing"]
    child.kill()
    store = SharedStore(relay, PREFIX, CAPACITY, SystemClock())
    assert used(relay) <= CAPACITY + MARKS
    for i in range(1000, 1200):
        hit = store.get(digest(i), soon())
        assert hit is None or bytes(hit.data) == data(i)
    for i in range(90):
        assert put(store, i)
        assert used(relay) <= CAPACITY + MARKS
    hit = store.get(digest(89), soon())
    assert hit is not None
    assert bytes(hit.data) == data(89)
    accounted(relay)
    assert not store.contains(digest(1000), soon())
    store.clear(soon())
    assert relay.keys("", soon()) == []


def test_writers_killed_at_any_moment_leave_a_store_that_holds_its_bound(relay: Relay, start: Start) -> None:
    moment = random.Random(7)
    for turn in range(5):
        writers = [start(WRITER, relay.url, CAPACITY, 200 * turn + 40 * me, 2000) for me in range(2)]
        for one in writers:
            one.hear()
        for one in writers:
            one.tell()
        select.select([], [], [], 0.3 + moment.random() * 0.4)
        for one in writers:
            one.kill()
        assert used(relay) <= CAPACITY + MARKS + 2 * (ENTRY + 400)
    store = SharedStore(relay, PREFIX, CAPACITY, SystemClock())
    for i in range(5000, 5100):
        assert put(store, i)
    assert used(relay) <= CAPACITY + MARKS
    accounted(relay)
    for i in range(3000):
        hit = store.get(digest(i), soon())
        assert hit is None or bytes(hit.data) == data(i)
    store.clear(soon())
    assert relay.keys("", soon()) == []


def notes(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def until(what: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it did not come"
        select.select([], [], [], 0.02)


def ask(askers: list[Child], key: int, log: Path, encode_s: float) -> None:
    for one in askers:
        one.tell(key=key, log=str(log), encode_s=encode_s, timeout_s=60)


@pytest.mark.slow
def test_thirty_two_processes_make_one_value_whatever_happens_to_the_lead(
    relay: Relay, start: Start, tmp_path: Path
) -> None:
    askers = [start(ASKER, relay.url, 4 << 20) for _ in range(32)]
    for one in askers:
        one.hear()

    # Nothing happens to it, and it takes longer than a dead one is left alone.
    log = tmp_path / "plain"
    ask(askers, 1, log, 2.5)
    answers = [one.hear() for one in askers]
    assert {answer["digest"] for answer in answers} == {hashlib.sha256(data(1)).hexdigest()}
    assert [what for what, _ in notes(log)] == ["began", "ended"]
    assert [answer["stood"] for answer in answers if answer["stood"]] == [[True]]

    # It is killed.
    log = tmp_path / "killed"
    ask(askers, 2, log, 1.0)
    until(lambda: bool(notes(log)))
    (lead,) = [one for one in askers if one.pid == int(notes(log)[0][1])]
    lead.kill()
    others = [one for one in askers if one is not lead]
    answers = [one.hear() for one in others]
    assert {answer["digest"] for answer in answers} == {hashlib.sha256(data(2)).hexdigest()}
    assert [what for what, _ in notes(log)] == ["began", "began", "ended"]
    assert [answer["epochs"] for answer in answers if answer["epochs"]] == [[1]]
    assert max(answer["took_s"] for answer in answers) < 30

    # It is stopped, and comes back when all is over.
    log = tmp_path / "stopped"
    ask(others, 3, log, 1.0)
    until(lambda: bool(notes(log)))
    (lead,) = [one for one in others if one.pid == int(notes(log)[0][1])]
    os.kill(lead.pid, signal.SIGSTOP)
    answers = [one.hear() for one in others if one is not lead]
    assert {answer["digest"] for answer in answers} == {hashlib.sha256(data(3)).hexdigest()}
    assert [answer["epochs"] for answer in answers if answer["epochs"]] == [[1]]
    os.kill(lead.pid, signal.SIGCONT)
    late = lead.hear()
    assert late["stood"] == [False]
    assert late["digest"] == hashlib.sha256(data(3)).hexdigest()
    assert [what for what, _ in notes(log)] == ["began", "began", "ended", "ended"]

    until(lambda: not relay.keys(f"{PREFIX}/f/", soon()))
    assert len(list(SharedStore(relay, PREFIX, 4 << 20, SystemClock()).entries(soon()))) == 3


@pytest.mark.mooncake
def test_the_same_on_a_mooncake_store(tmp_path: Path, start: Start) -> None:
    with MooncakeCluster(tmp_path, pool_bytes=64 << 20) as cluster:
        relay = MooncakeRelay(StoreConfig(url=cluster.url))
        with contextlib.closing(relay):
            relay.start()
            store = SharedStore(relay, PREFIX, CAPACITY, SystemClock())
            writers = [start(WRITER, cluster.url, CAPACITY, first, 120) for first in (0, 60)]
            for one in writers:
                one.hear()
            for one in writers:
                one.tell()
            answers = [one.hear() for one in writers]
            assert [answer["wrong"] for answer in answers] == [0, 0]
            usage = store.usage(soon())
            assert usage.nbytes <= CAPACITY
            kept = list(store.entries(soon()))
            assert 50 <= len(kept) <= 80
            for entry in kept:
                hit = store.get(entry.digest, soon())
                assert hit is not None
                assert bytes(hit.data) == data(int(entry.label.get("i", "0"))) or not entry.label

            child = start(STANDING, cluster.url, CAPACITY, "remove", 2, "before", 1000)
            assert child.hear()["standing"]
            child.kill()
            for i in range(2000, 2060):
                assert put(store, i)
            assert store.usage(soon()).nbytes <= CAPACITY
            accounted(relay)

            askers = [start(ASKER, cluster.url, CAPACITY) for _ in range(4)]
            for one in askers:
                one.hear()
            log = tmp_path / "log"
            ask(askers, 1, log, 1.0)
            until(lambda: bool(notes(log)))
            (lead,) = [one for one in askers if one.pid == int(notes(log)[0][1])]
            lead.kill()
            answers = [one.hear() for one in askers if one is not lead]
            assert {answer["digest"] for answer in answers} == {hashlib.sha256(data(1)).hexdigest()}
            assert [what for what, _ in notes(log)] == ["began", "began", "ended"]

            store.clear(soon())
            assert relay.keys("", soon()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("memory", 100_000), ("local", 20_000)])
def test_distinct_keys_without_end_stay_within_the_bound(relay: Relay, kind: str, count: int) -> None:
    made = relay if kind == "local" else MemoryRelay(StoreConfig(url=None, capacity_bytes=2 << 20))
    made.start()
    store = SharedStore(made, PREFIX, 1 << 19, SystemClock())
    keys: list[int] = []
    for i in range(count):
        assert put(store, i, b"%08d" % i * 8)
        if i % (count // 40) == 0:
            listed = made.keys("", soon())
            keys.append(len(listed))
            usage = store.usage(soon())
            assert usage.nbytes <= 1 << 19
            assert len(listed) <= 3 * usage.entries + 700  # slots, bytes, cards; marks of generations
            if kind == "local":
                assert used(made) <= (1 << 19) + MARKS
    assert max(keys[20:]) <= max(keys[:20]) + 300
    found = [i for i in range(count - 3000, count) if store.get(digest(i), soon()) is not None]
    assert found == list(range(found[0], count))
    assert len(found) >= 1500
    store.clear(soon())
    assert made.keys("", soon()) == []
    if kind == "memory":
        made.close()
    else:
        assert used(made) == 0
