"""The side through which the conformance suite tests the adapter, without the host and without the suite."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moonrelay.errors import Aborted, ConfigError, LeaseLost, UnsupportedTensor, WireError
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.targets.adapter import Outgoing, SideSettings
from moonrelay_conformance.targets.connector import ConnectorGround
from moonrelay_sglang import conformance
from moonrelay_sglang.conformance import FIELD, SglangSide, SglangTarget
from moonrelay_sglang.manager import PayloadManager
from moonrelay_sglang.plugin import SglangAdapter

TIMEOUT_S = 20.0


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SglangSide, SglangSide]]:
    monkeypatch.setattr(conformance, "class_of_manager", lambda: PayloadManager)
    with ConnectorGround(tmp_path) as ground:
        made = [SglangSide(ground.settings(SideSettings(role=role, route="p2p"))) for role in ("producer", "consumer")]
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


def test_the_adapter_gives_its_target() -> None:
    target = SglangAdapter().conformance_target()
    assert isinstance(target, SglangTarget)
    assert target.routes() == ("p2p", "store")
    assert target.named_routes() == ("spill",)
    assert target.supports(Capability.CLAIM, Capability.ABORT, Capability.RESUME, Capability.TTL, Capability.CAPACITY)
    assert not any(target.supports(one) for one in SglangTarget.WITHOUT)
    assert "engine shm, relay local" in target.host()


def test_a_ticket_is_what_the_head_sends(sides: tuple[SglangSide, SglangSide]) -> None:
    producer, consumer = sides
    ticket = producer.publish(outgoing({"a": [torch.arange(6), None]}))
    assert ticket == json.loads(json.dumps(ticket))
    assert ticket["msg_type"] == "transfer_ready"
    found = consumer.receive(ticket, timeout_s=TIMEOUT_S)
    assert found["a"][1] is None
    assert torch.equal(found["a"][0], torch.arange(6))
    with pytest.raises(LeaseLost):
        consumer.receive(ticket, timeout_s=TIMEOUT_S)
    with pytest.raises(WireError):
        consumer.receive({**ticket, "manifest": {}}, timeout_s=TIMEOUT_S)


def test_a_claim_is_held_until_it_is_acknowledged_or_given_back(sides: tuple[SglangSide, SglangSide]) -> None:
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
    assert consumer.in_use()["claims"] == 0


def test_an_acknowledgement_that_fails_is_seen(sides: tuple[SglangSide, SglangSide]) -> None:
    producer, consumer = sides
    ticket = producer.publish(outgoing(torch.ones(3)))
    claim = consumer.claim(ticket, timeout_s=TIMEOUT_S)
    producer.abort(ticket, "the client has gone")
    with pytest.raises(Aborted, match="the client has gone"):
        claim.ack(timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"metadata": {"seed": 1}}, "metadata"),
        ({"num_chunks": 2, "chunk_dim": 0}, "num_chunks"),
        ({"lease": "shared", "readers": 2}, "lease"),
        ({"lease": "ttl"}, "lease"),
    ],
)
def test_what_the_manager_has_no_word_for_is_refused(
    sides: tuple[SglangSide, SglangSide], more: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        sides[0].publish(outgoing(torch.ones(4), **more))
    assert caught.value.context["field"] == field


def test_a_refusal_names_the_place(sides: tuple[SglangSide, SglangSide]) -> None:
    with pytest.raises(UnsupportedTensor) as caught:
        sides[0].publish(outgoing({"callback": object()}))
    assert FIELD in str(caught.value.context["field"])
    assert "callback" in str(caught.value.context["field"])


def test_another_life_is_another_managers_and_goes_with_it(sides: tuple[SglangSide, SglangSide]) -> None:
    producer, consumer = sides
    ticket = producer.publish(outgoing(torch.ones(4), ttl_s=30.0))
    assert producer.in_use()["payloads"] == 1
    consumer.receive(ticket, timeout_s=TIMEOUT_S)
    assert set(producer.in_use().values()) == {0}
    assert len(producer._managers) == 1
