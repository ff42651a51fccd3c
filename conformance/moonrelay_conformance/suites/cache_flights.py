"""Single flight: of all who ask for one key one encodes, whoever dies, fails or dawdles."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from moonrelay.clock import Deadline, SystemClock
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.corpus import trees
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.cache_bench import CacheBench, CacheSuite, Encoder, file_lines
from moonrelay_conformance.suites.part_process import HelperProcess
from moonrelay_conformance.suites.part_shared import in_threads

_WAIT_S = 60.0
#: Above what a busy machine may keep one waiting for its turn.
_DEAD_AFTER_S = 4.0
_PEERS = 3


class _Held(Encoder):
    """An encoder that does not end before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.let_go = threading.Event()

    def __call__(self) -> Any:
        self.begun.set()
        assert self.let_go.wait(_WAIT_S), "nobody let the encoder go"
        return super().__call__()


class CacheFlights(CacheSuite):
    """Who encodes."""

    @promise(Level.L1, "Threads that ask at once encode once")
    def test_threads_that_ask_at_once_encode_once(self, bench: CacheBench) -> None:
        for shared in (False, True):
            cache, encode, key = bench.cache(shared=shared, wait_s=_WAIT_S), _Held(), bench.key(prompt=f"{shared}")
            found: list[str] = []

            def ask(me: int, cache: Any = cache, encode: _Held = encode, key: Any = key, found: Any = found) -> None:
                if me == 0:
                    assert encode.begun.wait(_WAIT_S)
                    threading.Event().wait(0.2)  # time for the others to arrive
                    encode.let_go.set()
                    return
                found.append(trees.digest(cache.get_or_encode(key, encode)))

            in_threads(9, ask)
            assert encode.calls == 1, f"{encode.calls} threads encoded the same (shared={shared})"
            assert found == [encode.digest] * 8

    @promise(Level.L1, "Two caches of one store that are asked at once encode once")
    def test_two_caches_that_are_asked_at_once_encode_once(self, bench: CacheBench) -> None:
        caches = [bench.cache(wait_s=_WAIT_S), bench.other(wait_s=_WAIT_S)]
        encode, found = _Held(), [""] * 2

        def ask(me: int) -> None:
            if me == 2:
                assert encode.begun.wait(_WAIT_S)
                threading.Event().wait(0.3)
                encode.let_go.set()
                return
            found[me] = trees.digest(caches[me].get_or_encode(bench.key(), encode))

        in_threads(3, ask)
        assert encode.calls == 1, "both caches encoded"
        assert found == [encode.digest] * 2

    @promise(Level.L1, "An encoder that fails lets the next one try, at once")
    def test_after_a_failure_the_next_one_tries(self, bench: CacheBench) -> None:
        caches = [bench.cache(wait_s=_WAIT_S), bench.other(wait_s=_WAIT_S)]
        held, encode, found, failed = _Held(), Encoder(), [""], []

        def fails() -> object:
            held()
            message = "the encoder broke"
            raise ArithmeticError(message)

        def ask(me: int) -> None:
            if me == 0:
                try:
                    caches[0].get_or_encode(bench.key(), fails)
                except ArithmeticError as exc:
                    failed.append(exc)
            elif me == 1:
                assert held.begun.wait(_WAIT_S)
                found[0] = trees.digest(caches[1].get_or_encode(bench.key(), encode))
            else:
                assert held.begun.wait(_WAIT_S)
                threading.Event().wait(0.2)
                held.let_go.set()

        in_threads(3, ask)
        assert len(failed) == 1
        assert encode.calls == 1
        assert found[0] == encode.digest

    @promise(Level.L1, "A slow encoder keeps nobody beyond the deadline")
    def test_a_slow_encoder_keeps_nobody_beyond_the_deadline(self, bench: CacheBench) -> None:
        slow, quick, found = _Held(), Encoder(), [""]
        first, second = bench.cache(), bench.other(wait_s=0.5)

        def ask(me: int) -> None:
            if me == 0:
                first.get_or_encode(bench.key(), slow)
                return
            assert slow.begun.wait(_WAIT_S)
            found[0] = trees.digest(second.get_or_encode(bench.key(), quick))
            slow.let_go.set()

        in_threads(2, ask, within_s=_WAIT_S / 2)
        assert quick.calls == 1
        assert found[0] == quick.digest
        assert second.counters().waits == 1

    @promise(Level.L1, "Processes that ask at once encode once", requires=(Capability.PROCESSES,))
    def test_processes_that_ask_at_once_encode_once(self, bench: CacheBench, tmp_path: Path) -> None:
        begun = tmp_path / "begun"
        peers = [bench.peer() for _ in range(_PEERS)]
        for peer in peers:
            _ask(peer, bench, begun, first_s=0.5, dead_after_s=_WAIT_S)  # nobody dies here
        answers = [peer.answer(_WAIT_S * 2) for peer in peers]
        assert len(file_lines(begun)) == 1, f"{len(file_lines(begun))} processes encoded the same"
        assert len({answer["digest"] for answer in answers}) == 1, "they were not given the same"
        assert sum(answer["encodes"] for answer in answers) == 1

    @promise(
        Level.L3,
        "When whoever encodes is killed another one does, and all others wait for it",
        requires=(Capability.PROCESSES,),
    )
    def test_a_killed_encoder_is_replaced_by_one(self, bench: CacheBench, tmp_path: Path) -> None:
        begun = tmp_path / "begun"
        peers = {peer.pid: peer for peer in (bench.peer() for _ in range(_PEERS))}
        for peer in peers.values():
            _ask(peer, bench, begun, first_s=_WAIT_S * 2, hold_s=0.3)
        dead = peers.pop(_first(begun))
        dead.kill()
        answers = [peer.answer(_WAIT_S) for peer in peers.values()]
        assert len(file_lines(begun)) == 2, f"{len(file_lines(begun)) - 1} processes encoded in a dead one's place"
        assert len({answer["digest"] for answer in answers}) == 1, "the living were not given the same"
        assert sum(answer["takeovers"] for answer in answers) == 1
        assert bench.cache().get(bench.key()) is not None, "what was encoded in a dead one's place is not kept"

    @promise(
        Level.L3, "One that falls silent is replaced, and does no harm when it wakes", requires=(Capability.PROCESSES,)
    )
    def test_a_silent_encoder_does_no_harm_when_it_wakes(self, bench: CacheBench, tmp_path: Path) -> None:
        begun = tmp_path / "begun"
        peers = {peer.pid: peer for peer in (bench.peer() for _ in range(2))}
        for peer in peers.values():
            _ask(peer, bench, begun, first_s=1.0, hold_s=0.1)
        silent = peers.pop(_first(begun))
        silent.stop()
        (other,) = peers.values()
        answer = other.answer(_WAIT_S)
        silent.go_on()
        silent.answer(_WAIT_S)
        kept = bench.cache().get(bench.key())
        assert trees.digest(kept) == answer["digest"], (
            "a sleeper's late result took the place of what others were given"
        )


def _ask(
    peer: HelperProcess,
    bench: CacheBench,
    begun: Path,
    *,
    first_s: float,
    hold_s: float = 0.0,
    dead_after_s: float = _DEAD_AFTER_S,
) -> None:
    settings = {"wait_s": _WAIT_S, "dead_after_s": dead_after_s}
    prompt = "A red fox in the snow"
    peer.send(
        "ask", word=bench.word, prompt=prompt, begun=str(begun), first_s=first_s, hold_s=hold_s, settings=settings
    )


def _first(begun: Path) -> int:
    """Wait until somebody encodes; return who."""
    deadline = Deadline(_WAIT_S, SystemClock())
    while not file_lines(begun):
        assert not deadline.expired, "nobody encodes"
        threading.Event().wait(0.02)
    return int(file_lines(begun)[0])
