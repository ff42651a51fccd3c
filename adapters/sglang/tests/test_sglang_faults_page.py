"""docs/sglang_faults.md names tests that exist, and every fault that a test shows of the host's own backend."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "sglang_faults.md"


def test_the_page_and_the_tests_are_of_the_same() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    sources = [path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py")]
    there = {name for source in sources for name in re.findall(r"^def (test_\w+)\(", source, re.MULTILINE)}
    assert not named - there
    # `@backends(KNOWN, "what the host does instead"…)` over the test, maybe with another decorator between.
    shown = r'^@backends\(\w+,\s*"[^@]*?^def (test_\w+)\('
    faults = {name for source in sources for name in re.findall(shown, source, re.MULTILINE)}
    assert len(faults) > 15
    assert not faults - named
