"""The engine of one process: peers are other instances in it, and a read is one memmove.

Owns the module's table of living instances. The reference in tests, and what two stages in one process use. Nothing
here crosses a process.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from typing import ClassVar

from moonrelay.config import TransferConfig
from moonrelay.errors import ClosedError, ConfigError, MoonrelayError, PeerLost, RegistrationError
from moonrelay.handle import EngineAddress, Region
from moonrelay.transfer.base import Operation, TransferEngine
from moonrelay.transfer.mapping import Mapping, copy, map_memory
from moonrelay.transfer.operations import Finished, out_of_bounds

#: Started engines of this process by nonce; weak, so that a forgotten engine is no peer.
_PEERS: weakref.WeakValueDictionary[str, MemoryEngine] = weakref.WeakValueDictionary()


class MemoryEngine(TransferEngine):
    """Reads between connectors of one process.

    Threads: any. A read is complete when ``read`` returns; the copy releases the GIL.
    """

    name: ClassVar[str] = "memory"
    lands_in_foreign_memory: bool = True
    # As for ``shm``: a digest reads from the core's own cache what was just copied.
    fixed_piece_bytes: int | None = 1 << 20

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        # Re-entrant, because `release` may be called by a finalizer while this thread is inside.
        self._lock = threading.RLock()
        self._address: EngineAddress | None = None
        self._closed = False
        # What peers may read, by key; for memory of our own also what keeps it mapped.
        self._served: dict[str, tuple[Region, Mapping | None]] = {}
        self._mapped: dict[str, Mapping] = {}
        self._count = 0

    def start(self) -> None:
        if self._config.device != "cpu":
            message = f"device={self._config.device!r} cannot be served by engine 'memory'; use device='cpu'"
            raise ConfigError(message, field="device")
        with self._lock:
            if self._closed:
                message = "the memory engine is closed"
                raise ClosedError(message)
            if self._address is None:
                nonce = secrets.token_hex(16)
                self._address = EngineAddress(engine=self.name, address=f"memory:{nonce[:8]}", nonce=nonce)
                _PEERS[nonce] = self

    @property
    def address(self) -> EngineAddress:
        if self._address is None:
            message = "the memory engine was not started"
            raise ClosedError(message)
        return self._address

    def allocate(self, nbytes: int) -> Region:
        self._require_open()
        mapping = map_memory(nbytes)
        return self._serve(mapping.address, nbytes, mapping)

    def release(self, region: Region) -> None:
        self._served.pop(region.key, None)
        self._mapped.pop(region.key, None)

    def register(self, address: int, nbytes: int) -> Region:
        self._require_open()
        if address <= 0 or nbytes < 1:
            message = f"cannot register {nbytes} bytes at {address:#x}: nothing to register"
            raise RegistrationError(message, nbytes=nbytes)
        return self._serve(address, nbytes, None)

    def unregister(self, region: Region) -> None:
        self._served.pop(region.key, None)

    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        self._require_open()
        source = _PEERS.get(peer.nonce)
        if source is None:
            message = "no such engine in this process: the peer is closed, or lives in another process (use 'shm')"
            return Finished(PeerLost(message, peer=peer.address))
        held = source.lookup(region, remote_address, nbytes)
        if isinstance(held, MoonrelayError):
            return Finished(held)
        copy(local_address, remote_address, nbytes)
        del held  # kept the source mapped during the copy
        return Finished()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._address is not None:
                _PEERS.pop(self._address.nonce, None)
            self._served.clear()

    def lookup(self, region: Region, address: int, nbytes: int) -> tuple[Region, Mapping | None] | MoonrelayError:
        """Return what a peer in this process may read there (keep it during the copy), or the error."""
        held = self._served.get(region.key)
        if held is None:
            message = f"region {region.key!r} is not registered (any more)"
            return RegistrationError(message, nbytes=nbytes)
        # Our own record decides, not what came with the request.
        return out_of_bounds(held[0], address, nbytes) or held

    def _serve(self, address: int, nbytes: int, mapping: Mapping | None) -> Region:
        with self._lock:
            self._require_open()
            for known, _ in list(self._served.values()):
                if address < known.base + known.nbytes and known.base < address + nbytes:
                    message = f"{nbytes} bytes at {address:#x} overlap memory that is registered already"
                    raise RegistrationError(message, nbytes=nbytes)
            self._count += 1
            region = Region(key=f"m{self._count}", base=address, nbytes=nbytes)
            self._served[region.key] = (region, mapping)
            if mapping is not None:
                self._mapped[region.key] = mapping
            return region

    def _require_open(self) -> None:
        if self._closed or self._address is None:
            message = f"the memory engine {'is closed' if self._closed else 'was not started'}"
            raise ClosedError(message)
