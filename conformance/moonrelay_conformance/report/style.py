"""What the pages have in common: the skeleton, the colours, and how an outcome looks.

Owns escaping. A page is one file that asks nothing of a network; colours only repeat what a sign and a word say, and
follow the reader's light or dark setting.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Final

from moonrelay_conformance.report.text import MEANINGS, SIGNS, word
from moonrelay_conformance.results import Level, Outcome

_CSS: Final = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1b2430; --quiet: #566373; --line: #dce1e8; --head: #eef1f5;
  --hover: #f3f6fa;
  --delivered: #0d6832; --delivered-bg: #ddf3e4; --refused: #0a5a75; --refused-bg: #d9eef6;
  --unsupported: #566373; --unsupported-bg: #edeff2; --not_run: #7a5200; --not_run-bg: #fdf0cf;
  --failed: #a3121f; --failed-bg: #fde1e3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #10151c; --card: #18202a; --text: #e4e9f0; --quiet: #a3b0bf; --line: #2d3845; --head: #202a36;
    --hover: #1e2834; --delivered: #7ee2a2; --delivered-bg: #12371f; --refused: #84d3ef; --refused-bg: #0f3340;
    --unsupported: #a3b0bf; --unsupported-bg: #252f3b; --not_run: #f3c969; --not_run-bg: #3b2d08;
    --failed: #ff9da4; --failed-bg: #4a151b;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1360px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 24px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 17px; margin: 36px 0 10px; }
h2 small { font-weight: 400; font-size: 13px; color: var(--quiet); margin-left: 8px; }
p { margin: 4px 0; } .quiet { color: var(--quiet); }
code { font: 12.5px/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.verdict { display: inline-block; font-size: 14px; font-weight: 600; padding: 2px 12px; border-radius: 999px;
  vertical-align: 3px; margin-left: 10px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); gap: 12px; margin: 18px 0 6px; }
.cards.three { grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.card h3 { margin: 0 0 6px; font-size: 13px; font-weight: 600; color: var(--quiet); }
.card .big { font-size: 22px; font-weight: 650; margin-right: 8px; }
.chips { display: flex; flex-wrap: wrap; gap: 4px 6px; margin-top: 4px; }
.chip { display: inline-block; border-radius: 6px; padding: 1px 8px; font-size: 12.5px; white-space: nowrap; }
.table { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: separate; border-spacing: 0; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 6px 12px; border-bottom: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
thead th { position: sticky; top: 0; background: var(--head); font-size: 12.5px; color: var(--quiet); font-weight: 600;
  z-index: 1; white-space: nowrap; }
thead th:first-child { border-top-left-radius: 10px; } thead th:last-child { border-top-right-radius: 10px; }
tbody th { font-weight: 400; } tbody th code { font-weight: 600; color: var(--text); overflow-wrap: anywhere; }
tbody tr:hover { background: var(--hover); }
td.level { width: 44px; color: var(--quiet); font-variant-numeric: tabular-nums; }
td.cell { min-width: 150px; } td .why { display: block; color: var(--quiet); font-size: 12.5px; max-width: 44ch;
  overflow-wrap: anywhere; margin-top: 2px; }
td code.why { font-size: 11.5px; }
.title { display: block; color: var(--quiet); font-size: 13px; }
.o { display: inline-block; white-space: nowrap; border-radius: 6px; padding: 1px 8px; font-size: 12.5px;
  font-weight: 550; }
.o i { font-style: normal; display: inline-block; width: 1.25em; }
.delivered, .held { color: var(--delivered); background: var(--delivered-bg); }
.refused { color: var(--refused); background: var(--refused-bg); }
.unsupported { color: var(--unsupported); background: var(--unsupported-bg); }
.not_run { color: var(--not_run); background: var(--not_run-bg); }
.failed { color: var(--failed); background: var(--failed-bg); }
.none { color: var(--quiet); }
ul.problems { list-style: none; margin: 0; padding: 0; background: var(--card); border: 1px solid var(--failed);
  border-radius: 10px; overflow: hidden; }
ul.problems .o { white-space: normal; }
ul.problems li { padding: 8px 14px; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
ul.problems li:last-child { border-bottom: 0; }
details summary { cursor: pointer; color: var(--quiet); font-size: 12.5px; }
details ol { margin: 4px 0 2px; padding-left: 22px; font-size: 12.5px; color: var(--quiet); }
.legend { display: flex; flex-wrap: wrap; gap: 6px 18px; margin: 14px 0 0; font-size: 12.5px; color: var(--quiet); }
.filter { display: none; gap: 8px; align-items: center; margin: 22px 0 -14px; flex-wrap: wrap; }
.filter button { font: inherit; font-size: 13px; color: var(--text); background: var(--card); padding: 3px 12px;
  border: 1px solid var(--line); border-radius: 999px; cursor: pointer; }
.filter button[aria-pressed=true] { background: var(--text); color: var(--page); border-color: var(--text); }
.filter input { font: inherit; font-size: 13px; color: var(--text); background: var(--card); min-width: 220px;
  border: 1px solid var(--line); border-radius: 999px; padding: 3px 12px; }
.filter :focus-visible, summary:focus-visible { outline: 2px solid var(--refused); outline-offset: 2px; }
tr[hidden] { display: none; }
@media (max-width: 900px) {
  .table { overflow-x: auto; } thead th { position: static; } main { padding: 16px 12px 48px; }
}
@media print { .filter { display: none !important; } thead th { position: static; } }
"""

# Rows carry their outcomes in data-o; without scripts everything is shown and the filter is not.
_JS: Final = """
(() => {
  const bar = document.querySelector('.filter'); if (!bar) return;
  const rows = [...document.querySelectorAll('tbody tr[data-o]')];
  const buttons = [...bar.querySelectorAll('button')], text = bar.querySelector('input');
  let only = '';
  const apply = () => {
    const words = text.value.toLowerCase();
    for (const row of rows) row.hidden =
      (only && !row.dataset.o.split(' ').includes(only)) || !row.textContent.toLowerCase().includes(words);
    for (const button of buttons) button.setAttribute('aria-pressed', String(button.dataset.o === only));
  };
  for (const button of buttons) button.onclick = () => { only = button.dataset.o; apply(); };
  text.oninput = apply; bar.style.display = 'flex'; apply();
})();
"""


def esc(text: object) -> str:
    """Return text for a page."""
    return html.escape(str(text), quote=True)


def document(title: str, body: Iterable[str]) -> str:
    """Return a whole page."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{esc(title)}</title>",
            f"<style>{_CSS}</style>",
            "</head>",
            "<body><main>",
            *body,
            f"</main><script>{_JS}</script></body>",
            "</html>",
            "",
        ]
    )


def badge(outcome: Outcome, text: str | None = None, *, hover: str = "") -> str:
    """Return an outcome as sign and words on its colour."""
    title = f' title="{esc(hover)}"' if hover else ""
    said = esc(text if text is not None else word(outcome))
    return f'<span class="o {outcome.value}"{title}><i aria-hidden="true">{SIGNS[outcome]}</i>{said}</span>'


def chips(counts: Mapping[Outcome, int]) -> str:
    """Return a count for each outcome that there is."""
    return (
        '<span class="chips">'
        + "".join(
            badge(outcome, f"{counts[outcome]} {word(outcome)}", hover=MEANINGS[outcome])
            for outcome in Outcome
            if counts.get(outcome)
        )
        + "</span>"
    )


def level_card(level: Level, counts: Mapping[Outcome, int]) -> str:
    """Return the counts of a level."""
    total = sum(counts.values())
    good = sum(count for outcome, count in counts.items() if outcome.good)
    tried = total - counts.get(Outcome.UNSUPPORTED, 0)
    about = {Level.L1: "every target", Level.L2: "by declared capability", Level.L3: "under faults"}[level]
    figure = f'<span class="big">{good}/{tried}</span>hold' if tried else '<span class="big">○</span>nothing tried'
    return f'<div class="card"><h3>{level.value} · {about}</h3>{figure}{chips(counts)}</div>'


def legend() -> str:
    """Return what signs and colours mean."""
    parts = (f"<span>{badge(outcome)} {esc(meaning)}</span>" for outcome, meaning in MEANINGS.items())
    return f'<div class="legend">{"".join(parts)}</div>'


def filter_bar(outcomes: Iterable[Outcome]) -> str:
    """Return the filter; it shows itself only where scripts run."""
    there = set(outcomes)
    buttons = "".join(
        f'<button type="button" data-o="{one.value}">{SIGNS[one]} {esc(word(one))}</button>'
        for one in Outcome
        if one in there
    )
    return (
        '<div class="filter"><button type="button" data-o="">all</button>'
        f'{buttons}<input type="search" placeholder="filter checks" aria-label="filter checks"></div>'
    )


def head(cells: Iterable[str]) -> str:
    """Return a table's heading row."""
    return "<thead><tr>" + "".join(f'<th scope="col">{cell}</th>' for cell in cells) + "</tr></thead>"


def row(level: Level, check: str, title: str, outcomes: Iterable[Outcome], cells: Iterable[str]) -> str:
    """Return a check's row; ``cells`` are markup."""
    values = " ".join(dict.fromkeys(outcome.value for outcome in outcomes))
    tds = "".join(f'<td class="cell">{cell}</td>' for cell in cells)
    return (
        f'<tr data-o="{values}"><td class="level">{level.value}</td>'
        f'<th scope="row"><code>{esc(check)}</code><span class="title">{esc(title)}</span></th>{tds}</tr>'
    )


def said(outcome: Outcome, text: str, code: str, reason: str, *, hover: str = "") -> str:
    """Return what stands in a cell: the outcome, and under it the error code or the reason."""
    lines = [badge(outcome, text, hover=hover)]
    if code:
        lines.append(f'<code class="why">{esc(code)}</code>')
    if reason:
        lines.append(f'<span class="why">{esc(reason)}</span>')
    return "".join(lines)


def problems(items: Iterable[tuple[str, str]]) -> str:
    """Return a list of what is wrong: name and text."""
    lines = (f"<li>{badge(Outcome.FAILED, name)} {esc(text)}</li>" for name, text in items)
    return f'<ul class="problems">{"".join(lines)}</ul>'
