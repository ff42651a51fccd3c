"""The raw engines: what a careful user writes without the connector, in the form that is safe.

Owns an engine of its own beside the connectors', over the same memory. Mooncake is called without our wrapper: one
entry per asynchronous read, and a sleeping poll. For ``shm`` the raw engine is the engine's own ``read``.
"""

from __future__ import annotations

import select
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import msgspec

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import TransferConfig
from moonrelay.errors import ConfigError, TransferFailed
from moonrelay.handle import EngineAddress, Region
from moonrelay.transfer.base import OperationState
from moonrelay.transfer.shm import ShmEngine

if TYPE_CHECKING:
    import torch

READ_TIMEOUT_S = 60.0
_POLL_MIN_S = 50e-6
_POLL_MAX_S = 1e-3


class Raw(ABC):
    """One process's raw engine. Threads: one."""

    @abstractmethod
    def source(self, shared: torch.Tensor) -> torch.Tensor:
        """Return the memory to offer from: ``shared`` itself where the engine can register it."""

    @abstractmethod
    def landing(self, destination: torch.Tensor) -> None:
        """Make memory fit for `take`."""

    @abstractmethod
    def offer(self, source: torch.Tensor) -> bytes:
        """Return what the other side needs to read."""

    @abstractmethod
    def take(self, ticket: bytes, destination: torch.Tensor) -> None:
        """Read. Blocks: until every byte is here.

        Raises:
            TransferFailed: The engine says so, or it took too long.
        """

    @abstractmethod
    def close(self) -> None:
        """End the engine. Idempotent."""


def raw_engine(name: str) -> Raw:
    """Return a started raw engine.

    Raises:
        ConfigError: There is none of that name.
        PluginError: Its library cannot be loaded.
    """
    makers: dict[str, type[RawMooncake | RawShm]] = {"mooncake": RawMooncake, "shm": RawShm}
    if name not in makers:
        message = f"engine={name!r} has no raw form to compare with; use one of {', '.join(makers)}"
        raise ConfigError(message, field="engine")
    return makers[name]()


class _Library(Protocol):
    def initialize(self, hostname: str, metadata: str, protocol: str, devices: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, nbytes: int, /) -> int: ...
    def batch_transfer_async_read(
        self, peer: str, local: list[int], remote: list[int], nbytes: list[int], /
    ) -> int: ...
    def transfer_check_status(self, handle: int, /) -> int: ...


class RawMooncake(Raw):
    """Mooncake's Transfer Engine. Made after a connector was, whose engine has set the library's environment."""

    def __init__(self) -> None:
        import mooncake.engine

        self._engine: _Library | None = mooncake.engine.TransferEngine()
        self._clock = SystemClock()
        self._memory: list[torch.Tensor] = []
        code = self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        if code != 0:
            message = f"Mooncake could not start (code {code})"
            raise TransferFailed(message)
        self._sid = f"127.0.0.1:{self._engine.get_rpc_port()}"

    def source(self, shared: torch.Tensor) -> torch.Tensor:
        self._register(shared)
        return shared

    def landing(self, destination: torch.Tensor) -> None:
        self._register(destination)

    def offer(self, source: torch.Tensor) -> bytes:
        return msgspec.msgpack.encode((self._sid, source.data_ptr(), source.numel()))

    def take(self, ticket: bytes, destination: torch.Tensor) -> None:
        sid, address, nbytes = msgspec.msgpack.decode(ticket, type=tuple[str, int, int])
        engine = self._open()
        handle = engine.batch_transfer_async_read(sid, [destination.data_ptr()], [address], [nbytes])
        if not handle:
            message = "the raw engine could not begin a read"
            raise TransferFailed(message)
        deadline = Deadline(READ_TIMEOUT_S, self._clock)
        pause = _POLL_MIN_S
        while True:
            answer = engine.transfer_check_status(handle)
            if answer == 1:
                return
            if answer == -1 or deadline.expired:
                message = f"the raw engine failed (answer {answer})"
                raise TransferFailed(message)
            select.select([], [], [], pause)
            pause = min(2 * pause, _POLL_MAX_S)

    def close(self) -> None:
        self._engine = None
        self._memory.clear()

    def _register(self, tensor: torch.Tensor) -> None:
        code = self._open().register_memory(tensor.data_ptr(), tensor.numel())
        if code != 0:
            message = f"the raw engine could not register {tensor.numel()} bytes (code {code})"
            raise TransferFailed(message)
        self._memory.append(tensor)

    def _open(self) -> _Library:
        if self._engine is None:
            message = "the raw engine is closed"
            raise TransferFailed(message)
        return self._engine


class RawShm(Raw):
    """The shared-memory engine, without pool, claim or digest."""

    def __init__(self) -> None:
        self._engine = ShmEngine(TransferConfig(engine="shm"))
        self._engine.start()
        self._region: Region | None = None

    def source(self, shared: torch.Tensor) -> torch.Tensor:
        from moonrelay.transfer.views import tensor_over

        # This engine serves only memory of its own.
        self._region = region = self._engine.allocate(shared.numel())
        self._engine.commit(region, 0, region.nbytes)
        own = tensor_over(region.base, region.nbytes, "cpu", lambda: self._engine.release(region))
        own.copy_(shared)
        return own

    def landing(self, destination: torch.Tensor) -> None:
        """Reads land in any memory."""

    def offer(self, source: torch.Tensor) -> bytes:
        return msgspec.msgpack.encode((self._engine.address, self._region, source.data_ptr(), source.numel()))

    def take(self, ticket: bytes, destination: torch.Tensor) -> None:
        peer, region, address, nbytes = msgspec.msgpack.decode(ticket, type=tuple[EngineAddress, Region, int, int])
        operation = self._engine.read(peer, region, address, destination.data_ptr(), nbytes)
        if operation.poll() is not OperationState.DONE:
            message = f"the raw engine failed: {operation.error}"
            raise TransferFailed(message)

    def close(self) -> None:
        self._engine.close()
