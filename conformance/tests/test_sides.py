"""Sides in processes: the wire, what is done to them, what is seen of them, and that they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonrelay.errors import CapacityError, ConfigError, MoonrelayError
from moonrelay_conformance.sides import Held, SideEnded, SideFailed, SideHung, SidePool, SideProcess, Slack
from moonrelay_conformance.sides.probe import FEWEST_CYCLES, beyond, leaks, look
from moonrelay_conformance.targets.adapter import NotSupported, SideSettings

pytestmark = pytest.mark.processes

HERE = str(Path(__file__).parent)
LOUD = "side_samples:LoudSide"
TREE = {"tensor": {"shape": [8], "dtype": "float32", "seed": 7}}


@pytest.fixture(scope="module", params=[False, True], ids=["started", "forked"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidePool]:
    log = tmp_path_factory.mktemp("sides") / "log"
    sys.path.append(HERE)
    with log.open("w") as file, SidePool(log=file, forked=request.param) as made:
        yield made
    sys.path.remove(HERE)


@pytest.fixture
def pool(shared: SidePool) -> Iterator[SidePool]:
    yield shared
    shared.take_back()


@pytest.fixture
def start(pool: SidePool) -> Callable[..., SideProcess]:
    def begin(side: str = LOUD, **extra: Any) -> SideProcess:
        return pool.start(side, SideSettings(role="producer", route="p2p", extra=extra))

    return begin


def publish(side: SideProcess, request_id: str = "r", **more: Any) -> Any:
    return side.do("publish", name="p", outgoing={"request_id": request_id}, tree=TREE, **more)


def test_what_the_host_prints_and_reads_does_not_reach_the_wire(start: Callable[..., SideProcess]) -> None:
    producer, consumer = start(), start()
    published = publish(producer)
    assert consumer.do("receive", ticket=published["ticket"])["digest"] == published["digest"]


def test_typed_errors_keep_their_class_and_context(start: Callable[..., SideProcess]) -> None:
    side = start()
    with pytest.raises(CapacityError) as caught:
        publish(side, "typed")
    assert caught.value.message == "full"
    assert caught.value.context["field"] == "data['a']"
    assert caught.value.context["wanted"] == 7
    with pytest.raises(NotSupported):
        side.do("claim", ticket={}, name="c")


def test_a_class_that_only_the_side_knows_keeps_its_code(start: Callable[..., SideProcess]) -> None:
    with pytest.raises(MoonrelayError) as caught:
        publish(start(), "own")
    assert type(caught.value) is MoonrelayError
    assert caught.value.context["code"] == "own_error"


def test_an_untyped_exception_is_told_apart(start: Callable[..., SideProcess]) -> None:
    side = start()
    with pytest.raises(SideFailed) as caught:
        publish(side, "untyped")
    assert caught.value.context["type"] == "KeyError"
    assert "side_samples" in caught.value.context["trace"]
    assert publish(side)["digest"]


def test_a_side_that_ends_or_hangs_is_told_apart(start: Callable[..., SideProcess]) -> None:
    ended, hanging = start(), start()
    with pytest.raises(SideEnded, match="exit status 3"):
        publish(ended, "exit")
    with pytest.raises(SideEnded):
        publish(ended)
    with pytest.raises(SideHung):
        publish(hanging, "hang", within_s=0.3)
    hanging.kill()
    assert not hanging.alive


def test_a_side_that_refuses_leaves_the_process_for_others(pool: SidePool, start: Callable[..., SideProcess]) -> None:
    with pytest.raises(CapacityError, match="no room for a side"):
        start(refuse=True)
    with pytest.raises(ConfigError, match="is no AdapterSide"):
        start("side_samples:NoSide")
    with pytest.raises(SideFailed) as caught:
        start("nowhere_at_all:Side")
    assert caught.value.context["type"] == "ModuleNotFoundError"
    pids = {process.pid for process in pool._busy}
    pool.take_back()
    assert start().pid in pids


def test_an_order_may_be_finished_later_and_a_late_answer_is_no_other_ones(start: Callable[..., SideProcess]) -> None:
    side = start()
    side.stop()
    side.send("in_use")
    with pytest.raises(SideHung, match="it is stopped"):
        side.answer(0.2)
    side.go_on()
    assert side.do("counters") == {"calls": 0}
    side.send("in_use")
    side.send("counters")
    assert side.unanswered == 2
    assert side.answer() == {"kept": 0}
    assert side.answer() == {"calls": 0}
    with pytest.raises(SideFailed, match="send one first"):
        side.answer()


def test_unknown_operations_and_names_are_refused(start: Callable[..., SideProcess]) -> None:
    side = start()
    for order in ({"op": "_answer"}, {"op": "explode"}, {"op": "ready", "name": "nobody", "chunk": 0}):
        with pytest.raises(ConfigError):
            side.do(**order)  # type: ignore[arg-type]


def test_a_process_serves_several_sides_and_forgets(pool: SidePool, start: Callable[..., SideProcess]) -> None:
    first = start()
    published = publish(first)
    first.do("receive", ticket=published["ticket"], name="mine")
    assert first.do("recheck", name="mine")["digest"] == published["digest"]
    pool.take_back()
    second = start()
    assert second.pid == first.pid
    with pytest.raises(ConfigError, match="no tree 'mine'"):
        second.do("recheck", name="mine")


def test_an_edit_changes_what_a_recheck_finds(start: Callable[..., SideProcess]) -> None:
    side = start()
    published = publish(side)
    side.do("receive", ticket=published["ticket"], name="mine")
    side.do("edit", name="mine")
    assert side.do("recheck", name="mine")["digest"] != published["digest"]


@pytest.mark.usefixtures("shared")
def test_a_spare_process_is_ready_and_ends_with_the_pool() -> None:
    with SidePool() as own:
        first = own.start(LOUD, SideSettings(role="producer", route="p2p"))
        (spare,) = own._idle
        second = own.start(LOUD, SideSettings(role="producer", route="p2p"))
        assert second is spare
        assert second.do("in_use") == {"kept": 0}
        assert second.unanswered == 0
        third = own._idle[0]
    assert not any(process.alive for process in (first, second, third))
    with SidePool(spare=False) as own:
        own.start(LOUD, SideSettings(role="producer", route="p2p"))
        assert own._idle == []


def test_a_killed_side_is_not_used_again(pool: SidePool, start: Callable[..., SideProcess]) -> None:
    side = start()
    side.kill()
    side.kill()
    with pytest.raises(SideEnded):
        side.do("in_use")
    pool.take_back()
    assert start().pid != side.pid


def test_the_side_runs_apart_from_our_folder_and_our_settings(
    pool: SidePool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "moonrelay.py").write_text("raise SystemExit('imported from the working folder')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOONRELAY_TRANSFER_MODE", "nonsense")
    with SideProcess(env={"ADDED": "yes"}) as side:
        assert side.do("threads")  # it runs: before that the system may list no environment yet
        environment = Path(f"/proc/{side.pid}/environ").read_bytes()
        assert Path(f"/proc/{side.pid}/cwd").readlink() == Path("/")
    assert b"MOONRELAY_" not in environment
    assert b"ADDED=yes" in environment
    assert not side.alive


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_side_dies_with_the_suite(stopped: bool, busy: bool) -> None:
    suite = textwrap.dedent(
        f"""
        import signal, sys, threading
        sys.path.append({HERE!r})
        from moonrelay_conformance.sides import SideProcess
        from moonrelay_conformance.targets.adapter import SideSettings
        side = SideProcess()
        side.do("start", side={LOUD!r}, settings={{"role": "producer", "route": "p2p"}})
        if {busy}:
            side.send("publish", name="p", outgoing={{"request_id": "hang"}}, tree={TREE!r})
        if {stopped}:
            side.stop()
        print(side.pid, flush=True)
        threading.Event().wait()
        """
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with subprocess.Popen(
        [sys.executable, "-c", suite],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        process.send_signal(signal.SIGKILL)
    until = time.monotonic() + 20
    while _alive(pid):
        assert time.monotonic() < until, "the side outlived the suite"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# What is seen.


@pytest.mark.parametrize(
    ("leak", "told"), [("fd", "descriptors"), ("thread", "threads"), ("map", "shared mappings"), ("", ""), ("pool", "")]
)
def test_a_leak_per_cycle_is_seen_and_a_pool_that_fills_is_none(
    start: Callable[..., SideProcess], leak: str, told: str
) -> None:
    side = start(leak=leak)
    before = side.probe()
    series = []
    for _ in range(12):
        side.do("counters")
        series.append(side.probe())
    found = leaks(series)
    assert [told in one for one in found] == ([True] if told else [])
    risen = beyond(before, series[-1])
    assert bool(risen) == bool(leak)
    assert not beyond(before, series[-1], Slack(fds=12, threads=12, maps=12))


def test_workers_of_a_pool_are_told_by_their_names() -> None:
    before = Held(thread_names={"MainThread": 1})
    pooled = Held(thread_names={"MainThread": 1, "moonrelay-mover": 3}, pooled=3)
    assert beyond(before, pooled) == []
    assert beyond(before, Held(thread_names={"MainThread": 1, "fetch": 1})) == ["1 threads more: fetch +1"]


def test_too_short_a_series_tells_nothing() -> None:
    with pytest.raises(ValueError, match="cannot tell"):
        leaks([Held()] * (FEWEST_CYCLES - 1))


def test_one_leak_in_many_cycles_is_no_leak_per_cycle() -> None:
    series = [Held(fd_names={"socket": 5 + (cycle > 8)}) for cycle in range(12)]
    assert leaks(series) == []


def test_a_look_at_a_process_that_is_gone_says_so() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    with pytest.raises(ProcessLookupError):
        look(process.pid)


def test_our_own_process_is_seen() -> None:
    held = look(os.getpid(), {os.getpid(): "MainThread"})
    assert held.fds > 2
    assert held.thread_names["MainThread"] == 1
