"""A connector in a process of its own, told what to do by JSON lines: `StagePeer` here, `main` there.

Tensors never cross: both sides make them from a number, see `tree`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ANSWER_TIMEOUT_S = 120.0
#: The host is imported then: ten seconds of a core's own, and minutes on a busy machine.
START_TIMEOUT_S = 420.0


class PeerFailed(Exception):
    """What a peer's call raised: ``kind`` is the class's name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def tree(seed: int, count: int = 4096) -> dict[str, Any]:
    """Return a payload that follows from ``seed``."""
    maker = torch.Generator().manual_seed(seed)
    return {
        "prompt_embeds": torch.randn(count, generator=maker).to(torch.bfloat16),
        "mask": torch.randint(0, 2, (7, 3), generator=maker).bool(),
        "step": seed,
        "none": None,
    }


def digest(value: Any) -> str:
    """Return what tells two payloads apart."""
    seen = hashlib.blake2b(digest_size=16)

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            seen.update(f"{item.dtype}{tuple(item.shape)}".encode())
            seen.update(item.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            for key, part in item.items():
                seen.update(repr(key).encode())
                add(part)
        elif isinstance(item, (list, tuple)):
            seen.update(type(item).__name__.encode())
            for part in item:
                add(part)
        else:
            seen.update(repr(item).encode())

    add(value)
    return seen.hexdigest()


def settings_in(place: Path) -> dict[str, Any]:
    """Return what a deploy YAML would hold, with everything in one folder, and short times."""
    return {
        "engine": "shm",
        "engine_options": {"directory": str(place / "segments")},
        "store": f"local://{place / 'store'}",
        "pool_bytes": 64 << 20,
        "lease_ttl_s": 30.0,
        "retry_s": 0.2,
        "peer_timeout_s": 1.5,
        "renew_s": 0.3,
        "claim_ttl_s": 1.5,
        "drain_timeout_s": 2.0,
    }


def new_place() -> Path:
    """Make a folder in shared memory, where there is some, for stores and segments."""
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    folder = base / f"moonrelay-omni-test-{secrets.token_hex(6)}"
    (folder / "segments").mkdir(parents=True, mode=0o700)
    return folder


def store_keys(place: Path) -> list[str]:
    """Return what lies in a test's store, by the system's listing."""
    return sorted(path.name for path in (place / "store" / "objects").glob("*"))


class StagePeer:
    """One `main` process; a subclass names another script, whose ``main`` serves other orders."""

    script = __file__

    def __init__(self, extra: dict[str, Any], *, host: bool) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, self.script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self.send("make", extra=extra, host=host)
        self.answer(START_TIMEOUT_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, op: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise PeerFailed("Ended", f"no answer, exit code {self._process.poll()}")
        reply = json.loads(line)
        if "error" in reply:
            raise PeerFailed(*reply["error"])
        return reply["result"]

    def do(self, op: str, **arguments: Any) -> Any:
        self.send(op, **arguments)
        return self.answer()

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class Served:
    """The other end."""

    def __init__(self) -> None:
        self.connector: Any = None

    def make(self, extra: dict[str, Any], host: bool) -> None:
        if host:
            from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
            from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec
            from vllm_omni.plugins import load_omni_general_plugins

            load_omni_general_plugins()
            self.connector = OmniConnectorFactory.create_connector(ConnectorSpec("MoonrelayConnector", extra))
        else:
            from moonrelay_vllm_omni.connector import StageConnector

            self.connector = StageConnector(extra)

    def put(self, key: str, seed: int, count: int = 4096, edge: tuple[str, str] = ("0", "1")) -> str:
        data = tree(seed, count)
        taken, _, _ = self.connector.put(*edge, key, data)
        assert taken
        return digest(data)

    def get(self, key: str, timeout_s: float, edge: tuple[str, str] = ("0", "1")) -> str | None:
        try:
            found = self.connector.get_with_deadline(*edge, key, None, deadline=time.monotonic() + timeout_s)
        finally:
            self.connector.abandon_get(key)
        return None if found is None else digest(found[0])

    def health(self) -> dict[str, Any]:
        return dict(self.connector.health())

    def close(self) -> None:
        self.connector.close()


def main(served: Any) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        order = json.loads(line)
        try:
            reply = {"result": getattr(served, order.pop("op"))(**order)}
        except Exception as exc:
            reply = {"error": [type(exc).__name__, str(exc)]}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(Served())
