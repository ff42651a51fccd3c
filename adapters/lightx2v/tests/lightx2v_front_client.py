"""A front in a thread of the test's process, over real sockets, and a client of it."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import uvicorn

from moonrelay.clock import SystemClock, unix_s
from moonrelay_lightx2v.front.front import Front
from moonrelay_lightx2v.front.routes import application
from moonrelay_lightx2v.front.settings import FrontConfig

ENDED = ("completed", "failed", "cancelled")
WAIT_S = 60.0


class FrontThread:
    """A front that serves on a free port of loopback.

    Args:
        config: Its settings; host and port are not used.
    """

    def __init__(self, config: FrontConfig) -> None:
        self.front: Front | None = None
        numbers = itertools.count(1)

        def make() -> Front:
            self.loop = asyncio.get_running_loop()
            self.front = Front(
                config,
                clock=SystemClock(),
                now=unix_s,
                draw_id=lambda: secrets.token_hex(10),
                draw_seed=lambda: 1000 + next(numbers),
            )
            return self.front

        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        settings = uvicorn.Config(
            application(make), loop="asyncio", http="h11", ws="none", log_config=None, timeout_graceful_shutdown=2
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="moonrelay-test-front", daemon=True
        )
        self._thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self.until(lambda: self.front is not None)

    def close(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the front did not end"
        self._socket.close()

    def post(self, prompt: Any, *, kind: str = "video", **fields: Any) -> httpx.Response:
        return self.http.post(f"/v1/tasks/{kind}/", json={"prompt": prompt, **fields})

    def status(self, task_id: str) -> dict[str, Any]:
        answer = self.http.get(f"/v1/tasks/{task_id}/status")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def ended(self, task_id: str) -> dict[str, Any]:
        """Wait for a request's end, and return its status."""
        last: dict[str, Any] = {}

        def over() -> bool:
            last.update(self.status(task_id))
            return last["status"] in ENDED

        self.until(over, lambda: last)
        return last

    def until(self, true: Callable[[], bool], told: Callable[[], object] = lambda: "") -> None:
        """Wait until something is so."""
        end_s = time.monotonic() + WAIT_S
        pause = threading.Event()
        while not true():
            assert time.monotonic() < end_s, told()
            pause.wait(0.02)
