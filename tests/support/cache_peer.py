"""Processes that ask for one embedding: forked from one that has everything imported, so that dozens start in a moment.

Run as ``python -m support.cache_peer '<settings>'``. Every child prints one line of JSON when it has its result; the
parent holds no connector and starts no thread. Encoding writes the process's number into a file as it begins, so that a
test can count, kill and stop.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

import torch

from moonrelay import DiffusionConnector
from moonrelay.cache.embeddings import EmbeddingCache
from moonrelay.cache.keys import EmbeddingKey
from support.trees import canon

KEY = EmbeddingKey(
    encoder="umt5@1", prompt="a fox", role="negative", params={"dtype": "bf16", "max_length": 512, "lora": None}
)


def encode(settings: dict[str, Any]) -> object:
    """Give something that no other call gives. The first of all processes may take longer."""
    with open(settings["begun"], "ab", buffering=0) as begun:
        begun.write(f"{os.getpid()}\n".encode())
    with open(settings["begun"], "rb") as begun:
        first = int(begun.readline()) == os.getpid()
    threading.Event().wait(settings["first_s"] if first else settings["encode_s"])
    random = torch.Generator().manual_seed(os.getpid() * 1000 + time.monotonic_ns() % 1000)
    return {"embeds": torch.randn(1, 512, 64, generator=random).to(torch.bfloat16), "mask": [None, torch.tensor(7)]}


def child(settings: dict[str, Any], gate: int) -> None:
    torch.set_num_threads(1)
    conn = DiffusionConnector("encode", "p2p", {"engine": "memory"}, settings["store"])
    cache = EmbeddingCache(
        conn, 64 << 20, store_bytes=16 << 20, wait_s=settings["wait_s"], dead_after_s=settings["dead_after_s"]
    )
    conn.store()
    os.read(gate, 1)  # until the parent lets go
    started = time.monotonic()
    tree = cache.get_or_encode(KEY, lambda: encode(settings))
    seconds = time.monotonic() - started
    again = cache.get_or_encode(KEY, lambda: encode(settings))
    answer = {
        "pid": os.getpid(),
        "digest": hashlib.sha256(repr(canon(tree)).encode()).hexdigest(),
        "again": canon(again) == canon(tree),
        "seconds": seconds,
        "counters": asdict(cache.counters()),
    }
    cache.close()
    conn.close()
    os.write(1, json.dumps(answer).encode() + b"\n")


def main() -> None:
    settings = json.loads(sys.argv[1])
    gate, opened = os.pipe()
    pids = []
    for _ in range(settings["count"]):
        pid = os.fork()
        if pid == 0:
            os.close(opened)
            status = 1
            try:
                child(settings, gate)
                status = 0
            except BaseException as exc:
                os.write(1, json.dumps({"error": f"{type(exc).__name__}: {exc}"}).encode() + b"\n")
            finally:
                os._exit(status)
        pids.append(pid)
    os.close(opened)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
