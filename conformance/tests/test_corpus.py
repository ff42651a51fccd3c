"""The corpus as it is shipped: complete, consistent, and refused where it is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from moonrelay.errors import ConfigError
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.corpus import load, tool
from moonrelay_conformance.corpus.load import cases, decode, reasons, scenarios
from moonrelay_conformance.corpus.model import Case, Expected, PromiseName, Scenario, check_case, check_scenario
from moonrelay_conformance.results import Level

CASE: dict[str, Any] = {
    "id": "a-case",
    "level": "L1",
    "promise": "values_are_kept",
    "title": "It arrives",
    "provenance": ["inputs:1"],
    "reason": "bytes",
    "tree": {"tensor": {"shape": [3], "dtype": "float32", "seed": 1}},
    "expect": {"outcome": "delivered", "digest": "0"},
}
PUBLISH: dict[str, Any] = {"do": "publish", "side": "producer", "as": "p", "expect": ["published"]}
CLAIM: dict[str, Any] = {"do": "claim", "side": "consumer", "of": "p", "as": "c", "expect": ["granted"]}
READ: dict[str, Any] = {"do": "read", "side": "consumer", "of": "c", "expect": ["delivered"]}


def a_case(**changes: Any) -> Case:
    (made,) = decode(json.dumps([{**CASE, **changes}]).encode(), Case, "cases_x.json")
    check_case(made, reasons(), "cases_x.json")
    return made


def a_scenario(*steps: dict[str, Any], **changes: Any) -> Scenario:
    entry = {key: CASE[key] for key in ("title", "provenance", "reason", "level")}
    entry = {**entry, "id": "a-scenario", "payload": CASE["tree"], "steps": list(steps), **changes}
    (made,) = decode(json.dumps([entry]).encode(), Scenario, "scenarios_x.json")
    check_scenario(made, reasons(), "scenarios_x.json")
    return made


# What is shipped.


def test_committed_digests_are_those_of_the_trees() -> None:
    assert tool.main(["--check"]) == 0


def test_there_is_enough_of_everything() -> None:
    assert len(cases()) >= 80
    assert len(scenarios()) >= 28
    assert {case.promise for case in cases()} == set(PromiseName)
    assert {case.expect.outcome for case in cases()} == set(Expected)


def test_every_report_that_the_corpus_grew_from_has_an_entry() -> None:
    everything = [*cases(), *scenarios()]
    named = {int(found) for one in everything for ref in one.provenance for found in re.findall(r"^inputs:(\d+)$", ref)}
    # Line 8 is an engine's failure: it is in the fault tests, no payload brings it about.
    assert named >= set(range(1, 20)) - {8}


def test_every_capability_to_carry_is_asked_for() -> None:
    asked = {one for case in cases() for one in case.requires}
    assert asked >= {one for one in Capability if one.carried}


def test_l1_is_what_every_adapter_must_carry() -> None:
    carried = [case for case in cases() if case.level is Level.L1 and case.expect.outcome is Expected.DELIVERED]
    text = json.dumps([case.tree for case in carried])
    dtypes = set(re.findall(r'"dtype": "(\w+)"', text))
    assert dtypes == {"float32", "float16", "bfloat16", "int64", "uint8"}
    assert set(re.findall(r'\{"(\w+)":', text)) == {"tensor", "dict", "shape"}


def test_no_reason_is_without_use() -> None:
    used = {one.reason for one in (*cases(), *scenarios())}
    assert used == set(reasons())


def test_scenarios_take_their_time_and_no_more() -> None:
    passing = sum(step.seconds for scenario in scenarios() for step in scenario.steps if step.do == "pass_time")
    assert passing <= 25.0


def test_what_could_hang_is_bounded() -> None:
    blocking = ("receive", "read", "next_chunk", "finish", "ack", "until_status")
    for scenario in scenarios():
        for number, step in enumerate(scenario.steps):
            assert step.do not in blocking or step.within_s is not None, f"{scenario.id}, step {number}"


def test_scenarios_end_settled() -> None:
    assert [one.id for one in scenarios() if one.steps[-1].do != "settled"] == []


def test_files_are_laid_out_as_the_tool_does() -> None:
    for name in load.files("cases_"):
        raw = load._data(name).decode()
        assert tool.refreshed(raw, name) == raw


def test_importing_the_corpus_loads_no_torch() -> None:
    code = (
        "import sys; from moonrelay_conformance.corpus import load, model, tool, trees, description;"
        "load.cases(); load.scenarios(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# What is refused.


def test_the_examples_of_this_module_are_right() -> None:
    a_case()
    a_scenario(PUBLISH, CLAIM, READ)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"promise": "nothing_is_kept"}, "promise"),
        ({"requires": ["flying"]}, "requires"),
        ({"reason": "because"}, "reason 'because' is not in reasons.json"),
        ({"id": "Not an id"}, "id is lower-case"),
        ({"title": ""}, "title"),
        ({"provenance": []}, "provenance"),
        ({"surprise": 1}, "surprise"),
        ({"requires": ["views"]}, "L1 is for every target"),
        ({"level": "L2"}, "which capability it requires"),
        ({"tree": {"tensor": {"shape": [-1], "dtype": "uint8"}}}, r"tree\.tensor\.shape\[0\] is -1"),
        ({"expect": {"outcome": "refused"}}, "codes are given where a refusal is allowed"),
        ({"expect": {"outcome": "refused", "codes": ["no_such_code"]}}, "unknown error code"),
        ({"expect": {"outcome": "delivered", "codes": ["capacity_error"]}}, "and only there"),
        ({"expect": {"outcome": "refused", "codes": ["capacity_error"], "digest": "00"}}, "no digest"),
        ({"outgoing": {"chunk_dim": 0, "num_chunks": 3, "ready_order": [0, 0, 1]}}, "each chunk once"),
        ({"side": {"pool_byte": 4}}, "pool_byte"),
    ],
)
def test_a_wrong_case_is_refused_with_the_place(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        a_case(**changes)
    assert "cases_x.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([{**PUBLISH, "do": "teleport"}], "unknown verb 'teleport'"),
        ([{**PUBLISH, "side": "bystander"}], "unknown side 'bystander'"),
        ([CLAIM], "'p' was not published before"),
        ([PUBLISH, READ], "has no claim or receipt 'c'"),
        ([PUBLISH, CLAIM, {**READ, "side": "consumer2"}], "consumer2 has no claim"),
        ([{key: value for key, value in PUBLISH.items() if key != "as"}], "needs as"),
        ([{**PUBLISH, "expect": []}], "needs expect"),
        ([{**PUBLISH, "expect": ["granted"]}], "publish cannot be observed as 'granted'"),
        ([PUBLISH, {**CLAIM, "expect": ["refused:no_such_code"]}], "unknown error code"),
        ([PUBLISH, {"do": "status", "side": "consumer", "of": "p", "expect": ["state:asleep"]}], "unknown state"),
        ([PUBLISH, {"do": "finish", "side": "consumer", "within_s": 5, "expect": ["granted"]}], "nothing was begun"),
        ([PUBLISH, {"do": "begin", "side": "consumer", "step": CLAIM, "expect": ["done"]}], "never finished"),
        ([{"do": "pass_time", "expect": ["done"]}], "needs seconds"),
        ([{**PUBLISH, "payload": {"list": 1}}], r"payload\.list is 1"),
        ([{**PUBLISH, "when": "now"}], "when"),
    ],
)
def test_a_wrong_scenario_is_refused_with_the_step(steps: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        a_scenario(*steps)
    assert "scenarios_x.json" in str(caught.value)


def test_unknown_routes_and_sides_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown route"):
        a_scenario(PUBLISH, routes=["pigeon"])
    with pytest.raises(ConfigError, match="unknown side"):
        a_scenario(PUBLISH, sides={"onlooker": {}})


def test_an_id_is_used_once() -> None:
    twice = [("a.json", a_case()), ("b.json", a_case())]
    with pytest.raises(ConfigError, match=r"id 'a-case' is also in a\.json"):
        load._unique(twice)


def test_a_file_that_is_no_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"x\.json: holds a dict"):
        decode(b"{}", Case, "x.json")
    with pytest.raises(ConfigError, match=r"x\.json: no JSON"):
        decode(b"[", Case, "x.json")


def test_what_is_begun_is_checked_by_its_own_verb() -> None:
    begin = {"do": "begin", "side": "consumer", "step": {**CLAIM, "expect": ["granted"]}, "expect": ["done"]}
    finish = {"do": "finish", "side": "consumer", "within_s": 5, "expect": ["granted"]}
    a_scenario(PUBLISH, begin, finish, READ)
    with pytest.raises(ConfigError, match="claim cannot be observed as 'delivered'"):
        a_scenario(PUBLISH, begin, {**finish, "expect": ["delivered"]})


def test_repeated_steps_are_written_out() -> None:
    made = a_scenario({"repeat": 3, "steps": [{**PUBLISH, "as": "p{i}"}]})
    assert [step.name for step in made.steps] == ["p0", "p1", "p2"]


# The tool.


def test_a_stale_digest_is_found_and_filled_in() -> None:
    stale = a_case(expect={"outcome": "delivered", "digest": "00" * 16})
    assert tool.stale([stale]) == ("a-case",)
    raw = json.dumps([CASE])
    (fresh,) = decode(tool.refreshed(raw, "x.json").encode(), Case, "x.json")
    assert tool.stale([fresh]) == ()
    assert len(fresh.expect.digest) == 32


def test_a_stale_chunk_is_found() -> None:
    outgoing = {"chunk_dim": 0, "num_chunks": 2}
    raw = json.dumps([{**CASE, "level": "L2", "requires": ["chunked"], "outgoing": outgoing}])
    entry = json.loads(tool.refreshed(raw, "x.json"))[0]
    assert len(entry["expect"]["chunks"]) == 2
    entry["expect"]["chunks"].reverse()
    (wrong,) = decode(json.dumps([entry]).encode(), Case, "x.json")
    assert tool.stale([wrong]) == ("a-case",)
