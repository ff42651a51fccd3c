"""HeadScheduler: which instance works on which request, and what becomes of it when that instance fails.

Owns the head's decisions and nothing else: no socket, no thread, no host object; time is passed in as a clock. The
work waits in a `moonrelay.queueing` queue inside the process, where each instance is a worker: priorities, credits,
affinity, attempts and fencing tokens are the queue's. Here is what the queue cannot know: epochs of instances, inputs
and who holds them, signs of life, and the order in which instances are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from moonrelay.clock import Clock, SystemClock
from moonrelay.errors import Cancelled, ConfigError, DeadlineExceeded, LeaseLost, MoonrelayError, PeerLost, WireError
from moonrelay.queueing import Pipeline, StageQueue, StageSpec, StageTask
from moonrelay.queueing.job import Job
from moonrelay.queueing.task import Priority
from moonrelay_sglang.actions import Action, Dispatch, Failed, Limits, Release, StageInput
from moonrelay_sglang.config import OUR_POLICIES, STOCK_POLICIES
from moonrelay_sglang.records import Instance, Request, Running

#: Names of the dispatch policies: the host's two, and ours, each of which adds to the one before.
POLICIES: Final = (*STOCK_POLICIES, *OUR_POLICIES)
#: How often in a row an instance must not name a job before it counts as lost on its way there.
_UNHELD_BEATS: Final = 2
#: How long a result may be on its way after its instance has said that it sent it, in seconds: frames are large.
_RESULT_S: Final = 120.0
#: Bounds of the queue. Ended requests are forgotten here as soon as their end is seen, and all may end at once.
_KEEP_EVENTS: Final = 2_000
_MAX_DEPTH: Final = 10_000
_KEEP_ENDED: Final = _MAX_DEPTH

#: Raised by a job whose claim is over: what came belongs to an earlier delivery.
_OVER: Final = (LeaseLost, Cancelled, DeadlineExceeded)
#: How the queue ends a request by itself.
_ENDS: Final = frozenset({"failed", "dead"})


class HeadScheduler:
    """Decides for the head of a disaggregated deployment.

    A request passes the stages in order. Each delivery of it has a number of its own, and what comes back under an
    older number changes nothing. Callers carry out the actions that the methods return, in their order.

    Args:
        pools: The stages in order, each with its instances' work endpoints.
        policy: One of `POLICIES`. ``round_robin`` and ``max_free_slots`` are the host's orders of asking. ``credits``
            asks the least busy instance, and begins work only while the next stage has room for its result;
            ``priority`` also heeds a request's class, and ``affinity`` also its labels.
        limits: Bounds.
        clock: Monotonic time.

    Raises:
        ConfigError: An unknown policy, or a stage without an endpoint.

    Threads: one; nothing here locks.
    """

    def __init__(
        self,
        pools: Mapping[str, Sequence[str]],
        *,
        policy: str = "round_robin",
        limits: Limits | None = None,
        clock: Clock | None = None,
    ) -> None:
        if policy not in POLICIES:
            message = f"policy={policy!r} is not known; use one of {', '.join(POLICIES)}"
            raise ConfigError(message, field="policy")
        for stage, endpoints in pools.items():
            if not endpoints:
                message = f"stage {stage!r} has no instance; give it an endpoint"
                raise ConfigError(message, field=stage)
        self.stages: tuple[str, ...] = tuple(pools)
        self.policy = policy
        self._limits = limits or Limits()
        self._clock = clock or SystemClock()
        self._started_at_s = self._clock.monotonic()
        self._instances = {
            stage: [Instance(stage=stage, index=number, endpoint=endpoint) for number, endpoint in enumerate(endpoints)]
            for stage, endpoints in pools.items()
        }
        self._credits = POLICIES.index(policy) >= POLICIES.index("credits")
        self._queue = StageQueue.connect(
            "memory://",
            clock=self._clock,
            pipeline=self._pipeline(),
            config={
                # Life is judged here, by signs of life; the queue's own lease only backs it up.
                "lease_s": 4 * self._limits.dead_after_s,
                "renew_s": self._limits.dead_after_s,
                "max_attempts": self._limits.attempts,
                "max_depth": _MAX_DEPTH,
                "affinity_wait_s": self._limits.affinity_wait_s,
                "keep_ended": _KEEP_ENDED,
                "keep_events": _KEEP_EVENTS,
            },
        )
        self._requests: dict[str, Request] = {}
        self._running: dict[str, Running] = {}
        self._next = dict.fromkeys(pools, 0)
        self._last_event = 0
        self._looked_at_s = self._started_at_s
        self._served = 0
        self._failed = 0

    # -- instances --------------------------------------------------------------------------------------------------

    def register(
        self,
        stage: str,
        index: int,
        *,
        epoch: str,
        slots: int,
        buffers: int | None = None,
        labels: Mapping[str, str] | None = None,
        name: str = "",
    ) -> bool:
        """Take an instance into its stage's pool, or note that it is still there.

        Another epoch than before is another process: what the earlier one had is delivered again. That one does not
        come back while its follower lives: its last words may arrive late, and two processes may claim one endpoint.

        Args:
            stage: Its stage.
            index: Its place among the stage's endpoints.
            epoch: A name of this process, unlike that of any other.
            slots: Requests that it takes at a time.
            buffers: Results that may wait for it; ``None`` is four for each slot.
            labels: What a request's affinity is compared with.
            name: For displays.

        Returns:
            Whether it is in the pool; not where another process has followed it, and lives.

        Raises:
            ConfigError: The stage or the place is not of this deployment, or a number is wrong.
        """
        instance = self._instance(stage, index)
        if instance.epoch == epoch and instance.worker is not None:
            instance.heard_at_s = self._clock.monotonic()
            return True
        if instance.worker is not None and epoch in instance.past and self._lives(instance):
            return False
        if instance.worker is not None:
            self._lay_off(instance, f"{instance} was started anew")
        if instance.epoch and instance.epoch != epoch:
            instance.past.append(instance.epoch)
        worker = self._queue.register_worker(
            stage, slots=slots, buffers=buffers, affinity=labels, worker_id=f"{stage}[{index}]", heartbeat=False
        )
        instance.worker = worker
        instance.epoch, instance.slots = epoch, slots
        instance.labels, instance.name = dict(labels or {}), name
        instance.heard_at_s = self._clock.monotonic()
        return True

    def beat(
        self,
        stage: str,
        index: int,
        *,
        epoch: str,
        holding: Iterable[tuple[str, int]],
        offered: Iterable[tuple[str, int]] = (),
    ) -> list[Action]:
        """Note a sign of life.

        Args:
            stage: The instance's stage.
            index: Its place.
            epoch: Its process; one that is not registered is ignored, `register` comes first.
            holding: What it has taken and not ended: pairs of request and attempt.
            offered: What it has made and still keeps, likewise.

        Returns:
            Releases of what it holds in vain: it was not there to be told, or another head was.
        """
        instance = self._instance(stage, index)
        if instance.worker is None or instance.epoch != epoch:
            return []
        instance.heard_at_s = self._clock.monotonic()
        instance.worker.renew()
        held = set(holding)
        for running in [run for run in self._running.values() if run.instance is instance]:
            if (running.job.request_id, running.attempt) in held:
                running.unheld = 0
                continue
            if running.sent_at_s is not None:
                if self._clock.monotonic() - running.sent_at_s > _RESULT_S:
                    self._give_up(running, PeerLost(f"the result that {instance} sent never came"))
                continue
            # A word of its end may be on its way by another road; a second beat without it settles that.
            running.unheld += 1
            if running.unheld > _UNHELD_BEATS and self._age_s(running) > self._limits.dead_after_s:
                self._give_up(running, PeerLost(f"the work never came to {instance}"))
        return [
            Release(stage=stage, index=index, request_id=request_id, attempt=attempt)
            for request_id, attempt in sorted({*held, *offered})
            if not self._is_running(request_id, attempt)
            and ((request_id, attempt) in held or not self._is_made(instance, request_id, attempt))
        ]

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self, request_id: str, *, priority: Priority | None = None, affinity: Mapping[str, str] | None = None
    ) -> None:
        """Queue a request at the first stage.

        Args:
            request_id: The request.
            priority: Its class, heeded by the policies ``priority`` and ``affinity``.
            affinity: Labels of the instances that should rather have it, heeded by ``affinity``.

        Raises:
            ConfigError: The id is taken, or a field is wrong.
            QueueFull: Too many requests are under way.
        """
        level = POLICIES.index(self.policy)
        self._queue.submit(
            StageTask(
                stage=self.stages[0],
                request_id=request_id,
                deadline_s=self._limits.request_s,
                priority=priority if level >= POLICIES.index("priority") else None,
                affinity=affinity if level >= POLICIES.index("affinity") else None,
            )
        )
        self._requests[request_id] = Request()

    def staged(
        self,
        stage: str,
        index: int,
        request_id: str,
        attempt: int,
        given: StageInput,
        *,
        next_stage: str | None = None,
    ) -> list[Action]:
        """Note that a stage has made the next one's input.

        Args:
            stage: The stage that made it.
            index: Which instance of it.
            request_id: The request.
            attempt: The delivery that it was made under.
            given: What it made.
            next_stage: Who takes it; the stage after this one by default.

        Returns:
            A release of it, where the delivery is over.

        Raises:
            WireError: No stage follows that one, or not the one that is named; nothing changes.
        """
        below = self.stages[self.stages.index(stage) + 1 :]
        follows = next_stage or (below[0] if below else "")
        if follows not in below:
            message = f"{stage} says that it made input for {follows or 'a stage'}, which does not follow it"
            raise WireError(message, field="stage", request_id=request_id)
        made = Release(stage=stage, index=index, request_id=request_id, attempt=attempt)
        running, request = self._running.get(request_id), self._requests.get(request_id)
        if request is None or running is None or running.attempt != attempt or running.job.stage != stage:
            return [made]
        request.inputs[follows] = given
        request.made.append(made)
        del self._running[request_id]
        try:
            affinity = running.job.task.affinity
            running.job.complete(next_task=StageTask(stage=follows, affinity=affinity))
        except _OVER:
            return []  # the request's end, which `poll` finds, releases it
        return []

    def failed(self, request_id: str, attempt: int, error: MoonrelayError, *, lost_input: bool = False) -> list[Action]:
        """Note that a delivery failed.

        Args:
            request_id: The request.
            attempt: The delivery; an earlier one's failure changes nothing.
            error: Why. A retryable one is delivered again, within the bound on attempts.
            lost_input: The input cannot be had any more: the request goes back to the stage that made it.
        """
        running = self._running.get(request_id)
        if running is None or running.attempt != attempt:
            return []
        del self._running[request_id]
        try:
            if lost_input:
                running.job.lost_input(error)
            else:
                running.job.fail(error)
        except _OVER:
            pass  # ended meanwhile
        # It may still hold what it read.
        return [self._release_of(running)]

    def sent(self, request_id: str, attempt: int) -> None:
        """Note that an instance has sent a request's result, which may take longer than its signs of life."""
        running = self._running.get(request_id)
        if running is not None and running.attempt == attempt:
            running.sent_at_s = self._clock.monotonic()

    def index_of(self, stage: str, epoch: str) -> int | None:
        """Return the place of a process among its stage's endpoints; ``None`` once another one answers there."""
        return next((one.index for one in self._instances[stage] if one.epoch == epoch), None)

    def lives(self, stage: str, index: int, epoch: str) -> bool:
        """Return whether this process answers at a stage's endpoint, and has given a sign of life in time."""
        instance = self._instances[stage][index]
        return instance.epoch == epoch and self._lives(instance)

    def attempt_of(self, request_id: str, stage: str) -> int | None:
        """Return the delivery under way at a stage, for reports that come without its number; ``None`` if none is."""
        running = self._running.get(request_id)
        return running.attempt if running is not None and running.job.stage == stage else None

    def finished(self, request_id: str) -> list[Action]:
        """Note that a request's result has come, under whichever attempt: all of them make the same bytes.

        Returns:
            Releases of what its stages still hold. Empty where the request had ended before.
        """
        request = self._requests.get(request_id)
        if request is None:
            return []
        running = self._running.pop(request_id, None)
        try:
            if running is not None:
                running.job.complete()
        except _OVER:
            pass
        # The result of an attempt that was given up: the request waits for another one, in vain now.
        self._queue.cancel(request_id)
        self._served += 1
        return self._forget(request_id, running)

    def cancel(self, request_id: str) -> list[Action]:
        """End a request whose client has gone; a running stage's result will be dropped."""
        if request_id not in self._requests:
            return []
        running = self._running.pop(request_id, None)
        self._queue.cancel(request_id)
        return self._forget(request_id, running)

    # -- time -------------------------------------------------------------------------------------------------------

    def poll(self) -> list[Action]:
        """Do what is due: bury dead instances, end what is overdue, hand out what waits."""
        for instance in self._all():
            if instance.worker is not None and not self._lives(instance):
                instance.deaths += 1
                silent_s = self._clock.monotonic() - (instance.heard_at_s or self._started_at_s)
                self._lay_off(instance, f"{instance} gave no sign of life for {silent_s:.1f} s")
        actions = self._overdue()
        actions += self._ended()
        for stage in reversed(self.stages):
            actions += self._hand_out(stage)
        return actions

    # -- displays ---------------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Return what keeps requests from being served, a line for each stage without a living instance.

        A deployment that has just begun has ``dead_after_s`` to bring its instances up.
        """
        if self._clock.monotonic() - self._started_at_s < self._limits.dead_after_s:
            return []
        return [
            f"no {stage} is alive; tried {', '.join(one.endpoint for one in instances)}"
            for stage, instances in self._instances.items()
            if not any(self._lives(one) for one in instances)
        ]

    def snapshot(self) -> dict[str, Any]:
        """Return the state as plain values, for ``/stats``."""
        stats = self._queue.stats()
        now_s = self._clock.monotonic()
        return {
            "policy": self.policy,
            "active": stats.active,
            "served": self._served,
            "failed": self._failed,
            "problems": self.problems(),
            "stages": {
                stage: {
                    "queued": load.queued,
                    "queued_by_priority": dict(load.queued_by_priority),
                    "running": load.running,
                    "slots": load.slots,
                    "credits_free": load.credits_free if self._credits else None,
                    "waits_for_credit": load.no_credit,
                    "instances": [
                        {
                            "endpoint": one.endpoint,
                            "name": one.name,
                            "alive": self._lives(one),
                            "epoch": one.epoch,
                            "slots": one.slots,
                            "running": self._busy(one),
                            "heard_s_ago": None if one.heard_at_s is None else round(now_s - one.heard_at_s, 3),
                            "deaths": one.deaths,
                            "labels": dict(one.labels),
                        }
                        for one in self._instances[stage]
                    ],
                }
                for stage, load in stats.stages.items()
            },
        }

    def close(self) -> None:
        """End the queue. Idempotent."""
        self._queue.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _pipeline(self) -> Pipeline:
        following = [*self.stages[1:], None]
        return Pipeline(
            [
                StageSpec(name=stage, kind="admission" if self._credits and below else "work", downstream=below)
                for stage, below in zip(self.stages, following, strict=True)
            ]
        )

    def _instance(self, stage: str, index: int) -> Instance:
        instances = self._instances.get(stage, [])
        if not 0 <= index < len(instances):
            message = f"{stage}[{index}] is not of this deployment; it has {', '.join(self.stages)}"
            raise ConfigError(message, field="stage")
        return instances[index]

    def _all(self) -> Iterator[Instance]:
        for instances in self._instances.values():
            yield from instances

    def _lives(self, instance: Instance) -> bool:
        heard_at_s = instance.heard_at_s
        return (
            instance.worker is not None
            and heard_at_s is not None
            and self._clock.monotonic() - heard_at_s < self._limits.dead_after_s
        )

    def _busy(self, instance: Instance) -> int:
        return sum(1 for running in self._running.values() if running.instance is instance)

    def _age_s(self, running: Running) -> float:
        return self._clock.monotonic() - running.given_at_s

    def _is_running(self, request_id: str, attempt: int) -> bool:
        running = self._running.get(request_id)
        return running is not None and running.attempt == attempt

    def _is_made(self, instance: Instance, request_id: str, attempt: int) -> bool:
        request = self._requests.get(request_id)
        return request is not None and any(
            (one.stage, one.index, one.attempt) == (instance.stage, instance.index, attempt) for one in request.made
        )

    @staticmethod
    def _release_of(running: Running) -> Release:
        return Release(
            stage=running.instance.stage,
            index=running.instance.index,
            request_id=running.job.request_id,
            attempt=running.attempt,
        )

    def _lay_off(self, instance: Instance, why: str) -> None:
        """Take an instance out of its pool, and its work from it."""
        worker, instance.worker = instance.worker, None
        for running in [run for run in self._running.values() if run.instance is instance]:
            self._give_up(running, PeerLost(why))
        if worker is not None:
            worker.close()

    def _give_up(self, running: Running, error: MoonrelayError) -> None:
        """Deliver again what an instance will not finish."""
        self._running.pop(running.job.request_id, None)
        # Whatever it makes of it after all is to be dropped there, when the request ends at the latest.
        request = self._requests.get(running.job.request_id)
        if request is not None:
            request.made.append(self._release_of(running))
        try:
            running.job.fail(error, retryable=True)
        except _OVER:
            pass  # ended meanwhile; `poll` finds out

    def _overdue(self) -> list[Action]:
        """End requests that waited too long for a stage; those that ran too long are the queue's to end."""
        limit_s = self._limits.queued_s
        if limit_s is None:
            return []
        now_s = self._clock.monotonic()
        if now_s - self._looked_at_s < limit_s / 10:
            return []
        self._looked_at_s = now_s
        actions: list[Action] = []
        for view in self._queue.requests():
            if view.state == "queued" and now_s - view.updated_at_s >= limit_s:
                self._queue.cancel(view.request_id)
                self._failed += 1
                text = f"waited {now_s - view.updated_at_s:.1f} s for a {view.stage} that was free, limit {limit_s:g} s"
                if view.error_message:
                    text += f"; before that: {view.error_message}"
                actions.append(Failed(request_id=view.request_id, error=text, code=DeadlineExceeded.code))
                # One may be under way all the same: its claim lapsed while the head stood still.
                actions += self._forget(view.request_id, self._running.pop(view.request_id, None))
        return actions

    def _ended(self) -> list[Action]:
        """Find requests that the queue has ended by itself: attempts used up, time over, an error that is final."""
        actions: list[Action] = []
        for request_id in self._ended_ids():
            if request_id not in self._requests:
                continue
            running = self._running.pop(request_id, None)
            self._failed += 1
            actions.append(self._told(request_id))
            actions += self._forget(request_id, running)
        return actions

    def _ended_ids(self) -> list[str]:
        found: list[str] = []
        while events := self._queue.events(self._last_event):
            if events[0].number > self._last_event + 1:
                # More ended at once than the feed keeps.
                found = [view.request_id for view in self._queue.requests() if view.state in _ENDS]
            found += [event.request_id for event in events if event.kind in _ENDS]
            self._last_event = events[-1].number
        return found

    def _told(self, request_id: str) -> Failed:
        try:
            self._queue.result(request_id, timeout_s=0)
        except MoonrelayError as exc:
            where = exc.context.get("stage")
            text = exc.message if where is None else f"{exc.message} ({where}, attempt {exc.context.get('attempt')})"
            return Failed(request_id=request_id, error=text, code=exc.code)
        return Failed(request_id=request_id, error="the request ended without a result", code=MoonrelayError.code)

    def _forget(self, request_id: str, running: Running | None) -> list[Action]:
        """Drop an ended request, and have everybody drop what he holds of it."""
        request = self._requests.pop(request_id, None)
        made = [] if request is None else list(request.made)
        if running is not None:
            made.append(self._release_of(running))
        self._queue.forget(request_id)
        return [one for one in dict.fromkeys(made) if self._instances[one.stage][one.index].worker is not None]

    def _hand_out(self, stage: str) -> list[Action]:
        actions: list[Action] = []
        handed = True
        while handed:
            handed = False
            for instance in self._in_order(stage):
                job = instance.worker.take(0) if instance.worker is not None else None
                if job is not None:
                    actions.append(self._dispatch(instance, job))
                    handed = True
                    break  # the order may be another one now
        return actions

    def _in_order(self, stage: str) -> list[Instance]:
        """Return the living instances with a free slot, in the order in which they are asked."""
        instances = self._instances[stage]
        start = self._next[stage]
        turned = instances[start:] + instances[:start]
        free: Callable[[Instance], int] = lambda one: one.slots - self._busy(one)  # noqa: E731
        able = [one for one in turned if self._lives(one) and free(one) > 0]
        return able if self.policy == "round_robin" else sorted(able, key=free, reverse=True)

    def _dispatch(self, instance: Instance, job: Job) -> Dispatch:
        self._next[instance.stage] = (instance.index + 1) % len(self._instances[instance.stage])
        self._running[job.request_id] = Running(job=job, instance=instance, given_at_s=self._clock.monotonic())
        return Dispatch(
            stage=instance.stage,
            index=instance.index,
            epoch=instance.epoch,
            request_id=job.request_id,
            attempt=job.token,
            given=self._requests[job.request_id].inputs.get(instance.stage),
        )
