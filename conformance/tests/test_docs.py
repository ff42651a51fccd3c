"""What the pages on conformance tell a reader to type, write and open is there, and what CI runs of them is found."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from moonrelay.errors import MoonrelayError
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.corpus import description, load, model
from moonrelay_conformance.results import SUITE_VERSION, Level

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "adapters.md", ROOT / "docs" / "conformance.md"]
EXAMPLES = ROOT / "docs" / "examples"
pytestmark = pytest.mark.skipif(not PAGES[0].exists(), reason="the pages are in the checkout only, not in the wheel")

#: What the pages name and the reader makes, or CI leaves behind.
MADE = {"acme.json", "acme.html", "acme-faulty.json", "both.html", "a.json", "b.json", "out.html", "shm.json"}
MADE |= {"matrix.html", "out/conformance", "out/conformance/index.html", "index.html"}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.exists() else ""


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", text_of(page), flags=re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in found]


def commands(program: str) -> list[list[str]]:
    lines = (line for page in PAGES for block in blocks(page, "console") for line in block.splitlines())
    found = {line.removeprefix("$ ").partition("  #")[0].strip() for line in lines if line.startswith(f"$ {program} ")}
    return [shlex.split(line) for line in sorted(found)]


def marked(page: Path, marker: str) -> str:
    """Return what follows a ``<!-- marker -->``: the inside of the fenced block, or the table."""
    after = text_of(page).partition(f"<!-- {marker} -->\n")[2]
    fenced = re.match(r"```\w+\n(.*?)^```", after, flags=re.DOTALL | re.MULTILINE)
    return fenced[1] if fenced else after.partition("\n\n")[0]


@cache
def help_of(*command: str) -> str:
    # A wide terminal: help texts fold long option names otherwise.
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    ended = subprocess.run(
        [sys.executable, "-m", *command, "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def unknown_options(words: list[str], text: str) -> list[str]:
    options = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return [option for option in options if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text)]


@cache
def made_noxfile() -> ModuleType:
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("words", commands("moonrelay"), ids=" ".join)
def test_moonrelay_commands_of_the_pages_exist(words: list[str]) -> None:
    assert unknown_options(words, help_of("moonrelay.cli.main", words[1])) == []


@pytest.mark.parametrize("words", commands("pytest"), ids=" ".join)
def test_pytest_commands_of_the_pages_exist(words: list[str]) -> None:
    assert unknown_options(words, help_of("pytest")) == []
    named = [word for word in words[1:] if word.endswith(".py")]
    assert all((EXAMPLES / word).exists() for word in named)


def test_an_option_that_does_not_exist_is_seen() -> None:
    assert unknown_options(["pytest", "--moonrelay-adaptor", "acme", "-q"], help_of("pytest")) == [
        "--moonrelay-adaptor"
    ]


def test_make_targets_and_nox_sessions_of_the_pages_exist() -> None:
    text = "\n".join(text_of(page) for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run"])
    targets = set(re.findall(r"^\$ make ([\w-]+)", text, flags=re.MULTILINE))
    assert {"conformance", "matrix"} <= targets
    assert targets <= set(re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), flags=re.MULTILINE))
    sessions = set(re.findall(r"nox --session (\w+)", text))
    assert {"conformance", "third_party", "matrix"} <= sessions
    assert all(f"\ndef {session}(session: nox.Session)" in text_of(ROOT / "noxfile.py") for session in sessions)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_links_and_modules_that_a_page_names_exist(page: Path) -> None:
    text = text_of(page)
    for link, _, anchor in (found.partition("#") for found in re.findall(r"\]\(([^)\s]+)\)", text)):
        target = (page.parent / link).resolve() if link else page
        assert target.exists(), f"link to {link}"
        if anchor:
            assert anchor in anchors(target), f"{link} has no heading #{anchor}"
    for path in set(re.findall(r"`((?:[\w.-]+/)+[\w.-]+|[\w-]+\.(?:md|json|html|py))`", text)) - MADE:
        places = (ROOT, ROOT / "docs", ROOT / "conformance", ROOT / load_folder())
        assert any((place / path).exists() for place in places), path
    for name in set(re.findall(r"`(moonrelay(?:_conformance)?(?:\.\w+)+)`", text)) - plugin_groups():
        assert importable(name), name


def load_folder() -> str:
    return "conformance/moonrelay_conformance/corpus/data"


def plugin_groups() -> set[str]:
    from moonrelay import plugins

    return {value for value in vars(plugins).values() if isinstance(value, str)}


def importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return hasattr(importlib.import_module(module), attribute)
    return True


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("code", [block for page in PAGES for block in blocks(page, "python")])
def test_python_of_the_pages_is_python(code: str) -> None:
    ast.parse(code)


def test_the_test_on_the_page_is_the_one_in_the_example() -> None:
    written = (EXAMPLES / "third_party_adapter" / "test_conformance.py").read_text()
    (shown,) = (block for block in blocks(PAGES[0], "python") if "AdapterConformance" in block)
    assert ast.dump(ast.parse(shown)) == ast.dump(ast.Module(ast.parse(written).body[1:], type_ignores=[]))


def test_the_case_on_the_page_is_in_the_corpus() -> None:
    (case,) = model_of(json.loads(marked(PAGES[1], "case")), model.Case)
    assert case in load.cases()


def test_the_scenario_on_the_page_is_in_the_corpus() -> None:
    (scenario,) = model_of(json.loads(marked(PAGES[1], "scenario")), model.Scenario)
    assert scenario in load.scenarios()


def test_a_wrong_scenario_would_be_refused() -> None:
    shown = json.loads(marked(PAGES[1], "scenario"))
    shown["steps"][0]["do"] = "publsh"
    with pytest.raises(MoonrelayError, match="publsh"):
        model.check_scenario(model_of(shown, model.Scenario)[0], load.reasons(), "the page")


def model_of(entry: dict[str, object], kind: type) -> tuple[object, ...]:
    return load.decode(json.dumps([entry]).encode(), kind, "the page")


def test_the_table_of_verbs_is_complete() -> None:
    rows = marked(PAGES[1], "verbs").splitlines()[2:]
    named = {verb for row in rows for verb in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(model.VERBS)


def test_every_description_on_the_page_is_one_and_every_kind_is_there() -> None:
    rows = marked(PAGES[1], "descriptions").splitlines()[2:]
    shown = [
        json.loads(text.replace(", …]", "]").replace("[…]", "[1]").replace("…", "1").replace("key, value", "1, 2"))
        for text in re.findall(r"`(\{.*?\})`(?= \||, `)", "\n".join(rows))
    ]
    kinds = {next(iter(one)) for one in shown}
    documented = set(re.findall(r'^\| `\{"(\w+)"|`, `\{"(\w+)"', description.__doc__ or "", flags=re.MULTILINE))
    assert kinds == {name for pair in documented for name in pair if name}
    for one in shown:
        if not {"same", "views"} & one.keys():
            description.check(one)
    with pytest.raises(MoonrelayError):
        description.check({"tensr": {}})


def test_the_page_names_every_level_and_the_versions() -> None:
    text = text_of(PAGES[1])
    assert all(f"| {level} |" in text for level in Level)
    assert SUITE_VERSION.count(".") == 1


def test_every_target_that_ci_runs_is_named() -> None:
    text = " ".join(text_of(PAGES[1]).partition("## How CI uses it")[2].split())
    targets = made_noxfile().TARGETS
    assert len(set(targets)) == len(targets)
    for target in targets:
        name = target.partition(":")[2]
        assert f"`{name}`" in text or f"the {name} adapter" in text, target


def test_nox_finds_the_commands_of_the_page_and_their_exit_codes() -> None:
    found = list(made_noxfile().page_commands(PAGES[0], "third_party"))
    assert ("pip install ./third_party_adapter", 0) in found
    assert ("pytest third_party_adapter/test_conformance.py --moonrelay-level L1", 0) in found
    assert ("pytest third_party_adapter_faulty/test_conformance.py -k structure_is_kept", 1) in found
    assert any(command.startswith("moonrelay conformance acme --json acme.json") for command, _ in found)
    assert not any("moonrelay[conformance]" in command for command, _ in found)


def test_commands_of_another_session_are_left_out(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- run by nox: other -->\n```console\n$ true\n```\n```console\n$ false\n```\n")
    assert list(made_noxfile().page_commands(page, "third_party")) == []
    assert list(made_noxfile().page_commands(page, "other")) == [("true", 0)]


def test_the_example_declares_what_the_page_says_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "third_party_adapter")
    target = importlib.import_module("acme_relay_adapter").AcmeTarget()
    declared = target.capabilities()
    assert not target.supports(Capability.TUPLES)
    assert declared[Capability.CHUNKED] is Support.NOT_IMPLEMENTED
    assert target.routes() == ("p2p",)
