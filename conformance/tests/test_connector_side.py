"""The connector as a target: every operation of a side on every route, and what its ground sees."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moonrelay.errors import (
    Aborted,
    CapacityError,
    ConfigError,
    LeaseLost,
    MoonrelayError,
    PeerLost,
    PluginError,
    UnsupportedTensor,
    WireError,
)
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.corpus import trees
from moonrelay_conformance.sides import SidePool, SideProcess
from moonrelay_conformance.sides.connector_side import ConnectorSide, handle_of
from moonrelay_conformance.sides.runner import _Opened
from moonrelay_conformance.targets.adapter import Faults, Outgoing, SideSettings
from moonrelay_conformance.targets.connector import ConnectorGround, ConnectorTarget

pytestmark = pytest.mark.processes

TENSOR = {"tensor": {"shape": [6, 5], "dtype": "bfloat16", "seed": 7}}
TREE = {"dict": [["a", TENSOR], ["b", {"tuple": [1, {"tensor": {"shape": [], "dtype": "float32", "seed": 1}}]}]]}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectorGround]:
    with ConnectorTarget().ground(tmp_path_factory.mktemp("ground")) as made:
        assert isinstance(made, ConnectorGround)
        yield made


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidePool]:
    with (tmp_path_factory.mktemp("log") / "log").open("w") as log, SidePool(log=log) as pool:
        yield pool


class Sides:
    """Sides of one route."""

    def __init__(self, pool: SidePool, ground: ConnectorGround, route: str) -> None:
        self._pool = pool
        self._ground = ground
        self.route = route

    def start(self, role: str, **settings: Any) -> SideProcess:
        return self._pool.start(
            ConnectorTarget.side, self._ground.settings(SideSettings(role=role, route=self.route, **settings))
        )


@pytest.fixture(params=["p2p", "store"])
def sides(shared: SidePool, ground: ConnectorGround, request: pytest.FixtureRequest) -> Iterator[Sides]:
    yield Sides(shared, ground, request.param)
    shared.take_back()


def publish(side: SideProcess, tree: Any = TREE, **outgoing: Any) -> Any:
    return side.do("publish", name="p", outgoing={"request_id": "r", **outgoing}, tree=tree)


def until(check: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_payload_is_received_with_its_metadata_and_leaves_nothing(sides: Sides, ground: ConnectorGround) -> None:
    producer, consumer = sides.start("producer"), sides.start("consumer")
    published = publish(producer, metadata={"step": 3})
    got = consumer.do("receive", ticket=published["ticket"], name="mine")
    assert got == {"digest": published["digest"], "metadata": {"step": 3}}
    assert (consumer.do("in_use")["slots"] > 0) == (sides.route == "p2p")
    consumer.do("drop", name="mine")
    assert set(consumer.do("in_use").values()) == {0}
    until(lambda: set(producer.do("in_use").values()) == {0})
    assert consumer.do("counters")[f"delivered_{sides.route}"] == 1
    until(lambda: ground.sweep() or ground.store_keys() == ())


def test_claim_read_ack_status(sides: Sides) -> None:
    producer, consumer = sides.start("producer"), sides.start("consumer")
    published = publish(producer)
    consumer.do("claim", ticket=published["ticket"], name="c")
    assert producer.do("status", ticket=published["ticket"]) == "claimed"
    assert consumer.do("read", name="c")["digest"] == published["digest"]
    consumer.do("nack", name="c")
    consumer.do("claim", ticket=published["ticket"], name="d")
    assert consumer.do("read", name="d")["digest"] == published["digest"]
    consumer.do("ack", name="d")
    with pytest.raises(LeaseLost):
        consumer.do("receive", ticket=published["ticket"], timeout_s=1)


def test_chunks_come_in_order_though_they_are_ready_in_another(sides: Sides) -> None:
    producer, consumer = sides.start("producer"), sides.start("consumer")
    opened = producer.do("open", name="o", outgoing={"request_id": "r", "chunk_dim": 0, "num_chunks": 4}, tree=TENSOR)
    consumer.do("claim", ticket=opened["ticket"], name="c")
    for chunk in (2, 0, 3, 1):
        producer.do("ready", name="o", chunk=chunk)
    seen = [consumer.do("next_chunk", name="c") for _ in range(4)]
    assert [one["digest"] for one in seen] == opened["chunk_digests"]
    assert [one["index"] for one in seen] == [0, 1, 2, 3]
    assert consumer.do("next_chunk", name="c") == {"end": True}
    consumer.do("ack", name="c")


def test_a_chunk_holds_zeros_until_it_is_ready() -> None:
    """A host that reads a chunk before its producer said that it is final gets wrong bytes, and is found out."""
    tree = trees.build(TENSOR)
    opened = _Opened(Outgoing(request_id="r", tree=tree, chunk_dim=0, num_chunks=3))
    published = opened.blank().tree
    assert not published.any()
    opened.fill(1)
    assert [
        trees.digest(chunk) == trees.digest(true) for chunk, true in zip(published.split(2), tree.split(2), strict=True)
    ] == [
        False,
        True,
        False,
    ]
    opened.fill(0)
    opened.fill(2)
    opened.fill(7)
    assert trees.digest(published) == trees.digest(tree)


@pytest.mark.parametrize("by", ["ticket", "publication"])
def test_abort_is_heard_with_its_reason(sides: Sides, by: str) -> None:
    producer, consumer = sides.start("producer"), sides.start("consumer")
    if by == "ticket":
        ticket = publish(producer)["ticket"]
        producer.do("abort_ticket", ticket=ticket, reason="out of frames")
    else:
        ticket = producer.do("open", name="o", outgoing={"request_id": "r"}, tree=TREE)["ticket"]
        producer.do("abort", name="o", reason="out of frames")
    with pytest.raises(Aborted, match="out of frames"):
        consumer.do("receive", ticket=ticket, timeout_s=5)


def test_release_drops_a_pinned_payload(sides: Sides) -> None:
    producer, consumer = sides.start("producer"), sides.start("consumer")
    published = publish(producer, lease="pinned")
    for _ in range(2):
        assert consumer.do("receive", ticket=published["ticket"])["digest"] == published["digest"]
    consumer.do("release", ticket=published["ticket"])
    with pytest.raises(LeaseLost):
        consumer.do("receive", ticket=published["ticket"], timeout_s=1)


def test_registered_memory_is_published_without_a_copy(shared: SidePool, ground: ConnectorGround) -> None:
    producer = Sides(shared, ground, "p2p").start("producer")
    consumer = Sides(shared, ground, "p2p").start("consumer")
    published = publish(producer, registered=True)
    assert consumer.do("receive", ticket=published["ticket"])["digest"] == published["digest"]
    assert producer.do("counters")["staged"] == 0
    publish(producer)
    assert producer.do("counters")["staged"] == 1
    shared.take_back()


def test_refusals_are_typed_and_name_the_field(sides: Sides) -> None:
    producer, consumer = sides.start("producer"), sides.start("consumer")
    with pytest.raises(UnsupportedTensor) as caught:
        publish(producer, {"dict": [["a", {"foreign": "object"}]]})
    assert "'a'" in caught.value.context["field"]
    with pytest.raises(WireError):
        consumer.do("receive", ticket={"handle": "AAAA"})
    with pytest.raises(PluginError):
        publish(producer, lease="no-such-lease")


@pytest.mark.parametrize(
    ("route", "faults"),
    [
        ("p2p", Faults(engine=("wrong",))),
        ("p2p", Faults(control=("send:ack:1", "receive:granted:1"))),
        ("store", Faults(relay=("get:wrong",))),
    ],
)
def test_faults_are_injected_and_told(shared: SidePool, ground: ConnectorGround, route: str, faults: Faults) -> None:
    sides = Sides(shared, ground, route)
    producer, consumer = sides.start("producer"), sides.start("consumer", faults=faults)
    published = publish(producer)
    assert consumer.do("receive", ticket=published["ticket"], timeout_s=20)["digest"] == published["digest"]
    if not faults.control:
        assert consumer.do("counters")["retried"] == 1
    shared.take_back()


def test_a_killed_producer_leaves_what_a_sweep_takes(sides: Sides, ground: ConnectorGround) -> None:
    before = ground.memory_names(), ground.store_keys()
    producer, consumer = sides.start("producer", lease_ttl_s=1.0), sides.start("consumer")
    ticket = publish(producer)["ticket"]
    if sides.route == "store":
        # Its last record: what was stored in part dies with the producer.
        until(lambda: any(key.endswith("end") for key in set(ground.store_keys()) - set(before[1])))
    producer.kill()
    if sides.route == "p2p":
        with pytest.raises(PeerLost):
            consumer.do("receive", ticket=ticket, timeout_s=10)
        assert any(str(producer.pid) in name for name in ground.memory_names())
    else:
        assert consumer.do("receive", ticket=ticket, timeout_s=10)["digest"]
    until(lambda: ground.sweep() or ground.store_keys() == ())
    assert not any(str(producer.pid) in name for name in ground.memory_names())


def test_a_sweep_leaves_what_is_not_over(shared: SidePool, tmp_path: Path) -> None:
    """Else a payload that an acknowledgement forgot would never be seen."""
    with ConnectorTarget().ground(tmp_path) as own:
        assert isinstance(own, ConnectorGround)
        producer = Sides(shared, own, "store").start("producer", lease_ttl_s=60.0)
        publish(producer)
        until(lambda: own.store_keys() != ())
        time.sleep(1.5)
        own.sweep()
        assert own.store_keys() != ()
        shared.take_back()


@pytest.mark.parametrize("left", [False, True])
def test_the_bound_is_the_same_on_each_route_whatever_lies_in_the_store(
    shared: SidePool, tmp_path: Path, left: bool
) -> None:
    fits, too_large = ({"tensor": {"shape": [size], "dtype": "uint8", "seed": 1}} for size in (900_000, 1_200_000))
    with ConnectorTarget().ground(tmp_path) as own:
        assert isinstance(own, ConnectorGround)
        if left:
            publish(Sides(shared, own, "store").start("producer"), fits)
            until(lambda: any(name.startswith("objects") for name in own.store_keys()))
            shared.take_back()
        for route in ("p2p", "store"):
            sides = Sides(shared, own, route)
            producer = sides.start("producer", pool_bytes=1 << 20)
            consumer = sides.start("consumer", pool_bytes=1 << 20)
            published = publish(producer, fits)
            got = consumer.do("receive", ticket=published["ticket"], timeout_s=10)
            assert got["digest"] == published["digest"]
            with pytest.raises(CapacityError):
                consumer.do("receive", ticket=publish(producer, too_large)["ticket"], timeout_s=10)
            shared.take_back()


def test_spill_moves_an_unclaimed_payload_to_the_store(shared: SidePool, tmp_path: Path) -> None:
    with ConnectorTarget().ground(tmp_path) as own:
        assert isinstance(own, ConnectorGround)
        sides = Sides(shared, own, "spill")
        producer, consumer = sides.start("producer", spill_after_s=0.1), sides.start("consumer")
        ticket = publish(producer)["ticket"]
        until(lambda: producer.do("counters")["spilled"] == 1)
        assert own.store_keys() != ()
        producer.kill()
        assert consumer.do("receive", ticket=ticket, timeout_s=10)["digest"]
        shared.take_back()


def test_a_ground_takes_away_what_it_made_and_what_a_killed_run_left(tmp_path: Path) -> None:
    ground = ConnectorGround(tmp_path)
    folder = ground._own.path
    assert folder.is_dir()
    other = ConnectorGround(tmp_path)
    assert folder.is_dir()
    os.close(ground._own._fd)  # as the system does for a killed run
    ground._own._fd = -1
    third = ConnectorGround(tmp_path)
    assert not folder.exists()
    for one in (other, third):
        one.close()
        one.close()
        assert not one._own.path.exists()


def test_what_is_declared_follows_from_the_choice(tmp_path: Path) -> None:
    assert ConnectorTarget().routes() == ("p2p", "store")
    direct = ConnectorTarget(relay="none")
    assert direct.routes() == ("p2p",)
    assert not direct.supports(Capability.SPILL)
    assert not direct.supports(Capability.INJECT_STORE)
    assert not ConnectorTarget(relay="mooncake").supports(Capability.CAPACITY)
    assert not ConnectorTarget().supports(Capability.PIPELINE)
    assert ConnectorTarget().info().host == "engine shm, relay local"
    with pytest.raises(ConfigError, match="engine='rmda'"):
        ConnectorTarget(engine="rmda")
    with direct.ground(tmp_path) as ground:
        assert ground.store_keys() == ()
        with pytest.raises(ConfigError, match="needs a store"):
            ground.settings(SideSettings(role="producer", route="store"))


def test_a_route_that_is_none_and_a_ticket_that_is_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="route='fax'"):
        ConnectorSide(SideSettings(role="producer", route="fax"))
    for ticket in ({}, {"handle": 7}, {"handle": "!"}, {"handle": ""}):
        with pytest.raises(MoonrelayError):
            handle_of(ticket)


@pytest.mark.mooncake
@pytest.mark.slow
def test_mooncake_engine_and_store(tmp_path: Path, shared: SidePool) -> None:
    target = ConnectorTarget(engine="mooncake", relay="mooncake")
    with target.ground(tmp_path) as ground:
        assert isinstance(ground, ConnectorGround)
        for route in target.routes():
            sides = Sides(shared, ground, route)
            producer, consumer = sides.start("producer"), sides.start("consumer")
            published = publish(producer)
            got = consumer.do("receive", ticket=published["ticket"], timeout_s=20)
            assert got["digest"] == published["digest"]
            shared.take_back()
        until(lambda: ground.sweep() or ground.store_keys() == (), 20)
