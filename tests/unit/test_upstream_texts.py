"""The issue texts for hosts' projects: complete, without traces of a machine, and all in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "upstream"
TEXTS = sorted(FOLDER.glob("*/*.md"))
HEADINGS = (
    "Version",
    "Reproduction",
    "What happens",
    "What was expected",
    "Cause",
    "Suggested fix",
    "How Moonrelay works around it",
    "Known upstream",
)
LONGEST_REPRODUCTION = 25
#: Places that say where a text was made, and nothing to its reader.
OF_A_MACHINE = re.compile(r"/(?:work|root|home|tmp)/|site-packages|pid=\d")

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="the texts are part of the checkout, not of the wheel")


def complaints(text: str) -> list[str]:
    """Return what a text lacks or has too much of."""
    found = []
    if not re.match(r"# .+\n", text):
        found.append("no title")
    headings = tuple(re.findall(r"^## (.+)$", text, re.MULTILINE))
    if headings != HEADINGS:
        found.append(f"headings are {headings}")
        return found
    sections = dict(zip(headings, re.split(r"^## .+$", text, flags=re.MULTILINE)[1:], strict=True))
    found += [f"nothing under {name}" for name, body in sections.items() if not body.strip()]
    blocks = re.findall(r"```(\w+)\n(.*?)```", sections["Reproduction"], re.DOTALL)
    if [kind for kind, _ in blocks] not in (["python", "text"], ["console", "text"]):
        found.append("the reproduction is not code and then output")
    found += [f"{kind} block is empty" for kind, body in blocks if body.strip() in ("", "None")]
    if any(len(body.splitlines()) > LONGEST_REPRODUCTION for kind, body in blocks if kind != "text"):
        found.append("the reproduction is too long")
    found += [f"names a place of a machine: {place}" for place in OF_A_MACHINE.findall(text)]
    return found


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_a_text_can_be_pasted_upstream(path: Path) -> None:
    assert complaints(path.read_text()) == []


def test_the_index_has_every_text_and_no_other() -> None:
    linked = re.findall(r"\]\(([\w/]+\.md)\)", (FOLDER / "README.md").read_text())
    assert sorted(linked) == [str(path.relative_to(FOLDER)) for path in TEXTS]
    assert len(TEXTS) >= 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("## Cause", "## Causes"),
        ("it breaks", " "),
        ("print(1)", "print(1)\n" * 30),
        ("```text\n1\n", "```text\nNone\n"),
        ("```text\n1\n```", ""),
        ("print(1)", "open('/tmp/x')"),
        ("# A title\n", "A title\n"),
    ],
)
def test_what_is_missing_is_found(old: str, new: str) -> None:
    body = dict.fromkeys(HEADINGS, "words")
    body["What happens"] = "it breaks"
    body["Reproduction"] = "```python\nprint(1)\n```\n\n```text\n1\n```"
    good = "# A title\n" + "".join(f"\n## {name}\n\n{words}\n" for name, words in body.items())
    assert complaints(good) == []
    assert old in good
    assert complaints(good.replace(old, new))
