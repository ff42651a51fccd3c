"""Life: the older one goes when the newer is whole, all go when the run ends or is abandoned; never in the way."""

from __future__ import annotations

import threading

from moonrelay.clock import SystemClock
from moonrelay.errors import CapacityError, ClosedError, MoonrelayError, PeerLost
from moonrelay.relay.sweeper import Sweeper
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.checkpoint_bench import IDLE_S, CheckpointBench, CheckpointSuite, resumed
from moonrelay_conformance.suites.checkpoint_loop import EULER, STEPS, Loop, unbroken
from moonrelay_conformance.suites.part_shared import in_threads

_TTL_S = 500.0
#: More than the steps of a loop take on a busy machine where nobody waits for the store.
_SHUT_S = 30.0
#: By when whatever a lease leaves for late readers is over, too.
_LONG_AFTER_S = 10_000.0
_ERRORS: tuple[MoonrelayError, ...] = (
    PeerLost("the store is gone"),
    CapacityError("it is full"),
    ClosedError("closed"),
)


class CheckpointLife(CheckpointSuite):
    """When they are taken, and when they go."""

    @promise(Level.L1, "A checkpoint is taken after every k-th step, and of the older ones none is kept")
    def test_every_kth_step_is_saved_and_the_older_one_goes(self, bench: CheckpointBench) -> None:
        conn = bench.conn()
        checkpointer = bench.checkpointer(conn, every=3)
        session = checkpointer.session(bench.identity())
        sizes = []

        def each(loop: Loop) -> None:
            assert checkpointer.wait_idle(IDLE_S)
            if loop.step % 3 == 0:
                sizes.append(len(bench.stored()))

        Loop(EULER).run(session=session, each=each)
        assert [event.fields()["step"] for event in conn.told("checkpoint_saved")] == [3, 6]
        assert [event.fields()["step"] for event in conn.told("checkpoint_dropped")] == [3]
        assert sizes[0] == sizes[1] > 0, f"objects in the store after one checkpoint, and after two: {sizes}"
        assert (checkpointer.counters().saved, checkpointer.counters().dropped) == (2, 1)

    @promise(Level.L1, "When a run ends nothing of it is left, whoever saved it")
    def test_a_finished_run_leaves_nothing(self, bench: CheckpointBench) -> None:
        bench.save(EULER, 2)
        conn = bench.conn()
        dead = bench.checkpointer(conn)
        half = dead.session(bench.identity())
        loop, _ = resumed(half, EULER)
        conn.between.dies_at = "/c/2/"
        loop.run(3)
        assert not half.save_now(3, loop.capture)
        heir = bench.checkpointer(bench.conn(1))
        session = heir.session(bench.identity())
        loop, _ = resumed(session, EULER)
        assert loop.run(session=session) == unbroken(EULER)
        assert heir.wait_idle(IDLE_S)
        assert bench.stored()
        session.finish()
        session.finish()
        assert heir.wait_idle(IDLE_S)
        left = bench.until_gone()
        assert not left, f"a run that has ended left {left}"

    @promise(Level.L1, "What an abandoned run left is swept by any connector once its lease is over, and not before")
    def test_an_abandoned_run_is_swept(self, bench: CheckpointBench) -> None:
        bench.save(EULER, 3, ttl_s=_TTL_S)
        anybody = Sweeper(bench.relay, bench.namespace, SystemClock())
        now = SystemClock().monotonic()
        for seconds in (0.0, _TTL_S * 0.9):
            anybody.sweep(now + seconds)
            assert resumed(bench.session(), EULER)[1].step == 3, "it was swept before its lease was over"
        for seconds in (_TTL_S * 1.1, _TTL_S * 1.2, _LONG_AFTER_S, _LONG_AFTER_S * 2):
            anybody.sweep(now + seconds)
        left = bench.until_gone()
        assert not left, f"an abandoned run's checkpoint stays for ever: {left}"
        assert bench.session().resume() is None

    @promise(Level.L2, "Requests that are known to have ended are swept, others and retained ones are not")
    def test_requests_that_ended_elsewhere_are_swept(self, bench: CheckpointBench) -> None:
        names = {what: f"{bench.request}-{what}" for what in ("ended", "going on", "retained")}
        for what, request_id in names.items():
            session = bench.checkpointer().session(bench.identity(request_id=request_id), retain=what == "retained")
            loop = Loop(EULER)
            loop.run(2)
            assert session.save_now(2, loop.capture)
        sweeper = bench.checkpointer(bench.conn(1))
        assert sweeper.sweep([names["ended"], names["retained"], "unknown"])
        assert sweeper.wait_idle(IDLE_S)
        found = {what: bench.session(request_id=name).resume() is not None for what, name in names.items()}
        assert found == {"ended": False, "going on": True, "retained": True}

    @promise(Level.L1, "A store that is slow keeps no step waiting; one checkpoint is under way, others are skipped")
    def test_a_slow_store_keeps_no_step_waiting(self, bench: CheckpointBench) -> None:
        conn = bench.conn()
        conn.between.gate = threading.Event()
        checkpointer = bench.checkpointer(conn)
        session = checkpointer.session(bench.identity())
        loop, captured = Loop(EULER), []

        def each(loop: Loop) -> None:
            assert not conn.told("checkpoint_saved"), "it was saved while its store was shut"
            captured.append(loop.step)

        def steps_on() -> None:
            loop.run(session=session, each=each)

        try:
            loop.run(1, session=session, each=each)
            assert conn.between.entered.wait(IDLE_S), "saving has not begun"
            in_threads(1, lambda _: steps_on(), within_s=_SHUT_S)  # it comes back while the store is shut
        finally:
            conn.between.gate.set()
        assert captured == [*range(1, STEPS + 1)]
        assert checkpointer.wait_idle(IDLE_S)
        assert [event.fields()["step"] for event in conn.told("checkpoint_saved")] == [1]
        assert checkpointer.counters().skipped == STEPS - 1
        assert loop.digest() == unbroken(EULER)
        assert resumed(bench.session(), EULER)[0].run() == unbroken(EULER), "what was saved meanwhile is another state"

    @promise(Level.L2, "A state that is changed while it is saved is void")
    def test_a_state_that_is_changed_while_it_is_saved_is_void(self, bench: CheckpointBench) -> None:
        bench.save(EULER, 1)
        conn = bench.conn()
        checkpointer = bench.checkpointer(conn)
        session = checkpointer.session(bench.identity())
        loop, _ = resumed(session, EULER)
        loop.run(2)
        state = loop.capture()
        conn.between.gate = threading.Event()
        assert session.after_step(2, lambda: state)
        assert conn.between.entered.wait(IDLE_S)
        state.latents.add_(1)
        conn.between.gate.set()
        assert checkpointer.wait_idle(IDLE_S)
        assert conn.told("checkpoint_failed"), "nobody was told"
        assert resumed(bench.session(), EULER)[0].run() == unbroken(EULER)

    @promise(Level.L1, "A store that is gone fails no run: it goes on, and says so")
    def test_a_store_that_is_gone_fails_no_run(self, bench: CheckpointBench) -> None:
        for error in _ERRORS:
            for calls in ((), ("put",), ("put_if_absent",), ("keys",)):
                conn = bench.conn()
                conn.between.error, conn.between.failing = error, calls
                checkpointer = bench.checkpointer(conn)
                session = checkpointer.session(bench.identity())
                assert session.resume() is None
                assert Loop(EULER).run(session=session) == unbroken(EULER)
                session.finish()
                assert checkpointer.wait_idle(IDLE_S)
                what = f"{type(error).__name__} in {calls or 'every call'}"
                assert conn.told("checkpoint_failed"), f"{what}: nobody was told"
                assert checkpointer.counters().failed > 0, f"{what}: it was not counted"
                assert checkpointer.counters().saved == 0, f"{what}: it was counted as saved"
