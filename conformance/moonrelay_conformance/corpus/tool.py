"""Keeps the digests of the corpus: ``python -m moonrelay_conformance.corpus.tool --check`` or ``--write``.

Owns the layout of the files: one entry after the other, short values on one line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from moonrelay_conformance.corpus.load import decode, files
from moonrelay_conformance.corpus.model import Case, Expected
from moonrelay_conformance.corpus.trees import build, chunk_digests, digest

_WIDTH: Final = 118


def expected_digests(case: Case) -> dict[str, Any]:
    """Return the digests that a case's expectation must have; empty for a refusal."""
    if case.expect.outcome is Expected.REFUSED:
        return {}
    found: dict[str, Any] = {"digest": digest(build(case.tree, received=True))}
    if case.outgoing.chunk_dim is not None:
        found["chunks"] = list(chunk_digests(case.tree, case.outgoing.chunk_dim, case.outgoing.num_chunks))
    return found


def stale(cases: Sequence[Case]) -> tuple[str, ...]:
    """Return the ids of the cases whose digests are not those of their trees."""
    found = []
    for case in cases:
        wanted = expected_digests(case)
        if wanted.get("digest", "") != case.expect.digest or tuple(wanted.get("chunks", ())) != case.expect.chunks:
            found.append(case.id)
    return tuple(found)


def formatted(entries: Sequence[Any]) -> str:
    """Return entries as the files have them."""
    return "[\n" + ",\n".join(_lines(entry, 1) for entry in entries) + "\n]\n"


def refreshed(raw: str, name: str) -> str:
    """Return a file of cases with all digests filled in, and laid out."""
    entries = json.loads(raw)
    for entry, case in zip(entries, decode(raw.encode(), Case, name), strict=True):
        kept = {key: value for key, value in entry["expect"].items() if key not in ("digest", "chunks")}
        entry["expect"] = {**kept, **expected_digests(case)}
    return formatted(entries)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check or write; return the exit status."""
    parser = argparse.ArgumentParser(prog="moonrelay_conformance.corpus.tool", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="compare the digests with the trees")
    what.add_argument("--write", action="store_true", help="fill the digests in")
    chosen = parser.parse_args(arguments)
    folder = Path(__file__).parent / "data"
    wrong: list[str] = []
    for name in files("cases_"):
        path = folder / name
        raw = path.read_text(encoding="utf-8")
        if chosen.write:
            path.write_text(refreshed(raw, name), encoding="utf-8")
        else:
            wrong += [f"{name}: {one}" for one in stale(decode(raw.encode(), Case, name))]
    if chosen.write:
        for name in files("scenarios_"):
            path = folder / name
            path.write_text(formatted(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")
    for one in wrong:
        sys.stderr.write(f"{one}: the digest is not that of the tree; run with --write\n")
    return 1 if wrong else 0


def _lines(value: Any, depth: int) -> str:
    """Return JSON in which whatever fits on a line stands on one."""
    indent = " " * depth
    flat = json.dumps(value, ensure_ascii=True)
    if len(flat) + depth <= _WIDTH or not isinstance(value, (dict, list)) or not value:
        return indent + flat
    if isinstance(value, list):
        return f"{indent}[\n" + ",\n".join(_lines(item, depth + 1) for item in value) + f"\n{indent}]"
    inner = []
    for key, item in value.items():
        inner.append(f"{indent} {json.dumps(key)}: " + _lines(item, depth + 1).lstrip())
    return f"{indent}{{\n" + ",\n".join(inner) + f"\n{indent}}}"


if __name__ == "__main__":
    sys.exit(main())
