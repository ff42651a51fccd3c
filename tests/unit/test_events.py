"""Events: who is told, what is logged, what is counted; and that an observer changes nothing."""

from __future__ import annotations

import logging

import pytest

from moonrelay.clock import ManualClock
from moonrelay.errors import ConfigError, PluginError
from moonrelay.events import EVENT_NAMES, Event, EventBus, ObserverSpec, hookimpl, load_observers
from moonrelay.metrics import MAX_WORDS, HistogramValue, Metrics
from moonrelay.plugins import Registry


class Recorder:
    """An observer with two hooks, one of which takes no argument."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    @hookimpl
    def moonrelay_delivered(self, event: Event) -> None:
        self.seen.append(event)

    @hookimpl
    def moonrelay_failed(self) -> None:
        self.seen.append("failed")


def broken(_event: Event) -> None:
    message = "observer"
    raise RuntimeError(message)


def test_there_is_a_hook_for_every_event() -> None:
    hooks = {name.removeprefix("moonrelay_") for name in vars(ObserverSpec) if name.startswith("moonrelay_")}
    assert hooks == set(EVENT_NAMES)


def test_callables_get_every_event_and_hooks_get_theirs() -> None:
    seen: list[Event] = []
    recorder = Recorder()
    bus = EventBus([seen.append, recorder], ManualClock(start_s=7.0))
    bus.emit(Event(name="published", request_id="r1"))
    bus.emit(Event(name="delivered", request_id="r1", at_s=3.0))
    bus.emit(Event(name="failed", request_id="r1"))
    assert [event.name for event in seen] == ["published", "delivered", "failed"]
    assert [event.at_s for event in seen] == [7.0, 3.0, 7.0]
    assert recorder.seen == [seen[1], "failed"]


def test_a_failing_observer_is_logged_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        @hookimpl
        def moonrelay_published(self, event: Event) -> None:
            raise KeyError(event.name)

    seen: list[Event] = []
    bus = EventBus([Broken(), broken, seen.append])
    with caplog.at_level(logging.DEBUG, logger="moonrelay.events"):
        bus.emit(Event(name="published"))
        bus.emit(Event(name="published"))
    assert len(seen) == 2
    failures = [record for record in caplog.records if "failed on published" in record.getMessage()]
    assert [record.levelno for record in failures] == [logging.ERROR, logging.ERROR, logging.DEBUG, logging.DEBUG]
    assert all(record.exc_info for record in failures)


def test_an_observer_that_wants_to_end_the_process_may() -> None:
    def leave(_event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EventBus([leave]).emit(Event(name="published"))


def test_unsubscribing_is_idempotent_and_takes_only_that_one() -> None:
    first: list[Event] = []
    second: list[Event] = []
    bus = EventBus()
    stop = bus.subscribe(first.append)
    bus.subscribe(second.append)
    bus.emit(Event(name="claimed"))
    stop()
    stop()
    bus.emit(Event(name="claimed"))
    assert (len(first), len(second)) == (1, 2)


def test_an_observer_may_unsubscribe_while_it_is_told() -> None:
    bus = EventBus()
    seen: list[Event] = []

    def once(event: Event) -> None:
        seen.append(event)
        stop()

    stop = bus.subscribe(once)
    bus.emit(Event(name="claimed"))
    bus.emit(Event(name="claimed"))
    assert len(seen) == 1


class Misspelt:
    @hookimpl
    def moonrelay_deliverd(self, event: Event) -> None: ...


class TwoArguments:
    @hookimpl
    def moonrelay_delivered(self, event: Event, payload: object) -> None: ...


class Unmarked:
    def moonrelay_delivered(self, event: Event) -> None: ...


@pytest.mark.parametrize("observer", [Misspelt(), TwoArguments(), Unmarked(), Recorder, 7, None])
def test_what_is_no_observer_is_refused(observer: object) -> None:
    with pytest.raises(PluginError, match="observer"):
        EventBus([observer])
    bus = EventBus()
    with pytest.raises(PluginError):
        bus.subscribe(observer)
    bus.emit(Event(name="delivered"))


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("published", logging.DEBUG),
        ("delivered", logging.DEBUG),
        ("spilled", logging.INFO),
        ("lease_expired", logging.INFO),
        ("retried", logging.WARNING),
        ("fallback", logging.WARNING),
        ("failed", logging.WARNING),
        ("cache_hit", logging.DEBUG),
        ("cache_trouble", logging.WARNING),
        ("cache_approximated", logging.INFO),
    ],
)
def test_log_records_have_a_level_and_the_ids(caplog: pytest.LogCaptureFixture, name: str, level: int) -> None:
    event = Event(
        name=name,  # type: ignore[arg-type]
        request_id="r1",
        stage="denoise",
        peer="127.0.0.1:1",
        attempt=2,
        reason="why",
        extra={"name": "not the name", "message": "kept apart", "slot": 3},
    )
    with caplog.at_level(logging.DEBUG, logger="moonrelay.events"):
        EventBus().emit(event)
    (record,) = caplog.records
    assert record.levelno == level
    assert (record.event, record.request_id, record.stage, record.peer, record.attempt) == (
        name,
        "r1",
        "denoise",
        "127.0.0.1:1",
        2,
    )
    assert record.getMessage().startswith(f"{name} ")
    assert "reason=why" in record.getMessage()
    assert "slot=3" in record.getMessage()


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(ConfigError, match="no event"):
        Event(name="exploded")  # type: ignore[arg-type]


def test_fields_never_let_extra_replace_a_field() -> None:
    event = Event(name="published", nbytes=4, extra={"nbytes": 9, "slot": 1, "none": None})
    assert event.fields() == {"name": "published", "nbytes": 4, "slot": 1}


def test_observers_by_name_are_loaded_only_when_asked() -> None:
    registry = Registry("moonrelay.observers", built_in={"metrics": "moonrelay.metrics:Metrics"})
    assert load_observers([], registry) == []
    (metrics,) = load_observers(["metrics"], registry)
    assert isinstance(metrics, Metrics)
    with pytest.raises(PluginError, match="no observer 'metric'"):
        load_observers(["metric"], registry)


def test_an_observer_class_that_cannot_be_made_is_a_plugin_error() -> None:
    registry = Registry("moonrelay.observers", built_in={"bus": "moonrelay.metrics:HistogramValue"})
    with pytest.raises(PluginError, match="cannot be made: TypeError"):
        load_observers(["bus"], registry)


def emit(metrics: Metrics, *events: Event) -> None:
    bus = EventBus([metrics], ManualClock())
    for event in events:
        bus.emit(event)


def test_metrics_count_events_bytes_and_errors() -> None:
    metrics = Metrics()
    emit(
        metrics,
        Event(name="published", stage="encode", kind="embedding", nbytes=100),
        Event(name="delivered", stage="denoise", kind="embedding", nbytes=100, path="p2p", duration_s=0.003),
        Event(name="delivered", stage="denoise", kind="embedding", nbytes=50, path="p2p", duration_s=0.2),
        Event(name="failed", stage="denoise", code="peer_lost", reason="it died"),
    )
    snapshot = metrics.snapshot()
    delivered = (("event", "delivered"), ("stage", "denoise"), ("path", "p2p"))
    assert snapshot["moonrelay_bytes_total"][delivered] == 150
    assert snapshot["moonrelay_errors_total"] == {(("event", "failed"), ("stage", "denoise"), ("code", "peer_lost")): 1}
    histogram = snapshot["moonrelay_duration_seconds"][(("event", "delivered"), ("path", "p2p"))]
    assert isinstance(histogram, HistogramValue)
    assert (histogram.count, histogram.total) == (2, pytest.approx(0.203))
    counts = dict(histogram.buckets)
    assert (counts[0.0025], counts[0.005], counts[0.1], counts[0.25], counts[float("inf")]) == (0, 1, 1, 2, 2)


def test_a_value_on_a_bound_belongs_to_that_bucket() -> None:
    metrics = Metrics()
    emit(metrics, Event(name="delivered", duration_s=0.005))
    (histogram,) = metrics.snapshot()["moonrelay_duration_seconds"].values()
    assert isinstance(histogram, HistogramValue)
    assert dict(histogram.buckets)[0.005] == 1
    assert dict(histogram.buckets)[0.0025] == 0


def test_a_snapshot_stands_still() -> None:
    metrics = Metrics()
    emit(metrics, Event(name="published", nbytes=1))
    before = metrics.snapshot()
    emit(metrics, Event(name="published", nbytes=1))
    assert list(before["moonrelay_events_total"].values()) == [1]
    assert list(metrics.snapshot()["moonrelay_events_total"].values()) == [2]


def test_no_id_stands_in_a_label_and_words_are_bounded() -> None:
    metrics = Metrics()
    for number in range(MAX_WORDS + 50):
        emit(
            metrics,
            Event(
                name="published",
                request_id=f"request-{number}",
                payload_id=f"payload-{number}",
                peer=f"peer-{number}",
                reason=f"reason-{number}",
                kind=f"kind-{number}",
                nbytes=1,
            ),
        )
    text = metrics.render()
    for word in ("request-", "payload-", "peer-", "reason-"):
        assert word not in text
    kinds = {dict(labels)["kind"] for labels in metrics.snapshot()["moonrelay_events_total"]}
    assert len(kinds) == MAX_WORDS + 1
    assert "other" in kinds


def test_the_text_format() -> None:
    metrics = Metrics()
    assert metrics.render() == ""
    emit(metrics, Event(name="published", kind='a"b\\c\nd', nbytes=2048))
    lines = metrics.render().splitlines()
    assert "# TYPE moonrelay_events_total counter" in lines
    assert r'moonrelay_events_total{event="published",stage="",kind="a\"b\\c\nd",path=""} 1' in lines
    assert "# TYPE moonrelay_payload_bytes histogram" in lines
    buckets = [line for line in lines if line.startswith("moonrelay_payload_bytes_bucket")]
    assert buckets[0].endswith('le="1024"} 0')
    assert buckets[1].endswith('le="4096"} 1')
    assert buckets[-1].endswith('le="+Inf"} 1')
    assert any(line.startswith("moonrelay_payload_bytes_sum") and line.endswith(" 2048") for line in lines)


def test_what_caches_move_and_what_troubles_them_is_counted() -> None:
    metrics = Metrics()
    for name in ("cache_hit", "cache_stored", "cache_evicted"):
        metrics(Event(name=name, path="store", nbytes=7))  # type: ignore[arg-type]
    metrics(Event(name="cache_trouble", path="store", code="peer_lost"))
    counted = metrics.snapshot()
    for name in ("cache_hit", "cache_stored", "cache_evicted"):
        assert counted["moonrelay_bytes_total"][(("event", name), ("stage", ""), ("path", "store"))] == 7
    errors = counted["moonrelay_errors_total"]
    assert errors == {(("event", "cache_trouble"), ("stage", ""), ("code", "peer_lost")): 1}
