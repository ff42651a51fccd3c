"""What makes "delivered" true: digests of bytes where they lie, and proof that every byte came exactly once.

Owns the digest algorithms by name. They tell accident and corruption, not an attacker: messages are authenticated by
the control channel. It moves no bytes between devices. Importing it loads no torch.

- ``xxh3_128``: host memory, at about the speed of a copy; releases the GIL.
- ``lanes128``: torch integer operations where the tensor is, with a small bounded temporary; the same on every device.
- ``off``: no digest; equal to itself only.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final

import xxhash

from moonrelay.errors import ConfigError, IntegrityError
from moonrelay.layout import Extent

if TYPE_CHECKING:
    import torch

#: The algorithm that checks nothing.
OFF: Final = "off"
#: The names that `digester` knows.
ALGORITHMS: Final = ("xxh3_128", "lanes128", OFF)

_MASK: Final = (1 << 64) - 1
_WORD: Final = 8
#: Words per row of ``lanes128``: one table of keys serves every row. Part of the algorithm.
_ROW: Final = 16384
_ROW_BYTES: Final = _ROW * _WORD
#: Rows handled at once; on a device the temporary is as large (16 MiB), on the CPU it is one row.
_BLOCK_ROWS: Final = 128
_SEEDS: Final = (0x6D6F6F6E72656C61, 0x792D6C616E657331)

#: Most bytes given to xxhash in one call.
_STEP: Final = 64 << 20

_view_of = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_PYBUF_READ: Final = 0x100
_PYBUF_WRITE: Final = 0x200


class Digest(ABC):
    """A digest in the making. Bytes are fed in order; how they are cut into updates does not matter.

    Threads: used by one thread at a time.
    """

    name: ClassVar[str]

    @abstractmethod
    def update(self, data: Extent | torch.Tensor) -> None:
        """Add bytes.

        Args:
            data: Host memory, or a contiguous 1-d uint8 tensor.

        Raises:
            ConfigError: The tensor is no such one, or is on a device that the algorithm cannot read.

        Blocks: for the time that it takes to read the bytes; on a GPU the work is only queued on the current stream.
        """

    @abstractmethod
    def digest(self) -> bytes:
        """Return the 16 bytes of all that was fed so far; none for ``off``.

        Blocks: on a GPU until the queued work is done.
        """


class _Xxh3(Digest):
    name = "xxh3_128"

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Extent | torch.Tensor) -> None:
        extent = data if isinstance(data, Extent) else _host(data)
        for offset in range(0, extent.nbytes, _STEP):
            size = min(_STEP, extent.nbytes - offset)
            self._state.update(_view_of(extent.address + offset, size, _PYBUF_READ))

    def digest(self) -> bytes:
        return bytes(self._state.digest())


class _Off(Digest):
    name = "off"

    def update(self, data: Extent | torch.Tensor) -> None:
        pass

    def digest(self) -> bytes:
        return b""


class LanesDigest(Digest):
    """``lanes128``: two 64-bit multilinear sums of the bytes as little-endian 64-bit words.

    With ``w`` the words, ``h`` their upper halves (signed), ``i`` a word's place in its row of 16384 and ``r`` the row:
    ``lane0 = sum(w * a[i] * q[r])`` and ``lane1 = sum(h * b[i] * q[r])`` modulo 2**64, ``a``, ``b``, ``q`` odd
    pseudo-random numbers, then each is mixed with the length. Two different contents of one length collide by chance in
    about 2**-64 where they differ in low bits, 2**-32 in the worst case. The sums are linear, so parts may be added in
    any order with `add`, each byte once; bytes never added count as zero, so pair it with `Coverage`.
    """

    name = "lanes128"

    #: Kinds of device where torch has an integer dot product.
    _host_types: ClassVar[frozenset[str]] = frozenset({"cpu"})

    def __init__(self) -> None:
        self._length = 0
        self._next = 0
        self._sums = [0, 0]
        self._queued: dict[torch.device, torch.Tensor] = {}

    def update(self, data: Extent | torch.Tensor) -> None:
        self.add(self._next, data)

    def add(self, offset: int, data: Extent | torch.Tensor) -> None:
        """Add bytes that stand at ``offset`` of the whole. A later `update` goes on behind the furthest byte.

        Raises:
            ConfigError: The offset is negative, or as `update`.
        """
        import torch

        if offset < 0:
            raise ConfigError(f"offset {offset} is negative; count from the first byte", field="offset")
        if isinstance(data, Extent):
            if data.nbytes == 0:
                return
            data = torch.frombuffer(_view_of(data.address, data.nbytes, _PYBUF_WRITE), dtype=torch.uint8)
        _check_bytes(data)
        if sys.byteorder != "little":
            raise ConfigError("lanes128 needs a little-endian machine; use xxh3_128", field="integrity")
        self._length += data.numel()
        self._next = max(self._next, offset + data.numel())
        with torch.no_grad():
            self._add(offset, data)

    def digest(self) -> bytes:
        for sums in self._queued.values():
            for index, lane in enumerate(sums.tolist()):
                self._sums[index] += lane
        self._queued.clear()
        lanes = [_mix((lane + self._length * _SEEDS[index]) & _MASK) for index, lane in enumerate(self._sums)]
        return b"".join(lane.to_bytes(8, "big") for lane in lanes)

    def _add(self, offset: int, data: torch.Tensor) -> None:
        """Cut the bytes at rows and words; odd ends and misaligned memory go through a padded copy of a few rows."""
        import torch

        done, total = 0, data.numel()
        while done < total:
            row, within = divmod(offset + done, _ROW_BYTES)
            size = min(total - done, (_ROW_BYTES - within) if within else _BLOCK_ROWS * _ROW_BYTES)
            if size > _ROW_BYTES:
                size -= size % _ROW_BYTES
            part = data[done : done + size]
            lead, tail = within % _WORD, -(within + size) % _WORD
            if lead or tail or part.data_ptr() % _WORD or part.storage_offset() % _WORD:
                padded = torch.zeros(lead + size + tail, dtype=torch.uint8, device=data.device)
                padded[lead : lead + size].copy_(part)
                part = padded
            rows = part.view(torch.int64).view(-1, min(part.numel() // _WORD, _ROW))
            keys = _keys(str(rows.device))
            low_keys, high_keys = (table[within // _WORD : within // _WORD + rows.shape[1]] for table in keys)
            if data.device.type in self._host_types:
                self._add_rows_on_host(rows, row, low_keys, high_keys)
            else:
                self._add_rows(rows, row, low_keys, high_keys)
            done += size

    def _add_rows_on_host(self, rows: torch.Tensor, row: int, low_keys: torch.Tensor, high_keys: torch.Tensor) -> None:
        """Add rows one by one: what is at work stays in the caches and in this thread."""
        import torch

        scratch = torch.empty(rows.shape[1], dtype=torch.int64)
        for index, words in enumerate(rows.unbind(0)):
            factor = _mix(row + index) | 1
            self._sums[0] += int(torch.dot(words, low_keys)) * factor
            torch.bitwise_right_shift(words, 32, out=scratch)
            self._sums[1] += int(torch.dot(scratch, high_keys)) * factor

    def _add_rows(self, rows: torch.Tensor, row: int, low_keys: torch.Tensor, high_keys: torch.Tensor) -> None:
        """Queue rows at once, on the device's current stream."""
        import torch

        factors = _mix_tensor(torch.arange(row, row + rows.shape[0], dtype=torch.int64, device=rows.device)) | 1
        scratch = rows * low_keys
        low = (scratch.sum(1) * factors).sum()
        torch.bitwise_right_shift(rows, 32, out=scratch)
        sums = torch.stack([low, (scratch.mul_(high_keys).sum(1) * factors).sum()])
        queued = self._queued.get(rows.device)
        self._queued[rows.device] = sums if queued is None else queued + sums


def digester(name: str) -> Digest:
    """Begin a digest.

    Args:
        name: ``xxh3_128``, ``lanes128`` or ``off``.

    Raises:
        ConfigError: There is no such algorithm.
    """
    makers: dict[str, type[Digest]] = {"xxh3_128": _Xxh3, "lanes128": LanesDigest, "off": _Off}
    if name not in makers:
        raise ConfigError(f"digest {name!r} is unknown; use one of {', '.join(ALGORITHMS)}", field="integrity")
    return makers[name]()


def choose(mode: str, device: str) -> str:
    """Return the algorithm for a payload.

    Args:
        mode: ``auto``, ``full`` or ``off``. The first two both give a digest; where a path cannot corrupt bytes (both
            ends are one process), the connector may skip it under ``auto`` only.
        device: Where the producer's tensors are, ``cpu``, ``cuda:0`` ...; for several, any that is not the host.

    Raises:
        ConfigError: The mode is unknown.
    """
    if mode not in ("auto", "full", "off"):
        raise ConfigError(f"integrity={mode!r} is unknown; use 'auto', 'full' or 'off'", field="integrity")
    if mode == "off":
        return "off"
    return "xxh3_128" if device.partition(":")[0] == "cpu" else "lanes128"


class Coverage:
    """Proof that each of ``total_nbytes`` bytes came exactly once, in whatever order.

    Threads: guarded by its owner.
    """

    def __init__(self, total_nbytes: int) -> None:
        if total_nbytes < 0:
            raise ConfigError(f"total_nbytes={total_nbytes} is negative; give a size", field="total_nbytes")
        self._total = total_nbytes
        self._covered = 0
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, offset: int, nbytes: int) -> None:
        """Count a range as come. Adding nothing, inside the whole, is fine.

        Raises:
            IntegrityError: It lies outside the whole or overlaps what came already; nothing was counted.
        """
        end = offset + nbytes
        if offset < 0 or nbytes < 0 or end > self._total:
            raise IntegrityError(f"bytes {offset} to {end} lie outside the payload's {self._total}", offset=offset)
        if nbytes == 0:
            return
        index = bisect.bisect_right(self._starts, offset)
        if (index and self._ends[index - 1] > offset) or (index < len(self._starts) and self._starts[index] < end):
            raise IntegrityError(f"bytes {offset} to {end} came twice, in part at least", offset=offset)
        joins_left = index > 0 and self._ends[index - 1] == offset
        joins_right = index < len(self._starts) and self._starts[index] == end
        if joins_left and joins_right:
            self._ends[index - 1] = self._ends.pop(index)
            self._starts.pop(index)
        elif joins_left:
            self._ends[index - 1] = end
        elif joins_right:
            self._starts[index] = offset
        else:
            self._starts.insert(index, offset)
            self._ends.insert(index, end)
        self._covered += nbytes

    @property
    def complete(self) -> bool:
        """Whether every byte came."""
        return self._covered == self._total

    @property
    def covered(self) -> int:
        """How many bytes came."""
        return self._covered

    def missing(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges that did not come, as ``(offset, nbytes)``."""
        edges = [0, *(edge for pair in zip(self._starts, self._ends, strict=True) for edge in pair), self._total]
        return tuple((edges[i], edges[i + 1] - edges[i]) for i in range(0, len(edges), 2) if edges[i] < edges[i + 1])

    def require_complete(self) -> None:
        """Pass when every byte came.

        Raises:
            IntegrityError: Some did not; the message names the first gap.
        """
        if not self.complete:
            offset, nbytes = self.missing()[0]
            message = (
                f"{self._total - self._covered} of {self._total} bytes did not come, the first {nbytes} at {offset}"
            )
            raise IntegrityError(message, offset=offset)


def _check_bytes(data: torch.Tensor) -> None:
    import torch

    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        message = f"a digest reads contiguous 1-d uint8 tensors, not {tuple(data.shape)} {data.dtype}; use bytes_of"
        raise ConfigError(message, field="data")


def _host(data: torch.Tensor) -> Extent:
    _check_bytes(data)
    if data.device.type != "cpu":
        raise ConfigError(f"xxh3_128 cannot read {data.device}; use lanes128", field="integrity")
    return Extent(address=data.data_ptr(), nbytes=data.numel())


def _mix(value: int) -> int:
    """Return splitmix64's output for a state."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix_tensor(values: torch.Tensor) -> torch.Tensor:
    """Return `_mix` of int64 values, elementwise."""

    def shifted(value: torch.Tensor, by: int) -> torch.Tensor:
        return (value >> by) & ((1 << (64 - by)) - 1)

    values = values + _signed(0x9E3779B97F4A7C15)
    values = (values ^ shifted(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ shifted(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ shifted(values, 31)


@functools.lru_cache(maxsize=16)
def _keys(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the constant key tables on a device; complete on return, whatever the stream."""
    import torch

    columns = torch.arange(_ROW, dtype=torch.int64)
    low, high = (_mix_tensor(columns * 2 + _signed(_mix(seed))) | 1 for seed in _SEEDS)
    return low.to(device), high.to(device)
