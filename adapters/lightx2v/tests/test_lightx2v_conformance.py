"""The side through which the conformance suite tests the adapter, without the host and without the suite."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import ConfigError, DeadlineExceeded, LeaseExpired, LeaseLost, UnsupportedTensor, WireError
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.targets.adapter import Outgoing, SideSettings
from moonrelay_conformance.targets.connector import ConnectorGround
from moonrelay_lightx2v import plugin
from moonrelay_lightx2v.conformance import FIELD, Lightx2vSide, Lightx2vTarget
from moonrelay_lightx2v.plugin import Lightx2vAdapter
from moonrelay_lightx2v.roles import BareMixin, link_of, native_mixin

TIMEOUT_S = 20.0
SHORT_S = 0.5


@pytest.fixture(params=["127.0.0.1", "::1"], ids=["v4", "v6"])
def sides(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Lightx2vSide, Lightx2vSide]]:
    monkeypatch.setattr(plugin, "host_folder", lambda: None)
    with ConnectorGround(tmp_path, relay="none") as ground:
        settings = (SideSettings(role=role, route="p2p", host=request.param) for role in ("producer", "consumer"))
        made = [Lightx2vSide(ground.settings(one)) for one in settings]
        producer, consumer = made
        try:
            for one in made:
                one.start()
            yield producer, consumer
        finally:
            consumer.close()
            producer.close()


def outgoing(tree: Any, **more: Any) -> Outgoing:
    return Outgoing(request_id="r", tree=tree, **more)


def settle(*sides: Lightx2vSide) -> None:
    deadline = Deadline(10.0, SystemClock())
    while any(any(side.in_use().values()) for side in sides):
        assert not deadline.expired, [dict(side.in_use()) for side in sides]
        threading.Event().wait(0.02)


def test_the_adapter_gives_its_target() -> None:
    target = Lightx2vAdapter().conformance_target()
    assert isinstance(target, Lightx2vTarget)
    assert target.routes() == ("p2p",)
    assert target.named_routes() == ()
    assert target.supports(Capability.CLAIM, Capability.RESUME, Capability.TTL, Capability.CAPACITY, Capability.IPV6)
    assert not any(target.supports(one) for one in Lightx2vTarget.WITHOUT)
    assert "engine shm" in target.host()
    assert not target.needs_host


def test_the_class_without_the_host_has_the_contracts_methods_and_gives_nothing(
    sides: tuple[Lightx2vSide, Lightx2vSide],
) -> None:
    """So what is run without the host is ours alone."""
    assert {name for name in vars(BareMixin) if not name.startswith("__")} == set(plugin.CONTRACT)
    assert native_mixin() is BareMixin
    for name in plugin.CONTRACT:
        with pytest.raises(NotImplementedError):
            getattr(BareMixin(), name)(None)
    producer, consumer = sides
    consumer.receive(producer.publish(outgoing(torch.ones(3))), timeout_s=TIMEOUT_S)


def test_a_ticket_is_what_a_role_is_told(sides: tuple[Lightx2vSide, Lightx2vSide]) -> None:
    producer, consumer = sides
    ticket = producer.publish(outgoing({"a": [torch.arange(6), None]}))
    assert ticket == json.loads(json.dumps(ticket))
    assert ticket.keys() == {"desk", "task_id"}
    found = consumer.receive(ticket, timeout_s=TIMEOUT_S)
    assert found["a"][1] is None
    assert torch.equal(found["a"][0], torch.arange(6))
    with pytest.raises(LeaseLost, match="consumed by another"):
        consumer.receive(ticket, timeout_s=SHORT_S)
    with pytest.raises(DeadlineExceeded):
        consumer.receive({**ticket, "task_id": "another"}, timeout_s=SHORT_S)


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"desk": "127.0.0.1:1"},
        {"desk": "localhost:1", "task_id": "t"},
        {"desk": "127.0.0.1", "task_id": "t"},
        {"desk": "127.0.0.1:0", "task_id": "t"},
        {"desk": "127.0.0.1:99999", "task_id": "t"},
        {"desk": "127.0.0.1:1", "task_id": ""},
        {"desk": ["127.0.0.1:1"], "task_id": "t"},
    ],
)
def test_a_damaged_ticket_is_refused(damaged: dict[str, Any]) -> None:
    side = Lightx2vSide(SideSettings(role="consumer", route="p2p"))
    with pytest.raises(WireError):
        side.claim(damaged, timeout_s=SHORT_S)


def test_a_claim_is_held_until_its_request_ends(sides: tuple[Lightx2vSide, Lightx2vSide]) -> None:
    producer, consumer = sides
    ticket = producer.publish(outgoing(torch.ones(3)))
    claim = consumer.claim(ticket, timeout_s=TIMEOUT_S)
    assert consumer.in_use()["claims"] == 1
    claim.nack()
    with pytest.raises(LeaseLost):
        claim.read(timeout_s=TIMEOUT_S)
    again = consumer.claim(ticket, timeout_s=TIMEOUT_S)
    assert torch.equal(again.read(timeout_s=TIMEOUT_S), torch.ones(3))
    again.ack(timeout_s=TIMEOUT_S)
    again.ack(timeout_s=TIMEOUT_S)
    settle(producer, consumer)


def test_one_consumer_may_be_at_several_requests(sides: tuple[Lightx2vSide, Lightx2vSide]) -> None:
    producer, consumer = sides
    tickets = [producer.publish(outgoing(torch.full((3,), float(number)))) for number in range(2)]
    claims = [consumer.claim(ticket, timeout_s=TIMEOUT_S) for ticket in reversed(tickets)]
    assert consumer.in_use()["claims"] == 2
    assert [float(claim.read(timeout_s=TIMEOUT_S)[0]) for claim in claims] == [1.0, 0.0]
    for claim in claims:
        claim.ack(timeout_s=TIMEOUT_S)
    settle(producer, consumer)
    assert not consumer._receivers, "who holds nothing is released"


def test_an_acknowledgement_that_fails_is_seen(sides: tuple[Lightx2vSide, Lightx2vSide]) -> None:
    producer, consumer = sides
    ticket = producer.publish(outgoing(torch.ones(3)))
    claim = consumer.claim(ticket, timeout_s=TIMEOUT_S)
    (sender,) = producer._senders.values()
    link = link_of(sender)
    (offered,) = link._offered
    link._drop(offered, "the same request was sent again")
    with pytest.raises(Exception, match="the same request was sent again"):
        claim.ack(timeout_s=TIMEOUT_S)
    settle(producer, consumer)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"metadata": {"seed": 1}}, "metadata"),
        ({"num_chunks": 2, "chunk_dim": 0}, "num_chunks"),
        ({"lease": "shared", "readers": 2}, "lease"),
        ({"lease": "ttl"}, "lease"),
    ],
)
def test_what_the_mixin_has_no_word_for_is_refused(more: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Lightx2vSide(SideSettings(role="producer", route="p2p")).publish(outgoing(torch.ones(4), **more))
    assert caught.value.context["field"] == field


def test_a_refusal_names_the_place_and_leaves_nothing(sides: tuple[Lightx2vSide, Lightx2vSide]) -> None:
    producer, _ = sides
    with pytest.raises(UnsupportedTensor) as caught:
        producer.publish(outgoing({"callback": object()}))
    assert FIELD in str(caught.value.context["field"])
    assert "callback" in str(caught.value.context["field"])
    settle(producer)


def test_another_life_is_another_senders_and_goes_with_it(sides: tuple[Lightx2vSide, Lightx2vSide]) -> None:
    producer, consumer = sides
    ticket = producer.publish(outgoing(torch.ones(4), ttl_s=30.0))
    assert producer.in_use()["payloads"] == 1
    consumer.receive(ticket, timeout_s=TIMEOUT_S)
    settle(producer)
    assert len(producer._senders) == 1


def test_who_comes_after_its_time_hears_that_it_has_expired(sides: tuple[Lightx2vSide, Lightx2vSide]) -> None:
    producer, consumer = sides
    ticket = producer.publish(outgoing(torch.ones(4), ttl_s=0.2))
    threading.Event().wait(0.5)
    with pytest.raises(LeaseExpired):
        consumer.receive(ticket, timeout_s=SHORT_S)
