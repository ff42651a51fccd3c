"""The embedding cache between real workers: requests past encode, and a store that is cleared on the way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonrelay import DiffusionConnector
from moonrelay.cache.embeddings import EmbeddingCache
from moonrelay.orchestrator import shortcut
from moonrelay.queueing import StageQueue, StageTask
from moonrelay_diffusers.embeddings import EncodeShortcut

pytestmark = [
    *(pytest.mark.model, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(400)),
    pytest.mark.usefixtures("same_bits"),
]

TIMEOUT_S = 120.0


class Deployment:
    """A queue, a store, and worker processes as they are asked for."""

    def __init__(self, model: str, root: Path) -> None:
        self.model = model
        self.root = root
        self.store = f"local://{root}/store"
        self.queue = StageQueue.connect(f"sqlite:///{root}/queue.db", config={"poll_s": 0.05})
        self.conn = DiffusionConnector("client", "store", store_config={"url": self.store})
        self.cache = EmbeddingCache(self.conn, 64 << 20)
        self.shortcut = EncodeShortcut(model)
        self.workers: dict[str, subprocess.Popen[str]] = {}

    def start(self, *stages: str) -> None:
        for stage in stages:
            self.workers[stage] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "moonrelay.cli.main", "worker", stage, "--engine=shm"),
                    *(f"--model={self.model}", f"--queue={self.queue.url}", f"--store={self.store}"),
                    *(f"--output={self.root}/out", "--format=npy", "--embedding-cache=64MiB", "--queue-lease-s=4"),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )

    def submit(self, request: Any, request_id: str) -> bool:
        first = StageTask(stage="encode", request_id=request_id, payload={"request": request.to_payload()})
        return shortcut.submit(self.queue, first, ahead=self.shortcut.task(request), cache=self.cache)

    def result(self, request_id: str) -> dict[str, Any]:
        result: Any = self.queue.result(request_id, timeout_s=TIMEOUT_S)
        return dict(result)

    def end(self, stage: str) -> dict[str, Any]:
        """End a worker in order; return its last line."""
        worker = self.workers.pop(stage)
        worker.terminate()
        out, _ = worker.communicate(timeout=TIMEOUT_S)
        last: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return last

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            worker.communicate()
        for part in (self.cache, self.conn, self.queue):
            part.close()


@pytest.fixture
def deployment(models: Any, tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(models.folder("wan2.1"), tmp_path)
    try:
        yield made
    finally:
        made.close()


def stages(result: dict[str, Any]) -> list[str]:
    return [entry["stage"] for entry in result["trace"]]


def test_requests_go_past_encode_and_back_when_the_store_was_cleared(deployment: Deployment, models: Any) -> None:
    request = models.request("wan2.1")
    deployment.start("encode", "denoise", "decode")
    assert not deployment.submit(request, "r1")
    first = deployment.result("r1")
    assert first["digest"] == models.digest("wan2.1")
    assert deployment.submit(request, "r2")
    second = deployment.result("r2")
    assert stages(second) == ["denoise", "decode"]
    assert second["digest"] == models.digest("wan2.1")

    # The denoise worker ends, and with it its memory; what the next one is sent to is cleared before it comes.
    assert deployment.end("denoise")["embedding_cache"]["hits_store"] == 2
    assert deployment.submit(request, "r3")
    cleared = [*(sys.executable, "-m", "moonrelay.cli.main", "cache", "clear"), f"--store={deployment.store}", "--json"]
    done = subprocess.run(cleared, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert json.loads(done.stdout)["removed"] == 2
    deployment.start("denoise")
    third = deployment.result("r3")
    assert stages(third) == ["encode", "denoise", "decode"]
    assert third["digest"] == models.digest("wan2.1")
    kinds = [event.kind for event in deployment.queue.events() if event.request_id == "r3"]
    assert kinds.count("rewound") == 1
    assert kinds[-1] == "done"
    # Encode's own memory still had them, and gave them back to the store.
    assert deployment.submit(request, "r4")
    assert stages(deployment.result("r4")) == ["denoise", "decode"]
    assert deployment.end("denoise")["rewound"] == 1
    # The encoder ran for the first request only.
    counters = deployment.end("encode")["embedding_cache"]
    assert (counters["encodes"], counters["hits_memory"]) == (2, 2)
