"""The adapter's page says what the code says: every setting with its default, the supported versions, the pipelines."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from moonrelay_vllm_omni import config, plugin
from moonrelay_vllm_omni.pipelines import registration

PAGE = Path(__file__).parents[1] / "README.md"
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


def rows(page: str) -> dict[str, str]:
    """Return the defaults of the table of settings, by key."""
    section = page.split("## Settings", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE)
    assert len(found) == len(dict(found)), "a key has two rows"
    return dict(found)


def defaults() -> dict[str, object]:
    """Return the default of every key, as the settings' classes have it."""
    found: dict[str, object] = {}
    of_settings = {one.name: one for one in fields(config.OmniSettings)}
    for key in config.KEYS:
        if key in of_settings:
            found[key] = of_settings[key].default
    settings = config.OmniSettings()
    for section, names in (
        (settings.transfer, config._TRANSFER),
        (settings.store, config._STORE),
        (settings.control, config._CONTROL),
    ):
        found.update({key: getattr(section, name) for key, name in names.items()})
    assert MISSING not in found.values()
    return found


def shown(key: str, value: object) -> str:
    """Return how the page writes a default."""
    named = {"transfer_mode": "`auto`", "store": "a folder of this machine", "bind_host": "as `hostname`"}
    if key in named:
        return named[key]
    if isinstance(value, bool):
        return str(value).lower()
    if value in ("", None, {}):
        return "none"
    if key.endswith("_bytes") and isinstance(value, int):
        for unit, shift in (("GiB", 30), ("MiB", 20)):
            if value % (1 << shift) == 0:
                return f"{value >> shift} {unit}"
    return f"{value:g}" if isinstance(value, (int, float)) else f"`{value}`"


def test_the_table_has_every_setting_with_its_default(page: str) -> None:
    assert sorted(rows(page)) == sorted(config.KEYS)
    assert rows(page) == {key: shown(key, value) for key, value in defaults().items()}


def test_the_versions_are_those_that_the_plugin_takes(page: str) -> None:
    assert f"`{plugin.SUPPORTED}`" in page


def test_the_table_of_pipelines_has_each_with_its_example(page: str) -> None:
    listed = dict(re.findall(r"^\| `([\w.]+\.yaml)` \| `(\w+)` \|", page, re.MULTILINE))
    assert sorted(listed.values()) == sorted(registration.names())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.yaml"))
    for file, pipeline in listed.items():
        assert f"\npipeline: {pipeline}\n" in (EXAMPLES / file).read_text()


def test_the_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page):
        assert (PAGE.parent / link).exists(), link
