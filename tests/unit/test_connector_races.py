"""Orders of events in which a connector could lose, leak, mix up or hang; each is forced, not waited for."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moonrelay import (
    Aborted,
    ClosedError,
    ConfigError,
    DeleteOnConsume,
    DiffusionConnector,
    Event,
    LeaseExpired,
    LeaseHeld,
    LeaseLost,
    LeaseStatus,
    MoonrelayError,
    PeerLost,
    Pinned,
    PublicationState,
    Shared,
    StageHandle,
    StagePayload,
    Ttl,
)
from moonrelay.clock import Deadline, ManualClock, SystemClock
from moonrelay.connector.sources import DirectSource
from moonrelay.control import messages as wire
from moonrelay.lease import Available
from moonrelay.relay.records import RelayedPayload

Make = Callable[..., DiffusionConnector]
CLAIM_TTL_S = 1.0
_names = itertools.count()


@pytest.fixture
def store() -> str:
    return f"memory://races-{next(_names)}"


@pytest.fixture
def make(store: str) -> Iterator[Make]:
    made: list[DiffusionConnector] = []

    def build(role: str = "denoise", mode: str = "p2p", **settings: Any) -> DiffusionConnector:
        engine = {"engine": "memory", "pool_bytes": settings.pop("pool_bytes", 1 << 20)}
        control = {"claim_ttl_s": CLAIM_TTL_S, "renew_s": 0.2, "peer_timeout_s": 1.0, "retry_s": 0.2}
        control |= settings.pop("control", {})
        if mode != "p2p":
            settings.setdefault("store_config", store)
        made.append(DiffusionConnector(role, mode, engine, control_config=control, **settings))
        if mode != "p2p":
            made[-1]._runtime.relay()  # the store lives as long as somebody has it open
        return made[-1]

    yield build
    for connector in made:
        connector.close()


class Gated:
    """A relay whose puts and gets can be held up by the test."""

    def __init__(self, connector: DiffusionConnector) -> None:
        self._inner = connector._runtime.relay()
        connector._runtime._relay = self  # type: ignore[assignment]
        self.before_put: Callable[[str], None] = lambda _key: None
        self.before_get: Callable[[str], None] = lambda _key: None

    def put(self, key: str, *args: Any, **kwargs: Any) -> None:
        self.before_put(key)
        self._inner.put(key, *args, **kwargs)

    def get(self, key: str, *args: Any, **kwargs: Any) -> bool:
        self.before_get(key)
        return self._inner.get(key, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Stop:
    """A point at which a thread waits until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self.go.wait(20)


class Call:
    """A call in a thread of its own, and what came of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="test-call", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as exc:
            self._error = exc

    def result(self, timeout_s: float = 15.0) -> Any:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the call hangs"
        if self._error is not None:
            raise self._error
        return self._value

    @property
    def running(self) -> bool:
        return self._thread.is_alive()


def latents(nbytes: int = 4096, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 255, (4, nbytes // 4), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def payload(tensor: torch.Tensor, chunks: int = 1, **more: Any) -> StagePayload:
    dim = 0 if chunks > 1 else None
    return StagePayload(request_id="r1", kind="latent", tensor=tensor, chunk_dim=dim, num_chunks=chunks, **more)


def pool(connector: DiffusionConnector) -> tuple[int, int]:
    gc.collect()
    arena = connector._runtime.data().arena
    return arena.live_slots, arena.used_bytes


def keys(connector: DiffusionConnector) -> list[str]:
    return connector._runtime.relay().keys("moonrelay/", Deadline(5, SystemClock()))


def until(predicate: Callable[[], bool], timeout_s: float = 10.0) -> None:
    limit = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < limit, "it did not become true"
        threading.Event().wait(0.005)


def die(connector: DiffusionConnector) -> None:
    """End a connector as a kill would: nobody is told, nothing is moved."""
    connector._runtime.close()


def same(got: object, sent: torch.Tensor) -> bool:
    return isinstance(got, torch.Tensor) and torch.equal(got, sent)


def relay_whole(producer: DiffusionConnector, handle: StageHandle) -> None:
    """Store a payload's chunks and end as its producer would."""
    entry = producer._outbox.ledger._entries[handle.id]
    assert entry.relayed is not None
    digests = producer._outbox.ledger.digests(entry)
    deadline = Deadline(5, SystemClock())
    for chunk in range(handle.num_chunks):
        entry.relayed.put_chunk(chunk, entry.placement.extents(chunk), digests[chunk], deadline)
    entry.relayed.put_end(handle.num_chunks, handle.lease.ttl_s, deadline)


# Waiting readers.


@pytest.mark.parametrize("end", ["nack", "ack"])
def test_a_waiter_being_retried_hears_of_what_happens_meanwhile(make: Make, end: str) -> None:
    producer, first, second = make(), make("decode"), make("decode")
    handle = producer.publish(payload(latents()))
    held = first.claim(handle)
    ledger = producer._outbox.ledger
    waiting = Call(lambda: second.receive(handle, timeout_s=30))
    until(lambda: len(ledger._entries[handle.id].waiters) == 1)
    original = ledger._try_claim
    here = threading.current_thread()

    def between(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        if threading.current_thread() is here:
            getattr(held, end)()
        return answer

    ledger._try_claim = between  # type: ignore[method-assign]
    ledger._apply((Available(handle.id),))
    if end == "nack":
        assert same(waiting.result(5), latents())
    else:
        with pytest.raises(LeaseLost):
            waiting.result(5)


def test_a_waiter_that_gave_up_is_not_granted_the_claim(make: Make) -> None:
    control = {"claim_ttl_s": 20.0, "renew_s": 1.0}
    producer, first, gone, second = make(control=control), make("decode"), make("decode"), make("decode")
    handle = producer.publish(payload(latents()))
    held = first.claim(handle)
    assert handle.direct is not None
    owner = handle.direct.control
    request = wire.Claim(payload_id=handle.id, reader="gone", wait_s=30.0)
    with pytest.raises(MoonrelayError):
        gone._runtime.channel().request(owner, request, Deadline(0.3, SystemClock()))
    gone.status(handle)  # says, by the way, that the claim is not waited for any more
    held.nack()
    assert same(second.receive(handle, timeout_s=5), latents())


def test_an_answer_that_fails_loses_no_memory(make: Make) -> None:
    producer, first, second = make(), make("decode"), make("decode")
    publication = producer.open(payload(latents(), lease=DeleteOnConsume(0.6)))
    publication.ready(0)
    other = producer.publish(payload(latents()))
    held = first.claim(other)
    waiting = Call(lambda: second.claim(other, timeout_s=2))
    ledger = producer._outbox.ledger
    until(lambda: len(ledger._entries[other.id].waiters) == 1)
    waiter = ledger._entries[other.id].waiters[0]

    class Broken:
        waiting = True

        def reply(self, message: object) -> None:
            raise MoonrelayError("it was answered before")

    waiter.responder = Broken()
    waiter.until = 0.0
    # Both in one tick: the answer that fails, and the end of the other payload's lease.
    until(lambda: producer._runtime.clock.monotonic() > 0)
    threading.Event().wait(0.7)
    ledger.tick(producer._runtime.clock.monotonic())
    publication.wait("expired", 5)
    held.ack()
    assert pool(producer) == (0, 0)
    with pytest.raises(MoonrelayError):
        waiting.result()


def test_64_readers_one_wins(make: Make) -> None:
    producer, readers = make(), [make("decode") for _ in range(2)]
    handle = producer.publish(payload(latents()))
    calls = [Call(lambda reader=readers[index % 2]: reader.receive(handle, timeout_s=20)) for index in range(64)]  # type: ignore[misc]
    outcomes = []
    for call in calls:
        try:
            outcomes.append(call.result(30))
        except LeaseLost as exc:
            outcomes.append(exc)
    winners = [outcome for outcome in outcomes if not isinstance(outcome, LeaseLost)]
    assert len(winners) == 1
    assert same(winners[0], latents())
    assert producer._outbox.ledger._entries == {}


def test_publishing_from_many_threads(make: Make) -> None:
    producer, consumer = make(), make("decode")

    def one(seed: int) -> bool:
        return all(
            same(consumer.receive(producer.publish(payload(latents(seed=seed)))), latents(seed=seed)) for _ in "123"
        )

    calls = [Call(lambda seed=seed: one(seed)) for seed in range(12)]  # type: ignore[misc]
    assert all(call.result(30) for call in calls)
    assert pool(producer) == (0, 0)


# Closing.


def test_a_refusal_that_was_caught_keeps_no_frames(make: Make) -> None:
    """Frames hold tensors: those of whoever called, too."""
    producer, consumer = make("encode"), make()
    handle = producer.publish(payload(latents()))
    consumer.receive(handle)

    class Held:
        pass

    def ask() -> weakref.ref[Held]:
        held = Held()
        with pytest.raises(LeaseLost):
            consumer.claim(handle, timeout_s=5.0)
        return weakref.ref(held)

    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()


def test_close_while_a_claim_is_being_asked_for(make: Make) -> None:
    producer, first, second = make(), make("decode"), make("decode")
    handle = producer.publish(payload(latents()))
    held = first.claim(handle)
    waiting = Call(lambda: second.claim(handle, timeout_s=20))
    until(lambda: len(producer._outbox.ledger._entries[handle.id].waiters) == 1)
    second.close()
    with pytest.raises(ClosedError):
        waiting.result(5)
    held.nack()
    assert same(first.receive(handle, timeout_s=5), latents())


def test_close_from_two_threads(make: Make) -> None:
    producer, consumer = make(mode="auto"), make("decode", "auto")
    handle = producer.publish(payload(latents()))
    calls = [Call(producer.close) for _ in range(3)]
    for call in calls:
        call.result()
    assert same(consumer.receive(handle, timeout_s=5), latents())


def test_a_spilled_payload_can_be_had_while_its_producer_is_slow_to_close(make: Make) -> None:
    producer, consumer = make(mode="auto", spill_after_s=0.0, drain_timeout_s=0.3), make("decode", "auto")
    gate = Gated(producer)
    spilled = producer.open(payload(latents()))
    spilled.ready(0)
    spilled.wait("spilled", 5)
    stop = Stop()
    gate.before_put = stop
    stuck = producer.open(payload(latents(seed=1)))
    stuck.ready(0)
    assert stop.reached.wait(5)
    closing = Call(producer.close)
    try:
        until(lambda: not producer._outbox.ledger._entries)
        assert same(consumer.receive(spilled.handle, timeout_s=5), latents())
        with pytest.raises(MoonrelayError):
            stuck.ready(0)
        assert stuck.state in (PublicationState.ABORTED, PublicationState.SPILLED)
    finally:
        stop.go.set()
        closing.result()


def test_memory_is_not_let_go_while_a_move_reads_it(make: Make) -> None:
    producer = make(mode="auto", spill_after_s=0.0, drain_timeout_s=0.3)
    gate = Gated(producer)
    stop = Stop()
    publication = producer.open(payload(latents(), chunks=2))
    gate.before_put = stop
    publication.ready(0)
    publication.ready(1)
    assert stop.reached.wait(5)
    placement = producer._outbox.ledger._entries[publication.handle.id].placement
    closing = Call(producer.close)
    until(lambda: not producer._outbox.ledger._entries)
    assert placement.leaves, "the move under way would store nothing in the place of the second chunk"
    stop.go.set()
    closing.result()
    assert placement.leaves == []


def test_close_relays_what_is_still_being_digested(make: Make) -> None:
    producer = make(mode="auto", spill_after_s=600.0, pool_bytes=8 << 20)
    consumer = make("decode", "auto", pool_bytes=8 << 20)
    stop = Stop()
    original = producer._outbox._digest

    def slow(*args: Any) -> bytes:
        stop()
        return original(*args)

    producer._outbox._digest = slow  # type: ignore[method-assign, assignment]
    handle = producer.publish(payload(latents(2 << 20)))
    assert stop.reached.wait(5)
    closing = Call(producer.close)
    until(lambda: producer._outbox._draining)
    stop.go.set()
    closing.result(8)
    assert same(consumer.receive(handle, timeout_s=5), latents(2 << 20))


def test_close_ends_every_publication(make: Make) -> None:
    producer, consumer = make(drain_timeout_s=0.2), make("decode")
    publication = producer.open(payload(latents()))
    publication.ready(0)
    claim = consumer.claim(publication.handle)
    waiting = Call(lambda: publication.wait("consumed", 60))
    producer.close()
    with pytest.raises(Aborted, match="closed"):
        waiting.result(5)
    claim.nack()


def test_close_after_an_engine_that_does_not_start(make: Make) -> None:
    broken = DiffusionConnector("denoise", "p2p", {"engine": "memory", "device": "cuda:0"})
    before = threading.active_count()
    with pytest.raises(ConfigError, match="device"):
        broken.publish(payload(latents()))
    broken.close()
    broken.close()
    until(lambda: threading.active_count() <= before)


def test_close_with_claims_and_publications_in_every_state(make: Make, store: str) -> None:
    before = threading.active_count()
    producer, consumer = make(mode="auto", drain_timeout_s=1.0), make("decode", "auto")
    opened = producer.open(payload(latents(), chunks=4))
    opened.ready(2)
    ready = producer.publish(payload(latents()))
    claimed = consumer.claim(producer.publish(payload(latents())))
    being_read = producer.open(payload(latents(), chunks=2))
    being_read.ready(0)
    chunks = consumer.consume(being_read.handle, timeout_s=20)
    next(chunks)
    aborted = producer.open(payload(latents(), chunks=2))
    aborting = consumer.claim(aborted.handle)
    aborted.abort("enough")
    expiring = producer.open(payload(latents(), lease=DeleteOnConsume(0.2)))
    expiring.ready(0)
    reading = consumer.claim(expiring.handle)
    expiring.wait("expire_pending", 5)
    watcher = make("decode", "auto")
    Call(producer.close).result()
    with pytest.raises(MoonrelayError):
        next(chunks)
    assert same(watcher.receive(ready, timeout_s=5), latents())
    for claim in (claimed, aborting, reading):
        claim.nack()
    Call(consumer.close).result()
    states = {publication.state for publication in (opened, being_read, aborted, expiring)}
    assert states <= {PublicationState.ABORTED, PublicationState.EXPIRED, PublicationState.SPILLED}
    # Bounded: what nobody has taken stays under its keys, and that is only what is whole.
    left = {key.split("/")[1] for key in keys(watcher)}
    assert opened.handle.id not in left
    assert being_read.handle.id not in left
    watcher.close()
    until(lambda: threading.active_count() <= before)


# Memory.


@pytest.mark.parametrize("what", ["handle", "stage", "ready"])
def test_a_publish_that_fails_late_holds_nothing(make: Make, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    producer = make(pool_bytes=8 << 20)
    producer._runtime.data()
    nbytes, copy = 4096, False
    if what == "handle":
        monkeypatch.setattr("moonrelay.connector.outbox.StageHandle", _refuse)
    elif what == "stage":
        copy = True
        monkeypatch.setattr("moonrelay.connector.placement.copy_bits", _refuse)
    else:
        nbytes = 2 << 20
        for name in ("submit", "submit_staging"):
            monkeypatch.setattr(producer._runtime, name, _refuse, raising=False)
    with pytest.raises(ClosedError):
        producer.publish(payload(latents(nbytes)), copy=copy)
    assert producer._outbox.ledger._entries == {}
    assert pool(producer) == (0, 0)


def _refuse(*_: object, **__: object) -> None:
    raise ClosedError("no")


def test_a_foreign_error_while_staging_reaches_the_reader(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = make(pool_bytes=8 << 20), make("decode", pool_bytes=8 << 20)

    def odd(*_: object) -> None:
        raise ValueError("odd memory")

    monkeypatch.setattr("moonrelay.connector.placement.copy_bits", odd)
    publication = producer.open(payload(latents(2 << 20)))
    publication.ready(0)
    with pytest.raises(MoonrelayError, match="odd memory"):
        consumer.receive(publication.handle, timeout_s=10)
    publication_state = publication.state
    assert publication_state is PublicationState.ABORTED
    assert pool(producer) == (0, 0)


def test_one_release_that_fails_does_not_keep_the_rest(make: Make) -> None:
    producer, consumer = make(), make("decode")
    handle = producer.publish(payload(latents()))
    placement = producer._outbox.ledger._entries[handle.id].placement

    def fail() -> None:
        raise MoonrelayError("the engine does not unregister")

    placement._on_release.insert(0, fail)
    consumer.receive(handle)
    assert pool(producer) == (0, 0)


def test_interrupts_in_claim_and_read_leave_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = make(), make("decode")
    handle = producer.publish(payload(latents()))

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(consumer._runtime.channel(), "request", interrupt)
        with pytest.raises(KeyboardInterrupt):
            consumer.claim(handle)
    assert len(consumer._claims) == 0
    with monkeypatch.context() as patched:
        patched.setattr(consumer._runtime.data().engine, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            consumer.receive(handle)
    assert len(consumer._claims) == 0
    assert pool(consumer) == (0, 0)
    assert same(consumer.receive(handle, timeout_s=5), latents())


def test_a_claim_that_is_dropped_lapses(make: Make) -> None:
    producer, consumer = make(), make("decode")
    handle = producer.publish(payload(latents()))
    claim = consumer.claim(handle)
    del claim
    gc.collect()
    assert same(make("decode").receive(handle, timeout_s=10), latents())


@pytest.mark.parametrize("what", ["store consumer", "other layout"])
def test_reads_land_in_memory_that_the_engine_can_write(make: Make, what: str) -> None:
    producer, consumer = make(mode="p2p"), make("decode", "store" if what == "store consumer" else "p2p")
    data = consumer._runtime.data()
    data.engine.lands_in_foreign_memory = False
    original = data.engine.read
    foreign = []

    def read(peer: Any, region: Any, remote: int, local: int, nbytes: int) -> Any:
        if data.arena.find(local, nbytes) is None and data.registrations.find(local, nbytes) is None:
            foreign.append(local)
        return original(peer, region, remote, local, nbytes)

    data.engine.read = read  # type: ignore[method-assign, assignment]
    sent = latents()
    dst = torch.zeros(1024, 4, dtype=torch.uint8).t() if what == "other layout" else None
    assert same(consumer.receive(producer.publish(payload(sent)), dst=dst), sent)
    assert foreign == []


# Threads that must not wait for each other.


def test_a_store_that_hangs_does_not_stop_the_direct_path(make: Make) -> None:
    producer = make(mode="auto", spill_after_s=0.0, pool_bytes=16 << 20)
    consumer = make("decode", "auto", pool_bytes=16 << 20)
    gate = Gated(producer)
    stop = Stop()
    gate.before_put = stop
    for seed in range(4):
        producer.publish(payload(latents(seed=seed)))
    assert stop.reached.wait(5)
    try:
        handle = producer.publish(payload(latents(2 << 20)))
        assert same(consumer.receive(handle, timeout_s=5), latents(2 << 20))
    finally:
        stop.go.set()


def test_a_peer_that_hangs_does_not_stop_the_renewals_of_others(make: Make) -> None:
    hung, alive, consumer = make(), make(), make("decode", control={"peer_timeout_s": 3.0})
    doomed = [consumer.claim(hung.publish(payload(latents()))) for _ in range(12)]
    publication = alive.open(payload(latents()))
    publication.ready(0)
    claim = consumer.claim(publication.handle)
    stop = Stop()
    hung._outbox.ledger.renew = stop  # type: ignore[method-assign, assignment]
    assert stop.reached.wait(5)
    threading.Event().wait(2.5 * CLAIM_TTL_S)
    try:
        assert publication.state is PublicationState.CLAIMED
        assert same(claim.read(), latents())
        claim.ack()
    finally:
        stop.go.set()
    assert doomed


def test_a_relay_that_is_slow_to_start_does_not_stop_renewals(make: Make) -> None:
    producer, consumer = make(), make("decode")
    publication = producer.open(payload(latents()))
    publication.ready(0)
    claim = consumer.claim(publication.handle)
    stop = Stop()

    def hold() -> None:
        with consumer._runtime._lock:  # as a start does
            stop()

    holding = Call(hold)
    assert stop.reached.wait(5)
    threading.Event().wait(2 * CLAIM_TTL_S)
    state = publication.state
    stop.go.set()
    holding.result()
    assert state is PublicationState.CLAIMED
    claim.nack()


def test_observers_are_not_called_under_the_lock(make: Make) -> None:
    owned: list[str] = []

    def observe(event: Event) -> None:
        ledger = producer._outbox.ledger
        if ledger.changed._is_owned():  # type: ignore[attr-defined]
            owned.append(event.name)
        raise RuntimeError("observers may raise")

    producer, consumer = make(observers=[observe]), make("decode")
    publication = producer.open(payload(latents()))
    publication.ready(0)
    claim = consumer.claim(publication.handle)
    claim.renew = lambda: None  # type: ignore[method-assign]
    publication.wait("ready", 10)
    assert same(consumer.receive(publication.handle), latents())
    assert owned == []


# Two owners of one payload: the producer, and the relay's records.


def test_a_renewal_that_fails_late_does_not_end_the_read_from_the_relay(make: Make) -> None:
    producer, consumer = make(mode="auto"), make("decode", "auto")
    gate = Gated(consumer)
    handle = producer.publish(payload(latents(), chunks=2))
    claim = consumer.claim(handle)
    relay_whole(producer, handle)
    producer._outbox.ledger._table.nack(handle.id, 1, 0.0)
    stop = Stop()
    first = threading.Event()
    lost = PeerLost("gone")

    def renew() -> None:
        if not first.is_set():
            first.set()
            stop()
        raise lost

    def fetch(*_: object) -> None:
        raise lost

    claim._source.renew = renew  # type: ignore[method-assign]
    claim._source.fetch = fetch  # type: ignore[method-assign, assignment]
    late = Call(claim.renew)
    assert stop.reached.wait(5)

    def before_get(key: str) -> None:
        if "/c/" in key and not stop.go.is_set():
            stop.go.set()
            late.result()

    gate.before_get = before_get
    assert same(claim.read(timeout_s=10), latents())
    assert claim.path == "store"
    claim.nack()


def test_a_producer_that_dies_before_all_was_stored_is_lost_not_late(make: Make) -> None:
    producer, consumer = make(mode="store"), make("decode", "store")
    publication = producer.open(payload(latents(), chunks=3))
    publication.ready(0)
    chunks = consumer.consume(publication.handle, timeout_s=60)
    assert torch.equal(next(chunks), latents()[:2])
    die(producer)
    with pytest.raises(PeerLost):
        Call(lambda: next(chunks)).result(10)


def test_a_producer_that_dies_after_all_was_stored_is_not_missed(make: Make) -> None:
    producer, consumer = make(mode="store"), make("decode", "store")
    publication = producer.open(payload(latents(), chunks=3))
    for chunk in range(3):
        publication.ready(chunk)
    publication.wait("spilled", 5)
    with consumer.claim(publication.handle, timeout_s=10) as claim:
        chunks = claim.chunks()
        next(chunks)
        die(producer)
        until(lambda: getattr(claim._source, "_direct", None) is None)
        assert len(list(chunks)) == 2
        claim.ack()
    with pytest.raises(LeaseLost):
        consumer.receive(publication.handle, timeout_s=5)


def test_of_a_relayed_payload_the_relays_record_decides(make: Make) -> None:
    producer, first, second = make(mode="auto", spill_after_s=0.0), make("decode", "auto"), make("decode", "auto")
    publication = producer.open(payload(latents()))
    publication.ready(0)
    publication.wait("spilled", 5)
    handle = publication.handle
    claim = first.claim(handle)
    claim.renew = lambda: None  # type: ignore[method-assign]
    publication.wait("spilled", 10)  # the producer's claim has lapsed, the record in the relay stands
    other = Call(lambda: second.receive(handle, timeout_s=20))
    until(lambda: publication.state is PublicationState.CLAIMED)
    outcomes: list[object] = []
    try:
        data = claim.read()
        claim.ack()
        outcomes.append(data)
    except LeaseLost as exc:
        outcomes.append(exc)
    try:
        outcomes.append(other.result())
    except LeaseLost as exc:
        outcomes.append(exc)
    assert sum(same(outcome, latents()) for outcome in outcomes) == 1, f"winners: {outcomes}"
    until(lambda: not producer._outbox.ledger._entries)
    until(lambda: not [key for key in keys(producer) if not key.endswith("/tomb")])


def test_a_renewal_that_came_too_late_does_not_end_a_read_whose_record_in_the_relay_stands(make: Make) -> None:
    producer, consumer = make(mode="store"), make("decode", "store")
    publication = producer.open(payload(latents(), chunks=2))
    publication.ready(0)
    claim = consumer.claim(publication.handle)
    renew = claim.renew
    claim.renew = lambda: None  # type: ignore[method-assign]
    publication.wait("open", 10)  # the producer's claim has lapsed, the record in the relay stands
    claim.renew = renew  # type: ignore[method-assign]
    until(lambda: publication.state is PublicationState.CLAIMED)
    publication.ready(1)  # pushed to those who hold a claim
    assert same(claim.read(timeout_s=10), latents())
    claim.ack()
    until(lambda: not producer._outbox.ledger._entries)


def test_a_late_renewal_of_what_was_released_meanwhile_ends_the_read(make: Make) -> None:
    producer, consumer = make(mode="store"), make("decode", "store")
    publication = producer.open(payload(latents(), chunks=2))
    publication.ready(0)
    claim = consumer.claim(publication.handle)
    renew = claim.renew
    claim.renew = lambda: None  # type: ignore[method-assign]
    publication.wait("open", 10)
    producer.release(publication.handle)
    claim.renew = renew  # type: ignore[method-assign]
    with pytest.raises(LeaseLost):
        claim.read(timeout_s=10)
    claim.nack()


def test_a_payload_is_not_complete_in_the_relay_while_it_is_read_directly(make: Make) -> None:
    """Else a reader that cannot reach the producer could win beside one that can."""
    producer, first, second = make(mode="auto", spill_after_s=0.0), make("decode", "auto"), make("decode", "auto")
    gate = Gated(producer)
    stop = Stop()
    gate.before_put = stop
    publication = producer.open(payload(latents()))
    publication.ready(0)
    handle = publication.handle
    assert stop.reached.wait(5)
    claim = first.claim(handle)
    assert claim.path == "p2p"
    stop.go.set()
    until(lambda: not producer._outbox.ledger._entries[handle.id].moving)
    assert [key for key in keys(producer) if key.endswith("/end")] == []
    assert same(claim.read(), latents())
    claim.nack()
    publication.wait("spilled", 5)
    assert len([key for key in keys(producer) if "/c/" in key]) == 1, "the chunk was stored twice"
    die(producer)
    assert same(second.receive(handle, timeout_s=10), latents())
    with pytest.raises(LeaseLost):
        first.receive(handle, timeout_s=10)


def test_readers_that_acknowledged_before_the_spill_count_after_it(make: Make) -> None:
    producer, consumer = make(mode="auto", spill_after_s=0.3), make("decode", "auto")
    publication = producer.open(payload(latents(), lease=Shared(3)))
    publication.ready(0)
    handle = publication.handle
    assert same(consumer.receive(handle), latents())
    publication.wait("spilled", 5)
    assert same(consumer.receive(handle), latents())
    die(producer)
    assert same(consumer.receive(handle, timeout_s=10), latents())
    with pytest.raises(LeaseLost):
        consumer.receive(handle, timeout_s=10)
    assert [key for key in keys(consumer) if not key.endswith("/tomb")] == []


@pytest.mark.parametrize("lease", [Ttl(30), Pinned()])
def test_any_number_of_readers_through_the_relay(make: Make, lease: object) -> None:
    producer, consumer = make(mode="store"), make("decode", "store")
    publication = producer.open(payload(latents(), lease=lease))
    publication.ready(0)
    publication.wait("spilled", 5)
    assert same(consumer.receive(publication.handle), latents())
    die(producer)
    for _ in range(2):
        assert same(consumer.receive(publication.handle, timeout_s=10), latents())
    consumer.release(publication.handle, timeout_s=10)
    with pytest.raises(LeaseLost):
        consumer.receive(publication.handle, timeout_s=10)
    assert [key for key in keys(consumer) if not key.endswith("/tomb")] == []
    assert consumer.status(publication.handle, timeout_s=10).state is LeaseStatus.RELEASED


def test_what_expired_in_the_relay_is_called_expired(make: Make) -> None:
    producer, consumer = make(mode="store"), make("decode", "store")
    handle = producer.publish(payload(latents()))
    until(lambda: any(key.endswith("/end") for key in keys(producer)))
    die(producer)
    assert handle.relay is not None
    buried = RelayedPayload(consumer._runtime.relay(), handle.relay.prefix, handle.id)
    buried.tombstone("its time ran out in the store", Deadline(5, SystemClock()), kind="expired")
    with pytest.raises(LeaseExpired):
        consumer.claim(handle, timeout_s=10)
    assert consumer.status(handle, timeout_s=10).state is LeaseStatus.EXPIRED


def test_an_ack_that_finds_no_producer_consumes_what_was_relayed(make: Make) -> None:
    producer, consumer = make(mode="auto"), make("decode", "auto")
    handle = producer.publish(payload(latents()))
    claim = consumer.claim(handle)
    assert same(claim.read(), latents())
    relay_whole(producer, handle)
    die(producer)
    claim.ack()
    with pytest.raises(LeaseLost):
        make("decode", "auto").receive(handle, timeout_s=10)


def test_a_spilled_payload_can_be_aborted_released_and_expire(make: Make) -> None:
    producer = make(mode="auto", spill_after_s=0.0)
    for end in ("abort", "release", "expire"):
        # The lease that expires is long enough to be spilled first.
        publication = producer.open(payload(latents(), lease=DeleteOnConsume(3.0 if end == "expire" else 60.0)))
        publication.ready(0)
        publication.wait("spilled", 5)
        if end == "abort":
            publication.abort("enough")
        elif end == "release":
            producer.release(publication.handle)
        until(lambda: not keys(producer))
        assert pool(producer) == (0, 0)


@pytest.mark.parametrize("end", ["abort", "release", "expire", "ack"])
def test_nothing_is_left_when_a_payload_ends_while_it_is_being_moved(make: Make, end: str) -> None:
    producer, consumer = make(mode="auto", spill_after_s=0.0), make("decode", "auto")
    gate = Gated(producer)
    stop = Stop()
    gate.before_put = stop
    publication = producer.open(payload(latents(), lease=DeleteOnConsume(0.5 if end == "expire" else 60.0), chunks=2))
    publication.ready(0)
    publication.ready(1)
    assert stop.reached.wait(5)
    if end == "abort":
        publication.abort("enough")
    elif end == "release":
        producer.release(publication.handle)
    elif end == "ack":
        assert same(consumer.receive(publication.handle), latents())
    else:
        publication.wait("expire_pending", 5)
    assert pool(producer)[0] == 1, "the put that is under way reads this memory"
    stop.go.set()
    until(lambda: not keys(producer))
    until(lambda: pool(producer) == (0, 0))
    assert producer._outbox.ledger._entries == {}


# Time.


def test_a_read_without_digests_of_memory_that_was_reused_is_not_delivered(make: Make) -> None:
    producer = make(integrity="off", control={"claim_ttl_s": 0.4, "renew_s": 0.1})
    consumer = make("decode", integrity="off", control={"claim_ttl_s": 60.0, "renew_s": 20.0})
    publication = producer.open(payload(latents()))
    publication.ready(0)
    claim = consumer.claim(publication.handle)
    claim.renew = lambda: None  # type: ignore[method-assign]
    publication.wait("ready", 5)  # lapsed
    producer.release(publication.handle)
    reused = producer.empty((4096,), dtype=torch.uint8).fill_(7)
    assert reused.numel()
    with pytest.raises(LeaseLost):
        claim.read(timeout_s=5)


def test_an_aborted_payload_is_not_delivered_without_digests(make: Make) -> None:
    producer, consumer = make(integrity="off"), make("decode", integrity="off")
    publication = producer.open(payload(latents()))
    publication.ready(0)
    claim = consumer.claim(publication.handle)
    original = claim._source.fetch

    def fetch(*args: Any) -> None:
        publication.abort("wrong after all")
        until(lambda: claim.progress.failure is not None)
        original(*args)

    claim._source.fetch = fetch  # type: ignore[method-assign, assignment]
    with pytest.raises(Aborted, match="wrong after all"):
        claim.read(timeout_s=5)
    claim.nack()


def test_a_claim_that_lapsed_is_named_when_its_bytes_are_wrong(make: Make) -> None:
    producer, consumer = make(), make("decode")
    publication = producer.open(payload(latents()))
    publication.ready(0)
    claim = consumer.claim(publication.handle)
    claim.renew = lambda: None  # type: ignore[method-assign]
    publication.wait("ready", 5)
    producer.release(publication.handle)
    reused = producer.empty((4096,), dtype=torch.uint8).fill_(7)
    assert reused.numel()
    with pytest.raises(LeaseLost):
        claim.read(timeout_s=5)


def test_renewals_follow_the_owners_clock_not_ours(make: Make) -> None:
    producer = make(control={"claim_ttl_s": 0.6, "renew_s": 0.1})
    consumer = make("decode", control={"claim_ttl_s": 60.0, "renew_s": 20.0})
    publication = producer.open(payload(latents()))
    publication.ready(0)
    claim = consumer.claim(publication.handle)
    threading.Event().wait(1.5)
    assert publication.state is PublicationState.CLAIMED
    assert same(claim.read(), latents())
    claim.ack()


def test_a_payload_read_at_the_last_moment_is_not_lost(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = make(), make("decode")
    handle = producer.publish(payload(latents()))
    original = DirectSource.fetch

    def slow(self: DirectSource, *args: Any) -> None:
        original(self, *args)
        threading.Event().wait(0.5)

    monkeypatch.setattr(DirectSource, "fetch", slow)
    try:
        delivered = same(consumer.receive(handle, timeout_s=0.4), latents())
    except MoonrelayError:
        delivered = False
    consumed = producer.status(handle).state is LeaseStatus.CONSUMED
    assert delivered == consumed


def test_no_time_at_all_disturbs_nobody(make: Make) -> None:
    control = {"claim_ttl_s": 20.0, "renew_s": 1.0}
    producer, hasty, consumer = make(control=control), make("decode"), make("decode")
    handle = producer.publish(payload(latents()))
    hasty.status(handle)
    for _ in range(5):
        with pytest.raises((MoonrelayError, TimeoutError)):
            hasty.claim(handle, timeout_s=0)
    assert same(consumer.receive(handle, timeout_s=5), latents())


def test_leases_follow_the_clock_that_was_given() -> None:
    clock = ManualClock()
    producer = DiffusionConnector("denoise", "p2p", {"engine": "memory", "pool_bytes": 1 << 20}, clock=clock)
    publication = producer.open(payload(latents(), lease=DeleteOnConsume(3600.0)))
    publication.ready(0)
    clock.advance(3599.0)
    assert publication.state is PublicationState.READY
    clock.advance(2.0)
    until(lambda: publication.state is PublicationState.EXPIRED)
    assert pool(producer) == (0, 0)
    producer.close()


def test_a_chunk_that_came_too_late_is_told_so_every_time(make: Make) -> None:
    publication = make().open(payload(latents(), chunks=2))
    publication.abort("enough")
    for _ in range(2):
        with pytest.raises(Aborted, match="enough"):
            publication.ready(0)


# Modes and shapes.


@pytest.mark.parametrize("mode", ["p2p", "store", "auto"])
def test_a_handle_in_the_process_that_made_it(make: Make, mode: str) -> None:
    conn = make(mode=mode)
    assert same(conn.receive(conn.publish(payload(latents()))), latents())
    claim = conn.claim(conn.publish(payload(latents(), chunks=2)))
    assert [chunk.shape[0] for chunk in claim.chunks()] == [2, 2]
    claim.ack()


@pytest.mark.parametrize("integrity", ["full", "off"])
@pytest.mark.parametrize("mode", ["p2p", "store", "auto"])
def test_payloads_without_bytes(make: Make, mode: str, integrity: str) -> None:
    settings: dict[str, Any] = {"integrity": integrity}
    if mode == "auto":
        settings["spill_after_s"] = 0.0
    producer, consumer = make(mode=mode, **settings), make("decode", mode, **settings)
    for tree in (torch.zeros(0, 4096), {}, [], None, {"a": [], "n": 3}, [torch.zeros(2, 0), None]):
        if isinstance(tree, torch.Tensor):
            publication = producer.open(payload(tree))
        else:
            publication = producer.open(StagePayload(request_id="r", kind="k", data=tree))
        publication.ready(0)
        if mode != "p2p":
            publication.wait("spilled", 5)
        got = consumer.receive(publication.handle, timeout_s=5)
        assert type(got) is type(tree)
        if isinstance(tree, torch.Tensor):
            assert isinstance(got, torch.Tensor)
            assert got.shape == tree.shape
    until(lambda: pool(producer) == (0, 0))
    if mode != "p2p":
        until(lambda: not keys(producer))


@pytest.mark.parametrize(("theirs", "ours"), list(itertools.permutations(["p2p", "store", "auto"], 2)))
def test_modes_of_the_two_sides_may_differ(make: Make, theirs: str, ours: str) -> None:
    producer, consumer = make(mode=theirs), make("decode", ours)
    tree = {"a": [latents(), latents(seed=1)], "b": 2}
    got = consumer.receive(producer.publish(StagePayload(request_id="r", kind="k", data=tree)), timeout_s=5)
    assert isinstance(got, dict)
    assert torch.equal(got["a"][1], latents(seed=1))
    publication = producer.open(payload(latents(), chunks=4))
    seen = consumer.consume(publication.handle, timeout_s=5)
    for chunk in range(4):
        publication.ready(chunk)
        assert torch.equal(next(seen), latents()[chunk : chunk + 1])
    assert next(seen, None) is None


@pytest.mark.parametrize("mode", ["p2p", "store"])
def test_a_tree_has_no_chunks(make: Make, mode: str) -> None:
    producer, consumer = make(mode=mode), make("decode", mode)
    with pytest.raises(ConfigError, match="chunk"):
        producer.publish(
            StagePayload(request_id="r", kind="k", data={"a": latents(), "b": latents()}, chunk_dim=0, num_chunks=2)
        )
    handle = producer.publish(StagePayload(request_id="r", kind="k", data={"a": latents()}))
    with consumer.claim(handle) as claim, pytest.raises(ConfigError, match="read"):
        claim.chunks()
    assert isinstance(consumer.receive(handle, timeout_s=5), dict)


def test_chunks_that_are_never_asked_for_hold_nothing(make: Make) -> None:
    producer, consumer = make(), make("decode")
    handle = producer.publish(payload(latents(), chunks=2))
    with consumer.claim(handle) as claim:
        chunks = claim.chunks()
        del chunks
        assert pool(consumer) == (0, 0)
    with pytest.raises(LeaseHeld):
        with make("decode").claim(handle):
            consumer.claim(handle, timeout_s=0.3)
