"""Write docs/reference/*.md from the docstrings, one page per room; ``--check`` only compares.

The sources are read, not imported, so that no native library is needed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import griffe

ROOT: Final = Path(__file__).resolve().parent.parent
TARGET: Final = ROOT / "docs" / "reference"
PACKAGES: Final = (
    ("moonrelay", ROOT / "core"),
    ("moonrelay_diffusers", ROOT / "adapters" / "diffusers"),
    ("moonrelay_conformance", ROOT / "conformance"),
)
#: Rooms whose docstrings are for those who work in them: tests, and what runs them.
LEFT_OUT: Final = {
    f"moonrelay_conformance.{room}"
    for room in ("child", "collecting", "fixtures", "guard", "job", "jobs", "plugin", "recording", "report", "suites")
}
NOTE: Final = "<!-- Written by tools/make_reference.py from the docstrings; `make docs` writes it anew. -->\n"


def pages() -> dict[str, str]:
    """Return file name to text of all pages, the index among them."""
    logging.getLogger("griffe").setLevel(logging.ERROR)
    found: dict[str, str] = {}
    index = ["# API reference\n", NOTE]
    for name, folder in PACKAGES:
        package = griffe.load(name, search_paths=[str(folder)], docstring_parser="google", allow_inspection=False)
        if not isinstance(package, griffe.Module):
            message = f"{name} is not a package"
            raise TypeError(message)
        index.append(f"\n## {name}\n\n{_first_line(package)}\n")
        for room in _rooms(package):
            page = f"{room.path}.md"
            index.append(f"- [`{room.path}`]({page}): {_first_line(room)}")
            found[page] = f"# {room.path}\n\n{NOTE}\n" + "\n".join(_module(room, top=True)).rstrip() + "\n"
    found["README.md"] = "\n".join(index).rstrip() + "\n"
    return found


def _rooms(package: griffe.Module) -> list[griffe.Module]:
    return [module for name, module in sorted(package.modules.items()) if _public(name) and module.path not in LEFT_OUT]


def _module(module: griffe.Module, *, top: bool) -> Iterator[str]:
    if not top:
        yield f"## {module.path}\n"
    yield from _docstring(module)
    for member in module.members.values():
        if not isinstance(member, griffe.Alias) and _public(member.name):
            if isinstance(member, griffe.Class):
                yield from _class(member)
            elif isinstance(member, griffe.Function):
                yield from _function(member, "###")
    for name, inner in sorted(module.modules.items()):
        if _public(name):
            yield from _module(inner, top=False)


def _class(item: griffe.Class) -> Iterator[str]:
    bases = ", ".join(str(base) for base in item.bases)
    yield f"### class `{item.name}{f'({bases})' if bases else ''}`\n"
    yield from _docstring(item)
    if "__init__" in item.members and isinstance(item.members["__init__"], griffe.Function):
        yield from _signature(item.members["__init__"], item.name)
    for member in item.members.values():
        if isinstance(member, griffe.Function) and _public(member.name):
            yield from _function(member, "####")
        elif isinstance(member, griffe.Attribute) and _public(member.name) and "property" in member.labels:
            shown = f": {member.annotation}" if member.annotation else ""
            yield f"#### property `{member.name}{shown}`\n"
            yield from _docstring(member)


def _function(item: griffe.Function, level: str) -> Iterator[str]:
    yield f"{level} `{item.name}`\n"
    yield from _signature(item, item.name)
    yield from _docstring(item)


def _signature(item: griffe.Function, name: str) -> Iterator[str]:
    parts: list[str] = []
    star = False
    for parameter in item.parameters:
        if parameter.name in ("self", "cls"):
            continue
        text = parameter.name
        if parameter.kind is griffe.ParameterKind.var_positional:
            text, star = f"*{text}", True
        elif parameter.kind is griffe.ParameterKind.var_keyword:
            text = f"**{text}"
        elif parameter.kind is griffe.ParameterKind.keyword_only and not star:
            parts.append("*")
            star = True
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and parameter.kind not in (
            griffe.ParameterKind.var_positional,
            griffe.ParameterKind.var_keyword,
        ):
            text += f" = {parameter.default}"
        parts.append(text)
    returns = f" -> {item.returns}" if item.returns is not None and name == item.name else ""
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"
    yield f"```python\n{line}\n```\n"


def _docstring(item: griffe.Object) -> Iterator[str]:
    if item.docstring is None:
        return
    for section in item.docstring.parse("google", warnings=False):
        yield from _section(section)


def _section(section: griffe.DocstringSection) -> Iterator[str]:
    value = section.value
    if isinstance(section, griffe.DocstringSectionText):
        yield f"{value}\n"
    elif isinstance(section, griffe.DocstringSectionAdmonition):
        yield f"*{section.title or value.kind.capitalize()}*: {_flat(value.contents)}\n"
    elif isinstance(section, (griffe.DocstringSectionParameters, griffe.DocstringSectionAttributes)):
        yield f"*{'Args' if isinstance(section, griffe.DocstringSectionParameters) else 'Attributes'}*\n"
        yield from (f"- `{entry.name}`: {_flat(entry.description)}" for entry in section.value)
        yield ""
    elif isinstance(section, griffe.DocstringSectionRaises):
        yield "*Raises*\n"
        yield from (f"- `{entry.annotation}`: {_flat(entry.description)}" for entry in section.value)
        yield ""
    elif isinstance(section, (griffe.DocstringSectionReturns, griffe.DocstringSectionYields)):
        title = "Returns" if isinstance(section, griffe.DocstringSectionReturns) else "Yields"
        yield f"*{title}*: {' '.join(_flat(entry.description) for entry in section.value)}\n"
    elif isinstance(section, griffe.DocstringSectionExamples):
        yield "*Examples*\n"
        for _, text in section.value:
            yield f"```python\n{textwrap.dedent(text)}\n```\n"
    else:
        yield f"{value}\n"


def _flat(text: str) -> str:
    return " ".join(text.split())


def _first_line(item: griffe.Object) -> str:
    return item.docstring.value.splitlines()[0] if item.docstring is not None else ""


def _public(name: str) -> bool:
    return not name.startswith("_")


def stale(wanted: dict[str, str], target: Path = TARGET) -> list[str]:
    """Return the names of pages that are missing, different, or not wanted any more."""
    present = {path.name: path.read_text(encoding="utf-8") for path in target.glob("*.md")}
    return sorted(name for name in {*wanted, *present} if wanted.get(name) != present.get(name))


def main(arguments: Iterable[str] | None = None) -> int:
    """Write the pages, or with ``--check`` say which are stale and return 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    options = parser.parse_args(None if arguments is None else list(arguments))
    wanted = pages()
    old = stale(wanted)
    if options.check:
        if old:
            print(f"docs/reference is out of date, run `make docs`: {', '.join(old)}", file=sys.stderr)
        return 1 if old else 0
    TARGET.mkdir(parents=True, exist_ok=True)
    for name in old:
        if name in wanted:
            (TARGET / name).write_text(wanted[name], encoding="utf-8")
        else:
            (TARGET / name).unlink()
    print(f"docs/reference: {len(wanted)} pages, {len(old)} written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
