"""Settings: what the host's JSON says, its variables and its file, and what is wrong in them is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightx2v_double import LockableDict

from moonrelay.errors import ConfigError
from moonrelay_lightx2v import config

VARIABLES = (
    "MOONCAKE_CONFIG_PATH",
    "MOONCAKE_PROTOCOL",
    "MOONCAKE_LOCAL_HOSTNAME",
    "MOONCAKE_METADATA_SERVER",
    "MOONCAKE_DEVICE_NAME",
    "MOONRELAY_TRANSFER_MODE",
    "MOONRELAY_AUTH_KEY",
    "MOONRELAY_TE_POOL_BYTES",
    "MOONRELAY_TE_ENGINE",
)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def role(name: str, **section: Any) -> LockableDict:
    """A role's config as the host holds it: its example's JSON, our connector, locked."""
    rooms: dict[str, dict[str, Any]] = {
        "encoder": {"bootstrap_room": 0, "sender_engine_rank": 0, "receiver_engine_rank": 1},
        "transformer": {
            "bootstrap_room": 0,
            "sender_engine_rank": 0,
            "receiver_engine_rank": 1,
            "decoder_engine_rank": 2,
            "decoder_bootstrap_room": 1,
        },
        "decode": {"bootstrap_room": 1, "sender_engine_rank": 1, "receiver_engine_rank": 2},
    }
    hosts = {
        "connector": "moonrelay",
        "bootstrap_addr": "127.0.0.1",
        "protocol": "tcp",
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
    }
    made = LockableDict({"disagg_mode": name, "disagg_config": {**hosts, **rooms.get(name, {}), **section}})
    made.lock()
    return made


# -- who is chosen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"disagg_config": {}}, {"disagg_config": {"connector": "native"}}, None, []])
def test_without_our_name_the_host_keeps_its_own(given: Any) -> None:
    assert not config.is_chosen(given)


def test_our_name_chooses_us() -> None:
    assert config.is_chosen(role("encoder"))


@pytest.mark.parametrize("name", ["moonrely", "Moonrelay", "", 5, ["moonrelay"]])
def test_a_connector_that_nobody_knows_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"connector=.* is not known; use 'moonrelay'"):
        config.is_chosen({"disagg_config": {"connector": name}})


# -- where roles meet -------------------------------------------------------------------------------------------------


def test_the_hosts_examples_meet() -> None:
    encoder, transformer, decoder = (config.parse(role(name)) for name in config.ROLES)
    assert encoder.listens == ("127.0.0.1", 17788)
    assert encoder.dials == ()
    assert transformer.dials == (encoder.listens,)
    assert transformer.listens == ("127.0.0.1", 17799), "the host's formula: 17788 + rank 1 + room 1 * 10"
    assert decoder.dials == (transformer.listens,)
    assert decoder.listens is None
    assert (encoder.sends, encoder.receives) == ("encoder outputs", None)
    assert (transformer.sends, transformer.receives) == ("transformer outputs", "encoder outputs")
    assert (decoder.sends, decoder.receives) == (None, "transformer outputs")


def test_two_stages_where_no_decoder_is_named() -> None:
    found = config.parse(role("transformer", decoder_engine_rank=None))
    assert found.listens is None
    assert found.sends is None
    assert found.dials == (("127.0.0.1", 17788),)


def test_several_senders_and_ports_of_their_own() -> None:
    found = config.parse(role("transformer", bootstrap_addr=["127.0.0.1", "127.0.0.1:4000", "[::1]:5000", "::1"]))
    assert found.dials == (("127.0.0.1", 17788), ("127.0.0.1", 4000), ("::1", 5000), ("::1", 17788))


def test_an_address_that_is_named_twice_is_asked_once() -> None:
    found = config.parse(role("decode", bootstrap_addr=["localhost:1", "127.0.0.1:1"]))
    assert found.dials == (("127.0.0.1", 1),)


def test_a_rendezvous_port_wins_over_the_formula() -> None:
    assert config.parse(role("encoder", rendezvous_port=0)).listens == ("127.0.0.1", 0)
    assert config.parse(role("encoder", rendezvous_port=4711)).listens == ("127.0.0.1", 4711)


def test_numbers_as_text_as_the_host_takes_them() -> None:
    assert config.parse(role("encoder", bootstrap_room="2", sender_engine_rank="3")).listens == ("127.0.0.1", 17811)


@pytest.mark.parametrize(
    ("name", "section", "field"),
    [
        ("encoder", {"bootstrap_room": 4775}, "bootstrap_room"),
        ("encoder", {"bootstrap_room": -1}, "bootstrap_room"),
        ("encoder", {"bootstrap_room": True}, "bootstrap_room"),
        ("encoder", {"bootstrap_room": "one"}, "bootstrap_room"),
        ("encoder", {"sender_engine_rank": 1.5}, "sender_engine_rank"),
        ("transformer", {"decoder_bootstrap_room": 9999}, "decoder_bootstrap_room"),
        ("encoder", {"rendezvous_port": 70000}, "rendezvous_port"),
        ("encoder", {"rendezvous_port": "4711"}, "rendezvous_port"),
        ("transformer", {"bootstrap_addr": ""}, "bootstrap_addr"),
        ("transformer", {"bootstrap_addr": []}, "bootstrap_addr"),
        ("transformer", {"bootstrap_addr": None}, "bootstrap_addr"),
        ("transformer", {"bootstrap_addr": ["127.0.0.1", 5]}, "bootstrap_addr"),
        ("transformer", {"bootstrap_addr": "127.0.0.1:"}, "bootstrap_addr"),
        ("transformer", {"bootstrap_addr": "127.0.0.1:70000"}, "bootstrap_addr"),
        ("transformer", {"bootstrap_addr": "no such host.invalid"}, "bootstrap_addr"),
        ("encoder", {"local_hostname": "no such host.invalid"}, "local_hostname"),
        ("encoder", {"local_hostname": 5}, "local_hostname"),
        ("encoder", {"metadata_server": "etcd://somewhere"}, "metadata_server"),
        ("encoder", {"protocol": "pigeon"}, "protocol"),
        ("encoder", {"decentralized_queue": True}, "decentralized_queue"),
        ("encoder", {"pairing": "fifo"}, "pairing"),
        ("encoder", {"pairing": 5}, "pairing"),
        ("encoder", {"transfer_mode": "carrier"}, "transfer_mode"),
        ("encoder", {"integrity": "some"}, "integrity"),
        ("encoder", {"lease_ttl_s": 0}, "lease_ttl_s"),
        ("encoder", {"lease_ttl_s": "60"}, "lease_ttl_s"),
        ("encoder", {"lease_ttl_s": True}, "lease_ttl_s"),
        ("encoder", {"spill_after_s": -1}, "spill_after_s"),
        ("encoder", {"transfer_timeout_s": float("nan")}, "transfer_timeout_s"),
        ("encoder", {"staging_bytes": 0}, "pool_bytes"),
        ("encoder", {"engine_options": 5}, "engine_options"),
        ("encoder", {"store_options": ["a"]}, "store_options"),
    ],
)
def test_what_is_wrong_is_named(name: str, section: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(role(name, **section))
    assert caught.value.context["field"] == field


def test_a_room_beyond_the_ports_is_no_other_room() -> None:
    """The host's own code wraps it round silently."""
    with pytest.raises(ConfigError, match="make port 65538, and there are 65535"):
        config.parse(role("encoder", bootstrap_room=4775))


@pytest.mark.parametrize("name", ["decoder", "controller", None, 5])
def test_a_role_that_is_none_of_ours(name: Any) -> None:
    with pytest.raises(ConfigError, match="use one of encoder, transformer, decode") as caught:
        config.parse(role(name))
    assert caught.value.context["field"] == "disagg_mode"


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'staging_byte'; did you mean 'staging_bytes'"):
        config.parse(role("encoder", staging_byte=1))


def test_keys_of_the_host_that_say_nothing_to_us_are_let_be() -> None:
    config.parse(role("encoder", rdma_buffer_slots=8, device_name="", encoder_engine_rank=0, decentralized_queue=False))


# -- what it runs on --------------------------------------------------------------------------------------------------


def test_the_hosts_engine_settings_take_effect() -> None:
    found = config.parse(role("encoder", protocol="rdma", device_name="mlx5_0", local_hostname="127.0.0.2"))
    assert (found.transfer.protocol, found.transfer.nics) == ("rdma", "mlx5_0")
    assert (found.transfer.hostname, found.control.bind_host) == ("127.0.0.2", "127.0.0.2")
    assert found.listens == ("127.0.0.2", 17788)


def test_variables_over_the_json_over_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps({"protocol": "tcp", "device_name": "mlx5_9", "local_hostname": "127.0.0.9", "x": 1}))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    found = config.parse(role("encoder", protocol="tcp", local_hostname="127.0.0.3"))
    assert found.transfer.protocol == "rdma", "the variable"
    assert found.transfer.hostname == "127.0.0.3", "the JSON"
    assert found.transfer.nics == "mlx5_9", "the file"
    monkeypatch.setenv("MOONCAKE_LOCAL_HOSTNAME", " 127.0.0.4 ")
    assert config.parse(role("encoder")).transfer.hostname == "127.0.0.4"


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_a_file_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "mooncake.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    with pytest.raises(ConfigError, match="MOONCAKE_CONFIG_PATH="):
        config.parse(role("encoder"))


def test_the_defaults() -> None:
    found = config.parse(role("encoder"))
    assert found.transfer.pool_bytes == 2 << 30
    assert (found.transfer.engine, found.transfer_mode, found.pairing) == ("mooncake", "p2p", "auto")
    assert found.integrity == "auto"


def test_our_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    found = config.parse(
        role(
            "encoder",
            engine="shm",
            staging_bytes=1 << 20,
            store="local:///x",
            namespace="n",
            engine_options={"a": {"b": [1]}},
            claim_ttl_s=3,
            lease_ttl_s=5,
            linger_s=2,
            auth_key="secret",
        )
    )
    assert (found.transfer.engine, found.transfer.pool_bytes) == ("shm", 1 << 20)
    assert type(found.transfer.options["a"]) is dict, "none that the host locks later"
    assert found.transfer_mode == "auto", "a store was named"
    assert (found.store.url, found.store.namespace, found.control.claim_ttl_s) == ("local:///x", "n", 3)
    assert (found.lease_ttl_s, found.linger_s, found.auth_key) == (5, 2, "secret")
    assert "secret" not in repr(found)
    monkeypatch.setenv("MOONRELAY_TRANSFER_MODE", "store")
    assert config.parse(role("encoder")).transfer_mode == "store"
    assert config.parse(role("encoder", transfer_mode="p2p")).transfer_mode == "p2p"


def test_variables_of_ours_where_the_json_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONRELAY_TE_POOL_BYTES", "4096")
    monkeypatch.setenv("MOONRELAY_AUTH_KEY", "from the environment")
    found = config.parse(role("encoder"))
    assert (found.transfer.pool_bytes, found.auth_key) == (4096, "from the environment")
    found = config.parse(role("encoder", staging_bytes=8192, auth_key="said"))
    assert (found.transfer.pool_bytes, found.auth_key) == (8192, "said")


def test_a_wrong_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="auth_key, a secret, must be str") as caught:
        config.parse(role("encoder", auth_key=12345))
    assert "12345" not in str(caught.value)
