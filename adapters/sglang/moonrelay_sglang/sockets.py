"""The sockets between a role's process and the head: the host's own, with our eyes on them, and ours beside them.

Owns what stands in for the host's sockets in its functions. What is sent and taken is `moonrelay_sglang.worker`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import zmq

if TYPE_CHECKING:
    from moonrelay_sglang.worker import RoleWorker

#: How long a report may wait for room in its socket, in milliseconds; the head is then away, and hears of it by a beat.
REPORT_MS: Final = 1000
#: How long a closed socket may take to send what it has, in milliseconds.
LINGER_MS: Final = 200


class ResultSocket:
    """The host's socket to the head, with everything that it sends about a request stamped, or held back.

    Args:
        socket: The host's PUSH socket.
        worker: Whose requests they are.

    Threads: the host's.
    """

    def __init__(self, socket: Any, worker: RoleWorker) -> None:
        self._socket = socket
        self._worker = worker

    def send_multipart(self, frames: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Send, with a stamp; nothing where nobody needs the request any more."""
        changed = self._worker.outgoing(frames)
        if changed is None:
            return None
        sent = self._socket.send_multipart(changed, *args, **kwargs)
        self._worker.sent()
        return sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class WorkSocket:
    """The host's socket from the head, as an encoder's main thread sees it: what another thread has taken already.

    So that an encoder that computes says of waiting work that it has it, and hears at once of what is released.

    Args:
        socket: The host's PULL socket.
        take: Gives the next work's frames; blocks.

    Threads: the host's.
    """

    def __init__(self, socket: Any, take: Callable[[], list[bytes]]) -> None:
        self._socket = socket
        self._take = take

    def recv_multipart(self, *_args: Any, **_kwargs: Any) -> list[bytes]:
        """Return the next work. Blocks: until there is some."""
        return self._take()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def push_socket(context: Any, endpoint: str, *, immediate: bool) -> Any:
    """Return a PUSH socket to the head.

    Args:
        context: The host's ZeroMQ context.
        endpoint: Where the head takes results.
        immediate: Keep nothing for a head that is not there; else it is kept until it comes.
    """
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDTIMEO, REPORT_MS)
    if immediate:
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, 2)
    socket.connect(endpoint)
    return socket
