"""Processes that ask for one embedding at the same moment: forked from one that has everything imported.

Reads one JSON object with ``url``, ``count``, ``encode_s`` and ``shape`` as its argument; prints one JSON line for each
process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moonrelay.cache.embeddings import EmbeddingCache
from moonrelay.cache.keys import EmbeddingKey
from moonrelay.clock import SystemClock
from moonrelay.connector import DiffusionConnector

if TYPE_CHECKING:
    import torch


def bench_key(prompt: str) -> EmbeddingKey:
    """Return the key of one of the measurement's prompts."""
    params = {"dtype": "bfloat16", "max_length": 512, "lora": None}
    return EmbeddingKey(encoder="bench/t5@1", prompt=prompt, role="positive", params=params)


def embedding(shape: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return something of an embedding's form."""
    import torch

    return {"embeds": torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)}


def main() -> None:
    """Fork so many askers, let them begin together, and wait for their ends."""
    import torch  # before the fork, so that nobody imports it for himself

    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    gate, opened = os.pipe()
    pids = []
    for _ in range(settings["count"]):
        pid = os.fork()
        if pid == 0:
            os.close(opened)
            status = 1
            try:
                _ask(settings, gate)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    os.close(opened)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _ask(settings: dict[str, object], gate: int) -> None:
    import torch

    clock = SystemClock()
    shape = [int(str(size)) for size in settings["shape"]] if isinstance(settings["shape"], list) else [1]
    encode_s = float(str(settings["encode_s"]))

    def encode() -> object:
        threading.Event().wait(encode_s)
        return embedding(shape)

    with DiffusionConnector("encode", "store", store_config={"url": str(settings["url"])}) as conn:
        conn.store()
        os.read(gate, 1)  # its end: everybody is there
        began = clock.monotonic()
        with EmbeddingCache(conn, 1 << 28, wait_s=60.0) as cache:
            tree = cache.get_or_encode(bench_key("one prompt"), encode)
            seconds = clock.monotonic() - began
            counters = cache.counters()
    found = tree["embeds"] if isinstance(tree, dict) else torch.zeros(0)
    digest = hashlib.sha256(found.view(torch.uint8).numpy().tobytes()).hexdigest()
    answer = {"digest": digest, "seconds": seconds, "encodes": counters.encodes, "hits": counters.hits_store}
    os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
