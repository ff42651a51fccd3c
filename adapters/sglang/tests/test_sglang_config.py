"""Settings: from the host's flags, from one JSON, and what is wrong in them is named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonrelay.errors import ConfigError
from moonrelay_sglang import config


def flags(**given: Any) -> SimpleNamespace:
    """The host's ``ServerArgs``, with its defaults."""
    known = {
        "disagg_role": "denoiser",
        "disagg_transfer_backend": "moonrelay",
        "disagg_dispatch_policy": "round_robin",
        "disagg_timeout": 3600,
        "disagg_downstream_wait_timeout": 1800,
        "disagg_instance_id": 0,
        "disagg_max_slots_per_instance": 8,
        "disagg_transfer_pool_size": 256 << 20,
        "disagg_p2p_hostname": "127.0.0.1",
        "disagg_ib_device": None,
        "scheduler_port": 19001,
    }
    return SimpleNamespace(**{**known, **given}, _explicit_arg_names=set(given))


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONRELAY_SGLANG", raising=False)
    monkeypatch.delenv("MOONRELAY_TRANSFER_MODE", raising=False)


def test_the_hosts_defaults() -> None:
    found = config.from_server_args(flags())
    assert (found.transfer.engine, found.transfer.protocol, found.transfer_mode) == ("mooncake", "tcp", "p2p")
    assert (found.transfer.pool_bytes, found.transfer.hostname) == (256 << 20, "127.0.0.1")
    assert found.slots == 2, "what the host's head assumes of a denoiser"
    assert found.lease_ttl_s > found.timeout_s == 3600
    assert found.instance == "denoiser@127.0.0.1:19001"


@pytest.mark.parametrize(("role", "slots"), [("encoder", 4), ("denoiser", 2), ("decoder", 4), ("image_encoder", 4)])
def test_slots_are_the_hosts_until_somebody_says(role: str, slots: int) -> None:
    assert config.from_server_args(flags(disagg_role=role)).slots == slots


def test_the_flags_that_the_host_ignores_take_effect() -> None:
    found = config.from_server_args(
        flags(
            disagg_max_slots_per_instance=8,
            disagg_downstream_wait_timeout=7,
            disagg_instance_id=3,
            disagg_timeout=60,
            disagg_transfer_pool_size=1 << 20,
            disagg_ib_device="mlx5_0",
            disagg_dispatch_policy="credits",
        )
    )
    assert found.slots == 8
    assert (found.queue_timeout_s, found.timeout_s) == (7.0, 60.0)
    assert found.instance == "denoiser-3"
    assert found.transfer.pool_bytes == 1 << 20
    assert (found.transfer.nics, found.transfer.protocol) == ("mlx5_0", "rdma")
    assert found.policy == "credits"


def test_the_json_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"engine": "shm", "pool-bytes": 4096, "beat_s": 0.1, "dead_after_s": 1, "labels": {"rack": "a"}, "slots": 5}
    monkeypatch.setenv("MOONRELAY_SGLANG", json.dumps(said))
    found = config.from_server_args(flags(disagg_max_slots_per_instance=8))
    assert (found.transfer.engine, found.transfer.pool_bytes, found.slots) == ("shm", 4096, 5)
    assert (found.beat_s, found.labels) == (0.1, {"rack": "a"})


def test_the_json_may_lie_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "sglang.json"
    file.write_text('{"engine": "shm"}')
    monkeypatch.setenv("MOONRELAY_SGLANG", str(file))
    assert config.from_server_args(flags()).transfer.engine == "shm"
    monkeypatch.setenv("MOONRELAY_SGLANG", str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="cannot be read"):
        config.from_server_args(flags())


@pytest.mark.parametrize(
    ("mode", "given"),
    [("p2p", {}), ("auto", {"store": "local:///dev/shm/x"}), ("store", {"transfer_mode": "store"})],
)
def test_only_a_named_store_is_used_by_itself(mode: str, given: dict[str, Any]) -> None:
    assert config.from_server_args(flags(), given).transfer_mode == mode


def test_the_variable_of_all_adapters_sets_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONRELAY_TRANSFER_MODE", "store")
    assert config.from_server_args(flags()).transfer_mode == "store"
    assert config.from_server_args(flags(), {"transfer_mode": "p2p"}).transfer_mode == "p2p"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"enigne": "shm"}, "did you mean 'engine'"),
        ({"slots": "four"}, "slots='four' must be int"),
        ({"slots": True}, "slots=True must be int"),
        ({"slots": 0}, "slots=0 must be a number above 0"),
        ({"send_all": 1}, "send_all=1 must be bool"),
        ({"transfer_mode": "fast"}, "transfer_mode='fast' is not known"),
        ({"dead_after_s": 1.0}, "dead_after_s=1.0 must be at least twice"),
        ({"spill_after_s": -1}, "spill_after_s=-1"),
        ({"labels": {"rack": 3}}, "labels\\['rack'\\]"),
        ({"pool_bytes": 1, "pool-bytes": 2}, "given twice"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config.from_server_args(flags(), given)


@pytest.mark.parametrize(("text", "says"), [("{", "no JSON"), ("[1]", "cannot be read"), ("{}x", "no JSON")])
def test_a_variable_that_is_no_json(monkeypatch: pytest.MonkeyPatch, text: str, says: str) -> None:
    monkeypatch.setenv("MOONRELAY_SGLANG", text)
    with pytest.raises(ConfigError, match=says):
        config.from_server_args(flags())


@pytest.mark.parametrize("said", ["auto", "off"])
def test_pinned_memory_is_refused_where_it_is_required(said: str) -> None:
    config.from_server_args(flags(disagg_transfer_pin_memory=said))
    with pytest.raises(ConfigError, match="pin-memory required"):
        config.from_server_args(flags(disagg_transfer_pin_memory="required"))


def test_a_host_name_becomes_an_address() -> None:
    assert config.from_server_args(flags(disagg_p2p_hostname="localhost")).transfer.hostname in ("127.0.0.1", "::1")
    with pytest.raises(ConfigError, match="disagg-p2p-hostname"):
        config.from_server_args(flags(disagg_p2p_hostname="no.such.host.invalid"))


def test_which_backend_is_ours() -> None:
    assert config.is_chosen(flags())
    assert not config.is_chosen(flags(disagg_transfer_backend="mooncake"))
    assert not config.is_chosen(object())


@pytest.mark.parametrize("text", ['["auth_key", "hush"]', '"auth_key": "hush"', '{"auth_key": ["hush"]}'])
def test_a_secret_is_in_no_refusal(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONRELAY_SGLANG", text)
    with pytest.raises(ConfigError) as refused:
        config.from_server_args(SimpleNamespace(disagg_role="encoder"))
    assert "hush" not in str(refused.value)
    assert "hush" not in str(refused.value.context)


def test_a_secret_is_in_no_display() -> None:
    assert "hush" not in repr(config.from_server_args(SimpleNamespace(disagg_role="encoder"), {"auth_key": "hush"}))
