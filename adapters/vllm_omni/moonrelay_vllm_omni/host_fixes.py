"""What the supported host versions do wrong where a stage dies, mended from outside, in the host's own process.

Owns nothing else: each fix says what happens without it. A host that has not what a fix mends is left alone.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

#: How long the host may try to tell a stage to end, in milliseconds.
_TELL_TIMEOUT_MS: Final = 1000
_MARK: Final = "_moonrelay_bounded"


def bound_shutdown_of_dead_stages() -> None:
    """Have the host give up telling a dead diffusion stage to end. Idempotent.

    vllm-omni 0.30 sends the word with a socket that waits for its peer; after a kill there is none, the orchestrator's
    only thread waits for ever, and with it every request, of any stage. With a bound the send fails, which the host
    takes as told, and the request fails with the stage's name.
    """
    import zmq
    from vllm_omni.diffusion.stage_diffusion_client import StageDiffusionClient

    original = StageDiffusionClient.shutdown
    if getattr(original, _MARK, False):
        return

    @wraps(original)
    def shutdown(self: Any) -> None:
        socket = getattr(self, "_request_socket", None)
        if isinstance(socket, zmq.Socket) and not socket.closed:
            socket.setsockopt(zmq.SNDTIMEO, _TELL_TIMEOUT_MS)
        original(self)

    setattr(shutdown, _MARK, True)
    StageDiffusionClient.shutdown = shutdown
