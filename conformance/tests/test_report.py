"""Reports: cells and tables of the matrix, agreement across adapters, the committed form and what got worse."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from moonrelay.errors import ConfigError, VersionError, WireError
from moonrelay_conformance.report import markdown
from moonrelay_conformance.report.compare import compare
from moonrelay_conformance.report.markdown import Said
from moonrelay_conformance.report.matrix import Matrix, cell_of, join, keep, load
from moonrelay_conformance.report.matrix_page import matrix_page
from moonrelay_conformance.report.page import page
from moonrelay_conformance.report.text import SIGNS, one_line
from moonrelay_conformance.results import Kind, Level, Outcome, Report, Result, TargetInfo

NASTY = "<script>alert('x')</script> | a & \"b\"\nnext"


def result(id_: str, outcome: Outcome, *, kind: Kind = Kind.CASE, level: Level = Level.L1, **more: object) -> Result:
    return Result(id=id_, kind=kind, level=level, outcome=outcome, title=f"Title of {id_}", **more)  # type: ignore[arg-type]


def report(
    *results: Result, name: str = "diffusers", kind: str = "adapter", complete: bool = True, **more: object
) -> Report:
    info = TargetInfo(
        kind=kind,
        name=name,
        distribution="moonrelay 0.1.7",
        host="diffusers 0.42.1 (engine shm)",
        capabilities={"p2p": "full"},
    )
    return Report(target=info, levels=tuple(Level), results=results, complete=complete, **more)  # type: ignore[arg-type]


def delivered(id_: str, digest: str, route: str = "") -> Result:
    return result(id_, Outcome.DELIVERED, digest=digest, route=route)


def played(id_: str, *steps: str, route: str = "") -> Result:
    return result(id_, Outcome.HELD, kind=Kind.SCENARIO, steps=steps, route=route)


class TestCell:
    def test_routes_that_agree_are_not_named(self) -> None:
        cell = cell_of([delivered("a", "1", "p2p"), delivered("a", "1", "store")])
        assert (cell.text, cell.reason) == ("delivered", "")

    def test_the_worst_route_decides_and_is_named(self) -> None:
        cell = cell_of(
            [delivered("a", "1", "p2p"), result("a", Outcome.FAILED, route="store", reason="it came back as (1,)")]
        )
        assert cell.outcome is Outcome.FAILED
        assert cell.text == "failed (store)"
        assert cell.reason == "p2p: delivered; store: failed, it came back as (1,)"

    def test_a_refusal_names_its_code(self) -> None:
        assert cell_of([result("a", Outcome.REFUSED, code="unsupported_tensor")]).text == "refused: unsupported_tensor"

    @pytest.mark.parametrize("better", [one for one in Outcome if one is not Outcome.FAILED])
    def test_nothing_hides_a_failure(self, better: Outcome) -> None:
        assert cell_of([result("a", better), result("a", Outcome.FAILED)]).outcome is Outcome.FAILED


class TestKept:
    """Columns of a committed matrix beside new reports."""

    def committed(self) -> str:
        return markdown.write(
            join(
                [
                    report(
                        delivered("a", "1"),
                        result("b", Outcome.REFUSED, code="unsupported_tensor", route="p2p"),
                        delivered("b", "2", "store"),
                        result("c", Outcome.UNSUPPORTED, reason="needs claim (not | declared)", level=Level.L2),
                        result("d", Outcome.FAILED, reason="not committed", route="p2p"),
                    ),
                    report(delivered("a", "1"), name="other"),
                    report(result("p", Outcome.HELD, kind=Kind.PROMISE), name="shm", kind="engine", complete=False),
                ]
            )
        )

    def test_what_is_read_is_written_again_as_it_was(self) -> None:
        text = self.committed()
        assert markdown.write(markdown.read(text)) == text

    def test_a_new_column_leaves_the_others_as_they_are(self) -> None:
        before = markdown.read(self.committed())
        new = join([report(delivered("a", "1"), delivered("e", "5"), name="newest")])
        text = markdown.write(keep(new, before))
        assert markdown.cells_of(markdown.read(text)) == {**markdown.cells_of(before), **markdown.cells_of(new)}
        assert [one.key for one in markdown.read(text).columns] == [
            "adapter:diffusers",
            "adapter:newest",
            "adapter:other",
            "engine:shm",
        ]
        assert "incomplete" in text

    def test_a_column_with_a_report_is_not_kept(self) -> None:
        new = join([report(delivered("a", "1"))])
        kept = markdown.cells_of(keep(new, markdown.read(self.committed())))
        assert {check for _, column, check in kept if column == "adapter:diffusers"} == {"a"}

    def test_another_version_is_refused(self) -> None:
        before = markdown.read(self.committed().replace("corpus 1.", "corpus 0.", 1))
        with pytest.raises(ConfigError, match="corpus version 0 cannot be kept beside 1"):
            keep(join([report(delivered("a", "1"))]), before)

    @pytest.mark.parametrize("cut", ["Suite ", "| `adapter:other` |"])
    def test_an_edited_file_is_refused(self, cut: str) -> None:
        text = "\n".join(line for line in self.committed().splitlines() if not line.startswith(cut))
        with pytest.raises(ConfigError, match="make it with"):
            markdown.read(text)


class TestMatrix:
    def test_kinds_have_tables_of_their_own(self) -> None:
        matrix = join(
            [
                report(result("p", Outcome.HELD, kind=Kind.PROMISE), name="sqlite", kind="queue"),
                report(delivered("b", "1"), played("s", "published"), result("p", Outcome.HELD, kind=Kind.PROMISE)),
                report(result("p", Outcome.HELD, kind=Kind.PROMISE), name="shm", kind="engine"),
            ]
        )
        assert [(table.heading, table.columns) for table in matrix.tables] == [
            ("Adapters: cases", ("adapter:diffusers",)),
            ("Adapters: lease scenarios", ("adapter:diffusers",)),
            ("Adapters: promises", ("adapter:diffusers",)),
            ("Transfer engines", ("engine:shm",)),
            ("Queues", ("queue:sqlite",)),
        ]
        assert matrix.passed

    def test_rows_stand_by_level_and_name(self) -> None:
        matrix = join(
            [report(result("b", Outcome.HELD), result("c", Outcome.HELD, level=Level.L2), delivered("a", "1"))]
        )
        assert [row.id for row in matrix.tables[0].rows] == ["a", "b", "c"]

    def test_a_check_that_one_target_lacks_has_no_cell(self) -> None:
        matrix = join([report(delivered("a", "1")), report(delivered("b", "1"), name="sglang")])
        assert [set(row.cells) for row in matrix.tables[0].rows] == [{"adapter:diffusers"}, {"adapter:sglang"}]

    def test_an_incomplete_report_and_a_failure_are_not_passed(self) -> None:
        assert not join([report(delivered("a", "1"), complete=False)]).passed
        assert not join([report(result("a", Outcome.FAILED))]).passed

    def test_a_report_is_not_complete_because_it_says_so(self) -> None:
        left = report(delivered("a", "1"), result("b", Outcome.NOT_RUN))
        assert not left.passed
        assert not join([left]).passed
        assert not report().passed
        assert not join([report()]).passed

    def test_one_target_twice_is_refused_unless_its_host_differs(self) -> None:
        with pytest.raises(ConfigError, match="two reports are of adapter:diffusers"):
            join([report(), report()])
        other = report()
        other = Report(
            target=TargetInfo(kind="adapter", name="diffusers", host="diffusers 0.36.0"), levels=(), results=()
        )
        keys = [column.key for column in join([report(), other]).columns]
        assert keys == [
            "adapter:diffusers (diffusers 0.36)",
            "adapter:diffusers (moonrelay 0.1, diffusers 0.42 (engine shm))",
        ]

    def test_versions_do_not_mix(self) -> None:
        with pytest.raises(ConfigError, match="corpus versions 1 and 2 do not join"):
            join([report(), report(name="x", corpus_version=2)])

    def test_nothing_is_no_matrix(self) -> None:
        with pytest.raises(ConfigError, match="at least one report"):
            join([])

    def test_what_is_no_report_is_named(self) -> None:
        with pytest.raises(WireError, match=r"b\.json is no conformance report"):
            load([("a.json", report().to_json()), ("b.json", b'{"x": 1}')])
        with pytest.raises(VersionError, match=r"a\.json has report version 9"):
            load([("a.json", b'{"report_version": 9}')])


class TestAgreement:
    def test_the_same_bytes_and_steps_agree(self) -> None:
        one = report(delivered("a", "1", "p2p"), delivered("a", "1", "store"), played("s", "published", "granted"))
        matrix = join([one, report(delivered("a", "1"), played("s", "published", "granted"), name="sglang")])
        assert matrix.disagreements == ()
        assert matrix.compared == 2

    def test_other_bytes_of_another_adapter_disagree(self) -> None:
        matrix = join([report(delivered("a", "11")), report(delivered("a", "22"), name="sglang")])
        assert [one.text for one in matrix.disagreements] == [
            "delivered different bytes: adapter:diffusers: 11; adapter:sglang: 22"
        ]
        assert not matrix.passed

    def test_other_bytes_on_another_route_disagree(self) -> None:
        matrix = join([report(delivered("a", "11", "p2p"), delivered("a", "22", "store"))])
        assert [one.id for one in matrix.disagreements] == ["a"]

    def test_a_delivery_without_a_digest_disagrees(self) -> None:
        matrix = join([report(delivered("a", "11")), report(delivered("a", ""), name="sglang")])
        assert "adapter:sglang: nothing" in matrix.disagreements[0].text

    def test_a_refusal_is_no_disagreement(self) -> None:
        matrix = join([report(delivered("a", "11")), report(result("a", Outcome.REFUSED), name="sglang")])
        assert matrix.disagreements == ()

    def test_a_step_that_differs_is_named(self) -> None:
        matrix = join(
            [report(played("s", "published", "granted")), report(played("s", "published", "refused:x"), name="sglang")]
        )
        assert matrix.disagreements[0].text == "step 2 differs: adapter:diffusers: granted; adapter:sglang: refused:x"

    def test_a_missing_step_differs(self) -> None:
        matrix = join([report(played("s", "published")), report(played("s"), name="sglang")])
        assert "different numbers of steps" in matrix.disagreements[0].text


def everything() -> Matrix:
    results = [
        result(f"case-{outcome.value}", outcome, code="c" if outcome is Outcome.REFUSED else "", reason=NASTY)
        for outcome in Outcome
    ]
    nasty = Result(id="pipe|d", kind=Kind.CASE, level=Level.L3, outcome=Outcome.UNSUPPORTED, title=NASTY, reason=NASTY)
    queue = report(result("q", Outcome.HELD, kind=Kind.PROMISE), name="memory", kind="queue")
    return join([report(*results, nasty), report(results[0], name="sglang", complete=False), queue])


class TestMarkdown:
    def test_what_is_written_reads_back(self) -> None:
        matrix = everything()
        read = markdown.parse(markdown.write(matrix))
        assert read == markdown.cells_of(matrix)
        assert len(read) == len(Outcome) + 3

    def test_it_is_the_same_whatever_the_order_and_the_times(self) -> None:
        one = report(delivered("a", "1"), delivered("b", "1"), seconds=1.5, environment={"python": "3.11.2"})
        two = report(delivered("b", "1"), delivered("a", "1"), seconds=99.0)
        other = report(delivered("a", "1"), name="sglang")
        assert markdown.write(join([one, other])) == markdown.write(join([other, two]))

    def test_it_holds_no_time_no_digest_and_no_reason_of_a_failure(self) -> None:
        text = markdown.write(
            join([report(delivered("a", "f00d"), result("b", Outcome.FAILED, reason="/tmp/x"), seconds=12.75)])
        )
        assert "f00d" not in text
        assert "/tmp" not in text
        assert "12.75" not in text
        assert "0.42.1" not in text
        assert "diffusers 0.42" in text

    def test_a_file_without_a_table_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"old\.md holds no table"):
            markdown.parse("# Something\n", source="old.md")

    def test_a_cell_without_an_outcome_is_refused(self) -> None:
        text = markdown.write(join([report(delivered("a", "1"))])).replace("✔ delivered |", "fine |")
        with pytest.raises(ConfigError, match="'fine' says no outcome"):
            markdown.parse(text)

    def test_a_row_that_lost_a_cell_is_refused(self) -> None:
        text = markdown.write(join([report(delivered("a", "1")), report(delivered("a", "1"), name="sglang")]))
        short = text.replace("✔ delivered | ✔ delivered |", "✔ delivered |")
        with pytest.raises(ConfigError, match=r"old\.md, line \d+: 4 cells under 5 headings"):
            markdown.parse(short, source="old.md")

    def test_a_row_that_stands_twice_is_refused(self) -> None:
        """As a merge that was not finished leaves it."""
        row = "| L1 | `a` | Title of a | ✔ delivered |\n"
        text = markdown.write(join([report(delivered("a", "1"))]))
        with pytest.raises(ConfigError, match=r"old\.md, line \d+: a of adapter:diffusers stands twice"):
            markdown.parse(text.replace(row, row + row.replace("✔ delivered", "✘ failed")), source="old.md")

    def test_an_adapter_that_is_all_alone_has_nothing_to_disagree_with(self) -> None:
        assert "No adapter is compared" in markdown.write(join([report(name="memory", kind="queue")]))


class TestCompare:
    COMMITTED = {
        ("T", "a", "x"): Said(Outcome.DELIVERED),
        ("T", "a", "y"): Said(Outcome.REFUSED),
        ("T", "b", "x"): Said(Outcome.HELD),
    }

    def test_the_same_is_no_change(self) -> None:
        changes = compare(self.COMMITTED, dict(self.COMMITTED))
        assert not changes.regressed
        assert (changes.better, changes.new) == ((), ())

    @pytest.mark.parametrize("after", [Outcome.REFUSED, Outcome.UNSUPPORTED, Outcome.NOT_RUN, Outcome.FAILED])
    def test_a_cell_that_got_worse_is_named(self, after: Outcome) -> None:
        changes = compare(self.COMMITTED, {**self.COMMITTED, ("T", "a", "x"): Said(after)})
        assert changes.worse == (f"a x: delivered → {after.value.replace('_', ' ')}",)
        assert changes.regressed

    def test_a_cell_that_got_better_is_told_and_fine(self) -> None:
        changes = compare(self.COMMITTED, {**self.COMMITTED, ("T", "a", "y"): Said(Outcome.DELIVERED)})
        assert changes.better == ("a y: refused → delivered",)
        assert not changes.regressed

    def test_a_cell_and_a_column_that_are_gone_are_named(self) -> None:
        changes = compare(self.COMMITTED, {("T", "a", "x"): Said(Outcome.DELIVERED)})
        assert changes.missing == ("a y: is gone (refused)", "column b of 'T': is gone")
        assert changes.regressed

    def test_what_is_new_is_told_and_a_new_failure_is_worse(self) -> None:
        new = {
            ("T", "a", "z"): Said(Outcome.HELD),
            ("T", "c", "x"): Said(Outcome.HELD),
            ("T", "a", "w"): Said(Outcome.FAILED),
        }
        changes = compare(self.COMMITTED, {**self.COMMITTED, **new})
        assert changes.new == ("a w: is new (failed)", "a z: is new (held)", "column c of 'T': is new")
        assert changes.worse == ("a w: new, failed",)

    @pytest.mark.parametrize("bad", [Outcome.FAILED, Outcome.REFUSED])
    def test_a_route_that_joins_the_bad_ones_is_worse(self, bad: Outcome) -> None:
        both = join([report(result("x", bad, route="p2p"), result("x", bad, route="store"))])
        other = join([report(delivered("x", "1", "p2p"), result("x", bad, route="store"))])
        one = join([report(result("x", bad, route="p2p"), delivered("x", "1", "store"))])
        committed = markdown.parse(markdown.write(one))
        assert not compare(committed, markdown.cells_of(one)).regressed
        changes = compare(committed, markdown.cells_of(both))
        assert changes.worse == (f"adapter:diffusers x: {bad.value} (p2p) → {bad.value}",)
        assert compare(committed, markdown.cells_of(other)).regressed
        assert not compare(markdown.parse(markdown.write(both)), markdown.cells_of(one)).regressed
        assert compare(markdown.parse(markdown.write(both)), markdown.cells_of(one)).better


class _Tags(HTMLParser):
    """Takes down the tags of a page, and whether they are balanced."""

    VOID = ("meta", "input", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.outside += [f"{name}={value}" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    "text",
    [
        matrix_page(everything()),
        matrix_page(
            everything(), compare({("T", "a", NASTY): Said(Outcome.HELD)}, {("T", "b", "x"): Said(Outcome.HELD)})
        ),
        page(report(*(result(f"c-{one.value}", one, reason=NASTY, steps=(NASTY,)) for one in Outcome))),
        page(report(delivered("a", "1", "p2p"), delivered("a", "1"), environment={"python": "3"}, complete=False)),
        page(report()),
    ],
    ids=["matrix", "compared", "report", "routes", "empty"],
)
def test_a_page_is_whole_escaped_and_by_itself(text: str) -> None:
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.outside == []
    assert tags.seen.count("script") == 1
    assert "<script>alert" not in text
    assert not re.search(r"url\(|@import|https?://", text)


def test_no_outcome_is_told_by_colour_alone() -> None:
    text = page(report(*(result(f"c-{one.value}", one) for one in Outcome)))
    for outcome in Outcome:
        assert f"</i>{outcome.value.replace('_', ' ')}</span>" in text
        assert f">{SIGNS[outcome]}</i>" in text


def test_one_line_counts_each_level() -> None:
    made = report(delivered("a", "1"), delivered("b", "1"), result("c", Outcome.FAILED, level=Level.L3))
    assert one_line(made) == "adapter:diffusers: FAILED (L1 2 delivered; L2 none; L3 1 failed)"
    assert one_line(report(complete=False)).startswith("adapter:diffusers: INCOMPLETE")
