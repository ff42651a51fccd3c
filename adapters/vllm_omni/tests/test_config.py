"""What a connector's ``extra`` may hold, and what a misspelled key is told."""

from __future__ import annotations

from typing import Any

import pytest

from moonrelay.errors import ConfigError
from moonrelay_vllm_omni.config import HOST_KEYS, KEYS, parse


def test_nothing_given_is_the_default() -> None:
    settings = parse({})
    assert (settings.readers, settings.lease_ttl_s, settings.stage_id) == (1, 600.0, -1)
    assert settings.transfer.engine == "mooncake"
    assert settings.transfer_mode is None


def test_our_keys_reach_the_part_that_they_are_of() -> None:
    settings = parse(
        {
            "transfer_mode": "p2p",
            "engine": "shm",
            "pool-bytes": 1 << 20,
            "store": "local:///tmp/x",
            "namespace": "mine",
            "lease-ttl-s": 5,
            "readers": 3,
            "peer_timeout_s": 1.0,
            "engine_options": {"directory": "/tmp"},
        }
    )
    assert settings.transfer_mode == "p2p"
    assert (settings.transfer.engine, settings.transfer.pool_bytes) == ("shm", 1 << 20)
    assert settings.transfer.options == {"directory": "/tmp"}
    assert (settings.store.url, settings.store.namespace) == ("local:///tmp/x", "mine")
    assert (settings.lease_ttl_s, settings.readers, settings.control.peer_timeout_s) == (5, 3, 1.0)


def test_one_address_serves_both_planes_unless_it_is_said_otherwise() -> None:
    assert parse({"hostname": "10.0.0.3"}).control.bind_host == "10.0.0.3"
    assert parse({"hostname": "10.0.0.3", "bind_host": "0.0.0.0"}).control.bind_host == "0.0.0.0"


@pytest.mark.parametrize("key", sorted(HOST_KEYS))
def test_what_the_host_injects_is_accepted(key: str) -> None:
    parse({key: "1"})


@pytest.mark.parametrize(
    "key", ["codec_chunk_frames", "connector_get_sleep_s", "initial_codec_chunk_frames", "decode_batch_max_size"]
)
def test_what_the_hosts_models_keep_there_is_left_alone(key: str) -> None:
    parse({key: 25})


def test_a_role_limits_nothing() -> None:
    assert parse({"role": "sender"}) == parse({"role": "receiver"}) == parse({})


@pytest.mark.parametrize(
    ("key", "near"), [("transfermode", "transfer_mode"), ("pool_byte", "pool_bytes"), ("lease-ttl", "lease_ttl_s")]
)
def test_a_misspelled_key_is_refused_with_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=near) as caught:
        parse({key: 1})
    assert caught.value.context["field"] == key


@pytest.mark.parametrize("key", ["memory_pool_size", "shm_threshold_bytes", "metadata_server"])
def test_another_connectors_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse({key: 1})


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"readers": -1}, "readers"),
        ({"readers": True}, "readers"),
        ({"readers": 1.5}, "readers"),
        ({"lease_ttl_s": 0}, "lease_ttl_s"),
        ({"lease_ttl_s": "5"}, "lease_ttl_s"),
        ({"transfer_mode": "rdma"}, "transfer_mode"),
        ({"integrity": "some"}, "integrity"),
        ({"protocol": "ib"}, "protocol"),
        ({"pool_bytes": 0}, "pool_bytes"),
        ({"fetchers": 0}, "fetchers"),
        ({"snapshot": 1}, "snapshot"),
        ({"spill_after_s": -1.0}, "spill_after_s"),
        ({"pool-bytes": 1, "pool_bytes": 2}, "pool_bytes"),
    ],
)
def test_a_wrong_value_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(given)
    assert caught.value.context["field"] == field


def test_extra_must_be_a_mapping() -> None:
    with pytest.raises(ConfigError, match="extra"):
        parse(["engine"])  # type: ignore[arg-type]


def test_what_extra_does_not_say_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONRELAY_TE_ENGINE", "shm")
    monkeypatch.setenv("MOONRELAY_STORE_NAMESPACE", "theirs")
    assert parse({}).transfer.engine == "shm"
    settings = parse({"engine": "memory"})
    assert (settings.transfer.engine, settings.store.namespace) == ("memory", "theirs")


@pytest.mark.parametrize(("given", "number"), [(2, 2), ("3", 3), (None, -1), ("decode", -1)])
def test_the_stages_number_is_read_where_there_is_one(given: object, number: int) -> None:
    assert parse({"stage_id": given}).stage_id == number


def test_no_key_of_ours_is_the_hosts_too() -> None:
    assert not HOST_KEYS & set(KEYS)
