"""Pure parts of the queue: fair choice, credits, states, tasks, pipelines and what may be stored."""

from __future__ import annotations

import math
from collections import Counter
from typing import get_args

import pytest

from moonrelay.errors import ConfigError, IntegrityError, LeaseLost, MoonrelayError, PeerLost, PluginError
from moonrelay.plugins import QUEUES, Registry
from moonrelay.queueing import (
    DEFAULT_PIPELINE,
    Pipeline,
    QueueConfig,
    StageQueue,
    StageSpec,
    StageTask,
    codec,
    delivery,
    intake,
    outcome,
)
from moonrelay.queueing.credits import Offer, account
from moonrelay.queueing.fairness import Passes, choose, longest_wait
from moonrelay.queueing.memory import MemoryTransaction
from moonrelay.queueing.states import ENDED, STATES, TABLE, Step, step
from moonrelay.queueing.store import Book, WorkerRow
from moonrelay.queueing.task import PRIORITIES, Priority


class TestFairness:
    def test_shares_follow_the_weights_when_all_wait(self) -> None:
        passes: Passes = {}
        served: Counter[Priority] = Counter()
        for _ in range(210):
            name, passes = choose(PRIORITIES, PRIORITIES, passes)
            served[name] += 1
        assert served == {"interactive": 160, "standard": 40, "batch": 10}

    @pytest.mark.parametrize("priority", PRIORITIES)
    def test_a_waiting_class_is_served_within_its_bound(self, priority: Priority) -> None:
        passes: Passes = {}
        since = worst = 0
        for _ in range(500):
            name, passes = choose(PRIORITIES, PRIORITIES, passes)
            since = 0 if name == priority else since + 1
            worst = max(worst, since)
        assert worst <= longest_wait(priority)

    def test_an_urgent_class_comes_first_when_it_begins(self) -> None:
        assert choose(PRIORITIES, PRIORITIES, {})[0] == "interactive"
        assert choose(("standard", "batch"), ("standard", "batch"), {})[0] == "standard"

    def test_idleness_earns_no_credit(self) -> None:
        passes: Passes = {}
        for _ in range(100):
            _, passes = choose(("batch",), ("batch",), passes)
        burst = []
        for _ in range(21):
            name, passes = choose(("interactive", "batch"), ("interactive", "batch"), passes)
            burst.append(name)
        assert 1 <= burst.count("batch") <= 2

    def test_a_class_that_this_worker_may_not_take_keeps_its_place(self) -> None:
        passes: Passes = {}
        for _ in range(30):
            name, passes = choose(("interactive", "batch"), ("interactive",), passes)
            assert name == "interactive"
        name, passes = choose(("interactive", "batch"), ("interactive", "batch"), passes)
        assert name == "batch"

    def test_a_class_alone_is_always_served(self) -> None:
        assert choose(("batch",), ("batch",), {"batch": 99})[0] == "batch"


class TestCredits:
    def test_offers_of_dead_workers_do_not_count(self) -> None:
        offers = [Offer(buffers=2, lease_until_s=10.0), Offer(buffers=3, lease_until_s=20.0)]
        assert account(offers, admitted=1, waiting=1, now_s=9.0).free == 3
        assert account(offers, admitted=1, waiting=1, now_s=10.0).free == 1
        assert account(offers, admitted=1, waiting=1, now_s=20.0).total == 0

    def test_free_is_never_negative(self) -> None:
        poor = account([Offer(buffers=1, lease_until_s=10.0)], admitted=3, waiting=1, now_s=0.0)
        assert (poor.free, poor.held, poor.total) == (0, 4, 1)


class TestFence:
    def test_a_lapsed_claim_is_lost_before_anybody_reaps_it(self) -> None:
        tx = MemoryTransaction()

        def book(now_s: float) -> Book:
            return Book(tx=tx, now_s=now_s, pipeline=DEFAULT_PIPELINE, config=QueueConfig())

        worker = WorkerRow(worker_id="w", stage="encode", slots=1, buffers=1, lease_until_s=0.0)
        intake.submit(
            book(0.0), "r1", intake.pack(1000, "task", StageTask(stage="encode", request_id="r1")), if_absent=False
        )
        got = delivery.claim(book(1.0), worker)
        assert isinstance(got, delivery.Delivery)
        outcome.fence(book(10.9), "r1", got.request.token)
        with pytest.raises(LeaseLost, match="not renewed in time"):
            outcome.fence(book(11.0), "r1", got.request.token)


class TestStates:
    def test_nothing_leads_out_of_an_end(self) -> None:
        for state in STATES:
            for what in get_args(Step):
                if state in ENDED or (state, what) not in TABLE:
                    with pytest.raises(MoonrelayError):
                        step(state, what)
                else:
                    assert step(state, what) in STATES

    def test_every_state_is_reached(self) -> None:
        assert {"queued", *TABLE.values()} == set(STATES)


class TestTask:
    @pytest.mark.parametrize(
        ("field", "values"),
        [
            ("stage", ("", "x" * 201, "a\nb", 5)),
            ("request_id", ("", "\x00")),
            ("priority", ("urgent", 1)),
            ("deadline_s", (0, -1, math.nan, math.inf, "5", True)),
            ("attempt", (-1, 1.5, True)),
            ("max_attempts", (0, "3")),
            ("affinity", ("n1", ["host"])),
            ("affinity key", ({1: "n1"},)),
            ("affinity['host']", ({"host": 1},)),
        ],
    )
    def test_a_wrong_field_is_named(self, field: str, values: tuple[object, ...]) -> None:
        for value in values:
            with pytest.raises(ConfigError) as caught:
                StageTask(**{"stage": "encode", field.partition("[")[0].partition(" ")[0]: value})  # type: ignore[arg-type]
            assert caught.value.context["field"] == field

    def test_pipelines_are_checked(self) -> None:
        for stages in (
            [],
            [StageSpec(name="a"), StageSpec(name="a")],
            [StageSpec(name="a", downstream="b")],
            [StageSpec(name="a"), StageSpec(name="b", downstream="a")],
            [StageSpec(name="a", downstream="a")],
            [StageSpec(name="a", kind="push")],  # type: ignore[arg-type]
        ):
            with pytest.raises(ConfigError):
                Pipeline(stages)

    def test_the_default_pipeline_admits_denoise_against_decode(self) -> None:
        assert [spec.name for spec in DEFAULT_PIPELINE.feeding("decode")] == ["denoise"]
        assert DEFAULT_PIPELINE.feeding("denoise") == ()
        with pytest.raises(ConfigError, match="encode, denoise, decode"):
            DEFAULT_PIPELINE["upscale"]


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "field"),
        [
            ({"lease_s": 0}, "lease_s"),
            ({"lease_s": 1.0}, "renew_s"),
            ({"retry_delay_s": -1.0}, "retry_delay_s"),
            ({"max_dept": 5}, "max_dept"),
            ({"max_depth": "many"}, "max_depth"),
        ],
    )
    def test_a_wrong_setting_is_named(self, settings: dict[str, object], field: str) -> None:
        with pytest.raises(ConfigError) as caught:
            StageQueue.connect("memory://", config=settings)
        assert caught.value.context["field"] == field

    def test_the_environment_gives_defaults(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MOONRELAY_QUEUE_MAX_DEPTH", "7")
        with StageQueue.connect("memory://") as queue:
            assert queue.config == QueueConfig(max_depth=7)


class TestConnect:
    def test_redis_is_announced_as_not_installed(self) -> None:
        with pytest.raises(PluginError, match="not installed yet"):
            StageQueue.connect("redis://127.0.0.1:6379/0")

    @pytest.mark.parametrize("url", ["", "queue.db", "sqlite:queue.db", 5, None, "http://[bad"])
    def test_what_is_no_url_is_refused(self, url: object) -> None:
        with pytest.raises(ConfigError) as caught:
            StageQueue.connect(url)  # type: ignore[arg-type]
        assert caught.value.context["field"] == "url"

    def test_an_unknown_scheme_names_the_known_ones(self) -> None:
        with pytest.raises(PluginError, match="memory, sqlite"):
            StageQueue.connect("kafka://host")

    def test_a_plugin_that_is_no_queue_hurts_only_its_scheme(self) -> None:
        registry = Registry(
            QUEUES, built_in={"odd": "moonrelay.errors:ConfigError", "memory": "moonrelay.queueing.memory:MemoryQueue"}
        )
        with pytest.raises(PluginError):
            StageQueue.connect("odd://", plugins=registry)
        StageQueue.connect("memory://", plugins=registry).close()

    def test_a_queue_in_memory_has_no_name(self) -> None:
        with pytest.raises(ConfigError):
            StageQueue.connect("memory://shared")


class TestCodec:
    @pytest.mark.parametrize(
        "value",
        [
            None,
            True,
            -(1 << 63),
            (1 << 64) - 1,
            0.1,
            -0.0,
            math.inf,
            "ü\n",
            b"\x00\xff",
            [1, [2, {"a": None}]],
            {1: "one", "1": "text"},
            {},
        ],
    )
    def test_plain_values_return_equal(self, value: object) -> None:
        back = codec.unpack_plain(codec.pack_plain("payload", value, at_most=1000))
        assert back == value
        assert type(back) is type(value)

    @pytest.mark.parametrize(
        ("value", "place"),
        [
            ({"a": [1, object()]}, "payload['a'][1]"),
            ({"n": 1 << 64}, "payload['n']"),
            ({(1, 2): 3}, "payload"),
            ({True: 3}, "payload"),
            ({"s": {1, 2}}, "payload['s']"),
            ("\ud800", "payload"),
            (bytearray(b"x"), "payload"),
            (1 + 2j, "payload"),
        ],
    )
    def test_the_place_of_what_is_not_plain_is_named(self, value: object, place: str) -> None:
        with pytest.raises(ConfigError) as caught:
            codec.pack_plain("payload", value, at_most=1000)
        assert caught.value.context["field"] == place

    def test_depth_and_size_are_bounded(self) -> None:
        nested: list[object] = []
        nested.append(nested)
        with pytest.raises(ConfigError, match="deeper"):
            codec.pack_plain("payload", nested, at_most=1000)
        with pytest.raises(ConfigError, match="above the bound"):
            codec.pack_plain("payload", b"x" * 2000, at_most=1000)

    def test_errors_keep_class_flag_and_place(self) -> None:
        error = PeerLost("gone", peer="n1")
        back = codec.rebuild(codec.unpack_error(codec.pack_error(error, stage="denoise", attempt=2)), state="failed")
        assert type(back) is PeerLost
        assert back.retryable
        assert (back.context["stage"], back.context["attempt"], back.context["state"]) == ("denoise", 2, "failed")

    @pytest.mark.parametrize(
        ("error", "again"), [(OSError("x"), True), (RuntimeError("x"), True), (KeyError("x"), False)]
    )
    def test_foreign_errors_are_classed(self, error: Exception, again: bool) -> None:
        own = codec.foreign(error)
        assert own.retryable is again
        assert type(error).__name__ in own.message

    def test_damage_is_told(self) -> None:
        with pytest.raises(IntegrityError):
            codec.unpack_plain(b"\xc1")
        with pytest.raises(IntegrityError):
            codec.unpack_error(b"\xc1")

    def test_handles_are_bytes_or_have_a_wire_form(self) -> None:
        assert codec.pack_handle(None) == ("none", None)
        assert codec.pack_handle(b"h") == ("bytes", b"h")
        with pytest.raises(ConfigError) as caught:
            codec.pack_handle("h")
        assert caught.value.context["field"] == "handle"
