"""The Mooncake store's native side: its import, its return codes, and the shape of one transfer.

Owns every fact about the wheel that `mooncake_store` relies on: variables it reads at import, the libraries it needs,
what its codes mean, and how many pieces of which size one call may carry. Source: wheel 0.3.13.post1, run on TCP
loopback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from moonrelay.config import default_environment
from moonrelay.errors import (
    CapacityError,
    IntegrityError,
    MoonrelayError,
    PeerLost,
    PluginError,
    TransferFailed,
)
from moonrelay.handle import Extent

#: Return codes that decide something; every other negative one is a failure by `translate`.
OK = 0
NO_ROOM = -200
INVALID = -600
NOT_COMPLETE = -703
NOT_FOUND = -704
EXISTS = -705

#: Parts below this size are gathered into one piece: a piece of 4 KiB costs as much as 100 KiB of data.
DIRECT_BYTES = 256 << 10
#: Memory of one thread for gathering.
STAGE_BYTES = 4 << 20
#: Pieces in one native call; the transport refuses more than about two thousand at a time.
MAX_ENTRIES = 64
#: Bytes in one native call. The library gives a call up after 60 s whatever still moves; these are long over by then.
MAX_MOVE_BYTES = 64 << 20

#: Debian packages by the beginning of a shared library's name.
DEBIAN_PACKAGES = {
    "libibverbs": "libibverbs1",
    "libnuma": "libnuma1",
    "libcurl": "libcurl4",
    "libnl-route": "libnl-route-3-200",
    "libnl": "libnl-3-200",
    "librdmacm": "librdmacm1",
    "libstdc++": "libstdc++6",
    "liburing": "liburing2",
}


class NativeStore(Protocol):
    """The methods of ``mooncake.store.MooncakeDistributedStore`` that we call; none before setup or after close."""

    def setup(
        self, hostname: str, metadata: str, segment: int, local_buffer: int, protocol: str, nics: str, master: str, /
    ) -> int: ...
    def close(self) -> int: ...
    def register_buffer(self, address: int, nbytes: int, /) -> int: ...
    def unregister_buffer(self, address: int, /) -> int: ...
    def get_size(self, key: str, /) -> int: ...
    def get_into(self, key: str, address: int, nbytes: int, /) -> int: ...
    def remove(self, key: str, force: bool, /) -> int: ...
    def batch_remove(self, keys: list[str], force: bool, /) -> list[int]: ...
    def batch_put_session_start(self, keys: list[str], sizes: list[int], config: object, /) -> list[int]: ...
    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], offsets: list[list[int]], /
    ) -> list[int]: ...
    def batch_put_session_end(self, keys: list[str], /) -> list[int]: ...
    def batch_put_session_revoke(self, keys: list[str], /) -> list[int]: ...
    def batch_get_session_start(self, keys: list[str], /) -> list[int]: ...
    def batch_get_into_multi_buffer_ranges(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], offsets: list[list[int]], /
    ) -> list[int]: ...
    def batch_get_session_end(self, keys: list[str], /) -> int: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """The imported library: a store not yet set up, and the setting that pins objects."""

    store: NativeStore
    hard_pin: object


def environment(protocol: str) -> dict[str, str]:
    """Return the variables that the wheel reads at its first import, as we want them unless the user set them."""
    values = {
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # a missing master is told after seconds, not after 90
        "MC_RPC_TIMEOUT_MS": "5000",  # a stopped master holds a call this long, not 30 s
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "10",
        "MC_LOG_LEVEL": "ERROR",
    }
    if protocol == "tcp":
        values["MC_FORCE_TCP"] = "1"  # with an RDMA device present "tcp" would mean RDMA
    return values


def load(protocol: str) -> Loaded:
    """Import the library. Blocks: up to a second.

    Raises:
        PluginError: It is missing, or a library that it needs is; the message holds the import error and the remedy.
    """
    default_environment(environment(protocol))
    try:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig
    except ImportError as error:
        message = f"Mooncake's store cannot be loaded: {error}; {import_remedy(error)}"
        raise PluginError(message) from error
    config = ReplicateConfig()
    config.with_hard_pin = True
    return Loaded(cast(NativeStore, MooncakeDistributedStore()), config)


def import_remedy(error: ImportError) -> str:
    """Return what to do about a failed import of ``mooncake.engine`` or ``mooncake.store``."""
    if isinstance(error, ModuleNotFoundError):
        return "install it with: pip install 'moonrelay[mooncake-cpu]' (with CUDA: 'moonrelay[mooncake]')"
    return library_remedy(str(error))


def library_remedy(text: str) -> str:
    """Return what to do about a loader's message such as ``libibverbs.so.1: cannot open shared object file``."""
    found = re.search(r"\b(lib[\w+.-]+?)\.so", text)
    if found is None:
        return "run moonrelay doctor"
    library = found.group(1)
    if library.startswith(("libcuda", "libcudart")):
        return "this is the CUDA wheel; without a GPU install mooncake-transfer-engine-non-cuda instead"
    for start, package in DEBIAN_PACKAGES.items():
        if library.startswith(start):
            return f"on Debian: apt-get install {package}"
    return f"install the package that holds {library}"


def translate(code: int, what: str, key: str | None = None) -> MoonrelayError:
    """Return the error that a negative return code stands for; the one table of this backend."""
    kinds: dict[int, tuple[type[MoonrelayError], str]] = {
        NO_ROOM: (
            CapacityError,
            "the pool has no room for it, or no pool is mounted; add pool or consume first",
        ),
        INVALID: (TransferFailed, "the store refused the arguments"),
        NOT_COMPLETE: (TransferFailed, "the object is not complete; its writer is slow or died"),
        NOT_FOUND: (TransferFailed, "the object is gone"),
        EXISTS: (IntegrityError, "the key exists already; keys are used once"),
        -706: (TransferFailed, "the object is leased to a reader"),
        -707: (TransferFailed, "the read took longer than the store's lease; raise default_kv_lease_ttl"),
        -800: (TransferFailed, "the transfer to or from the pool failed"),
        -801: (IntegrityError, "the store's checksum does not match"),
        -900: (PeerLost, "the store's master does not answer"),
        -901: (PeerLost, "the store's master did not answer in time"),
    }
    kind, meaning = kinds.get(code, (TransferFailed, "the store failed"))
    return kind(f"{what}: {meaning}", code=code, key=key)


@dataclass(slots=True)
class Entry:
    """One contiguous piece of an object: memory of the caller's, or (``staged``) of the gathering buffer."""

    address: int
    nbytes: int
    offset: int
    staged: bool


@dataclass(slots=True)
class Move:
    """One native call: its pieces, and the copies between the caller's parts and the gathering buffer.

    Attributes:
        entries: Pieces; a staged one's ``address`` counts from the gathering buffer's start.
        copies: ``(address of the part, offset in the gathering buffer, size)``.
    """

    entries: list[Entry] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def plan(
    parts: Sequence[Extent],
    direct: Callable[[Extent], bool],
    *,
    stage_bytes: int = STAGE_BYTES,
    max_entries: int = MAX_ENTRIES,
    max_bytes: int = MAX_MOVE_BYTES,
) -> Iterator[Move]:
    """Cut an object into native calls that together cover it once, in order.

    Args:
        parts: Not empty, each of at least one byte.
        direct: Whether a part's memory may be given to the store as it is; others pass through the gathering buffer.
        stage_bytes: Size of the gathering buffer; each call uses it from its start.
        max_entries: Pieces in one call.
        max_bytes: Bytes in one call.
    """
    move = Move()
    staged = moved = offset = 0
    for part in parts:
        is_direct = direct(part)
        at = 0
        while at < part.nbytes:
            joins = not is_direct and bool(move.entries) and move.entries[-1].staged
            full = moved == max_bytes or (not is_direct and staged == stage_bytes)
            if full or (not joins and len(move.entries) == max_entries):
                yield move
                move, staged, moved, joins = Move(), 0, 0, False
            nbytes = min(part.nbytes - at, max_bytes - moved)
            if is_direct:
                move.entries.append(Entry(part.address + at, nbytes, offset, staged=False))
            else:
                nbytes = min(nbytes, stage_bytes - staged)
                if joins:
                    move.entries[-1].nbytes += nbytes
                else:
                    move.entries.append(Entry(staged, nbytes, offset, staged=True))
                move.copies.append((part.address + at, staged, nbytes))
                staged += nbytes
            moved += nbytes
            offset += nbytes
            at += nbytes
    if move.entries:
        yield move
