"""The adapter's page says what the code says: settings with their defaults, versions, pipelines, and what to type."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from dataclasses import MISSING, fields
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from moonrelay.connector import caching
from moonrelay.connector.caching import CacheChoice
from moonrelay_vllm_omni import config, plugin
from moonrelay_vllm_omni.pipelines import conditioning, registration
from moonrelay_vllm_omni.serve.__main__ import parse
from moonrelay_vllm_omni.serve.schema import Limits, image_orders

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


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert found, f"no {language}"
    return found


def wired(deploy: dict[str, Any]) -> int:
    """Hold that every edge has a connector at both ends, the same one, and return how many edges there are."""
    out, into = (
        {
            (int(stage["stage_id"]), int(word.rpartition("_")[2])): name
            for stage in deploy["stages"]
            for word, name in stage.get(f"{side}_connectors", {}).items()
        }
        for side in ("output", "input")
    )
    assert out == {(first, second): name for (second, first), name in into.items()}
    assert set(out.values()) <= deploy["connectors"].keys()
    return len(out)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_an_example_is_wired_and_its_settings_are_taken(file: Path) -> None:
    deploy = yaml.safe_load(file.read_text())
    assert [stage["stage_id"] for stage in deploy["stages"]] == list(range(len(deploy["stages"])))
    assert wired(deploy) == len(deploy["stages"]) - 1
    (connector,) = deploy["connectors"].values()
    assert connector.keys() == {"name", "extra"}
    assert connector["name"] == plugin.NAME
    config.parse(connector["extra"])
    assert deploy["async_chunk"] is False, "the host's default is true, which stages of diffusion do not do"


def test_what_the_page_says_to_put_into_a_yaml_is_taken(page: str) -> None:
    switch, cache, hook = (yaml.safe_load(text) for text in blocks(page, "yaml"))
    assert wired(switch) == 1
    config.parse(switch["connectors"]["mr"]["extra"])
    (between,) = re.findall(r"`(extra: \{.*?\})`", page)
    assert config.parse(yaml.safe_load(between)["extra"]).store.url == "mooncake://10.0.0.1:50051"
    asked = [conditioning._checked(one[0]["model_config"][conditioning.SETTINGS]) for one in (cache, hook)]
    assert [one[conditioning.CACHE] for one in asked] == [CacheChoice(), None]
    assert [one[conditioning.HOOK] for one in asked] == [None, "my_cache:make"]


def test_the_table_of_the_cache_has_every_key(page: str) -> None:
    section = page.split("## Remember", 1)[1].split("\n## ", 1)[0]
    found = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE))
    assert sorted(found) == sorted(caching._KEYS)
    assert found["bytes"] == shown("pool_bytes", CacheChoice().capacity_bytes)


def test_every_command_of_the_page_is_one(page: str) -> None:
    """Those that need a model are run by the host's tests; here it is what they are given."""
    lines = [line[2:] for text in blocks(page, "console") for line in text.splitlines() if line.startswith("$ ")]
    lines += re.findall(r"`((?:moonrelay|python) [^`]*)`", page)
    seen = set()
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:2] == ["pip", "install"]:
            extras = re.findall(r"\[(.*)\]", words[2])[0].split(",")
            assert set(extras) <= set(metadata("moonrelay").get_all("Provides-Extra"))
        elif words[:3] == ["python", "-m", "moonrelay_vllm_omni.serve"]:
            served = [str(EXAMPLES / word) if word.endswith(".yaml") else word for word in words[3:]]
            assert parse(served).port == 8000
        elif words[0] == "curl":
            assert words[1] == "localhost:8000/v1/images/generations"
            image_orders(json.loads(words[words.index("-d") + 1]), Limits(), model="m", seed=1)
        else:
            assert words[0] == "moonrelay", line
            command = [sys.executable, "-m", "moonrelay.cli.main", *words[1:], "--help"]
            subprocess.run(command, capture_output=True, timeout=60, check=True)
        seen.add(" ".join(words[:2]))
    assert {"pip install", "python -m", "moonrelay doctor", "moonrelay bench", "moonrelay conformance"} <= seen


def test_the_pages_program_is_one(page: str) -> None:
    (program,) = blocks(page, "python")
    imported = {
        (node.module, name.name)
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    # The host's two names and the call are those of `omni_engine`, which the host's tests run.
    run = (Path(__file__).parent / "omni_engine.py").read_text()
    for module, name in imported - {("moonrelay_vllm_omni.plugin", "register")}:
        assert f"from {module} import {name}\n" in run
    assert ("moonrelay_vllm_omni.plugin", "register") in imported
    assert re.search(r'deploy_config="(.*?)"', program)[1] in {file.name for file in EXAMPLES.glob("*.yaml")}
