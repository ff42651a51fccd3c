"""A pipe from a supervisor to its child: its end means that the supervisor is gone, a byte in it says "go on".

Owns the thread that reads it. Nothing is polled and no process id is compared, so neither a reused id nor a missed look
can keep a child alive; the kernel closes the pipe however the supervisor died.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from moonrelay.errors import ConfigError


class Lifeline:
    """Watches the reading end of a pipe whose writing end the supervisor alone holds.

    Args:
        fd: The pipe, inherited from the supervisor; ``0`` where it is the standard input.
        on_gone: Called once, in the watching thread, when the supervisor is gone.

    Attributes:
        go_on: Set by the first byte that the supervisor writes.

    Raises:
        ConfigError: ``fd`` is not open.

    Threads: one of its own, ``moonrelay-lifeline``, which lives as long as the pipe does.
    """

    def __init__(self, fd: int, on_gone: Callable[[], None]) -> None:
        try:
            os.fstat(fd)
        except OSError as exc:
            message = f"parent_fd={fd} is not open; give the number of an inherited pipe"
            raise ConfigError(message, field="parent_fd") from exc
        self.go_on = threading.Event()
        self._fd = fd
        self._on_gone = on_gone
        self._thread = threading.Thread(target=self._watch, name="moonrelay-lifeline", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the watching thread; return whether it has ended. Blocks: until then, or ``timeout_s``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _watch(self) -> None:
        while self._read():
            self.go_on.set()
        self._on_gone()

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, 4096)
        except OSError:  # closed under us, or no pipe at all: nobody holds the other end
            return b""
