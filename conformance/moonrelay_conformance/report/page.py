"""One report as a page: the target, counts for each level, and every check on every route.

Owns the layout; looks and escaping are `moonrelay_conformance.report.style`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moonrelay_conformance.capability import Support
from moonrelay_conformance.report.style import (
    document,
    esc,
    filter_bar,
    head,
    legend,
    level_card,
    problems,
    row,
    said,
)
from moonrelay_conformance.report.text import verdict, word
from moonrelay_conformance.results import Kind, Outcome, Report, Result

_HEADINGS = {Kind.CASE: "Cases", Kind.SCENARIO: "Lease scenarios", Kind.PROMISE: "Promises"}
_VERDICTS = {"passed": Outcome.HELD, "FAILED": Outcome.FAILED, "INCOMPLETE": Outcome.NOT_RUN}


def page(report: Report) -> str:
    """Return the page."""
    return document(f"Conformance of {report.target.label}", _body(report))


def _body(report: Report) -> Iterator[str]:
    target, ended = report.target, verdict(report)
    outcome = _VERDICTS[ended]
    yield f'<h1>{esc(target.label)}<span class="verdict {outcome.value}">{esc(ended.lower())}</span></h1>'
    about = [part for part in (target.distribution, target.host) if part]
    about += [f"suite {report.suite_version}", f"corpus {report.corpus_version}", f"{report.seconds:.0f} s"]
    yield f'<p class="quiet">{esc(" · ".join(about))}</p>'
    if report.environment:
        versions = " · ".join(f"{name} {version}" for name, version in report.environment.items())
        yield f'<p class="quiet">{esc(versions)}</p>'
    cards = "".join(level_card(level, counts) for level, counts in report.counts().items())
    yield f'<div class="cards three">{cards}</div>'
    yield _capabilities(report)
    yield legend()
    failed = [result for result in report.results if result.outcome is Outcome.FAILED]
    if failed:
        yield f"<h2>Broken promises <small>{len(failed)}</small></h2>"
        yield problems((_name(result), result.reason) for result in failed)
    yield filter_bar(result.outcome for result in report.results)
    for kind, heading in _HEADINGS.items():
        results = [result for result in report.results if result.kind is kind]
        if results:
            yield from _table(heading, results)


def _capabilities(report: Report) -> str:
    by_support: dict[str, list[str]] = {}
    for name, support in report.target.capabilities.items():
        by_support.setdefault(support, []).append(name)
    words = {
        Support.FULL.value: (Outcome.HELD, "declared"),
        Support.NOT_IMPLEMENTED.value: (Outcome.NOT_RUN, "not implemented yet"),
        Support.UNSUPPORTED.value: (Outcome.UNSUPPORTED, "not supported"),
    }
    cards = []
    for support, (outcome, heading) in words.items():
        names = by_support.get(support, [])
        if names:
            chips = "".join(
                f'<span class="chip {outcome.value}">{esc(name.replace("_", " "))}</span>' for name in names
            )
            cards.append(
                f'<div class="card"><h3>Capabilities {heading} · {len(names)}</h3>'
                f'<div class="chips">{chips}</div></div>'
            )
    return f'<div class="cards three">{"".join(cards)}</div>' if cards else ""


def _table(heading: str, results: Sequence[Result]) -> Iterator[str]:
    routes = [route for route in dict.fromkeys(result.route for result in results) if route]
    columns = [*routes, *([""] if any(not result.route for result in results) else [])]
    by_check: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        by_check.setdefault((result.level.value, result.id), []).append(result)
    yield f"<h2>{heading} <small>{len(by_check)}</small></h2>"
    names = [esc(column) if column else "any route" if routes else "outcome" for column in columns]
    yield f'<div class="table"><table>{head(["level", "check", *names])}<tbody>'
    for (_, check), found in sorted(by_check.items()):
        cells = ["".join(_cell(result) for result in found if result.route == column) for column in columns]
        empty = '<span class="none">·</span>'
        yield row(
            found[0].level, check, found[0].title, (one.outcome for one in found), [cell or empty for cell in cells]
        )
    yield "</tbody></table></div>"


def _cell(result: Result) -> str:
    code = result.code if result.outcome is Outcome.REFUSED else ""
    parts = [said(result.outcome, word(result.outcome), code, result.reason, hover=_hover(result))]
    if result.steps:
        steps = "".join(f"<li>{esc(step)}</li>" for step in result.steps)
        parts.append(f"<details><summary>{len(result.steps)} steps</summary><ol>{steps}</ol></details>")
    return "".join(parts)


def _hover(result: Result) -> str:
    parts = [result.test, f"{result.seconds:.2f} s"]
    if result.expected:
        parts.append(f"expected {result.expected}")
    if result.digest:
        parts.append(f"digest {result.digest}")
    return ", ".join(part for part in parts if part)


def _name(result: Result) -> str:
    return f"{result.id} ({result.route})" if result.route else result.id
