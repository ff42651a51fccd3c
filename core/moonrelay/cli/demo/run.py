"""One run of the demo: start everything, watch until every request has its end and its comparison, end everything.

Owns the order of steps. What is shown, drawn and written is made from the board and the summary that it fills.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moonrelay.cli.demo.board import Board, Span, short_name
from moonrelay.cli.demo.children import EXITED, Child, Children, Inbox, Message
from moonrelay.cli.demo.pool import WorkerPool
from moonrelay.cli.demo.prompts import demo_prompts
from moonrelay.cli.demo.settings import LEASE_S, STAGES, DemoSettings
from moonrelay.cli.demo.submitting import Submitter
from moonrelay.cli.demo.summary import Kill, RequestReport, Summary, Yield, read_result
from moonrelay.cli.demo.undivided import Order
from moonrelay.cli.embeddings import cache_bytes
from moonrelay.cli.hold import HELD
from moonrelay.cli.worker import TOLD
from moonrelay.clock import Clock, Deadline, SystemClock
from moonrelay.errors import DeadlineExceeded, MoonrelayError, WireError, from_wire
from moonrelay.queueing.base import StageQueue
from moonrelay.queueing.task import Plain

if TYPE_CHECKING:
    from moonrelay.cache.embeddings import EmbeddingCache
    from moonrelay.cli.demo.display import Display
    from moonrelay.cli.demo.folders import OutputFolder
    from moonrelay.queueing.views import QueueEvent

logger = logging.getLogger(__name__)

YARDSTICK = "undivided"
_LOOK_S = 0.1


class DemoRun:
    """A run, from the first child to the last.

    Args:
        settings: What was asked for.
        folder: Where results go; open.
        display: What shows it; entered.
        clock: Time.

    Threads: one.
    """

    def __init__(
        self, settings: DemoSettings, folder: OutputFolder, display: Display, clock: Clock | None = None
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._display = display
        self._clock: Clock = clock or SystemClock()
        self._deadline = Deadline(settings.timeout_s, self._clock)
        self._inbox = Inbox()
        prompts = demo_prompts(settings.requests, settings.seed)
        self.board = Board(prompts, STAGES, self._clock.monotonic())
        self.summary = Summary(
            requests=[RequestReport(prompt=prompt) for prompt in prompts], settings=settings.as_dict()
        )
        self._reports = {report.prompt.request_id: report for report in self.summary.requests}
        self._since = 0
        self._fetched: set[str] = set()
        self._held: set[str] = set()
        self._payloads: dict[str, dict[str, Plain]] = {}
        self._ahead: dict[str, dict[str, Plain]] = {}
        self._model: str | None = None
        self._yardstick_ended = False
        self._headline_shown = ""

    def run(self) -> Summary:
        """Do it all. Blocks: a minute or two; ``timeout_s`` at most, and the seconds that ending takes.

        Returns:
            The summary; whether all is identical is in it.

        Raises:
            PluginError: Something that is needed is not installed.
            ConfigError: The model cannot do what was asked.
            PeerLost: A child died too early or too often.
            DeadlineExceeded: The run took too long.
        """
        with ExitStack() as stack:
            stack.callback(self._sweep)
            children = Children(self._clock)
            yardstick = self._start_yardstick(children)
            stack.callback(yardstick.close)
            store_url = self._start_store(stack)
            # Ended before the store, so that they can drain.
            stack.callback(children.close)
            model = self._wait_for_model()
            queue = stack.enter_context(self._open_queue())
            pool = WorkerPool(
                self._settings,
                self._folder,
                queue_url=queue.url,
                store_url=store_url,
                model=model,
                board=self.board,
                children=children,
                inbox=self._inbox,
                clock=self._clock,
            )
            self._show("loading the workers")
            pool.start_all()
            cache = self._open_cache(stack, store_url)
            last = self.board.prompts[-1].request_id if self._settings.preempt else None
            self._watch(queue, pool, Submitter(queue, STAGES, self._payloads, self._ahead, cache, last))
            self._show("ending the processes")
        self.summary.seconds = self._clock.monotonic() - self.board.started_s
        return self.summary

    # -- starting -------------------------------------------------------------------------------------------------

    def _start_yardstick(self, children: Children) -> Child:
        settings = self._settings
        built = "the model" if settings.model else "a tiny random Wan"
        self._show(f"preparing {built}" + (" and the store" if settings.starts_store else ""))
        order = Order(
            model=settings.model,
            build=str(self._folder.work / "model"),
            prompts=[(one.request_id, one.prompt, one.negative_prompt, one.seed) for one in self.board.prompts],
            steps=settings.steps,
            size=settings.size,
            frames=settings.frames,
            device=settings.device,
            dtype=settings.dtype,
            threads=settings.threads,
        )
        return children.add(
            Child(
                YARDSTICK,
                [sys.executable, "-m", "moonrelay.cli.demo.undivided"],
                self._inbox,
                self._folder.logs / f"{YARDSTICK}.log",
                first_line=msgspec.json.encode(order).decode(),
                clock=self._clock,
            )
        )

    def _start_store(self, stack: ExitStack) -> str:
        settings = self._settings
        # In p2p it is for the caches only.
        if settings.store == "local" or settings.transfer_mode == "p2p":
            return f"local://{self._folder.work / 'store'}"
        if settings.store is not None:
            return settings.store
        from moonrelay.relay.cluster import MooncakeCluster

        cluster = stack.enter_context(MooncakeCluster(self._folder.logs, clock=self._clock))
        now = self._clock.monotonic()
        pids = ", ".join(f"{name} pid {pid}" for name, pid in cluster.pids.items())
        self.board.note(now, f"Mooncake store is up: {pids}")
        return cluster.url

    def _wait_for_model(self) -> str:
        while self._model is None:
            self._check_time()
            self._show()
            message = self._inbox.get(_LOOK_S)
            if message is not None:
                self._from_yardstick(message)
        return self._model

    def _open_queue(self) -> StageQueue:
        return StageQueue.connect(
            f"sqlite:///{self._folder.work / 'queue.db'}",
            config={"lease_s": LEASE_S, "renew_s": LEASE_S / 4, "poll_s": _LOOK_S, "keep_ended": 1_000_000},
        )

    def _open_cache(self, stack: ExitStack, store_url: str) -> EmbeddingCache | None:
        """Open the cache that is asked whether embeddings are there; none where no two requests have the same texts."""
        bound = cache_bytes(self._settings.embedding_cache)
        texts = [(prompt.prompt, prompt.negative_prompt) for prompt in self.board.prompts]
        if bound is None or len(set(texts)) == len(texts):
            return None
        from moonrelay.cache.embeddings import EmbeddingCache
        from moonrelay.connector import DiffusionConnector

        conn = stack.enter_context(DiffusionConnector("demo", "store", store_config={"url": store_url}))
        return stack.enter_context(EmbeddingCache(conn, bound))

    # -- watching -------------------------------------------------------------------------------------------------

    def _watch(self, queue: StageQueue, pool: WorkerPool, submitter: Submitter) -> None:
        while not self._complete():
            self._check_time()
            submitter.submit_due(self.board)
            events = queue.events(self._since, timeout_s=_LOOK_S)
            # A worker says that it is ready before it takes a job, so its name is known before its first event.
            self._listen(pool)
            for event in events:
                self._since = event.number
                self.board.apply(event)
                if self._settings.preempt:
                    self._overtake(event, pool, submitter)
                else:
                    self._kill_if_held(event, pool)
                if event.kind in ("done", "failed", "dead", "cancelled"):
                    self._fetch(queue, event.request_id, pool)
            self._compare()
            self._show(self._headline())
        self.summary.numerics = self._check_numerics(pool)
        self.summary.deliveries = queue_counts(self.board.spans)

    def _listen(self, pool: WorkerPool) -> None:
        while (message := self._inbox.get(0)) is not None:
            self._from_child(message, pool)

    def _complete(self) -> bool:
        if not self.board.finished:
            return False
        failed = any(report.problem is not None for report in self.summary.requests)
        compared = all(report.undivided_digest is not None for report in self.summary.requests)
        return failed or compared or self._yardstick_ended

    def _headline(self) -> str:
        if any(row.ready_s is None and row.ended_s is None for row in self.board.workers.values()):
            return "loading the workers" if self.board.spans == [] else "working"
        return "waiting for the undivided pipeline" if self.board.finished else "working"

    def _kill_if_held(self, event: QueueEvent, pool: WorkerPool) -> None:
        if self.summary.killed is not None or event.kind != "progress" or event.note != HELD:
            return
        name = short_name(event.worker)
        pid = self.board.workers[name].pid
        replacement = pool.kill(name)
        now = self._clock.monotonic()
        self.summary.killed = Kill(
            stage=event.stage,
            worker=name,
            pid=pid,
            request_id=event.request_id,
            attempt=event.attempt,
            fraction=event.fraction,
            at_s=now - self.board.started_s,
            replacement=replacement,
        )
        self.board.note(
            now,
            f"kill -9 of {name} (pid {pid}) in the middle of {event.request_id} {event.stage}, "
            f"{self.summary.killed.where}; {replacement} takes its place",
            grave=True,
        )

    def _overtake(self, event: QueueEvent, pool: WorkerPool, submitter: Submitter) -> None:
        """Bring the interactive request once every denoise worker has a batch job, and take note of who makes way."""
        if event.kind == "progress" and event.note == HELD:
            self._held.add(event.worker)
            if len(self._held) == self._settings.denoise_workers:
                self.board.note(event.at_s, f"{submitter.interactive} comes, and is interactive")
                submitter.release()
        elif event.kind == "asked_to_yield":
            pool.go_on(pool.held_stage)
        elif event.kind == "preempted":
            self.summary.yields.append(
                Yield(
                    request_id=event.request_id,
                    made_way_for=submitter.interactive or "",
                    stage=event.stage,
                    worker=short_name(event.worker),
                    attempt=event.attempt,
                    at_s=event.at_s - self.board.started_s,
                    note=event.note,
                )
            )

    def _fetch(self, queue: StageQueue, request_id: str, pool: WorkerPool) -> None:
        report = self._reports[request_id]
        if request_id in self._fetched:
            return
        self._fetched.add(request_id)
        try:
            result = queue.result(request_id, timeout_s=5.0)
        except MoonrelayError as exc:
            report.problem = str(exc)
            return
        file = read_result(report, result, began_s=self.board.started_s, names=pool.names)
        if file is not None:
            report.file = self._folder.keep(file, request_id)
        killed = self.summary.killed
        if killed is not None and killed.request_id == request_id and killed.stage in report.stages:
            killed.attempt_after = report.stages[killed.stage].attempt

    def _from_child(self, message: Message, pool: WorkerPool) -> None:
        if message.child == YARDSTICK:
            self._from_yardstick(message)
        elif message.event == "ready":
            pool.ready(message)
        elif message.event in TOLD:
            self._checkpoint(message)
        elif message.event == EXITED:
            pool.exited(message)

    def _checkpoint(self, message: Message) -> None:
        fields = message.fields
        step, at_s = fields.get("step"), fields.get("at_s")
        self.summary.checkpoints += message.event == "checkpoint_saved"
        self.board.checkpoint(
            message.child,
            message.event,
            str(fields.get("request_id")),
            step if isinstance(step, int) else 0,
            at_s if isinstance(at_s, float) else message.at_s,
        )

    def _from_yardstick(self, message: Message) -> None:
        fields = message.fields
        if message.event == "model":
            self._model = str(fields["model"])
            self._payloads = _payloads(fields.get("requests"))
            self._ahead = _payloads(fields.get("ahead"))
            numerics = fields.get("numerics")
            self.summary.numerics = numerics if isinstance(numerics, dict) else {}
            self.board.note(message.at_s, f"the model is there: {self._model}, of family {fields['family']}")
        elif message.event == "undivided":
            self._measured(fields)
        elif message.event == "error":
            error = from_wire(str(fields["code"]), bool(fields["retryable"]), str(fields["message"]))
            error.context.clear()
            raise error
        elif message.event == EXITED:
            self._yardstick_ended = True
            if fields.get("code") != 0 or self._model is None:
                raise self._lost_yardstick(fields.get("code"))

    def _lost_yardstick(self, code: object) -> MoonrelayError:
        log = self._folder.logs / f"{YARDSTICK}.log"
        message = f"the undivided pipeline's process ended with code {code}; see {log}"
        return WireError(message)

    def _measured(self, fields: object) -> None:
        found = fields if isinstance(fields, dict) else {}
        name, began, ended = str(found["request_id"]), float(found["started_s"]), float(found["ended_s"])
        report = self._reports[name]
        report.undivided_digest = str(found["digest"])
        report.undivided_s = ended - began
        self.board.undivided_done += 1
        self.board.undivided_spans.append(
            Span(
                worker=YARDSTICK,
                stage=YARDSTICK,
                request_id=name,
                attempt=1,
                started_s=began,
                ended_s=ended,
                how="completed",
            )
        )

    def _compare(self) -> None:
        for name, report in self._reports.items():
            row = self.board.requests[name]
            if row.identical is None and report.digest is not None and report.undivided_digest is not None:
                row.identical = report.identical

    def _check_numerics(self, pool: WorkerPool) -> dict[str, str | int]:
        """Return what decides bits, and warn where a worker had it otherwise."""
        own = {str(key): value for key, value in self.summary.numerics.items() if isinstance(value, (str, int))}
        for name, theirs in pool.numerics.items():
            if dict(theirs) != own:
                self.board.note(
                    self._clock.monotonic(), f"{name} computes with {theirs}, the undivided with {own}", grave=True
                )
        return own

    def _check_time(self) -> None:
        if self._deadline.expired:
            open_ones = [name for name, row in self.board.requests.items() if row.state not in ("done", "failed")]
            what = f"{', '.join(open_ones)} not done" if open_ones else "the undivided pipeline is not done"
            message = f"given up after {self._settings.timeout_s:g} s: {what}; see {self._folder.logs}"
            raise DeadlineExceeded(message)

    def _show(self, headline: str | None = None) -> None:
        self._headline_shown = headline or self._headline_shown
        self._display.update(self.board, self._headline_shown)

    def _sweep(self) -> None:
        """Take away shared memory that a killed worker left."""
        if self._settings.engine == "shm":
            from moonrelay.transfer.shm import sweep_orphans

            sweep_orphans()


def queue_counts(spans: list[Span]) -> dict[str, int]:
    """Return how many deliveries ended how."""
    counts: dict[str, int] = {}
    for span in spans:
        counts[span.how or "open"] = counts.get(span.how or "open", 0) + 1
    return counts


def write_summary(summary: Summary, file: Path) -> str:
    """Write ``summary.json``; return its text."""
    text = json.dumps(summary.as_dict(), indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
    return text


def _payloads(requests: object) -> dict[str, dict[str, Plain]]:
    if not isinstance(requests, dict):
        message = "the undivided pipeline's process did not say which requests it took"
        raise WireError(message)
    return {str(name): dict(payload) for name, payload in requests.items() if isinstance(payload, dict)}
