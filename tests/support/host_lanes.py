"""A host that is none: lanes over files of the bench's folder, with one for each way in which a lane may fail."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from moonrelay.cli.bench.host_lanes import CONSUMER, PRODUCER, End, HostBench, Lane, Room

LANES = (
    Lane(name="theirs", says="files"),
    Lane(name="mended", says="files", fix="a fix"),
    Lane(name="other-bytes", says="files, one byte of them changed"),
    Lane(name="refuses", says="cannot be opened"),
    Lane(name="dies", says="takes its process with it"),
    Lane(name="ours", says="files", ours=True),
)


class FileBench(HostBench):
    host = "none 1.0"

    def lanes(self) -> tuple[Lane, ...]:
        return LANES

    @contextlib.contextmanager
    def shared(self, lanes: Sequence[str], largest: int, folder: Path) -> Iterator[Mapping[str, str]]:
        (folder / "started").write_text(f"{','.join(lanes)} {largest}")
        yield {"folder": str(folder)}
        (folder / "started").unlink()

    def open(self, lane: str, side: str, room: Room, *, fixed: bool) -> End:
        if lane == "refuses" or (lane == "mended" and not fixed):
            try:
                raise LookupError("the innermost\nreason")
            except LookupError as exc:
                message = "no such luck"
                raise RuntimeError(message) from exc
        return FileEnd(lane, side, Path(room.shared["folder"]))


class FileEnd(End):
    def __init__(self, lane: str, side: str, folder: Path) -> None:
        self._lane = lane
        self._side = side
        self._folder = folder

    def put(self, key: str, data: dict[str, Any]) -> bytes:
        assert self._side == PRODUCER
        if self._lane == "dies":
            os.write(2, b"the last words\n")
            os._exit(3)
        fields = {name: _encoded(value) for name, value in data.items()}
        (self._folder / key).write_bytes(msgspec.msgpack.encode(fields))
        return f"ticket of {key}".encode()

    def get(self, key: str, ticket: bytes) -> object:
        assert self._side == CONSUMER
        assert ticket == f"ticket of {key}".encode()
        fields = msgspec.msgpack.decode((self._folder / key).read_bytes())
        data = {name: _decoded(value) for name, value in fields.items()}
        if self._lane == "other-bytes":
            data["prompt_embeds"].view(torch.uint8).view(-1)[100] ^= 1
        return data

    def discard(self, key: str) -> None:
        (self._folder / key).unlink(missing_ok=True)

    def notes(self) -> Sequence[str]:
        return (f"a note of {self._lane}",)

    def close(self) -> None:
        (self._folder / f"closed-{self._lane}-{self._side}").touch()


def _encoded(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    raw = bytes(value.contiguous().view(-1).view(torch.uint8).tolist())
    return [str(value.dtype).removeprefix("torch."), list(value.shape), raw]


def _decoded(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    dtype, shape, raw = value
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).view(shape)
