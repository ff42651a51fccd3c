"""The payloads of ``moonrelay bench host``: dicts as stages exchange them, whose every byte is known to both ends.

Owns one buffer per process, of which payloads are views, and the comparison of what arrived with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from moonrelay.cli.bench.host_lanes import HostPayload
from moonrelay.cli.bench.samples import parse_sizes
from moonrelay.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    import torch

#: Bytes of the random pattern; each repetition carries its number, so that no two are alike.
_TILE: Final = 1 << 20
_STAMP: Final = 8
SMALLEST: Final = 1 << 10
_SIZES: Final = "64KiB,1MiB,64MiB,512MiB"
_SEED: Final = 20


class Payloads:
    """Payloads up to a size.

    Args:
        largest: Tensor bytes of the largest one.
        own: Those with shapes of their host's own, each told from the others by its size.

    Raises:
        ConfigError: It is too small to be a payload.

    Threads: one.
    """

    def __init__(self, largest: int, own: Sequence[HostPayload] = ()) -> None:
        import torch

        if largest < SMALLEST:
            message = f"sizes: {largest} bytes are too few for a payload; give at least {SMALLEST}"
            raise ConfigError(message, field="sizes")
        self._own = {one.nbytes: one for one in own}
        tiles = -(-largest // _TILE)
        tile = torch.randint(0, 256, (_TILE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(_SEED))
        self._bytes = tile.repeat(tiles)
        self._bytes.view(torch.int64)[:: _TILE // 8] = torch.arange(tiles) + (1 << 40)

    def make(self, nbytes: int, stamp: int) -> dict[str, Any]:
        """Return a payload whose tensors have ``nbytes`` together; valid until the next call.

        Args:
            nbytes: A multiple of 16.
            stamp: Stands in the first and the last bytes.
        """
        import torch

        mark = torch.tensor([stamp], dtype=torch.int64).view(torch.uint8)
        self._bytes[:_STAMP] = mark
        if nbytes in self._own:
            self._bytes[nbytes - _STAMP : nbytes] = mark
            return {**_laid_out(self._bytes, self._own[nbytes]), **self._own[nbytes].values}
        embeds = nbytes // 16 // 16 * 16
        mask = max(16, nbytes // 256 // 16 * 16)
        latents = nbytes - embeds - mask
        parts = self._bytes[:nbytes]
        parts[-_STAMP:] = mark
        return {
            "latents": parts[:latents].view(torch.bfloat16).view(1, 4, -1),
            "prompt_embeds": parts[latents : latents + embeds].view(torch.float16).view(1, -1),
            "prompt_embeds_mask": parts[latents + embeds :].view(torch.int64),
            "height": 1024,
            "width": 1024,
            "prompt": "a relay race on the moon",
        }

    def raw(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of the buffer."""
        return self._bytes[:nbytes]

    def check(self, found: object, nbytes: int, stamp: int) -> None:
        """Compare what arrived with what was put, every byte of it.

        Raises:
            IntegrityError: Something differs; names it.
        """
        import torch

        expected = self.make(nbytes, stamp)
        if not isinstance(found, dict) or set(found) != set(expected):
            message = f"what arrived is no dict with the fields that were put: {type(found).__name__}"
            raise IntegrityError(message)
        for name, value in expected.items():
            arrived = found[name]
            if not isinstance(value, torch.Tensor):
                same = arrived == value
            else:
                same = (
                    isinstance(arrived, torch.Tensor)
                    and arrived.dtype == value.dtype
                    and arrived.shape == value.shape
                    and torch.equal(_bytes(arrived), _bytes(value))
                )
            if not same:
                message = f"{name} differs from what was put"
                raise IntegrityError(message)


def sizes_of(text: str, own: Sequence[HostPayload]) -> tuple[int, ...]:
    """Return the sizes of a list; where a host has payloads of its own, their names, or all for an empty list.

    Raises:
        ConfigError: A name or size is none.
    """
    if not own:
        sizes = parse_sizes(text or _SIZES)
        for nbytes in sizes:
            check_size(nbytes)
        return sizes
    known = {one.name: one.nbytes for one in own}
    wanted = [part.strip() for part in text.split(",") if part.strip()] or list(known)
    for name in wanted:
        if name not in known:
            message = f"sizes: {name!r} is no payload of this host; use some of {', '.join(known)}"
            raise ConfigError(message, field="sizes")
    return tuple(known[name] for name in wanted)


def smallest_of(own: Sequence[HostPayload]) -> int:
    """Return the size of the smallest payload there is."""
    return min((one.nbytes for one in own), default=SMALLEST)


def check_size(nbytes: int) -> None:
    """Refuse a size that no payload can have.

    Raises:
        ConfigError: It is too small, or no multiple of 16.
    """
    if nbytes < SMALLEST or nbytes % 16:
        message = f"sizes: {nbytes} bytes are no size of a payload; give a multiple of 16, at least {SMALLEST}"
        raise ConfigError(message, field="sizes")


def _laid_out(buffer: torch.Tensor, payload: HostPayload) -> dict[str, Any]:
    """Return a payload's tensors as views of a buffer, one behind the other."""
    import torch

    fields: dict[str, Any] = {}
    begin = 0
    for name, (dtype, shape) in payload.tensors.items():
        kind: torch.dtype = getattr(torch, dtype)
        end = begin + math.prod(shape) * kind.itemsize
        fields[name] = buffer[begin:end].view(kind).view(shape)
        begin = end
    return fields


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8)
