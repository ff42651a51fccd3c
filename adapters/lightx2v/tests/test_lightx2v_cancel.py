"""What becomes of a request that its client gives up while a role waits for its input: the role is free in a second.

From the find up to the host's server, whose DELETE only sets an event on the task.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import lightx2v_double as double
import pytest
import torch
from lightx2v_desk_process import TIMEOUT_S, Finding, until, within

from moonrelay.config import TransferConfig
from moonrelay.errors import Aborted, Cancelled, DeadlineExceeded
from moonrelay_lightx2v import given_up
from moonrelay_lightx2v.config import DECODER, ENCODER, TRANSFORMER, LinkConfig
from moonrelay_lightx2v.link import StageLink
from moonrelay_lightx2v.mixin import dispatching, end_of
from moonrelay_lightx2v.rendezvous import Caller, Desk

NAMES = ("task:1", "same:x")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def desk(stack: ExitStack) -> Desk:
    found = Desk("127.0.0.1", 0, phase="encoder")
    stack.callback(found.close)
    found.start()
    return found


def caller(stack: ExitStack, there: Desk) -> Caller:
    """A caller that would not look at anything for a long time."""
    found = Caller([there.address], phase="encoder", retry_s=1000.0, peer_timeout_s=3000.0)
    stack.callback(found.close)
    return found


def until_waited_for(there: Desk, finds: int = 1) -> None:
    def waiting() -> bool:
        with there._lock:
            return len(there._book._waiters) == finds

    until(waiting, f"{finds} finds wait")


# -- the find ---------------------------------------------------------------------------------------------------------


def test_a_find_that_is_cancelled_ends_soon_and_is_forgotten_by_the_desk(stack: ExitStack) -> None:
    there = desk(stack)
    asking = caller(stack, there)
    stop = threading.Event()
    finding = Finding(asking, *NAMES, cancelled=stop.is_set)
    until_waited_for(there)
    stop.set()
    with pytest.raises(Cancelled, match=r"task:1, same:x was cancelled while it waited for the encoder stage"):
        finding.result()
    until_waited_for(there, 0)
    there.offer(NAMES, "p", b"handle")
    assert asking.find(NAMES, within(TIMEOUT_S), cancelled=stop.is_set) == b"handle", "it is there, and was not given"


def test_a_find_looks_now_and_then_whether_it_is_cancelled(stack: ExitStack) -> None:
    looks: list[None] = []
    with pytest.raises(DeadlineExceeded):
        caller(stack, desk(stack)).find(NAMES, within(1.0), cancelled=lambda: bool(looks.append(None)))
    assert 2 <= len(looks) <= 20


# -- the link ---------------------------------------------------------------------------------------------------------

KIB = 1024


def link(stack: ExitStack, role: str, dials: StageLink | None = None, **more: Any) -> StageLink:
    address = () if dials is None or dials.address is None else (dials.address,)
    made = StageLink(
        LinkConfig(
            role=role,
            listens=None if role == DECODER else ("127.0.0.1", 0),
            dials=address,
            transfer=TransferConfig(engine="memory", pool_bytes=64 * KIB),
            **more,
        )
    )
    made.start()
    stack.callback(made.close)
    return made


def start(stack: ExitStack, call: Any) -> Future[Any]:
    """Call it in a thread, which ends at the latest when the links are closed."""
    pool = ThreadPoolExecutor(max_workers=1)
    stack.callback(pool.shutdown, wait=False)
    return pool.submit(call)


def test_a_receive_that_is_given_up_ends_and_its_own_receivers_are_told(stack: ExitStack) -> None:
    encoder = link(stack, ENCODER)
    transformer = link(stack, TRANSFORMER, encoder)
    decoder = link(stack, DECODER, transformer)
    stop = threading.Event()
    transformer.begin(NAMES, cancelled=stop.is_set)
    received = start(stack, transformer.receive)
    until_waited_for(encoder._desk)  # type: ignore[arg-type]
    decoder.begin(NAMES)
    told = start(stack, decoder.receive)
    until_waited_for(transformer._desk)  # type: ignore[arg-type]
    stop.set()
    with pytest.raises(Cancelled) as caught:
        received.result(TIMEOUT_S)
    transformer.end(caught.value)
    with pytest.raises(Aborted, match=r"transformer failed: task:1, same:x was cancelled") as aborted:
        told.result(TIMEOUT_S)
    assert aborted.value.context["cause"] == "cancelled"
    decoder.end(aborted.value)


def test_what_is_given_up_is_neither_received_nor_sent(stack: ExitStack) -> None:
    encoder = link(stack, ENCODER)
    transformer = link(stack, TRANSFORMER, encoder)
    encoder.begin(NAMES)
    encoder.send({"latents": torch.ones(4)})
    encoder.end()
    transformer.begin(NAMES, cancelled=lambda: True)
    with pytest.raises(Cancelled, match="task:1 was cancelled before the transformer was done with it"):
        transformer.receive()
    with pytest.raises(Cancelled):
        transformer.send({"latents": torch.ones(4)})
    transformer.end(Cancelled("it was"))
    assert transformer.in_use()["payloads"] == 0
    transformer.begin(NAMES)
    assert transformer.receive()[0]["latents"].tolist() == [1.0] * 4, "it is there for another try"
    transformer.end()


def test_a_sender_that_waits_for_room_is_free_when_it_is_given_up(stack: ExitStack) -> None:
    encoder = link(stack, ENCODER, send_timeout_s=600.0)
    for number in range(2):
        encoder.begin((f"task:{number}",))
        encoder.send({"latents": torch.ones(7 * KIB)})
        encoder.end()
    stop = threading.Event()
    encoder.begin(NAMES, cancelled=stop.is_set)
    sent = start(stack, lambda: encoder.send({"latents": torch.ones(7 * KIB)}))
    with pytest.raises(TimeoutError):
        sent.result(0.3)
    stop.set()
    with pytest.raises(Cancelled):
        sent.result(TIMEOUT_S)


# -- the host's server ------------------------------------------------------------------------------------------------


class Tasks:
    """As the host's manager of tasks."""

    def __init__(self) -> None:
        self.known: dict[str, SimpleNamespace] = {}

    def get_task(self, task_id: str) -> SimpleNamespace | None:
        return self.known.get(task_id)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tasks]:
    """The host serves."""
    module = ModuleType("lightx2v.server.task_manager")
    found = Tasks()
    module.task_manager = found  # type: ignore[attr-defined]
    with double.installed(tmp_path / "host"):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        yield found


def test_a_task_is_found_by_its_id_where_the_host_serves(tasks: Tasks) -> None:
    stop = threading.Event()
    tasks.known["t"] = SimpleNamespace(stop_event=stop)
    told = given_up.watch({"task_id": "t"})
    assert told is not None
    assert not told()
    stop.set()
    assert told()
    assert given_up.watch({"task_id": "another"}) is None
    assert given_up.watch({}) is None
    assert given_up.watch(None) is None


def test_without_a_server_nobody_gives_up() -> None:
    assert "lightx2v.server.task_manager" not in sys.modules
    assert given_up.watch({"task_id": "t"}) is None
    assert "lightx2v.server.task_manager" not in sys.modules, "it is not imported"


def test_a_manager_that_we_do_not_know_is_told_of_and_stops_nothing(
    tasks: Tasks, caplog: pytest.LogCaptureFixture
) -> None:
    tasks.known["t"] = SimpleNamespace()
    assert given_up.watch({"task_id": "t"}) is None
    assert "a DELETE will not end one that waits" in caplog.text
    tasks.known["t"] = SimpleNamespace(stop_event="no event")
    assert given_up.watch({"task_id": "t"}) is None


def test_a_runner_that_waits_is_free_when_its_task_is_given_up(tasks: Tasks, stack: ExitStack) -> None:
    encoder = link(stack, ENCODER)
    assert encoder.address is not None
    section = {
        "connector": "moonrelay",
        "engine": "memory",
        "staging_bytes": 1 << 20,
        "bootstrap_addr": f"127.0.0.1:{encoder.address[1]}",
        "rendezvous_port": 0,
    }
    settings = double.settings_of("transformer", task="t2v", stages=3, disagg=section)
    worker = double.Worker(double.runner_of(settings, dispatching(double.native_mixin())))
    stack.callback(worker.runner.release_disagg)
    tasks.known["t"] = SimpleNamespace(stop_event=threading.Event())
    answer = start(stack, lambda: worker.process("t", prompt="a cat", seed=1))
    until_waited_for(encoder._desk)  # type: ignore[arg-type]
    tasks.known["t"].stop_event.set()
    said = answer.result(TIMEOUT_S)
    assert (said["status"], said["error_type"]) == ("failed", "Cancelled")
    end = end_of(worker.runner)
    assert end is not None
    assert end.depth == 0
