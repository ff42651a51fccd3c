"""The adapter's page says what the code says: every setting with its default, versions, policies and hooks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from moonrelay.queueing.task import PRIORITIES
from moonrelay_sglang import config, plugin

PAGE = Path(__file__).parents[1] / "README.md"
#: Defaults that depend on the host's flags, or on where a process runs.
IN_WORDS = {
    "transfer_mode": "`p2p`, with a `store` `auto`",
    "lease_ttl_s": "`--disagg-timeout` and 60",
    "slots": "2 for a denoiser, else 4",
    "instance": "role, host and port",
    "encoder": "the model's name",
    "encoder_revision": "`--revision` where it is a commit, or the hub's cache",
    "protocol": "`tcp`, with a NIC `rdma`",
    "hostname": "`--disagg-p2p-hostname`",
    "nics": "`--disagg-ib-device`",
    "pool_bytes": "`--disagg-transfer-pool-size`",
    "store": "a folder of this machine",
    "bind_host": "as `hostname`",
}


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


def section(page: str, title: str) -> str:
    return page.split(f"\n## {title}", 1)[1].split("\n## ", 1)[0]


def rows(page: str) -> dict[str, str]:
    """Return the defaults of the table of settings, by key."""
    found = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section(page, "Settings"), re.MULTILINE)
    assert len(found) == len(dict(found)), "a key has two rows"
    return dict(found)


def defaults() -> dict[str, object]:
    """Return the default of every key, as the settings' classes have it."""
    of_settings = {one.name: one for one in fields(config.SglangConfig)}
    found: dict[str, object] = {
        key: of_settings[key].default
        if of_settings[key].default is not MISSING
        else (of_settings[key].default_factory() if of_settings[key].default_factory is not MISSING else None)
        for key in config._OWN
    }
    settings = config.SglangConfig(role="encoder", instance="one")
    for part, names in (
        (settings.transfer, config._TRANSFER),
        (settings.store, config._STORE),
        (settings.control, config._CONTROL),
    ):
        found.update({key: getattr(part, name) for key, name in names.items()})
    return found


def shown(key: str, value: object) -> str:
    """Return how the page writes a default."""
    if key in IN_WORDS:
        return IN_WORDS[key]
    if isinstance(value, bool):
        return str(value).lower()
    if value in ("", None) or (isinstance(value, Mapping) and not value):
        return "none"
    if key.endswith("_bytes") and isinstance(value, int):
        for unit, shift in (("GiB", 30), ("MiB", 20)):
            if value % (1 << shift) == 0:
                return f"{value >> shift} {unit}"
    return f"{value:g}" if isinstance(value, (int, float)) else f"`{value}`"


def test_the_table_has_every_setting_with_its_default(page: str) -> None:
    assert sorted(rows(page)) == sorted(config.KEYS)
    assert rows(page) == {key: shown(key, value) for key, value in defaults().items()}


def test_defaults_in_words_are_those_of_the_code() -> None:
    plain = config.from_server_args(object(), {})
    assert (plain.transfer_mode, plain.lease_ttl_s - plain.timeout_s, plain.transfer.protocol) == ("p2p", 60, "tcp")
    assert config.from_server_args(object(), {"store": "memory://page"}).transfer_mode == "auto"
    assert (config.STOCK_SLOTS, config.OTHER_SLOTS) == ({"denoiser": 2}, 4)


def test_the_table_of_policies_has_each(page: str) -> None:
    listed = re.findall(r"^\| `(\w+)` \|", section(page, "Who gets work"), re.MULTILINE)
    assert tuple(listed) == (*config.STOCK_POLICIES, *config.OUR_POLICIES)
    assert all(f"`{name}`" in section(page, "Who gets work") for name in PRIORITIES)


def test_the_versions_and_the_hooks_are_those_of_the_plugin(page: str) -> None:
    assert f"`{plugin.SUPPORTED}`" in page
    count = len(plugin.HOOKS)
    assert f"plugin active: {count} of {count} hooks applied" in page


def test_every_role_of_the_quick_start_has_a_master_port_and_the_flag(page: str) -> None:
    quick = page.split("### One machine", 1)[1].split("```", 2)[1]
    roles = [line for line in quick.splitlines() if line.startswith("$ROLE")]
    assert [re.search(r"--disagg-role (\w+)", line)[1] for line in roles] == ["encoder", "denoiser", "decoder"]  # type: ignore[index]
    assert len({re.search(r"--master-port (\d+)", line)[1] for line in roles}) == len(roles)  # type: ignore[index]
    assert quick.count(f"--disagg-transfer-backend {config.BACKEND}") == 2


def test_the_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page):
        assert (PAGE.parent / link).exists(), link
