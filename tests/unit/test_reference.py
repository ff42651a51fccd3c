"""The API reference's generator: what a docstring says reaches its page, and a stale page is found."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "make_reference.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="the generator is part of the checkout, not of the wheel")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location("make_reference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(generator: ModuleType) -> dict[str, str]:
    made: dict[str, str] = generator.pages()
    return made


def test_every_room_has_a_page_and_a_line_in_the_index(pages: dict[str, str]) -> None:
    for room in ("errors", "events", "transfer", "relay", "lease", "queueing", "control", "connector", "plugins"):
        assert f"moonrelay.{room}.md" in pages
        assert f"(moonrelay.{room}.md)" in pages["README.md"]


def test_a_docstrings_sections_reach_the_page(pages: dict[str, str]) -> None:
    page = pages["moonrelay.plugins.md"]
    assert "### class `Registry`" in page
    assert "load(name: str) -> object" in page
    assert "- `PluginError`: The name is unknown" in page
    assert "*Returns*: The object, usually a class" in page
    assert "_import" not in page


def test_it_says_the_same_twice(generator: ModuleType, pages: dict[str, str]) -> None:
    assert generator.pages() == pages


def test_a_stale_page_is_found(generator: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "same.md").write_text("same", encoding="utf-8")
    (tmp_path / "changed.md").write_text("old", encoding="utf-8")
    (tmp_path / "gone.md").write_text("not wanted", encoding="utf-8")
    wanted = {"same.md": "same", "changed.md": "new", "missing.md": "x"}
    assert generator.stale(wanted, tmp_path) == ["changed.md", "gone.md", "missing.md"]
