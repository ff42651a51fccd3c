"""A connector in a process of its own, told what to do by JSON lines on its standard input.

Run as ``python -m support.peer``. Each line is ``{"do": name, ...}``; the answer is one line, ``{"ok": value}`` or
``{"error": code, "retryable": bool, "message": text}``. Tensors are made from seeds, and come back as digests.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import xxhash

import moonrelay
from moonrelay import DiffusionConnector, MoonrelayError, StageHandle, StagePayload
from moonrelay.connector.runtime import MOVERS, RENEWERS, STAGERS

#: Threads of pools, which grow to a fixed size as they are first needed.
POOLED = ("moonrelay-mover", "moonrelay-stage", "moonrelay-renew")


def made(seed: int, shape: list[int], dtype: str) -> torch.Tensor:
    """Return the tensor that a seed stands for; the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.tensor(shape).prod()) * getattr(torch, dtype).itemsize
    return (
        torch.randint(0, 255, (count,), dtype=torch.uint8, generator=generator).view(getattr(torch, dtype)).view(shape)
    )


def digest_of(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bytes in C order, that shares nothing with the code under test."""
    return xxhash.xxh3_64(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def held() -> dict[str, int]:
    """Return what this process holds of things that must not pile up."""
    gc.collect()
    pooled = [thread for thread in threading.enumerate() if thread.name.startswith(POOLED)]
    assert len(pooled) <= MOVERS + STAGERS + RENEWERS, "the connector's own pools grew"
    return {
        "threads": threading.active_count() - len(pooled),
        "fds": len(os.listdir("/proc/self/fd")),
        "maps": sum("moonrelay" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }


class Peer:
    """The connector and what was made with it."""

    def __init__(self) -> None:
        self.connector: DiffusionConnector | None = None
        self.things: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []

    @property
    def conn(self) -> DiffusionConnector:
        assert self.connector is not None
        return self.connector

    def start(self, **settings: Any) -> None:
        self.connector = DiffusionConnector(**settings, observers=[lambda event: self.events.append(event.fields())])

    def publish(
        self,
        name: str,
        seed: int,
        shape: list[int],
        dtype: str = "uint8",
        registered: bool = False,
        follow: bool = False,
        lease: list[Any] | None = None,
        **payload: Any,
    ) -> dict[str, str]:
        tensor = made(seed, shape, dtype)
        if registered:
            own = self.conn.empty(shape, dtype=getattr(torch, dtype))
            own.copy_(tensor)
            tensor = own
        if lease is not None:
            payload["lease"] = getattr(moonrelay, lease[0])(*lease[1:])
        staged = StagePayload(request_id=name, kind="latent", tensor=tensor, **payload)
        if follow:
            publication = self.conn.open(staged)
            self.things[name] = publication
            handle = publication.handle
        else:
            handle = self.conn.publish(staged)
        return {"handle": base64.b64encode(handle.to_bytes()).decode(), "digest": digest_of(tensor)}

    def ready(self, name: str, chunk: int) -> None:
        self.things[name].ready(chunk)

    def abort(self, name: str, reason: str) -> None:
        self.things[name].abort(reason)

    def state(self, name: str) -> str:
        return str(self.things[name].state)

    def wait(self, name: str, state: str, timeout_s: float) -> str:
        return str(self.things[name].wait(state, timeout_s))

    def status(self, handle: str, timeout_s: float = 10.0) -> str:
        return str(self.conn.status(decode(handle), timeout_s=timeout_s).state)

    def claim(self, name: str, handle: str, timeout_s: float = 30.0) -> str:
        self.things[name] = self.conn.claim(decode(handle), timeout_s=timeout_s)
        return str(self.things[name].path)

    def read(self, name: str) -> dict[str, str]:
        data = self.things[name].read()
        return {"digest": digest_of(data), "path": self.things[name].path}

    def first_chunk(self, name: str) -> list[int]:
        self.things[f"{name}/chunks"] = self.things[name].chunks()
        return list(next(self.things[f"{name}/chunks"]).shape)

    def next_chunk(self, name: str) -> list[int]:
        return list(next(self.things[f"{name}/chunks"]).shape)

    def ack(self, name: str) -> None:
        self.things[name].ack()

    def nack(self, name: str) -> None:
        self.things[name].nack()

    def receive(self, handle: str, timeout_s: float = 30.0) -> dict[str, Any]:
        started = time.monotonic()
        data = self.conn.receive(decode(handle), timeout_s=timeout_s)
        assert isinstance(data, torch.Tensor)
        return {"digest": digest_of(data), "seconds": time.monotonic() - started}

    def release(self, handle: str) -> None:
        self.conn.release(decode(handle))

    def seen(self) -> list[dict[str, Any]]:
        return self.events

    def held(self) -> dict[str, int]:
        pool = self.conn._runtime._data
        found = held()
        found["slots"] = 0 if pool is None else pool.arena.live_slots
        return found

    def close(self) -> None:
        self.conn.close()

    def reset(self) -> None:
        """Close the connector and forget everything, so that the process can serve another test."""
        if self.connector is not None:
            self.connector.close()
        self.__init__()  # type: ignore[misc]
        gc.collect()


def decode(handle: str) -> StageHandle:
    return StageHandle.from_bytes(base64.b64decode(handle))


def main() -> None:
    """Answer until standard input ends."""
    peer = Peer()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        order = json.loads(line)
        act = getattr(peer, order.pop("do"))
        try:
            answer = {"ok": act(**order)}
        except MoonrelayError as exc:
            answer = {"error": exc.code, "retryable": exc.retryable, "message": str(exc)}
        except Exception as exc:
            answer = {"error": type(exc).__name__, "retryable": False, "message": str(exc)}
        print(json.dumps(answer), file=answers)
    if peer.connector is not None:
        peer.connector.close()


if __name__ == "__main__":
    main()
