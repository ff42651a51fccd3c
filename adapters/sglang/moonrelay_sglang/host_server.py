"""What we use of the host's ``DiffusionServer``: every name of it that is not public, in one place.

Owns those names. The host changes its head between versions, so a server that lacks one is refused at the start, with
the name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

import zmq

from moonrelay.errors import PluginError

logger = logging.getLogger(__name__)

_NEEDED: Final = (
    "_complete_with_error",
    "_encoder_tta",
    "_extract_request_id",
    "_glm_distributed_state",
    "_handle_decoder_result",
    "_pools",
    "_role_order",
    "tracker",
)


class HostServer:
    """A head of the host, as ours drives it.

    Args:
        server: The host's object.
        supported: Host versions that have what is needed, for the refusal.

    Raises:
        PluginError: The server lacks something that is needed.

    Threads: the server's loop.
    """

    def __init__(self, server: Any, supported: str) -> None:
        missing = [name for name in _NEEDED if not hasattr(server, name)]
        if missing:
            message = f"this host's DiffusionServer has no {missing[0]}; Moonrelay supports sglang {supported}"
            raise PluginError(message, plugin="sglang")
        self._server = server

    @property
    def roles(self) -> list[Any]:
        """The host's roles in the order in which a request passes them."""
        return list(self._server._role_order)

    @property
    def has_own_encoder(self) -> bool:
        """Whether this is the head for GLM-Image, which encodes by itself and moves nothing between roles."""
        return self._server._glm_distributed_state is not None

    def endpoints(self, role: Any) -> list[str]:
        """Return where a role's instances take work, in the order of the head's URLs."""
        return list(self._server._pools[role].endpoints)

    def send(self, role: Any, index: int, frames: Sequence[bytes]) -> None:
        """Send to an instance; raise ``zmq.ZMQError`` where it takes nothing now."""
        self._server._pools[role].pushes[index].send_multipart(frames, zmq.NOBLOCK)

    def note_peer(self, role: Any, index: int, peer: dict[str, Any]) -> None:
        """Keep the host's own statistics, which count its peers."""
        self._server._pools[role].peers[index] = {**peer, "free_preallocated_slots": []}

    def take_accepted(self) -> Iterator[tuple[str, bytes]]:
        """Yield the requests that the host has accepted, as ids and pickled work, and take them from its queue."""
        while self._server._encoder_tta:
            entry = self._server._encoder_tta.popleft()
            yield entry.request_id, entry.payload

    def fail(self, request_id: str, text: str) -> None:
        """Tell a request's client that it failed."""
        self._server._complete_with_error(request_id, text)

    def deliver(self, tensors: dict[str, Any], scalars: dict[str, Any]) -> None:
        """Send a decoder's result to the client."""
        self._server._handle_decoder_result(tensors, scalars)

    def request_id_of(self, frames: list[Any]) -> str | None:
        """Return the request that damaged result frames name."""
        found: str | None = self._server._extract_request_id(frames)
        return found

    def dispatched(self, request_id: str, role: Any, index: int) -> None:
        """Keep the host's tracker: the request is with an instance."""
        known = {f"{role.value}_instance": index} if role.value in {"encoder", "denoiser", "decoder"} else {}
        self._track(request_id, self._server._pools[role].running, **known)

    def staged(self, request_id: str, role: Any, follows: Any) -> None:
        """Keep the host's tracker: a role is done with the request, the next one has it in its queue."""
        self._track(request_id, self._server._pools[role].done)
        self._track(request_id, self._server._pools[follows].waiting)

    def _track(self, request_id: str, state: Any, **instance: int) -> None:
        try:
            self._server.tracker.transition(request_id, state, **instance)
        except ValueError:
            # A repeated delivery is a step that the host's tracker does not know.
            logger.debug("the tracker does not take %s to %s", request_id, state)


def unpacked(payload: bytes) -> Any:
    """Return what the head's HTTP side sent, ``None`` where it cannot be unpacked.

    The host's own wire inside its head: it unpacks the same bytes in the same way right afterwards, and refuses what
    cannot be.
    """
    from sglang.multimodal_gen.runtime.disaggregation import orchestrator

    try:
        return orchestrator.pickle.loads(payload)
    except Exception:  # noqa: BLE001  whatever damaged bytes may raise
        return None


def packed(value: object) -> bytes:
    """Return what the head's HTTP side, or its encoder, unpacks."""
    from sglang.multimodal_gen.runtime.disaggregation import orchestrator

    content: bytes = orchestrator.pickle.dumps(value)
    return content


def output_batch(*, output: Any = None, error: str | None = None) -> Any:
    """Return an answer as the HTTP side takes it."""
    from sglang.multimodal_gen.runtime.disaggregation import orchestrator

    return orchestrator.OutputBatch(output=output, error=error)


def unpacked_result(frames: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and the plain values of a role's result; raises what the host's codec raises."""
    from sglang.multimodal_gen.runtime.disaggregation import orchestrator

    tensors, scalars = orchestrator.unpack_tensors(frames, device="cpu")
    return tensors, scalars
