"""The demo's workers: ``moonrelay worker`` processes by stage, replaced when they die.

Owns their command lines, their names and how often one may die by itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Final

from moonrelay.cli.demo.board import Board
from moonrelay.cli.demo.children import Child, Children, Inbox, Message
from moonrelay.cli.demo.folders import OutputFolder
from moonrelay.cli.demo.settings import LEASE_S, STAGES, DemoSettings
from moonrelay.clock import Clock

logger = logging.getLogger(__name__)

#: How far the first job of a stage has come when its worker is killed.
HOLD_AT: Final = 0.5
#: Workers that may die unasked in one run; a further one ends it.
MAX_CRASHES: Final = 3


class WorkerPool:
    """Starts and replaces workers.

    Args:
        settings: The run's settings.
        folder: Where logs and results go.
        queue_url: Where jobs come from.
        store_url: The relay; ``None`` where none is used.
        model: Folder or hub id.
        board: Is told of workers' starts and ends.
        children: Ends what is started here.
        inbox: Where workers' messages go.
        clock: Time.

    Threads: one.
    """

    def __init__(
        self,
        settings: DemoSettings,
        folder: OutputFolder,
        *,
        queue_url: str,
        store_url: str | None,
        model: str,
        board: Board,
        children: Children,
        inbox: Inbox,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._queue_url = queue_url
        self._store_url = store_url
        self._model = model
        self._board = board
        self._children = children
        self._inbox = inbox
        self._clock = clock
        self._counts: dict[str, int] = dict.fromkeys(STAGES, 0)
        self._crashes = 0
        self.names: dict[str, str] = {}
        self.numerics: dict[str, Mapping[str, object]] = {}

    def start_all(self) -> None:
        """Start the workers that were asked for; those of the stage to be killed hold their first job."""
        for stage in STAGES:
            for _ in range(self._settings.workers(stage)):
                self.start(stage, hold=stage == self.held_stage)

    @property
    def held_stage(self) -> str:
        """The stage whose workers hold their first job, for a kill or to be overtaken; empty for none."""
        settings = self._settings
        return "denoise" if settings.preempt else settings.kill if settings.kill != "none" else ""

    def start(self, stage: str, *, hold: bool = False) -> str:
        """Start one worker of a stage; return its name."""
        self._counts[stage] += 1
        name = f"{stage}-{self._counts[stage]}"
        command = self._command(stage, name)
        if hold:
            command += ["--hold-at", str(HOLD_AT)]
        child = self._children.add(
            Child(name, command, self._inbox, self._folder.logs / f"{name}.log", clock=self._clock)
        )
        self._board.worker_started(name, stage, child.pid, child.started_s)
        return name

    def ready(self, message: Message) -> None:
        """Take note that a worker joined its pool."""
        self._board.worker_ready(message.child, message.at_s)
        self.names[str(message.fields.get("worker_id"))] = message.child
        numerics = message.fields.get("numerics")
        if isinstance(numerics, dict):
            self.numerics[message.child] = numerics

    def kill(self, name: str) -> str:
        """SIGKILL a worker, let the others of its stage go on, and start one in its place; return that one's name."""
        self._children[name].kill()
        self._board.worker_gone(name, "killed", self._clock.monotonic())
        stage = self._board.workers[name].stage
        self.go_on(stage)
        return self.start(stage)

    def go_on(self, stage: str) -> None:
        """Let the workers of a stage go on that hold their first job."""
        for row in self._board.workers.values():
            if row.stage == stage and row.phase not in ("killed", "lost"):
                self._children[row.name].tell("go on")

    def exited(self, message: Message) -> None:
        """Replace a worker that ended by itself.

        Raises:
            PeerLost: It never was ready, or too many have died.
        """
        child, row = self._children[message.child], self._board.workers[message.child]
        if child.killed:
            return
        now = message.at_s
        self._board.worker_gone(row.name, "lost", now)
        error = child.failure(message.fields.get("code"))
        self._crashes += 1
        if row.ready_s is None or self._crashes > MAX_CRASHES:
            raise error
        replacement = self.start(row.stage)
        self._board.note(now, f"{error.message}; {replacement} takes its place", grave=True)

    def _command(self, stage: str, name: str) -> list[str]:
        settings = self._settings
        options: dict[str, object] = {
            "model": self._model,
            "queue": self._queue_url,
            "transfer-mode": settings.transfer_mode,
            "engine": settings.engine,
            "store": self._store_url,
            "output": self._folder.work / "results",
            "device": settings.device,
            "dtype": settings.dtype,
            "threads": settings.threads,
            "worker-id": name,
            "claim-ttl-s": LEASE_S,
            "queue-lease-s": LEASE_S,
            "grace-s": 1.0,
            "drain-timeout-s": 2.0,
            "embedding-cache": settings.embedding_cache,
            "parent-fd": 0,
        }
        if stage == "denoise" and settings.checkpoint_every:
            options["checkpoint-every"] = settings.checkpoint_every
            if self._store_url is None:
                # Payloads need no relay then, and checkpoints do.
                options["store"] = f"local://{self._folder.work / 'store'}"
        given = [f"--{key}={value}" for key, value in options.items() if value is not None]
        if stage == "denoise" and settings.checkpoint_every:
            given.append("--tell-checkpoints")
        if stage == "denoise" and settings.preempt:
            given += ["--preempt", "--preempt-least-s=0"]
        return [sys.executable, "-m", "moonrelay.cli.main", "--log-level", "info", "worker", stage, *given]
