"""What the pages tell a reader to type works: Python blocks run, commands and options exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in (
        *(ROOT / "README.md", ROOT / "docs/operating.md", ROOT / "docs/caches.md"),
        ROOT / "adapters/diffusers/README.md",
    )
    if page.exists()
]
#: Commands that have commands of their own.
GROUPS = {"cache"}
pytestmark = pytest.mark.skipif(len(PAGES) < 4, reason="the pages are in the checkout only, not beside the wheel")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    found = [
        line.removeprefix("$ ").partition("#")[0].strip()
        for page in PAGES
        for block in blocks(page, "console")
        for line in block.splitlines()
        if line.startswith("$ moonrelay ")
    ]
    return sorted(set(found))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # A wide terminal: help texts fold long option names otherwise.
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, env=environment, check=False
    )


@pytest.mark.parametrize("code", blocks(ROOT / "README.md", "python") if PAGES else [])
def test_python_in_the_readme_runs(code: str) -> None:
    ended = run("-c", code)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["(1, 16, 2, 60, 104)"] * 4


@pytest.mark.parametrize("code", blocks(ROOT / "docs/caches.md", "python") if PAGES else [])
def test_python_of_the_caches_page_runs(code: str) -> None:
    ended = run("-c", code)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "1 1\n"


@pytest.mark.parametrize("command", commands())
def test_commands_and_options_exist(command: str) -> None:
    words = shlex.split(command)[1:]
    called = words[:2] if words[0] in GROUPS else words[:1]
    ended = run("-m", "moonrelay.cli.main", *called, "--help")
    assert ended.returncode == 0, ended.stderr
    for word in words[1:]:
        if word.startswith("--"):
            assert word.partition("=")[0] in ended.stdout, f"{words[0]} has no option {word}"


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^\$ make (\w+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert targets
    listed = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert targets <= listed
