"""Publishing registered memory allocates, copies and reads nothing of its size; consuming into ``dst`` allocates none.

Measured, not argued. While a payload is published, its memory may be touched by nobody (``mprotect``): a copy, or a
digest, ends the process by SIGSEGV. Allocations show in the peak of the resident memory, and in the pool's own count.
Each measure is shown to bite on a case that does allocate, copy or read.

Run as a program, this file is one of the two processes: it obeys JSON lines on its standard input.
"""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
NBYTES = 256 * MIB
#: What everything but the payload may take: a thousandth part would be a quarter of a MiB, Python itself takes more.
SLACK = 8 * MIB
ENGINES = ["shm", pytest.param("mooncake", marks=pytest.mark.mooncake)]

pytestmark = pytest.mark.processes


# The processes.


def status(field: str) -> int:
    """Return a figure of this process in bytes, as the kernel counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


@contextmanager
def untouchable(address: int, nbytes: int) -> Iterator[None]:
    """Let any access to the pages inside a range end this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = mmap.PAGESIZE
    begin, end = -(-address // page) * page, (address + nbytes) // page * page
    assert libc.mprotect(begin, end - begin, 0) == 0, os.strerror(ctypes.get_errno())
    yield
    assert libc.mprotect(begin, end - begin, mmap.PROT_READ | mmap.PROT_WRITE) == 0


class Side:
    """One process: a connector, and 256 MiB of memory of one kind."""

    def __init__(self, role: str, engine: str, memory: str, integrity: str) -> None:
        import torch

        from moonrelay import DiffusionConnector

        torch.set_num_threads(1)  # threads would add stacks
        self.events: list[Any] = []
        te_config = {"engine": engine, "pool_bytes": 3 * NBYTES}
        self.connector = DiffusionConnector(role, "p2p", te_config, integrity=integrity, observers=[self.events.append])
        if memory == "pool":
            self.tensor = self.connector.empty((NBYTES,), dtype=torch.uint8)
        else:
            self.tensor = torch.empty(NBYTES, dtype=torch.uint8)
        if memory == "registered":
            self.registration = self.connector.register(self.tensor)
        self.tensor.fill_(1)  # every page is there
        self.kept: list[Any] = []

    def publish(self, *, seed: int, guard: bool) -> dict[str, Any]:
        from moonrelay import StagePayload

        self.tensor[:: NBYTES // 64].fill_(seed)
        payload = StagePayload(request_id="zero", kind="latent", tensor=self.tensor)
        with self._measured() as found:
            if guard:
                with untouchable(self.tensor.data_ptr(), NBYTES):
                    handle = self.connector.publish(payload)
            else:
                handle = self.connector.publish(payload)
        found["staged"] = sum(event.nbytes for event in self.events if event.name == "staged")
        return {**found, "handle": base64.b64encode(handle.to_bytes()).decode()}

    def receive(self, *, handle: str, into: str) -> dict[str, Any]:
        import torch

        dst = self.tensor if into == "dst" else None
        with self._measured() as found:
            data = self.connector.receive(base64.b64decode(handle), dst=dst, timeout_s=60)
        assert isinstance(data, torch.Tensor)
        self.kept.append(data)
        return {**found, "first": int(data[0]), "ones": int((data == 1).sum()), "same": data is self.tensor}

    @contextmanager
    def _measured(self) -> Iterator[dict[str, int]]:
        found: dict[str, int] = {}
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        used = self._pool_used()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = status("VmRSS")
        yield found
        found["grown"] = status("VmHWM") - before
        found["faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        found["pool"] = self._pool_used() - used

    def _pool_used(self) -> int:
        return self.connector._runtime.data().arena.used_bytes


def main(role: str, engine: str, memory: str, integrity: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    side = Side(role, engine, memory, integrity)
    answers.write('"ready"\n')
    for line in sys.stdin:
        order = json.loads(line)
        answers.write(json.dumps(getattr(side, order.pop("do"))(**order)) + "\n")
    side.connector.close()


# The tests.


class Process:
    """One `Side` in a process of its own."""

    def __init__(self, role: str, engine: str, memory: str, integrity: str = "off") -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, role, engine, memory, integrity],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            bufsize=1,
        )

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"the process ended with {self._process.wait(10)}")
        return json.loads(line)

    def send(self, what: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")

    def do(self, what: str, **arguments: Any) -> Any:
        self.send(what, **arguments)
        return self.answer()

    def returncode(self) -> int:
        until = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        return self._process.returncode

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[Process] = []

    def begin(*arguments: str) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    yield begin
    for process in started:
        process.end()


def registered(engine: str) -> str:
    """Return the kind of memory that the engine serves in place."""
    return "pool" if engine == "shm" else "registered"


@pytest.mark.parametrize("engine", ENGINES)
def test_registered_memory_is_neither_copied_nor_read_and_dst_is_landed_in(start: Any, engine: str) -> None:
    producer, consumer = start("denoise", engine, registered(engine)), start("decode", engine, registered(engine))
    assert producer.answer() == consumer.answer() == "ready"
    # The first hand-over starts engines, channels and threads, and maps the peer's memory.
    for seed, first_time in ((7, True), (9, False)):
        published = producer.do("publish", seed=seed, guard=True)
        received = consumer.do("receive", handle=published.pop("handle"), into="dst")
        assert published["staged"] == published["pool"] == received["pool"] == 0
        assert received["same"]
        assert received["first"] == seed
        assert received["ones"] == NBYTES - 64
        if not first_time:
            for found in (published, received):
                assert found["grown"] < SLACK
                assert found["faults"] * mmap.PAGESIZE < SLACK


@pytest.mark.parametrize("engine", ENGINES)
def test_the_measure_shows_a_staged_copy_and_pool_memory(start: Any, engine: str) -> None:
    """Unregistered memory is staged, and a read without ``dst`` takes pool memory: both are seen."""
    producer, consumer = start("denoise", engine, "plain"), start("decode", engine, "plain")
    assert producer.answer() == consumer.answer() == "ready"
    published = producer.do("publish", seed=7, guard=False)
    received = consumer.do("receive", handle=published["handle"], into="pool")
    assert published["staged"] == published["pool"] == received["pool"] == NBYTES
    assert received["grown"] > NBYTES - SLACK
    assert not received["same"]
    assert received["ones"] == NBYTES - 64


def test_the_guard_ends_a_process_that_reads_the_memory(start: Any) -> None:
    """With digests the producer has to read every byte: under the same guard it dies, so the guard does bite."""
    producer = start("denoise", "shm", "pool", "full")
    assert producer.answer() == "ready"

    def publish_again_and_again() -> None:
        for seed in range(20):  # the digest has a thread of its own: it may be late for the first guard
            producer.do("publish", seed=seed, guard=True)

    with pytest.raises(EOFError):
        publish_again_and_again()
    assert producer.returncode() == -signal.SIGSEGV


if __name__ == "__main__":
    main(*sys.argv[1:])
