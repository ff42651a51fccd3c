"""What a client is promised: a request passes its stages and ends once, and what was given comes back as given.

Owns the checks of submit, result, forget, events and closing; everything in one process.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable
from typing import Final

import pytest

from moonrelay.errors import ClosedError, ConfigError, DeadlineExceeded, MoonrelayError, QueueFull
from moonrelay.handle import LeaseTerms, StageHandle
from moonrelay.payload import ChunkPlan
from moonrelay.queueing import Pipeline, StageQueue, StageSpec, StageTask
from moonrelay.tree import encode_tree
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.queue_base import (
    ENDS,
    LEASE,
    Aside,
    OpenQueue,
    Pace,
    QueueSuite,
    all_events,
    at,
    join,
    kinds,
    submit,
    take,
    view,
)

#: Every kind of plain value, by name; what comes back is the value itself, but for tuples.
VALUES: Final[dict[str, object]] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, -(1 << 63), (1 << 64) - 1],
    "floats": [0.5, -0.0, 5e-324, 1.7976931348623157e308, float("inf"), float("-inf")],
    "whole-float": 1.0,
    "nan": float("nan"),
    "text": ["", "a cat", "Katze \u2014 \u732b \U0001f408", "line\nbreak", "\x00"],
    "bytes": [b"", b"\x00\xff", bytes(range(256))],
    "list": [1, ["two", [3.0, None]], []],
    "tuple": (1, ("two", b"3")),
    "text-keys": {"prompt": "a cat", "": 1, "size": {"w": 832, "h": 480}},
    "int-keys": {1: "one", -5: "minus five", 1 << 40: "large"},
    "deep": {"a": [{"b": [{"c": [{"d": [1, 2, {"e": b"end"}]}]}]}]},
}

_BAD_VALUES: Final[dict[str, object]] = {
    "object": object(),
    "set": {1, 2},
    "large-int": 1 << 64,
    "float-key": {1.5: 1},
    "bytes-key": {b"k": 1},
    "surrogate": "\ud800",
    "endless": [],
}
_BAD_VALUES["endless"].append(_BAD_VALUES["endless"])  # type: ignore[attr-defined]


class Requests(QueueSuite):
    """One request from submit to forget."""

    @promise(Level.L1, "A request passes its stages in order and ends with its result")
    def test_a_request_passes_its_stages_and_ends_with_its_result(self, queue: StageQueue) -> None:
        workers = {stage: join(queue, stage) for stage in ("encode", "denoise", "decode")}
        submit(queue, "r1", payload={"prompt": "a cat", "n": [1, 2]})
        assert workers["decode"].take(timeout_s=0) is None
        job = take(workers["encode"])
        assert (job.request_id, job.stage, job.attempt) == ("r1", "encode", 1)
        assert (job.task.payload, job.task.handle) == ({"prompt": "a cat", "n": [1, 2]}, None)
        job.complete(next_task=StageTask(stage="denoise", handle=b"embedding", payload={"steps": 4}))
        assert at(queue, "r1") == ("queued", "denoise")
        job = take(workers["denoise"])
        assert (job.task.payload, job.task.handle, job.attempt) == ({"steps": 4}, b"embedding", 1)
        assert view(queue, "r1").worker == workers["denoise"].worker_id
        job.complete(next_task=StageTask(stage="decode", handle=b"latents"))
        take(workers["decode"]).complete(result={"frames": 81})
        assert queue.result("r1", timeout_s=0) == {"frames": 81}
        assert at(queue, "r1") == ("done", "decode")
        steps = ["submitted", *("claimed", "completed") * 3, "done"]
        assert kinds(queue, "r1") == steps

    @promise(Level.L1, "A result can be asked for again and stays the same")
    def test_a_result_is_the_same_each_time_it_is_asked_for(self, queue: StageQueue) -> None:
        submit(queue, "r1")
        submit(queue, "r2")
        worker = join(queue, "encode", slots=2)
        first, second = take(worker), take(worker)
        first.complete(result="mine")
        second.fail(ConfigError("no such model", field="model"))
        assert [queue.result("r1", timeout_s=0) for _ in range(3)] == ["mine"] * 3
        for _ in range(3):
            with pytest.raises(ConfigError, match="no such model") as caught:
                queue.result("r2", timeout_s=0)
            assert (caught.value.context["state"], caught.value.context["stage"]) == ("failed", "encode")

    @promise(Level.L1, "A job that was settled cannot be settled again")
    def test_a_job_is_settled_once(self, queue: StageQueue) -> None:
        submit(queue, "r1")
        job = take(join(queue, "encode"))
        job.complete(result=1)
        acts: list[Callable[[], object]] = [
            lambda: job.complete(result=2),
            lambda: job.fail(OSError("late")),
            job.give_back,
        ]
        for act in acts:
            with pytest.raises(MoonrelayError):
                act()
        assert queue.result("r1", timeout_s=0) == 1
        assert kinds(queue, "r1").count("done") == 1

    @promise(Level.L1, "A plain payload value comes back equal and of the same type; a tuple as a list")
    @pytest.mark.parametrize("value", list(VALUES))
    def test_payload_values_come_back_equal(self, queue: StageQueue, value: str) -> None:
        submit(queue, "r1", payload=VALUES[value])
        assert_same(take(join(queue, "encode")).task.payload, listed(VALUES[value]))

    @promise(Level.L1, "A plain result comes back equal and of the same type; a tuple as a list")
    @pytest.mark.parametrize("value", list(VALUES))
    def test_result_values_come_back_equal(self, queue: StageQueue, value: str) -> None:
        submit(queue, "r1")
        take(join(queue, "encode")).complete(result=VALUES[value])  # type: ignore[arg-type]
        assert_same(queue.result("r1", timeout_s=0), listed(VALUES[value]))

    @promise(Level.L1, "A later edit of what was given does not reach the queue")
    def test_a_payload_is_taken_as_it_was_at_submit(self, queue: StageQueue) -> None:
        payload = {"prompts": ["a cat"]}
        submit(queue, "r1", payload=payload)
        payload["prompts"].append("a dog")
        assert take(join(queue, "encode")).task.payload == {"prompts": ["a cat"]}

    @promise(Level.L1, "A handle comes back as it was given: a StageHandle as one, bytes as bytes")
    @pytest.mark.parametrize("form", ["bytes", "handle", "handle-bytes", "none"])
    def test_a_handle_comes_back_as_given(self, queue: StageQueue, form: str) -> None:
        handle = _handle()
        forms: dict[str, StageHandle | bytes | None] = {
            "bytes": b"\x00any bytes\xff",
            "handle": handle,
            "handle-bytes": handle.to_bytes(),
            "none": None,
        }
        given = forms[form]
        submit(queue, "r1", handle=given)
        encode, denoise = join(queue, "encode"), join(queue, "denoise")
        join(queue, "decode")
        job = take(encode)
        assert (type(job.task.handle), job.task.handle) == (type(given), given)
        job.complete(next_task=StageTask(stage="denoise", handle=given))
        again = take(denoise).task.handle
        assert (type(again), again) == (type(given), given)

    @promise(Level.L1, "The pipeline's own stages are used, not the built-in three")
    def test_a_pipeline_of_other_stages_is_kept(self, open_queue: OpenQueue) -> None:
        pipeline = Pipeline([StageSpec(name="draft", downstream="refine"), StageSpec(name="refine")])
        queue = open_queue(pipeline=pipeline)
        assert queue.pipeline == pipeline
        submit(queue, "r1", "draft")
        take(join(queue, "draft")).complete(next_task=StageTask(stage="refine"))
        take(join(queue, "refine")).complete(result=1)
        assert queue.result("r1", timeout_s=0) == 1
        with pytest.raises(ConfigError, match="encode"):
            queue.submit(StageTask(stage="encode", request_id="r2"))

    @promise(Level.L1, "A taken id is refused, and free again once forgotten")
    def test_a_taken_id_is_refused_until_it_is_forgotten(self, queue: StageQueue) -> None:
        submit(queue, "r1", payload=1)
        before = queue.requests()
        with pytest.raises(ConfigError) as caught:
            queue.submit(StageTask(stage="encode", request_id="r1", payload=1))
        assert caught.value.context["field"] == "request_id"
        assert queue.requests() == before
        with pytest.raises(ConfigError):
            queue.forget("r1")
        take(join(queue, "encode")).complete(result=1)
        with pytest.raises(ConfigError):
            queue.submit(StageTask(stage="encode", request_id="r1", payload=1))
        assert queue.forget("r1") is True
        assert queue.forget("r1") is False
        with pytest.raises(ConfigError):
            queue.result("r1", timeout_s=0)
        submit(queue, "r1", payload=2)
        job = take(join(queue, "encode"))
        assert (job.task.payload, job.attempt) == (2, 1)

    @promise(Level.L1, "A submit repeated with if_absent queues nothing twice, and refuses a different task")
    def test_a_repeated_submit_is_harmless_with_if_absent(self, queue: StageQueue) -> None:
        task = StageTask(stage="encode", request_id="r1", payload={"n": 1}, priority="batch", handle=b"h")
        assert queue.submit(task, if_absent=True) is True
        for _ in range(2):
            assert queue.submit(task, if_absent=True) is False
        for other in (
            StageTask(stage="encode", request_id="r1", payload={"n": 2}, priority="batch", handle=b"h"),
            StageTask(stage="encode", request_id="r1", payload={"n": 1}, priority="batch", handle=b"other"),
            StageTask(stage="decode", request_id="r1", payload={"n": 1}, priority="batch", handle=b"h"),
        ):
            with pytest.raises(ConfigError):
                queue.submit(other, if_absent=True)
        worker = join(queue, "encode", slots=2)
        job = take(worker)
        assert queue.submit(task, if_absent=True) is False
        assert worker.take(timeout_s=0) is None
        job.complete(result=1)
        assert queue.submit(task, if_absent=True) is False
        assert kinds(queue, "r1").count("submitted") == 1
        assert queue.result("r1", timeout_s=0) == 1

    @promise(Level.L1, "Beyond max_depth a submit is refused as QueueFull and nothing is queued")
    def test_a_full_queue_refuses_and_queues_nothing(self, open_queue: OpenQueue) -> None:
        queue = open_queue(max_depth=2)
        worker = join(queue, "encode")
        submit(queue, "r1")
        take(worker).complete(next_task=StageTask(stage="denoise"))
        submit(queue, "r2")
        before, last = queue.requests(), queue.stats().last_event
        with pytest.raises(QueueFull) as caught:
            queue.submit(StageTask(stage="encode", request_id="r3"))
        assert caught.value.retryable
        assert (queue.requests(), queue.stats().last_event) == (before, last)
        # What is under way is not held up by the bound.
        take(worker).complete(next_task=StageTask(stage="denoise"))
        queue.cancel("r1")
        submit(queue, "r3")

    @promise(Level.L1, "Bad input is refused by the name of the field and changes nothing")
    def test_bad_input_is_refused_by_name_and_changes_nothing(self, queue: StageQueue) -> None:
        acts: dict[str, Callable[[], object]] = {
            "request_id": lambda: queue.submit(StageTask(stage="encode")),
            "stage": lambda: queue.submit(StageTask(stage="upscale", request_id="r1")),
            "slots": lambda: queue.register_worker("encode", slots=0),
            "buffers": lambda: queue.register_worker("encode", buffers=-1),
            "affinity": lambda: queue.register_worker("encode", affinity={"host": 1}),  # type: ignore[dict-item]
            "worker_id": lambda: queue.register_worker("encode", worker_id=""),
            "upscale": lambda: queue.register_worker("upscale"),
            "since": lambda: queue.events(-1),
            "limit": lambda: queue.events(0, limit=0),
            "r8": lambda: queue.result("r8"),
            "r9": lambda: queue.cancel("r9"),
        }
        for field, act in acts.items():
            with pytest.raises(ConfigError, match=field):
                act()
        assert queue.requests() == []
        assert queue.stats().workers == ()
        assert queue.events() == []

    @promise(Level.L1, "A payload that is not plain is refused, naming the place, and nothing is queued")
    @pytest.mark.parametrize("value", list(_BAD_VALUES))
    def test_what_is_not_plain_is_refused_and_not_queued(self, queue: StageQueue, value: str) -> None:
        task = StageTask(stage="encode", request_id="r1", payload={"x": _BAD_VALUES[value]})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="payload"):
            queue.submit(task)
        assert queue.requests() == []
        assert queue.events() == []

    @promise(Level.L1, "A payload above max_task_bytes is refused and nothing is queued")
    def test_a_payload_beyond_its_bound_is_refused(self, open_queue: OpenQueue) -> None:
        queue = open_queue(max_task_bytes=1000)
        submit(queue, "r1", payload=b"x" * 900)
        with pytest.raises(ConfigError, match="payload"):
            queue.submit(StageTask(stage="encode", request_id="r2", payload=b"x" * 1100))
        assert [one.request_id for one in queue.requests()] == ["r1"]

    @promise(Level.L1, "A completion that is refused leaves the job to its worker")
    def test_a_refused_completion_leaves_the_job_as_it_was(self, queue: StageQueue) -> None:
        submit(queue, "r1", "denoise")
        join(queue, "decode")
        job = take(join(queue, "denoise"))
        before = queue.requests()
        acts: list[Callable[[], object]] = [
            lambda: job.complete(next_task=StageTask(stage="encode")),
            lambda: job.complete(next_task=StageTask(stage="denoise")),
            lambda: job.complete(next_task=StageTask(stage="upscale")),
            lambda: job.complete(next_task=StageTask(stage="decode", request_id="other")),
            lambda: job.complete(next_task=StageTask(stage="decode", payload=object())),  # type: ignore[arg-type]
            lambda: job.complete(result=object()),  # type: ignore[arg-type]
            lambda: job.progress(1.5),
        ]
        for act in acts:
            with pytest.raises(ConfigError):
                act()
        assert queue.requests() == before
        job.complete(result=None)
        assert queue.result("r1", timeout_s=0) is None

    @promise(Level.L1, "A wait for a result ends at its own bound, says where the request is, and wakes at its end")
    def test_a_wait_for_a_result_ends_by_its_bound_or_by_the_end(self, queue: StageQueue, pace: Pace) -> None:
        submit(queue, "r1")
        with pytest.raises(DeadlineExceeded, match="encode") as caught:
            queue.result("r1", timeout_s=0)
        assert "waited_s" in caught.value.context
        job = take(join(queue, "encode"))
        waiting = Aside(lambda: queue.result("r1", timeout_s=pace.s(9)))
        assert waiting.running()
        job.complete(result="woken")
        assert waiting.outcome() == "woken"

    @promise(Level.L1, "A worker that waits is woken by a submit")
    def test_a_waiting_worker_is_woken_by_new_work(self, queue: StageQueue, pace: Pace) -> None:
        worker = join(queue, "encode")
        waiting = Aside(lambda: worker.take(timeout_s=pace.s(9)))
        assert waiting.running()
        submit(queue, "r1", payload=7)
        job = waiting.outcome()
        assert job is not None, "the wait ended without the job that was submitted"

    @promise(Level.L1, "Events are numbered without a gap, in order, and can be read page by page")
    def test_events_are_numbered_one_by_one(self, queue: StageQueue, pace: Pace) -> None:
        worker = join(queue, "encode")
        for number in range(4):
            submit(queue, f"r{number}")
            pace.advance(0.01)
            take(worker).complete(result=number)
        events = all_events(queue)
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        assert queue.stats().last_event == len(events)
        assert [event.at_s for event in events] == sorted(event.at_s for event in events)
        assert queue.events(3, limit=2) == events[3:5]
        assert queue.events(len(events)) == []
        waiting = Aside(lambda: queue.events(len(events), timeout_s=pace.s(9)))
        assert waiting.running()
        submit(queue, "late")
        told = waiting.outcome()
        assert isinstance(told, list)
        assert [(event.number, event.kind, event.request_id) for event in told] == [
            (len(events) + 1, "submitted", "late")
        ]

    @promise(Level.L1, "Only the newest keep_events events are kept, and their numbers go on")
    def test_old_events_go_first_and_numbers_go_on(self, open_queue: OpenQueue) -> None:
        queue = open_queue(keep_events=5)
        for number in range(12):
            submit(queue, f"r{number}")
        assert [event.number for event in queue.events()] == [8, 9, 10, 11, 12]

    @promise(Level.L1, "Ended requests are kept up to keep_ended, those under way always")
    def test_ended_requests_are_kept_up_to_their_bound(self, open_queue: OpenQueue) -> None:
        queue = open_queue(keep_ended=3)
        worker = join(queue, "encode")
        submit(queue, "under-way", "decode")
        for number in range(6):
            submit(queue, f"r{number}")
            take(worker).complete(result=number)
        assert [one.request_id for one in queue.requests()] == ["under-way", "r3", "r4", "r5"]
        assert queue.result("r5", timeout_s=0) == 5
        with pytest.raises(ConfigError):
            queue.result("r0", timeout_s=0)

    @promise(Level.L1, "Each request ends once and its end is told once, whatever the end")
    def test_each_end_is_told_once(self, queue: StageQueue, pace: Pace) -> None:
        worker = join(queue, "encode", slots=9)
        for name in ("done", "failed", "dead", "cancelled", "late"):
            submit(queue, name, max_attempts=1, deadline_s=pace.s(5) if name == "late" else None)
        jobs = {job.request_id: job for job in (take(worker) for _ in range(5))}
        jobs["done"].complete(result=1)
        jobs["failed"].fail(ConfigError("no such model"))
        jobs["dead"].fail(OSError("flaky"))
        queue.cancel("cancelled")
        pace.advance(3 * LEASE)
        states = {one.request_id: one.state for one in queue.requests()}
        assert states == {
            "done": "done",
            "failed": "failed",
            "dead": "dead",
            "cancelled": "cancelled",
            "late": "failed",
        }
        ends = Counter(event.request_id for event in all_events(queue) if event.kind in ENDS)
        assert ends == dict.fromkeys(states, 1)
        assert queue.stats().ended == {"done": 1, "failed": 2, "dead": 1, "cancelled": 1}
        assert queue.stats().active == 0

    @promise(Level.L1, "Closing wakes everybody who waits, with ClosedError, and nothing works afterwards")
    def test_close_wakes_all_who_wait_with_a_typed_error(self, open_queue: OpenQueue) -> None:
        queue, quiet = open_queue(), open_queue()
        worker = join(queue, "encode")
        submit(queue, "r1", "decode")
        waiting = [
            Aside(lambda: queue.result("r1")),
            Aside(worker.take),
            # In a queue of its own: that a worker leaves is an event too.
            Aside(lambda: quiet.events(0, timeout_s=1e6)),
        ]
        assert all(one.running() for one in waiting)
        quiet.close()
        queue.close()
        for one in waiting:
            with pytest.raises(ClosedError):
                one.outcome()
        queue.close()
        acts: list[Callable[[], object]] = [
            queue.requests,
            queue.stats,
            queue.events,
            lambda: queue.result("r1"),
            lambda: queue.cancel("r1"),
            lambda: queue.submit(StageTask(stage="encode", request_id="r2")),
            lambda: queue.register_worker("encode"),
            lambda: worker.take(timeout_s=0),
            worker.renew,
        ]
        for act in acts:
            with pytest.raises(ClosedError):
                act()


def listed(value: object) -> object:
    """Return a value with its tuples as lists."""
    if isinstance(value, (list, tuple)):
        return [listed(part) for part in value]
    if isinstance(value, dict):
        return {key: listed(part) for key, part in value.items()}
    return value


def assert_same(got: object, wanted: object, place: str = "value") -> None:
    """Assert that two plain values are the same in type and, for floats, in bits."""
    assert type(got) is type(wanted), f"{place} came back as a {type(got).__name__}, not a {type(wanted).__name__}"
    if isinstance(got, list) and isinstance(wanted, list):
        assert len(got) == len(wanted), place
        for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert_same(one, other, f"{place}[{number}]")
    elif isinstance(got, dict) and isinstance(wanted, dict):
        assert_same(list(got), list(wanted), f"keys of {place}")
        for key in wanted:
            assert_same(got[key], wanted[key], f"{place}[{key!r}]")
    elif isinstance(got, float) and isinstance(wanted, float):
        same = (math.isnan(wanted) and math.isnan(got)) or struct.pack("<d", got) == struct.pack("<d", wanted)
        assert same, f"{place} came back as {got!r}, not {wanted!r}"
    else:
        assert got == wanted, f"{place} came back as {got!r}, not {wanted!r}"


def _handle() -> StageHandle:
    tree, _leaves = encode_tree({"steps": 4}, "data")
    return StageHandle(
        id="0" * 32,
        request_id="r1",
        kind="latent",
        attempt=0,
        tree=tree,
        tensors=(),
        chunks=ChunkPlan(dim=None, sizes=(1,)),
        digest="off",
        lease=LeaseTerms(policy="delete_on_consume", readers=1, ttl_s=None),
    )
