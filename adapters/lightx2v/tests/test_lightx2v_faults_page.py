"""docs/lightx2v_faults.md names tests that exist, and every fault that was shown on the real host."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "lightx2v_faults.md"
#: Files whose tests are about what goes wrong, with the real host.
FAULTS = ("stock_*", "host_servers", "host_two_stages", "host_front", "host_config", "host_ways", "host_infer")


def names_in(*patterns: str) -> set[str]:
    sources = [path.read_text(encoding="utf-8") for pattern in patterns for path in HERE.glob(pattern)]
    return {name for source in sources for name in re.findall(r"^def (test_\w+)\(", source, re.MULTILINE)}


def test_the_page_and_the_tests_are_of_the_same() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    assert not named - names_in("test_*.py")
    for kind in FAULTS:
        there = names_in(f"test_lightx2v_{kind}.py")
        assert there, kind
        assert not there - named
