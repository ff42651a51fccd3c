"""The demo's child processes: started apart from the terminal, heard line by line, ended by their ids.

Owns one reading thread per child. Each child holds the reading end of a pipe (its standard input) whose other end only
the demo has: however the demo ends, the pipe breaks, and the child ends itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from moonrelay.clock import Clock, Deadline, SystemClock
from moonrelay.errors import PeerLost

logger = logging.getLogger(__name__)

#: Event that the reader adds when the child has ended; ``code`` is its exit code.
EXITED = "exited"
_STOP_TIMEOUT_S = 8.0
_KILL_TIMEOUT_S = 5.0
_LOG_TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A JSON line of a child, or its end.

    Attributes:
        child: Name of the child.
        event: The line's ``event``, or `EXITED`.
        at_s: When it was read.
        fields: The other fields.
    """

    child: str
    event: str
    at_s: float
    fields: Mapping[str, object] = field(default_factory=dict)


class Inbox:
    """What all children said, in order of arrival. Threads: any."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[Message] = SimpleQueue()

    def put(self, message: Message) -> None:
        self._messages.put(message)

    def get(self, timeout_s: float) -> Message | None:
        """Return the next message, ``None`` when none came. Blocks: up to ``timeout_s``."""
        try:
            return self._messages.get(timeout=timeout_s) if timeout_s > 0 else self._messages.get_nowait()
        except Empty:
            return None


class Child:
    """One child process.

    Args:
        name: For messages and for the log file.
        command: What to run.
        inbox: Where its JSON lines go.
        log: File for its stderr, and for lines on stdout that are no messages.
        first_line: Written to its standard input at once; the pipe stays open.

    Threads: any; one of its own, ``moonrelay-demo-reader-<name>``.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        inbox: Inbox,
        log: Path,
        first_line: str = "",
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.killed = False
        self._inbox = inbox
        self._clock: Clock = clock or SystemClock()
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C in a terminal is the demo's to handle
            )
        self.pid = self._process.pid
        self.started_s = self._clock.monotonic()
        self._reader = threading.Thread(target=self._read, name=f"moonrelay-demo-reader-{name}", daemon=True)
        self._reader.start()
        if first_line:
            self.tell(first_line)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def tell(self, line: str) -> None:
        """Write a line to the child's standard input; nothing happens when it has ended."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone."""
        self.killed = True
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(_KILL_TIMEOUT_S)

    def ask_to_end(self) -> None:
        """SIGTERM it."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)

    def close(self, deadline: Deadline | None = None) -> None:
        """End it: by SIGTERM, and by SIGKILL at the deadline. Idempotent."""
        deadline = deadline or Deadline(_STOP_TIMEOUT_S, self._clock)
        self.ask_to_end()
        try:
            self._process.wait(deadline.remaining())
        except subprocess.TimeoutExpired:
            logger.warning("%s did not end in time and is killed", self.name)
            self._process.kill()
            self._process.wait(_KILL_TIMEOUT_S)
        finally:
            if not self.running:
                self._reader.join(_KILL_TIMEOUT_S)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def failure(self, code: object) -> PeerLost:
        """Return what to say when it ended by itself: its last words, and where the others are."""
        message = f"{self.name} ended with code {code}: {self._last_words()}"
        return PeerLost(message, log=str(self.log))

    def _last_words(self) -> str:
        try:
            lines = self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip().splitlines()
        except OSError as exc:
            return f"its log cannot be read: {exc}"
        return lines[-1].removeprefix("error: ") if lines else "it said nothing"

    def _read(self) -> None:
        stdout = self._process.stdout
        if stdout is not None:
            with contextlib.suppress(ValueError), self.log.open("ab") as log:  # ValueError: closed under us
                for line in stdout:
                    message = self._parse(line)
                    if message is None:
                        log.write(line)
                    else:
                        self._inbox.put(message)
        code = self._process.wait()
        self._inbox.put(Message(child=self.name, event=EXITED, at_s=self._clock.monotonic(), fields={"code": code}))

    def _parse(self, line: bytes) -> Message | None:
        try:
            fields = json.loads(line)
        except ValueError:
            return None
        if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
            return None
        return Message(child=self.name, event=fields.pop("event"), at_s=self._clock.monotonic(), fields=fields)


class Children:
    """All children of a run, ended together."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all: dict[str, Child] = {}

    def add(self, child: Child) -> Child:
        self._all[child.name] = child
        return child

    def __getitem__(self, name: str) -> Child:
        return self._all[name]

    def close(self) -> None:
        """End all of them, side by side. Idempotent."""
        deadline = Deadline(_STOP_TIMEOUT_S, self._clock)
        for child in self._all.values():
            child.ask_to_end()
        for child in self._all.values():
            child.close(deadline)
