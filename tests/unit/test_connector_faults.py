"""The connector on an engine that lies, fails, stalls and writes late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moonrelay import (
    DiffusionConnector,
    Event,
    IntegrityError,
    LeaseStatus,
    StagePayload,
    TransferFailed,
    TransferTimeout,
)

MakeConnector = Callable[..., DiffusionConnector]


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def make(events: list[Event]) -> Iterator[MakeConnector]:
    made: list[DiffusionConnector] = []

    def build(role: str, *faults: str, mode: str = "p2p", **settings: Any) -> DiffusionConnector:
        engine: dict[str, Any] = {"engine": "memory", "pool_bytes": 1 << 20}
        if faults:
            engine |= {"engine": "faulty", "options": {"inner": "memory", "faults": list(faults)}}
        made.append(DiffusionConnector(role, mode, engine, observers=[events.append], **settings))
        return made[-1]

    yield build
    for connector in made:
        connector.close()


def sent(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, 4, 6, 8, 8, generator=torch.Generator().manual_seed(seed))


def publish(producer: DiffusionConnector, chunks: int = 1) -> Any:
    return producer.publish(
        StagePayload(
            request_id="r", kind="latent", tensor=sent(), chunk_dim=2 if chunks > 1 else None, num_chunks=chunks
        )
    )


def names(events: list[Event]) -> list[str]:
    return [event.name for event in events]


@pytest.mark.parametrize("fault", ["fail", "fail_after"])
def test_one_failure_of_the_engine_is_retried(make: MakeConnector, fault: str) -> None:
    producer, consumer = make("denoise"), make("decode", fault)
    assert torch.equal(consumer.receive(publish(producer)), sent())  # type: ignore[arg-type]


def test_an_engine_that_keeps_failing_is_reported_and_leaves_the_payload(
    make: MakeConnector, events: list[Event]
) -> None:
    producer, consumer = make("denoise"), make("decode", *["fail"] * 4)
    handle = publish(producer)
    with pytest.raises(TransferFailed) as caught:
        consumer.receive(handle, timeout_s=10)
    assert caught.value.retryable
    assert "failed" in names(events)
    assert producer.status(handle).state is LeaseStatus.READY
    assert consumer._runtime.data().arena.live_slots == 0
    assert torch.equal(make("decode").receive(handle), sent())  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", ["wrong", "short", "nothing"])
def test_false_success_is_never_delivered(make: MakeConnector, events: list[Event], fault: str) -> None:
    producer, consumer = make("denoise"), make("decode", *[fault] * 4)
    handle = publish(producer)
    with pytest.raises(IntegrityError, match="differs"):
        consumer.receive(handle, timeout_s=10)
    assert "delivered" not in names(events)
    assert producer.status(handle).state is LeaseStatus.READY


@pytest.mark.parametrize("fault", ["wrong", "short", "nothing"])
def test_one_false_success_is_healed_by_the_retry(make: MakeConnector, events: list[Event], fault: str) -> None:
    producer, consumer = make("denoise"), make("decode", fault)
    assert torch.equal(consumer.receive(publish(producer)), sent())  # type: ignore[arg-type]
    assert "retried" in names(events)


def test_a_wrong_chunk_is_not_handed_out(make: MakeConnector) -> None:
    # Chunk 0 is fine, then every read of chunk 1 (four strips of it, twice) is wrong.
    producer, consumer = make("denoise"), make("decode", *["none"] * 4, *["wrong"] * 8)
    chunks = consumer.consume(publish(producer, chunks=3), timeout_s=10)
    assert torch.equal(next(chunks), sent()[:, :, :2])
    with pytest.raises(IntegrityError):
        next(chunks)


def test_late_bytes_never_land_in_reused_memory(make: MakeConnector) -> None:
    producer, consumer = make("denoise"), make("decode", "late")
    with pytest.raises(TransferTimeout):
        consumer.receive(publish(producer), timeout_s=0.3)
    arena, quarantine = consumer._runtime.data().arena, consumer._runtime.data().quarantine
    assert quarantine.busy == 1
    assert arena.live_slots == 1, "the landing place of a read that is not quiet was given back to the pool"
    others = [consumer.empty((1, 4, 6, 8, 8), dtype=torch.float32).zero_() for _ in range(8)]
    engine: Any = consumer._runtime.data().engine
    engine.let_late_writes()
    until = time.monotonic() + 10
    while quarantine.busy and time.monotonic() < until:
        threading.Event().wait(0.01)
    assert quarantine.busy == 0
    assert all(torch.all(other == 0) for other in others)
    del others
    assert arena.live_slots == 0


def test_a_stalled_engine_ends_at_the_deadline(make: MakeConnector) -> None:
    producer, consumer = make("denoise"), make("decode", "stall")
    handle = publish(producer)
    with pytest.raises(TransferTimeout):
        consumer.receive(handle, timeout_s=0.3)
    assert torch.equal(make("decode").receive(handle, timeout_s=10), sent())  # type: ignore[arg-type]


def test_without_digests_a_lying_engine_is_believed(make: MakeConnector) -> None:
    # What `integrity="off"` gives up; the same fault is caught above with digests on.
    producer, consumer = make("denoise", integrity="off"), make("decode", "wrong", integrity="off")
    assert not torch.equal(consumer.receive(publish(producer)), sent())  # type: ignore[arg-type]


def test_a_failing_engine_falls_back_to_nothing_it_was_not_told(make: MakeConnector, tmp_path: Any) -> None:
    # The producer lives and has not relayed: a broken read is an error, not a silent other path.
    settings = {"mode": "auto", "store_config": f"local://{tmp_path}"}
    producer, consumer = make("denoise", **settings), make("decode", *["fail"] * 4, **settings)
    with pytest.raises(TransferFailed):
        consumer.receive(publish(producer), timeout_s=10)
