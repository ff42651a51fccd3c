"""The queue suite bites: each planted fault is caught by the test that is there for it, and whole queues pass."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonrelay.errors import ConfigError, LeaseLost, PluginError
from moonrelay.queueing import StageQueue
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Kind, Level, Outcome
from moonrelay_conformance.run import run
from moonrelay_conformance.suites.base import MARKER
from moonrelay_conformance.suites.queue import QueueConformance
from moonrelay_conformance.suites.queue_base import submit
from moonrelay_conformance.suites.queue_model import Account
from moonrelay_conformance.suites.queue_peer import name_of, target_of
from moonrelay_conformance.suites.queue_processes import PeerPool, PeerProcess, Peers, refusal
from moonrelay_conformance.suites.queue_requests import assert_same
from moonrelay_conformance.targets.queues import InstalledQueue, target_for

sys.path.insert(0, str(Path(__file__).parent))
from planted import queues

TESTS = sorted(name for name in dir(QueueConformance) if name.startswith("test_"))
IN_PROCESS = sorted(name for name in queues.CAUGHT_BY if not issubclass(getattr(queues, name), queues.PlantedFile))
IN_FILES = sorted(set(queues.CAUGHT_BY) - set(IN_PROCESS))


def assert_caught(name: str) -> None:
    """Run the one test that must catch a planted fault; others are not run."""
    test = queues.CAUGHT_BY[name]
    report = run(getattr(queues, name)(), select=[test])
    failed = {result.test.partition("[")[0] for result in report.results if result.outcome is Outcome.FAILED}
    assert failed == {test}, f"{name} is not caught by {test}"


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_planted_fault_is_caught_by_its_test(name: str) -> None:
    assert_caught(name)


@pytest.mark.processes
@pytest.mark.parametrize("name", IN_FILES)
def test_a_planted_fault_of_a_shared_queue_is_caught_by_its_test(name: str) -> None:
    assert_caught(name)


def test_every_planted_queue_is_in_the_table() -> None:
    made = {
        name
        for name, one in vars(queues).items()
        if isinstance(one, type) and issubclass(one, queues.Planted) and not name.startswith("Planted")
    }
    assert made == set(queues.CAUGHT_BY)
    assert set(queues.CAUGHT_BY.values()) <= set(TESTS)


def test_each_test_of_the_suite_has_a_promise_of_its_own() -> None:
    promises = {}
    for name in TESTS:
        marks = [mark for mark in getattr(QueueConformance, name).pytestmark if mark.name == MARKER]
        assert len(marks) == 1, name
        promises[name] = marks[0].args[0]
    assert len({one.title for one in promises.values()}) == len(promises)
    assert {one.kind for one in promises.values()} == {Kind.PROMISE}
    for name, one in promises.items():
        # What every queue must do needs nothing declared; whatever needs a second process says so.
        assert bool(one.requires) == (one.level is not Level.L1), name
        assert one.level is not Level.L3 or Capability.PROCESSES in one.requires, name


def test_the_queue_in_memory_passes() -> None:
    report = run(target_for("memory"))
    assert [result for result in report.results if result.outcome is Outcome.FAILED] == []
    assert report.counts()[Level.L1].keys() == {Outcome.HELD}
    assert report.counts()[Level.L3].keys() == {Outcome.UNSUPPORTED}
    assert report.passed


@pytest.mark.processes
@pytest.mark.slow
def test_the_queue_in_a_file_passes() -> None:
    report = run(target_for("sqlite"))
    assert [result for result in report.results if result.outcome is not Outcome.HELD] == []
    assert report.passed


class ServersTime(InstalledQueue):
    """A queue that goes by a clock of its own."""

    takes_clock = False


def test_a_queue_with_a_clock_of_its_own_can_be_checked_too() -> None:
    chosen = ("test_a_lapsed_claim_*", "test_random_histories_*", "test_the_heartbeat_*", "test_affinity_waits_*")
    report = run(ServersTime("memory"), select=chosen)
    ran = [result for result in report.results if result.outcome is not Outcome.NOT_RUN]
    assert len(ran) >= len(chosen)
    assert {result.outcome for result in ran} == {Outcome.HELD}


class TestTarget:
    def test_an_unknown_queue_is_refused_with_the_names_there_are(self) -> None:
        with pytest.raises(PluginError, match="memory, sqlite"):
            target_for("kafka")

    def test_each_url_is_a_new_queue(self, tmp_path: Path) -> None:
        folder = tmp_path / "a folder?"
        folder.mkdir()
        target = target_for("sqlite")
        urls = [target.url(folder) for _ in range(2)]
        assert urls[0] != urls[1]
        for url in urls:
            with target.open(url, clock=None, pipeline=None, config=None) as queue:
                submit(queue, "r1")
        assert len(list(folder.glob("*.db"))) == 2

    def test_it_says_what_it_can_do_and_who_provides_it(self) -> None:
        assert target_for("sqlite").supports(Capability.PROCESSES, Capability.DURABLE)
        assert target_for("memory").lacking(Capability.PROCESSES, Capability.DURABLE)
        assert target_for("memory").info().distribution.startswith("moonrelay ")

    def test_it_can_be_named_to_another_process(self) -> None:
        for target in (target_for("sqlite"), queues.SubmittedInTwoSteps()):
            again = target_of(name_of(target))
            assert (type(again), again.name) == (type(target), target.name)
        with pytest.raises(ConfigError, match="no QueueTarget"):
            target_of("pathlib:Path")


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    pool = PeerPool()
    made = Peers(target_for("sqlite"), tmp_path, pool)
    yield made
    made.close()
    pool.close()


@pytest.mark.processes
class TestPeers:
    def test_what_was_told_before_a_kill_is_kept_and_half_a_line_is_not(self, peers: Peers) -> None:
        (peer,) = peers.start()
        peer.send("pour", prefix="c", count=10_000, stage="encode", size=10)
        assert peer.told_by(5)[:5] == [f"c-{number}" for number in range(5)]
        told = peer.kill()
        assert told == [f"c-{number}" for number in range(len(told))]
        assert 0 <= len(peers.queue.requests()) - len(told) <= 1

    def test_a_typed_error_comes_back_typed_and_another_one_fails_the_test(self, peers: Peers) -> None:
        (peer,) = peers.start()
        submit(peers.queue, "r1")
        peer.do("join", worker="w", stage="encode")
        assert peer.do("take", worker="w", timeout_s=0)["request_id"] == "r1"
        peers.queue.cancel("r1")
        peers.queue.forget("r1")
        assert refusal(peer, "complete", request_id="r1") is LeaseLost
        with pytest.raises(AssertionError, match=r"KeyError.*no typed error"):
            peer.do("take", worker="nobody", timeout_s=0)

    def test_a_process_serves_the_next_test_unless_it_was_hurt(self, tmp_path: Path) -> None:
        pool, pids = PeerPool(), []
        for _ in range(3):
            made = Peers(target_for("sqlite"), tmp_path, pool)
            (peer,) = made.start()
            pids.append(peer.pid)
            if len(pids) == 2:
                peer.kill()
            made.close()
        pool.close()
        assert pids[0] == pids[1] != pids[2]

    def test_a_stopped_process_stands_until_it_goes_on(self, peers: Peers) -> None:
        (peer,) = peers.start()
        peer.stop()
        peer.send("submit", request_id="r1", stage="encode")
        assert peers.queue.events(timeout_s=0.2) == []
        peer.go_on()
        assert peer.answer() is True

    def test_one_that_is_never_ended_by_its_test_is_ended(self) -> None:
        peer = PeerProcess()
        peer.stop()
        peer.end()
        peer.end()
        with pytest.raises(ProcessLookupError):
            peer.go_on()


class TestAccount:
    def test_an_end_is_final(self) -> None:
        account = Account()
        account.begin("r1", "encode", None)
        account.end("r1", "done")
        with pytest.raises(AssertionError, match="ended as done and as dead"):
            account.end("r1", "dead")
        account.begin("r1", "encode", None)
        account.end("r1", "dead")

    @pytest.mark.parametrize(
        ("sent", "reason"),
        [
            ({("r1", "encode"): {"n": 1}}, None),
            ({("r1", "encode"): {"n": 2}}, "another stage's or request's payload"),
            ({("r1", "denoise"): {"n": 1}}, "nobody sent it there"),
        ],
    )
    def test_what_is_delivered_was_sent(self, sent: dict[tuple[str, str], object], reason: str | None) -> None:
        with StageQueue.connect("memory://") as queue:
            submit(queue, "r1", payload={"n": 1})
            job = queue.register_worker("encode").take(timeout_s=0)
            assert job is not None
            account = Account(payloads=sent)
            if reason is not None:
                with pytest.raises(AssertionError, match=reason):
                    account.deliver(job)
                return
            account.deliver(job)
            with pytest.raises(AssertionError, match="token"):
                account.deliver(job)
            account.token = 0
            with pytest.raises(AssertionError, match="attempt 1 at delivery 2"):
                account.deliver(job)
            account.token = 0
            account.end("r1", "done")
            with pytest.raises(AssertionError, match="after its end"):
                account.deliver(job)


@pytest.mark.parametrize(
    ("got", "wanted"),
    [(1, True), (1.0, 1), (-0.0, 0.0), ("a", b"a"), ([1], [1, 2]), ({"a": 1}, {1: 1}), ({"a": [1.0]}, {"a": [1]})],
)
def test_values_are_compared_with_their_types_and_bits(got: object, wanted: object) -> None:
    assert_same(wanted, wanted)
    with pytest.raises(AssertionError):
        assert_same(got, wanted)


def test_a_peer_loads_neither_torch_nor_pytest() -> None:
    """Processes are started by the dozen."""
    code = (
        "import json, sys, moonrelay_conformance.suites.queue_peer;"
        "print(json.dumps([name in sys.modules for name in ('torch', 'pytest', 'hypothesis')]))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(shown.stdout) == [False, False, False]
