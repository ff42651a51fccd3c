"""A role of several ranks: rank 0 hands over, and what it receives, or why it cannot, all of them get.

Owns what the ranks of one role say to each other. The host starts a role's ranks with torch.distributed and has each
call the same methods; on the wire between roles they are one. The ranks' own wire is a group of torch.distributed made
here, over the CPU and with our timeout: a rank waits as long as the role before computes, longer than a GPU's group
lets it. Frames of our own go over it, no pickles.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moonrelay.errors import ClosedError, MoonrelayError, PeerLost, from_wire
from moonrelay.tree import decode_tree, encode_tree
from moonrelay_lightx2v.link import FETCH_TIMEOUT_S, StageLink

if TYPE_CHECKING:
    import torch

    from moonrelay_lightx2v.config import LinkConfig
    from moonrelay_lightx2v.pairing import Names

logger = logging.getLogger(__name__)

#: What a rank waits beyond the time that rank 0 may take, in seconds.
_MARGIN_S: Final = 60.0


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """What came of rank 0's call: an error's wire form, or a tree and its tensors' dtypes and shapes."""

    code: str | None = None
    retryable: bool = False
    message: str = ""
    tree: bytes = b""
    tensors: list[tuple[str, list[int]]] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Said)


def world_size() -> int:
    """Return of how many ranks this process is one."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


class RankedLink:
    """A `StageLink` of several ranks, each of which makes one and makes the same calls.

    Args:
        config: The role's settings.

    Threads: as `StageLink`.
    """

    def __init__(self, config: LinkConfig) -> None:
        import torch

        self.config = config
        self._rank = torch.distributed.get_rank()
        timeout = timedelta(seconds=config.transfer_timeout_s + FETCH_TIMEOUT_S + _MARGIN_S)
        self._group: Any = torch.distributed.new_group(backend="gloo", timeout=timeout)
        self._link = StageLink(config) if self._rank == 0 else None
        self._refused: MoonrelayError | None = None

    def __repr__(self) -> str:
        return f"<RankedLink {self._rank} {self._link!r}>"

    @property
    def address(self) -> tuple[str, int] | None:
        """Where this role's receivers find it, known to rank 0."""
        return None if self._link is None else self._link.address

    def start(self) -> None:
        """Start rank 0's link; all ranks fail where it does. Blocks: seconds at most. Raises: as `StageLink.start`."""
        self._together(lambda link: link.start())

    def begin(self, names: Names, *, cancelled: Callable[[], bool] | None = None) -> None:
        """Note that this role works on a request from now on. A refusal comes with what is asked of the link next."""
        self._refused = None
        if self._link is not None:
            try:
                self._link.begin(names, cancelled=cancelled)
            except MoonrelayError as exc:
                self._refused = exc

    def send(self, data: Mapping[str, Any], *, metadata: dict[str, object] | None = None) -> None:
        """Offer what this role made: rank 0's, which is every rank's. Raises, for rank 0: as `StageLink.send`."""
        if self._link is not None:
            self._check()
            self._link.send(data, metadata=metadata)

    def receive(self) -> tuple[dict[str, Any], dict[str, object]]:
        """Return what the role before made, to every rank; rank 0's lies in its pool.

        Raises:
            PeerLost: Another rank of this role is gone.
            MoonrelayError: As `StageLink.receive`, at every rank.

        Blocks: until it is here, and every rank asks for it.
        """

        def receive(link: StageLink) -> tuple[dict[str, Any], dict[str, object]]:
            self._check()
            return link.receive()

        found: tuple[dict[str, Any], dict[str, object]] = self._together(receive)
        return found

    def end(self, error: BaseException | None = None) -> None:
        """End the request that this role works on. Raises nothing."""
        if self._link is not None:
            self._link.end(error)

    def in_use(self) -> Mapping[str, int]:
        """Return what this rank holds for payloads now."""
        return {} if self._link is None else self._link.in_use()

    def close(self) -> None:
        """End the link. Idempotent. Blocks: some seconds at most."""
        import torch

        if self._link is not None:
            self._link.close()
        group, self._group = self._group, None
        if group is not None and torch.distributed.is_initialized():
            with contextlib.suppress(RuntimeError, ValueError):  # the host took all groups down before
                torch.distributed.destroy_process_group(group)

    def at_exit(self) -> None:
        """End the link where the process ends; as `StageLink.at_exit`."""
        if self._link is not None:
            self._link.at_exit()

    def close_when_taken(self, *, then: Callable[[], object] | None = None) -> None:
        """End the link once what was sent is taken; as `StageLink.close_when_taken`."""
        if self._link is not None:
            self._link.close_when_taken(then=then)
        elif then is not None:
            then()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def _together(self, call: Callable[[StageLink], Any]) -> Any:
        """Call rank 0's link, and return or raise at every rank what came of it."""
        if self._group is None:
            message = "the link is closed; init_disagg makes a new one"
            raise ClosedError(message)
        if self._link is None:
            return self._hear()
        try:
            result = call(self._link)
            tree, leaves = encode_tree(result, "received")
        except Exception as exc:
            error = exc if isinstance(exc, MoonrelayError) else MoonrelayError(f"{type(exc).__name__}: {exc}")
            code, retryable, text = error.to_wire()
            self._say(_Said(code=code, retryable=retryable, message=text), [])
            raise
        tensors = [tensor for _, tensor in leaves]
        shapes = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
        self._say(_Said(tree=tree, tensors=shapes), tensors)
        return result

    def _say(self, said: _Said, tensors: list[torch.Tensor]) -> None:
        import torch

        frame = torch.frombuffer(bytearray(_encoder.encode(said)), dtype=torch.uint8)
        self._broadcast(torch.tensor([frame.numel()]))
        self._broadcast(frame)
        for tensor in tensors:
            self._broadcast(tensor.cpu().reshape(-1).view(torch.uint8))

    def _hear(self) -> Any:
        import torch

        length = torch.zeros(1, dtype=torch.int64)
        self._broadcast(length)
        frame = torch.empty(int(length), dtype=torch.uint8)
        self._broadcast(frame)
        said = _decoder.decode(frame.numpy().tobytes())
        if said.code is not None:
            raise from_wire(said.code, said.retryable, said.message)
        tensors = [torch.empty(shape, dtype=getattr(torch, name)) for name, shape in said.tensors]
        for tensor in tensors:
            self._broadcast(tensor.view(-1).view(torch.uint8))
        return decode_tree(said.tree, tensors)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        import torch

        if not tensor.numel():
            return
        try:
            torch.distributed.broadcast(tensor, src=0, group=self._group)
        except RuntimeError as exc:
            message = f"another rank of this {self.config.role} is gone, or does not ask for its input: {exc}"
            raise PeerLost(message) from exc


__all__ = ["RankedLink", "world_size"]
