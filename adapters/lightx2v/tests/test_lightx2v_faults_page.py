"""docs/lightx2v_faults.md names tests that exist, and every test that was run on the real host."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "lightx2v_faults.md"


def names_in(pattern: str) -> set[str]:
    sources = [path.read_text(encoding="utf-8") for path in HERE.glob(pattern)]
    return {name for source in sources for name in re.findall(r"^def (test_\w+)\(", source, re.MULTILINE)}


def test_the_page_and_the_tests_are_of_the_same() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    assert not named - names_in("test_*.py")
    stock, ours = names_in("test_lightx2v_stock_*.py"), names_in("test_lightx2v_host_*.py")
    assert len(stock) > 10
    assert len(ours) > 15
    assert not (stock | ours) - named
