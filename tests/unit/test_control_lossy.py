"""Control messages lost on command."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moonrelay import DiffusionConnector, LeaseStatus, PeerLost, StagePayload
from moonrelay.control import messages
from moonrelay.control.lossy import MESSAGES, losses
from moonrelay.errors import ConfigError

Make = Callable[..., DiffusionConnector]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[DiffusionConnector] = []

    def build(role: str, *drop: str, **control: Any) -> DiffusionConnector:
        control = {"retry_s": 0.05, "peer_timeout_s": 1.0, "claim_ttl_s": 1.0, "renew_s": 0.2, **control}
        if drop:
            control["options"] = {"drop": list(drop)}
        engine = {"engine": "memory", "pool_bytes": 1 << 20}
        made.append(DiffusionConnector(role, "p2p", engine, control_config=control, drain_timeout_s=0.2))
        return made[-1]

    yield build
    for connector in made:
        connector.close()


def publish(producer: DiffusionConnector) -> Any:
    return producer.publish(StagePayload("r", "latent", torch.arange(100)))


def test_the_words_are_the_messages_on_the_wire() -> None:
    assert {"ack", "granted", "claim", "renew", "done", "progressed", "welcome", "hello", "failure"} <= set(MESSAGES)


def test_only_what_was_named_is_lost_and_only_so_often() -> None:
    lost = losses({"drop": ["send:ack:2", "receive:done"]})
    assert lost is not None
    ack, done = messages.Ack(payload_id="p", token=1), messages.Done()
    assert [lost("send", ack) for _ in range(4)] == [True, True, False, False]
    assert [lost("receive", ack), lost("send", done)] == [False, False]
    assert [lost("receive", done) for _ in range(2)] == [True, False]


def test_all_is_without_end() -> None:
    lost = losses({"drop": ["send:renew:all"]})
    assert lost is not None
    assert all(lost("send", messages.Renew(payload_id="p", token=1)) for _ in range(100))


def test_nothing_to_lose_is_no_part_of_the_channel() -> None:
    assert losses({}) is None
    assert losses({"drop": []}) is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"drip": []}, "did you mean 'drop'"),
        ({"drop": "send:ack"}, "must be a list"),
        ({"drop": ["lose:ack"]}, "must begin with send or receive"),
        ({"drop": ["send:akc"]}, "did you mean 'ack'"),
        ({"drop": ["send:ack:many"]}, "must end with a number"),
        ({"drop": ["send:ack:-1"]}, "must end with a number"),
    ],
)
def test_what_is_not_understood_is_refused_when_the_connector_is_made(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DiffusionConnector("denoise", control_config={"options": options})


@pytest.mark.parametrize(
    ("producer_drop", "consumer_drop"),
    [
        ((), ("send:ack:2",)),
        ((), ("receive:granted:1",)),
        (("send:done:1",), ()),
        (("receive:claim:2",), ()),
        (("send:progressed:all",), ()),
    ],
)
def test_a_payload_is_handed_over_once_though_messages_are_lost(
    make: Make, producer_drop: tuple[str, ...], consumer_drop: tuple[str, ...]
) -> None:
    producer, consumer = make("denoise", *producer_drop), make("decode", *consumer_drop)
    handle = publish(producer)
    got = consumer.receive(handle, timeout_s=10)
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got, torch.arange(100))
    assert producer.status(handle).state is LeaseStatus.CONSUMED


def test_a_peer_that_hears_nothing_is_lost(make: Make) -> None:
    producer, consumer = make("denoise"), make("decode", "send:claim:all")
    with pytest.raises(PeerLost):
        consumer.claim(publish(producer), timeout_s=5)


def test_loss_on_purpose_is_said_aloud(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make("decode", "send:ack:1").start()
    assert "lost on purpose: send:ack:1" in caplog.text
