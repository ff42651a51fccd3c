"""Queues with one fault each, as targets, and which test of the suite must catch each.

Importable as ``planted.queues:TokenUsedTwice``, also in the processes that the suite starts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from moonrelay.clock import Clock, Deadline
from moonrelay.errors import ConfigError
from moonrelay.queueing import Pipeline, QueueConfig, StageTask, codec, intake, outcome
from moonrelay.queueing.delivery import Delivery
from moonrelay.queueing.fairness import Passes
from moonrelay.queueing.memory import MemoryEngine, MemoryTransaction
from moonrelay.queueing.rows import SqliteTransaction
from moonrelay.queueing.sqlite import SqliteQueue
from moonrelay.queueing.states import State
from moonrelay.queueing.store import Counter, RequestRow, WorkerRow
from moonrelay.queueing.stored import StoredQueue, WorkerDesk
from moonrelay.queueing.task import Plain
from planted.queue_base import Planted, PlantedFile
from planted.queue_clients import (
    CancelIgnored,
    CancelUntold,
    DeadlineIgnored,
    EndedForEver,
    EndToldTwice,
    EventsForEver,
    FinalFailureTriedAgain,
    FullButTaken,
    HandleAsBytes,
    PayloadAsJson,
    QueuedCancelIgnored,
    QueuedDeadlineIgnored,
    RefusedButQueued,
    RepeatedSubmitTakenIn,
    ResultReadOnce,
    SleepsThroughClose,
    WholeFloatAsInt,
)

# -- claims -----------------------------------------------------------------------------------------------------------


class TokenUsedTwice(Planted):
    """A redelivery has the token of the delivery before: nobody is fenced."""

    class rows(MemoryTransaction):  # noqa: N801 - takes the place of the attribute
        def next(self, counter: Counter) -> int:
            return max(1, super().next(counter) // 2) if counter == "token" else super().next(counter)


class TokenOfTheStage(Planted):
    """Tokens grow within a request's stage only, so that they fall from one stage to the next."""

    class desk(WorkerDesk):  # noqa: N801
        def claim(self, worker: WorkerRow, deadline: Deadline, stopped: Callable[[], bool]) -> Delivery | None:
            got = super().claim(worker, deadline, stopped)
            if got is None:
                return None
            row = replace(got.request, token=got.stage.attempt)
            with self._engine.transaction(write=True) as tx:
                tx.put_request(row)
            return replace(got, request=row)


class DeliveredTwice(Planted):
    """A job is given to a second worker while the first one has it."""

    class desk(WorkerDesk):  # noqa: N801
        last: Delivery | None = None

        def claim(self, worker: WorkerRow, deadline: Deadline, stopped: Callable[[], bool]) -> Delivery | None:
            before, self.last = self.last, None
            if before is not None and before.request.worker != worker.worker_id:
                return before
            self.last = super().claim(worker, deadline, stopped)
            return self.last


class TakesWithoutALock(Planted):
    """Choosing a job and taking it are two steps, between which another thread can choose the same."""

    class desk(WorkerDesk):  # noqa: N801
        def claim(self, worker: WorkerRow, deadline: Deadline, stopped: Callable[[], bool]) -> Delivery | None:
            with self._engine.transaction(write=False) as tx:
                seen = next((row for row in tx.queued(worker.stage, "standard")), None)
            threading.Event().wait(0.002)
            got = super().claim(worker, deadline, stopped)
            if seen is None or got is None or got.request.request_id == seen.request_id:
                return got
            with self._engine.transaction(write=True) as tx:
                tx.put_request(replace(got.request, state="queued", worker=None, lease_until_s=None))
                now = tx.request(seen.request_id)
                stage = tx.stage(seen.request_id, worker.stage)
                assert now is not None
                assert stage is not None
                return replace(got, request=now, stage=stage)


class NeverRedelivers(Planted):
    """Claims never lapse: a dead worker keeps its job for ever."""

    class rows(MemoryTransaction):  # noqa: N801
        def overdue(self, now_s: float) -> list[RequestRow]:
            return [
                row for row in super().overdue(now_s) if row.deadline_at_s is not None and row.deadline_at_s <= now_s
            ]


class RedeliversEarly(Planted):
    """A claim lapses at half of its life."""

    class rows(MemoryTransaction):  # noqa: N801
        life_s = 5.0

        def put_request(self, row: RequestRow) -> None:
            if row.lease_until_s is not None:
                row = replace(row, lease_until_s=row.lease_until_s - self.life_s)
            super().put_request(row)


class LateCompleteAccepted(Planted):
    """A completion is taken from whoever comes, with whatever token."""

    class desk(WorkerDesk):  # noqa: N801
        def finish(self, request_id: str, token: int, result: Plain) -> None:
            with self._engine.transaction(write=False) as tx:
                row = tx.request(request_id)
            super().finish(request_id, token if row is None else row.token, result)


class LateProgressAccepted(Planted):
    """Progress with an old token is shown, and renews the other worker's claim."""

    class desk(WorkerDesk):  # noqa: N801
        def progress(self, request_id: str, token: int, fraction: float, note: str) -> None:
            with self._engine.transaction(write=False) as tx:
                row = tx.request(request_id)
            super().progress(request_id, token if row is None else row.token, fraction, note)


class RenewalRevives(Planted):
    """A renewal brings a lapsed claim back, over the head of its new holder."""

    class desk(WorkerDesk):  # noqa: N801
        def renew(self, worker: WorkerRow, held: Mapping[str, int]) -> Mapping[str, Any]:
            with self._engine.transaction(write=True) as tx:
                for request_id, token in held.items():
                    row = tx.request(request_id)
                    if row is not None and row.state == "running" and row.token != token:
                        tx.put_request(replace(row, token=token, worker=worker.worker_id))
            return super().renew(worker, held)


class AttemptsWithoutEnd(Planted):
    """Redeliveries are not counted, so that a job which kills its workers goes on for ever."""

    class desk(WorkerDesk):  # noqa: N801
        def claim(self, worker: WorkerRow, deadline: Deadline, stopped: Callable[[], bool]) -> Delivery | None:
            got = super().claim(worker, deadline, stopped)
            if got is not None:
                with self._engine.transaction(write=True) as tx:
                    tx.put_stage(replace(got.stage, spent=0))
            return got


class LostWhenGivenBack(Planted):
    """A job that is given back is dropped from the queue and stays running for ever."""

    class desk(WorkerDesk):  # noqa: N801
        def give_back(self, request_id: str, token: int, note: str) -> State:
            return "queued"


# -- order ------------------------------------------------------------------------------------------------------------


class CreditNotReturned(Planted):
    """The credit of a job that failed stays taken."""

    class rows(MemoryTransaction):  # noqa: N801
        leaked = 0

        def count(self, stage: str, state: State) -> int:
            extra = self.leaked if (stage, state) == ("denoise", "running") else 0
            return super().count(stage, state) + extra

    class desk(WorkerDesk):  # noqa: N801
        def fail(self, request_id: str, token: int, error: Any, retryable: bool) -> State:
            engine = self._engine
            assert isinstance(engine, MemoryEngine)
            row = engine._rows.request(request_id)
            after = super().fail(request_id, token, error, retryable)
            if row is not None and row.stage == "denoise":
                engine._rows.leaked += 1  # type: ignore[attr-defined]
            return after


class AdmittedWithoutCredit(Planted):
    """Results that wait downstream are not counted, so that more is admitted than there is room for."""

    class rows(MemoryTransaction):  # noqa: N801
        def count(self, stage: str, state: State) -> int:
            return 0 if (stage, state) == ("decode", "queued") else super().count(stage, state)


class UrgentFirstAlways(Planted):
    """As long as there is urgent work nobody else is served."""

    class rows(MemoryTransaction):  # noqa: N801
        def passes(self, stage: str) -> Passes:
            return {}


class LastComeFirstServed(Planted):
    """The newest request of a class is served first."""

    class rows(MemoryTransaction):  # noqa: N801
        def queued(self, stage: str, priority: Any) -> Iterable[RequestRow]:
            return reversed(list(super().queued(stage, priority)))


class AffinityForEver(Planted):
    """A task waits for its preferred worker however long that takes."""

    class rows(MemoryTransaction):  # noqa: N801
        def queued(self, stage: str, priority: Any) -> Iterable[RequestRow]:
            return [replace(row, queued_at_s=1e9) if row.affinity else row for row in super().queued(stage, priority)]


class AffinityToNobody(Planted):
    """A task whose preferred worker does not exist is shown to nobody."""

    class rows(MemoryTransaction):  # noqa: N801
        def queued(self, stage: str, priority: Any) -> Iterable[RequestRow]:
            return [row for row in super().queued(stage, priority) if row.affinity.get("host") != "n9"]


class PriorityLost(Planted):
    """A request is of the standard class from its second stage on."""

    class desk(WorkerDesk):  # noqa: N801
        def advance(self, request_id: str, token: int, task: StageTask) -> None:
            super().advance(request_id, token, replace(task, priority=task.priority or "standard"))


class LoadMiscounted(Planted):
    """The number of requests under way counts those that have ended."""

    class rows(MemoryTransaction):  # noqa: N801
        def active(self) -> int:
            return len(list(self.requests()))


class GoneButCounted(Planted):
    """The credits of a worker that left can still be taken."""

    class rows(MemoryTransaction):  # noqa: N801
        def drop_worker(self, worker_id: str) -> None:
            row = self.worker(worker_id)
            if row is None or row.stage != "decode":
                super().drop_worker(worker_id)


class LostInputAsFailure(Planted):
    """A lost input ends the request instead of being made again."""

    class desk(WorkerDesk):  # noqa: N801
        def lose_input(self, request_id: str, token: int, error: Any) -> State:
            return self.fail(request_id, token, error, False)


class RewindForgetsAttempts(Planted):
    """A stage that makes a lost input again begins to count anew; only a history shows it."""

    class desk(WorkerDesk):  # noqa: N801
        def lose_input(self, request_id: str, token: int, error: Any) -> State:
            after = super().lose_input(request_id, token, error)
            with self._engine.transaction(write=True) as tx:
                row = tx.request(request_id)
                stage = None if row is None else tx.stage(request_id, row.stage)
                if stage is not None and after == "queued":
                    tx.put_stage(replace(stage, attempt=stage.attempt - 1))
            return after


# -- files and processes ----------------------------------------------------------------------------------------------


class SubmittedInTwoSteps(PlantedFile):
    """A request and its task are written one after the other, and a process can die in between."""

    class queue(SqliteQueue):  # noqa: N801
        def submit(self, task: StageTask, *, if_absent: bool = False) -> bool:
            request_id = task.request_id or ""
            packed = intake.pack(self.config.max_task_bytes, "task", task)
            with self._engine.transaction(write=False) as tx:
                known = tx.request(request_id) is not None
            if known:
                return super().submit(task, if_absent=if_absent)
            taken = super().submit(replace(task, payload=None), if_absent=False)
            threading.Event().wait(0.01)
            with self._engine.transaction(write=True) as tx:
                row, stage = tx.request(request_id), tx.stage(request_id, task.stage)
                assert row is not None
                assert stage is not None
                tx.put_request(replace(row, fingerprint=packed.fingerprint))
                tx.put_stage(replace(stage, payload=packed.payload))
            return taken


class ConfirmedBeforeWritten(PlantedFile):
    """A submit is confirmed when it is in the process's memory; a thread writes it a moment later."""

    class queue(SqliteQueue):  # noqa: N801
        def submit(self, task: StageTask, *, if_absent: bool = False) -> bool:
            def write() -> None:
                threading.Event().wait(0.05)
                StoredQueue.submit(self, task, if_absent=True)

            threading.Thread(target=write, daemon=True).start()
            return True


class DoneBeforeWritten(PlantedFile):
    """A completion is confirmed before it is written, and lost with the process."""

    class desk(WorkerDesk):  # noqa: N801
        def finish(self, request_id: str, token: int, result: Plain) -> None:
            def write() -> None:
                threading.Event().wait(0.05)
                WorkerDesk.finish(self, request_id, token, result)

            threading.Thread(target=write, daemon=True).start()


class CompletedInTwoSteps(PlantedFile):
    """The end of a request is told before it is written: a process that dies in between has it told twice."""

    class desk(WorkerDesk):  # noqa: N801
        def finish(self, request_id: str, token: int, result: Plain) -> None:
            packed = codec.pack_plain("result", result, at_most=1 << 20)

            def tell(book: Any) -> None:
                row, job = outcome.fence(book, request_id, token)
                book.tell("done", row, attempt=job.attempt, worker=row.worker or "")

            self._engine.run(tell)
            threading.Event().wait(0.05)
            with self._engine.transaction(write=True) as tx:
                row = tx.request(request_id)
                assert row is not None
                tx.put_request(
                    replace(row, state="done", result=packed, worker=None, lease_until_s=None, ended=tx.next("end"))
                )
            self._engine.wake()


class TokensOfTheProcess(PlantedFile):
    """Each process counts its tokens for itself, so that two of them give the same."""

    class desk(WorkerDesk):  # noqa: N801
        given = 0

        def claim(self, worker: WorkerRow, deadline: Deadline, stopped: Callable[[], bool]) -> Delivery | None:
            got = super().claim(worker, deadline, stopped)
            if got is None:
                return None
            self.given += 1
            row = replace(got.request, token=self.given)
            with self._engine.transaction(write=True) as tx:
                tx.put_request(row)
            return replace(got, request=row)


class ForgottenOnReopening(PlantedFile):
    """Results are kept by the process that completed them, and are gone with it."""

    class queue(SqliteQueue):  # noqa: N801
        def close(self) -> None:
            if not self._engine.closed:
                with self._engine.transaction(write=True) as tx:
                    for row in list(tx.requests()):
                        if row.state == "done":
                            tx.put_request(replace(row, result=codec.pack_plain("result", None, at_most=9)))
            super().close()


class DeafToOthers(PlantedFile):
    """A worker never hears that another process cancelled its request."""

    desk = CancelUntold.desk


class LateFromAnotherProcess(PlantedFile):
    """A completion is taken from whoever comes, also from another process."""

    desk = LateCompleteAccepted.desk


class LateAfterAStop(PlantedFile):
    """The same, and what comes is a process that stood still."""

    desk = LateCompleteAccepted.desk


class DoneToldTwice(PlantedFile):
    """A completion tells the end two times."""

    class desk(WorkerDesk):  # noqa: N801
        def finish(self, request_id: str, token: int, result: Plain) -> None:
            super().finish(request_id, token, result)
            with self._engine.transaction(write=False) as tx:
                row = tx.request(request_id)
            if row is not None:
                self._engine.run(lambda book: book.tell("done", row, attempt=1))


class ConfirmedEarly(PlantedFile):
    """A submit is confirmed when it is in the process's memory, and everybody dies."""

    queue = ConfirmedBeforeWritten.queue


class SubmitsWithoutALock(PlantedFile):
    """To look for an id and to take it are two steps: two processes are both told that theirs was taken in."""

    class queue(SqliteQueue):  # noqa: N801
        def submit(self, task: StageTask, *, if_absent: bool = False) -> bool:
            known = any(one.request_id == task.request_id for one in self.requests())
            threading.Event().wait(0.02)
            return super().submit(task, if_absent=if_absent) or not known


class AdmittedByEachProcess(PlantedFile):
    """Results that wait downstream are not counted, in a queue of several processes."""

    class file_rows(SqliteTransaction):  # noqa: N801
        def count(self, stage: str, state: State) -> int:
            return 0 if (stage, state) == ("decode", "queued") else super().count(stage, state)


class AnyPipeline(PlantedFile):
    """Whoever opens the queue with another pipeline gets the stored one, and is not told."""

    class queue(SqliteQueue):  # noqa: N801
        @classmethod
        def open(cls, url: str, *, clock: Clock, pipeline: Pipeline | None, config: QueueConfig) -> SqliteQueue:
            try:
                return super().open(url, clock=clock, pipeline=pipeline, config=config)
            except ConfigError:
                return super().open(url, clock=clock, pipeline=None, config=config)


__all__ = [
    "CAUGHT_BY",
    "CancelIgnored",
    "CancelUntold",
    "DeadlineIgnored",
    "EndToldTwice",
    "EndedForEver",
    "EventsForEver",
    "FinalFailureTriedAgain",
    "FullButTaken",
    "HandleAsBytes",
    "PayloadAsJson",
    "QueuedCancelIgnored",
    "QueuedDeadlineIgnored",
    "RefusedButQueued",
    "RepeatedSubmitTakenIn",
    "ResultReadOnce",
    "SleepsThroughClose",
    "WholeFloatAsInt",
]

#: Test of the suite that must fail, by the name of the planted queue. Other tests may fail too.
CAUGHT_BY: dict[str, str] = {
    "TokenUsedTwice": "test_tokens_grow_with_every_claim",
    "TokenOfTheStage": "test_tokens_grow_with_every_claim",
    "DeliveredTwice": "test_a_claim_is_kept_until_its_lease_ends",
    "TakesWithoutALock": "test_threads_that_race_never_hold_one_job",
    "NeverRedelivers": "test_a_lapsed_claim_is_redelivered_and_its_holder_is_fenced",
    "RedeliversEarly": "test_a_claim_is_kept_until_its_lease_ends",
    "LateCompleteAccepted": "test_a_late_holder_is_fenced_whatever_it_does",
    "LateProgressAccepted": "test_a_late_holder_is_fenced_whatever_it_does",
    "RenewalRevives": "test_a_renewal_tells_of_the_loss_and_brings_nothing_back",
    "AttemptsWithoutEnd": "test_dead_workers_use_attempts_up_and_the_client_is_told",
    "LostWhenGivenBack": "test_a_returned_job_is_delivered_again",
    "CancelIgnored": "test_a_cancelled_running_request_stays_cancelled",
    "CancelUntold": "test_the_worker_of_a_cancelled_request_is_told",
    "DeadlineIgnored": "test_a_deadline_ends_a_running_request_and_its_worker_is_told",
    "ResultReadOnce": "test_a_result_is_the_same_each_time_it_is_asked_for",
    "EndToldTwice": "test_each_end_is_told_once",
    "PayloadAsJson": "test_payload_values_come_back_equal",
    "HandleAsBytes": "test_a_handle_comes_back_as_given",
    "FullButTaken": "test_a_full_queue_refuses_and_queues_nothing",
    "RefusedButQueued": "test_what_is_not_plain_is_refused_and_not_queued",
    "SleepsThroughClose": "test_close_wakes_all_who_wait_with_a_typed_error",
    "CreditNotReturned": "test_the_credit_comes_back_however_the_job_ends",
    "AdmittedWithoutCredit": "test_denoise_is_admitted_only_against_a_credit",
    "UrgentFirstAlways": "test_no_priority_class_starves",
    "LastComeFirstServed": "test_first_come_first_served_within_a_class",
    "AffinityForEver": "test_affinity_waits_for_its_worker_but_not_for_ever",
    "LostInputAsFailure": "test_a_lost_input_goes_back_to_its_maker",
    "RewindForgetsAttempts": "test_random_histories_agree_with_the_model",
    "SubmittedInTwoSteps": "test_a_client_killed_in_submit_leaves_requests_whole_or_absent",
    "ConfirmedBeforeWritten": "test_a_client_killed_in_submit_leaves_requests_whole_or_absent",
    "DoneBeforeWritten": "test_a_worker_killed_in_complete_loses_and_doubles_nothing",
    "CompletedInTwoSteps": "test_a_worker_killed_in_complete_loses_and_doubles_nothing",
    "TokensOfTheProcess": "test_processes_that_race_never_hold_one_job",
    "ForgottenOnReopening": "test_everything_survives_reopening",
    "DeafToOthers": "test_a_cancel_and_a_deadline_reach_another_process",
    "LateFromAnotherProcess": "test_a_late_holder_in_another_process_is_fenced",
    "LateAfterAStop": "test_a_worker_stopped_past_its_claim_is_fenced",
    "DoneToldTwice": "test_each_request_ends_once_while_workers_are_killed",
    "ConfirmedEarly": "test_everything_confirmed_survives_the_death_of_everybody",
    "SubmitsWithoutALock": "test_processes_that_submit_one_id_queue_it_once",
    "AdmittedByEachProcess": "test_credits_are_one_account_for_all_processes",
    "AnyPipeline": "test_the_pipeline_is_kept_with_the_queue",
    "QueuedDeadlineIgnored": "test_a_deadline_ends_a_queued_request",
    "QueuedCancelIgnored": "test_a_cancelled_queued_request_is_never_worked_on",
    "FinalFailureTriedAgain": "test_a_final_failure_ends_the_request_at_once",
    "RepeatedSubmitTakenIn": "test_a_repeated_submit_is_harmless_with_if_absent",
    "WholeFloatAsInt": "test_result_values_come_back_equal",
    "EventsForEver": "test_old_events_go_first_and_numbers_go_on",
    "EndedForEver": "test_ended_requests_are_kept_up_to_their_bound",
    "AffinityToNobody": "test_affinity_to_nobody_holds_nothing_up",
    "PriorityLost": "test_priority_is_kept_through_the_stages",
    "LoadMiscounted": "test_stats_show_the_load_there_is",
    "GoneButCounted": "test_a_credit_that_comes_lets_the_next_job_in",
}
