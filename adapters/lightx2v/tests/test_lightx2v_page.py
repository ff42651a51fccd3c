"""The adapter's page says what the code says: settings and defaults, the host's keys, the front, and its JSON works."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from moonrelay import errors
from moonrelay.plugins import COMMANDS, Registry
from moonrelay_lightx2v import activity, config, plugin
from moonrelay_lightx2v.front.command import front

PAGE = Path(__file__).parents[1] / "README.md"
#: Defaults that come from another place, or depend on another key.
IN_WORDS = {
    "transfer_mode": "`p2p`, with a `store` `auto`",
    "rendezvous_port": "the host's formula",
    "auth_key": "`MOONRELAY_AUTH_KEY`",
}


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*config._VARIABLES.values(), config._FILE, "MOONRELAY_TE_POOL_BYTES", "MOONRELAY_AUTH_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


def section(page: str, title: str) -> str:
    return page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def roles(text: str) -> dict[str, dict[str, Any]]:
    """Return the JSON files of a part of the page, by their ``disagg_mode``."""
    files = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]
    return {one["disagg_mode"]: one for one in files}


def shown(key: str, value: object) -> str:
    """Return how the page writes a default."""
    if key in IN_WORDS:
        return IN_WORDS[key]
    if value in ("", None) or (isinstance(value, Mapping) and not value):
        return "none"
    if key.endswith("_bytes") and isinstance(value, int):
        for unit, shift in (("GiB", 30), ("MiB", 20)):
            if value % (1 << shift) == 0:
                return f"{value >> shift} {unit}"
    return f"{value:g}" if isinstance(value, (int, float)) else f"`{value}`"


def defaults() -> dict[str, object]:
    """Return what each key is where nobody says it."""
    made = config.parse({"disagg_mode": "decode", "disagg_config": {"connector": config.CONNECTOR}})
    found: dict[str, object] = {key: getattr(made, key, None) for key in config._OWN}
    for part, names in (
        (made.transfer, config._TRANSFER),
        (made.store, config._STORE),
        (made.control, config._CONTROL),
    ):
        found.update({key: getattr(part, name) for key, name in names.items()})
    return found


def test_the_table_has_every_setting_with_its_default(page: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section(page, "Settings"), re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a key has two rows"
    assert sorted(dict(rows)) == sorted(config.KEYS)
    assert dict(rows) == {key: shown(key, value) for key, value in defaults().items()}


def test_defaults_in_words_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(**keys: Any) -> config.LinkConfig:
        return config.parse({"disagg_mode": "encoder", "disagg_config": {"connector": "moonrelay", **keys}})

    assert parsed().transfer_mode == "p2p"
    assert parsed(store="local:///nowhere").transfer_mode == "auto"
    assert parsed(sender_engine_rank=3, bootstrap_room=2).listens == ("127.0.0.1", 17788 + 3 + 10 * 2)
    assert parsed(rendezvous_port=0).listens == ("127.0.0.1", 0)
    monkeypatch.setenv("MOONRELAY_AUTH_KEY", "of-the-environment")
    assert parsed().auth_key == "of-the-environment"


def test_the_hosts_keys_are_all_told_of(page: str) -> None:
    part = section(page, "The host's keys")
    cells = re.findall(r"^\| (`.*?) \|", part, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`([\w*]+)`", cell)]
    assert len(named) == len(set(named))
    assert set(named) == {*config._HOSTS, "rdma_*"}
    assert set(re.findall(r"`(MOONCAKE_\w+)`", part)) == {*config._VARIABLES.values(), config._FILE}


def test_the_roles_of_the_quick_start_find_each_other(page: str) -> None:
    files = roles(page.split("### One machine", 1)[1].split("\n### ", 1)[0])
    assert tuple(files) == config.ROLES
    assert all(config.is_chosen(one) for one in files.values())
    encoder, transformer, decoder = (config.parse(one) for one in files.values())
    assert encoder.listens is not None
    assert transformer.dials == (encoder.listens,)
    assert transformer.listens is not None
    assert decoder.dials == (transformer.listens,)
    assert (decoder.listens, encoder.dials) == (None, ())
    assert {one.transfer.protocol for one in (encoder, transformer, decoder)} == {"tcp"}
    # With two roles.
    for key in ("decoder_engine_rank", "decoder_bootstrap_room"):
        del files["transformer"]["disagg_config"][key]
    assert config.parse(files["transformer"]).listens is None


def test_the_decoder_of_several_transformers_dials_them_all(page: str) -> None:
    found = config.parse(roles(section(page, "Several of a role"))["decode"])
    assert found.dials == (("10.0.0.2", 17799), ("10.0.0.3", 18001))
    assert found.transfer.hostname == "10.0.0.4"


def test_the_options_of_the_front_have_their_defaults(page: str) -> None:
    part = section(page, "One POST instead of three")
    app = typer.Typer(add_completion=False)
    app.command()(front)
    options = {one.opts[0]: one.default for one in get_command(app).params if one.name != "help"}
    rows = dict(re.findall(r"^\| `(--[\w-]+)` \| ([^|]*) \|", part, re.MULTILINE))
    assert rows == {name: shown("", value).strip("`") for name, value in options.items()}
    used = re.findall(r"(--[\w-]+) http", part)
    assert used == ["--encoder", "--transformer", "--decoder"]
    assert "lightx2v-front" in Registry(COMMANDS).names()


def test_the_ways_in_are_there(page: str) -> None:
    assert "python -m moonrelay_lightx2v lightx2v.server" in page
    assert importlib.util.find_spec("moonrelay_lightx2v.__main__") is not None
    assert "import moonrelay_lightx2v.enable" in page
    assert importlib.util.find_spec("moonrelay_lightx2v.enable") is not None
    assert f"`{activity.GROUP}`" in page


def test_the_versions_and_the_finding_are_the_plugins(page: str) -> None:
    first, last, day = re.fullmatch(r"commits from (.*?) \(.*\) to (\w+) of (.*)", plugin.SUPPORTED).groups()  # type: ignore[union-attr]
    versions = section(page, "Versions")
    assert f"| {last} ({day}) |" in versions
    assert f"| from {first} to that one |" in versions
    assert f"(commit {last}), plugin active: {plugin.MIXIN} is ours" in page


def test_the_errors_are_those_that_there_are(page: str) -> None:
    named = re.findall(r"\| `([A-Z]\w+)` \|$", section(page, "What happens when"), re.MULTILINE)
    assert len(named) > 5
    for name in named:
        assert issubclass(getattr(errors, name), errors.MoonrelayError)


def test_the_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)", page):
        file, _, anchor = link.partition("#")
        text = page if not file else (PAGE.parent / file).read_text()
        headings = [re.sub(r"[^\w -]", "", one.lower()) for one in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
        assert not anchor or anchor.replace("-", " ") in headings, link
