"""Resuming: at every step the same bits as an unbroken run, from the newest checkpoint that is whole."""

from __future__ import annotations

import pytest

from moonrelay.errors import CheckpointMismatch
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.corpus import trees
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.checkpoint_bench import CheckpointBench, CheckpointSuite, resumed
from moonrelay_conformance.suites.checkpoint_loop import (
    BOTH,
    EULER,
    MULTISTEP,
    STEPS,
    STOCHASTIC,
    Kind,
    Loop,
    unbroken,
)
from moonrelay_conformance.suites.part_between import flipped

#: Where a writer may die: while it puts its index, its description, its tensors, or the record that makes it whole.
_DEATHS = ("/c/0/", "/c/1/", "/c/2/", "/end/")


def _goes_on(bench: CheckpointBench, kind: Kind) -> None:
    """Save after every step, and check each time that another worker ends with the bits of an unbroken run."""
    wanted = unbroken(kind)
    checkpointer = bench.checkpointer()
    session = checkpointer.session(bench.identity(kind))
    first = Loop(kind)
    for step in range(1, STEPS + 1):
        first.run(step)
        assert session.save_now(step, first.capture), f"the state after step {step} was not saved"
        loop, _ = resumed(bench.session(kind), kind)
        assert loop.digest() == first.digest(), f"the latents after step {step} are others"
        assert loop.run() == wanted, f"resumed after step {step} the run ends otherwise"
    assert first.digest() == wanted, "saving changed the run itself"


class CheckpointResume(CheckpointSuite):
    """What comes back."""

    @promise(Level.L1, "A run resumed at any step gives the bits of an unbroken one")
    def test_resumed_at_any_step_it_is_the_unbroken_run(self, bench: CheckpointBench) -> None:
        _goes_on(bench, EULER)

    @promise(Level.L1, "A multistep scheduler's history comes back: resumed at any step, the same bits")
    def test_the_schedulers_history_comes_back(self, bench: CheckpointBench) -> None:
        _goes_on(bench, MULTISTEP)

    @promise(Level.L1, "Random generators go on where they were: resumed at any step, the same bits")
    def test_random_generators_go_on_where_they_were(self, bench: CheckpointBench) -> None:
        _goes_on(bench, STOCHASTIC)

    @promise(Level.L1, "History, noise and bfloat16 together: resumed at any step, the same bits")
    def test_history_and_noise_together_come_back(self, bench: CheckpointBench) -> None:
        _goes_on(bench, BOTH)

    @promise(Level.L1, "The step that is resumed is the one that was saved, and the session says so")
    def test_the_step_is_the_one_that_was_saved(self, bench: CheckpointBench) -> None:
        for step in (1, 3, STEPS):
            bench.save(EULER, step)
            session = bench.session()
            state = session.resume()
            assert state is not None
            assert (state.step, session.resumed_step) == (step, step)

    @promise(Level.L1, "The whole state comes back, bit for bit, and is the caller's own")
    def test_the_whole_state_comes_back(self, bench: CheckpointBench) -> None:
        loop = Loop(BOTH)
        loop.run(5)
        wanted = trees.digest(loop.capture().tree())
        bench.save(BOTH, 5)
        session = bench.session(BOTH)
        first, second = session.resume(), session.resume()
        assert first is not None
        assert second is not None
        assert trees.digest(first.tree()) == wanted
        first.latents.zero_()
        assert trees.digest(second.tree()) == wanted, "two that resume share memory"

    @promise(Level.L1, "The newest whole checkpoint is taken, however many are kept")
    def test_the_newest_whole_one_is_taken(self, bench: CheckpointBench) -> None:
        bench.save(EULER, 2, 4, 6, keep=3)
        _, state = resumed(bench.session(), EULER)
        assert state.step == 6, f"the one of step {state.step} was taken, the newest is of step 6"
        # Another worker has gone on, and begins to count anew.
        heir = bench.checkpointer(bench.conn(1), keep=3)
        session = heir.session(bench.identity())
        loop, _ = resumed(session, EULER)
        loop.run(7)
        assert session.save_now(7, loop.capture)
        _, state = resumed(bench.session(conn=bench.conn()), EULER)
        assert state.step == 7, f"the one of step {state.step} was taken, the newest is of step 7"

    @promise(Level.L1, "A newer one that is half-written hides no older one, wherever its writer died")
    def test_a_half_written_newer_one_hides_no_older_one(self, bench: CheckpointBench) -> None:
        bench.save(EULER, 5)
        for where in _DEATHS:
            conn = bench.conn()
            dying = bench.checkpointer(conn)
            session = dying.session(bench.identity())
            loop, _ = resumed(session, EULER)
            conn.between.dies_at = where
            loop.run(6)
            assert not session.save_now(6, loop.capture, timeout_s=30.0), f"it died at {where}, and says it saved"
            after, state = resumed(bench.session(), EULER)
            assert state.step == 5, f"a writer died at {where}: the state of step {state.step} was taken for whole"
            assert after.run() == unbroken(EULER)

    @promise(Level.L1, "A newer one that is damaged hides no older one, and is told of")
    def test_a_damaged_newer_one_hides_no_older_one(self, bench: CheckpointBench) -> None:
        bench.save(EULER, 3, 6, keep=2)
        for at in (0, -1):
            conn, reads = bench.conn(1), [0]

            def spoil(raw: bytes, at: int = at, reads: list[int] = reads) -> bytes:
                reads[0] += 1
                return flipped(at)(raw) if reads[0] <= 1 else raw

            conn.between.spoil = spoil
            loop, state = resumed(bench.session(conn=conn), EULER)
            assert state.step == 3, f"the damaged one of step {state.step} was taken"
            assert loop.run() == unbroken(EULER)
            assert conn.told("checkpoint_refused"), "nobody was told that one is damaged"

    @promise(Level.L1, "One whose tensors are damaged is a fresh start, never other bits")
    def test_damaged_tensors_are_a_fresh_start(self, bench: CheckpointBench) -> None:
        bench.save(EULER, 4)
        whole = trees.digest(resumed(bench.session(), EULER)[1].tree())
        for damaged in (1, 2, 3):
            conn, reads = bench.conn(1), [0]

            def spoil(raw: bytes, damaged: int = damaged, reads: list[int] = reads) -> bytes:
                reads[0] += 1
                return flipped(len(raw) // 2)(raw) if reads[0] == damaged else raw

            conn.between.spoil = spoil
            state = bench.session(conn=conn).resume()
            assert reads[0] >= damaged, "a checkpoint is read in fewer objects than this test knows of"
            assert state is None, f"object {damaged} is damaged, and a state was given" + (
                "" if state and trees.digest(state.tree()) == whole else ", of other bits"
            )

    @promise(Level.L2, "Of several that are kept one can be chosen by its step; what is not there is refused by name")
    def test_one_can_be_chosen_by_its_step(self, bench: CheckpointBench) -> None:
        bench.save(EULER, 2, 4, 6, keep=3)
        for step in (2, 4, 6):
            state = bench.session().resume(step=step)
            assert state is not None
            assert state.step == step
        with pytest.raises(CheckpointMismatch) as caught:
            bench.session().resume(step=3)
        assert caught.value.context["field"] == "step"

    @promise(
        Level.L3,
        "A worker that is killed at any step: another process ends with the same bits, and redoes one step at most",
        requires=(Capability.PROCESSES,),
    )
    def test_a_killed_worker_is_replaced_by_the_same_bits(self, bench: CheckpointBench) -> None:
        wanted = unbroken(BOTH)
        peer = bench.peer()
        for last in ({"step": 1}, {"whole": 4}, {"whole": STEPS}):
            request = f"{bench.request}-{last}"
            dying = peer
            dying.send("run", request=request, kind=BOTH.name, until=STEPS, every=1)
            while dying.answer() != last:
                pass
            dying.kill()
            peer = heir = bench.peer()  # and the next to die
            heir.send("run", request=request, kind=BOTH.name, until=STEPS, every=1)
            while "digest" not in (answer := heir.answer()):
                pass
            assert answer["digest"] == wanted, f"killed after {last}: other bits"
            ((what, step),) = last.items()
            least = step if what == "whole" else step - 1
            assert answer["first"] >= least, f"killed after {last}: it went on from step {answer['first']}"
