"""A small double of the host's server for one role, and processes of it; run as a command it serves on loopback.

It has the host's routes, words and queue (one task at a time, in order), and does with a task what its prompt says:
``encoder: work=0.2; decoder: fail=out of memory``. Words: ``work=S`` seconds, ``fail=TEXT``, ``refuse=STATUS``,
``hang`` until cancelled (``hang=first``: only where it is begun for the first time), ``late=S`` seconds before its POST
is answered, ``size=N`` bytes of the result, ``unmeasured``: the result does not say its length, ``broken``: its answer
ends in its midst.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any


def result_of(fields: dict[str, Any], size: int) -> bytes:
    """Return what the last stage makes of a request: its own for each prompt and seed."""
    return hashlib.shake_128(f"{fields['prompt']}|{fields['seed']}".encode()).digest(size)


def plan_of(stage: str, prompt: str) -> dict[str, str]:
    """Return the words of a prompt for a stage."""
    for part in prompt.split(";"):
        name, colon, words = part.partition(":")
        if colon and name.strip() == stage:
            return {word.partition("=")[0].strip(): word.partition("=")[2] for word in words.split(",")}
    return {}


def _hangs(plan: dict[str, str], task_id: str) -> bool:
    return "hang" in plan and (plan["hang"] != "first" or not task_id.rpartition(".")[2].isdecimal())


class Role:
    """One role's tasks."""

    def __init__(self, stage: str, queue_size: int) -> None:
        self.stage = stage
        self.queue_size = queue_size
        self.tasks: dict[str, dict[str, Any]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.looks = 0
        self.work: asyncio.Queue[str] = asyncio.Queue()

    def active(self) -> int:
        return sum(task["status"] in ("pending", "processing") for task in self.tasks.values())

    async def run(self) -> None:
        while True:
            task_id = await self.work.get()
            task = self.tasks.get(task_id)
            if task is None or task["status"] != "pending":
                continue
            task["status"] = "processing"
            plan = plan_of(self.stage, task["fields"]["prompt"])
            with contextlib.suppress(TimeoutError):
                seconds = 600.0 if _hangs(plan, task_id) else float(plan.get("work", "0.01"))
                await asyncio.wait_for(task["stop"].wait(), seconds)
            if task["stop"].is_set():
                # As the host does: what was cancelled at work is failed in the end.
                task["status"], task["error"] = "failed", "Task cancelled during processing"
            elif "fail" in plan:
                task["status"], task["error"], task["error_type"] = "failed", plan["fail"], "RuntimeError"
            else:
                task["status"] = "completed"
                task["save_result_path"] = task["save_result_path"] + ".mp4"


def application(role: Role) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        running = asyncio.create_task(role.run())
        yield
        running.cancel()

    async def create(request: Request) -> Response:
        fields = await request.json()
        plan = plan_of(role.stage, str(fields.get("prompt", "")))
        await asyncio.sleep(float(plan.get("late", "0")))
        if "refuse" in plan:
            return JSONResponse({"detail": f"refused by {role.stage}"}, int(plan["refuse"]))
        if not isinstance(fields.get("prompt", ""), str):
            detail = [{"loc": ["body", "prompt"], "msg": "Input should be a valid string"}]
            return JSONResponse({"detail": detail}, 422)
        task_id = fields["task_id"]
        if task_id in role.tasks:
            return JSONResponse({"detail": f"Task ID {task_id} already exists"}, 503)
        if role.active() >= role.queue_size:
            return JSONResponse({"detail": f"Task queue is full (max {role.queue_size} tasks)"}, 503)
        path = fields.get("save_result_path") or task_id
        role.bodies.append({**fields, "route": request.url.path})
        role.tasks[task_id] = {
            "fields": {"prompt": "", **fields},
            "status": "pending",
            "error": None,
            "error_type": "",
            "save_result_path": path,
            "stop": asyncio.Event(),
        }
        role.work.put_nowait(task_id)
        return JSONResponse({"task_id": task_id, "task_status": "pending", "save_result_path": path})

    async def status(request: Request) -> Response:
        role.looks += 1
        task = role.tasks.get(request.path_params["task_id"])
        if task is None:
            return JSONResponse({"detail": "Task not found"}, 404)
        told = {key: task[key] for key in ("status", "error", "error_type", "save_result_path")}
        times = {"start_time": "2026-01-01T00:00:00", "end_time": None}
        return JSONResponse({"task_id": request.path_params["task_id"], **times, **told})

    async def result(request: Request) -> Response:
        task = role.tasks.get(request.path_params["task_id"])
        if task is None or task["status"] != "completed":
            return JSONResponse({"detail": "Task not completed" if task else "Task not found"}, 404)
        plan = plan_of(role.stage, task["fields"]["prompt"])
        size = int(plan.get("size", "1000"))
        data = result_of(task["fields"], size)

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, size // 2 if "broken" in plan else size, 1 << 20):
                yield data[at : at + (1 << 20)]
            if "broken" in plan:
                os.kill(os.getpid(), signal.SIGKILL)

        headers = {
            "Content-Disposition": f'attachment; filename="{task["save_result_path"]}"',
            "Content-Length": str(size),
        }
        if "unmeasured" in plan:
            del headers["Content-Length"]
        return StreamingResponse(pieces(), media_type="video/mp4", headers=headers)

    async def cancel(request: Request) -> Response:
        task_id = request.path_params["task_id"]
        task = role.tasks.get(task_id)
        if task is None or task["status"] in ("completed", "failed"):
            reason = "Task not found or already completed."
            return JSONResponse({"stop_status": "do_nothing", "reason": reason})
        role.cancelled.append(task_id)
        task["stop"].set()
        task["status"], task["error"] = "cancelled", "Task cancelled by user"
        return JSONResponse({"stop_status": "success", "reason": "Task stopped successfully."})

    async def health(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def seen(_request: Request) -> Response:
        """For tests alone: what this role has seen."""
        states = {task_id: task["status"] for task_id, task in role.tasks.items()}
        told = {"bodies": role.bodies, "cancelled": role.cancelled, "tasks": states, "looks": role.looks}
        return JSONResponse(told)

    async def forget(_request: Request) -> Response:
        """For tests alone: be as after a new start."""
        for task in role.tasks.values():
            task["stop"].set()
        role.tasks.clear()
        return JSONResponse({})

    return Starlette(
        routes=[
            Route("/v1/tasks/video/", create, methods=["POST"]),
            Route("/v1/tasks/image/", create, methods=["POST"]),
            Route("/v1/tasks/", create, methods=["POST"]),
            Route("/v1/tasks/{task_id}/status", status),
            Route("/v1/tasks/{task_id}/result", result),
            Route("/v1/tasks/{task_id}", cancel, methods=["DELETE"]),
            Route("/health", health),
            Route("/test/seen", seen),
            Route("/test/forget", forget, methods=["POST"]),
        ],
        lifespan=lifespan,
    )


class RoleProcess:
    """A role's server in a process of its own."""

    def __init__(self, stage: str, *, port: int = 0, queue_size: int = 100) -> None:
        self.stage = stage
        self.queue_size = queue_size
        command = [sys.executable, __file__, "--stage", stage, "--port", str(port), "--queue-size", str(queue_size)]
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, text=True
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], 60)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.kill()
            message = f"the {stage} did not start"
            raise RuntimeError(message)
        self.port = int(line)
        self.url = f"http://127.0.0.1:{self.port}"

    def seen(self) -> dict[str, Any]:
        import httpx

        answer = httpx.get(f"{self.url}/test/seen", timeout=30, trust_env=False)
        return dict(answer.json())

    def forget(self) -> None:
        import httpx

        httpx.post(f"{self.url}/test/forget", timeout=30, trust_env=False).raise_for_status()

    def kill(self) -> None:
        """End it at once, as ``kill -9`` does. Idempotent."""
        self._process.kill()
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def stop(self) -> None:
        """Have it hang: connections are taken, and nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def again(self) -> RoleProcess:
        """Start a new one at the address of this one, which must have ended."""
        return RoleProcess(self.stage, port=self.port, queue_size=self.queue_size)


def free_port() -> int:
    """Return a port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--queue-size", type=int, default=100)
    given = parser.parse_args()
    listening = socket.create_server(("127.0.0.1", given.port), backlog=1024)
    sys.stdout.write(f"{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    app = application(Role(given.stage, given.queue_size))
    config = uvicorn.Config(app, log_level="warning", access_log=False, loop="asyncio", http="h11", ws="none")
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
