"""One role of the double in a process of its own: `Role` starts it and talks to it, the program below is it.

Spoken are JSON lines. A role that is told to stop at a point says so there and goes no further, to be killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ANSWER_TIMEOUT_S = 60.0


class Role:
    """A process with one role; ``address`` is where its receivers find it.

    Args:
        role: ``encoder``, ``transformer`` or ``decode``.
        host: Folder with the double's packages.
        task: Of the host.
        stages: 2 where the transformer decodes itself.
        ranks: This process's rank, how many there are, and a file of theirs; for a role of several.
        section: More for ``disagg_config``.
    """

    def __init__(
        self,
        role: str,
        host: Path,
        *,
        task: str = "t2v",
        stages: int = 2,
        ranks: tuple[int, int, str] | None = None,
        **section: Any,
    ) -> None:
        given = {"role": role, "task": task, "stages": stages, "ranks": ranks, "section": section}
        folders = [str(Path(__file__).parent), str(host)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lightx2v_role", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # a line that waits in a buffer of ours would be seen by no select
            cwd=host,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "GLOO_SOCKET_IFNAME": "lo"},
        )
        self.pid = self._process.pid

    def ready(self) -> Role:
        """Wait until it has started; several start side by side."""
        self.address: list[Any] | None = self.answer()["address"]
        return self

    def tell(self, do: str, **given: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **given}).encode() + b"\n")

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        assert ready, "no answer in time"
        line = self._process.stdout.readline()
        assert line, f"the process has ended: {self._process.wait()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def do(self, do: str, **given: Any) -> dict[str, Any]:
        self.tell(do, **given)
        return self.answer()

    def post(self, task_id: str = "t", **request: Any) -> dict[str, Any]:
        return self.do("post", task_id=task_id, request=request)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(20)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def ended(self, timeout_s: float = 30.0) -> int:
        """Return the exit status."""
        return self._process.wait(timeout_s)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(20)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


# -- the process ------------------------------------------------------------------------------------------------------


def say(**said: Any) -> None:
    print(json.dumps(said), flush=True)


def stop_at(runner: Any, point: str) -> None:
    """Make a runner stop where it is about to compute, or where it has found its input and has not claimed it."""
    import lightx2v_double as double

    from moonrelay_lightx2v.mixin import end_of

    def stopped(*_: Any) -> None:
        say(stopped=point)
        threading.Event().wait()

    if point == "compute":
        part: Any = {"encoder": double.TextEncoder, "transformer": double.Dit, "decode": double.VaeDecoder}
        kind = part[runner.config["disagg_mode"]]
        setattr(kind, "decode" if kind is double.VaeDecoder else "infer", stopped)
        return
    end = end_of(runner)
    assert point == "found"
    assert end is not None
    caller: Any = end.link._caller
    find = caller.find

    def found(*args: Any, **more: Any) -> Any:
        handle = find(*args, **more)
        say(stopped=point)
        sys.stdin.readline()
        return handle

    caller.find = found


def held() -> dict[str, Any]:
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
    }


def main() -> None:
    import lightx2v_double as double

    from moonrelay_lightx2v.mixin import dispatching, end_of

    given = json.loads(sys.argv[1])
    if given["ranks"]:
        import torch.distributed

        rank, world, file = given["ranks"]
        torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    disagg = {
        "connector": "moonrelay",
        "engine": "shm",
        "staging_bytes": 1 << 20,
        "transfer_timeout_s": 30.0,
        "peer_timeout_s": 3.0,
        "retry_s": 0.2,
        "claim_ttl_s": 1.0,
        "renew_s": 0.2,
        "rendezvous_port": 0,
        **given["section"],
    }
    config = double.settings_of(given["role"], task=given["task"], stages=given["stages"], disagg=disagg)
    worker = double.Worker(double.runner_of(config, dispatching(double.native_mixin())))
    end = end_of(worker.runner)
    assert end is not None
    say(address=end.link.address)
    while line := sys.stdin.readline():
        told = json.loads(line)
        match told["do"]:
            case "post":
                answer = worker.process(told["task_id"], **told["request"])
                made = answer.pop("pipeline_return", None)
                if made is not None:
                    (tensor,) = made.values()
                    answer["digest"] = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
                    del tensor
                del made
                say(**answer)
            case "stop_at":
                stop_at(worker.runner, told["point"])
                say()
            case "held":
                say(**held())
            case "fail_at":
                worker.runner.fails_at = told["part"]
                say()
            case "release":
                worker.runner.release_disagg()
                say()
            case "in_use":
                deadline = time.monotonic() + told["within_s"]
                while any(end.link.in_use().values()) and time.monotonic() < deadline:
                    threading.Event().wait(0.02)
                say(**end.link.in_use())
            case "end":
                say()
                return


if __name__ == "__main__":
    main()
