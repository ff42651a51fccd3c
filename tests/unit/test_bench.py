"""The benchmark's figures: sizes, turns, medians, ratios, and how they are shown. Nothing is measured here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence

import pytest
import torch
from typer.testing import CliRunner

from moonrelay.cli.bench import cache_table, command, host
from moonrelay.cli.bench.samples import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    WARM_UP,
    median_s,
    parse_sizes,
    ratio,
    rounds,
    spread,
    take_turns,
)
from moonrelay.cli.bench.sides import read_stamp, write_stamp
from moonrelay.cli.sizes import say_size
from moonrelay.clock import Clock, ManualClock
from moonrelay.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("64KiB,1MiB", (65536, 1 << 20)),
        ("1 GiB", (1 << 30,)),
        ("17", (17,)),
        (" 3b , 2mib", (3, 2 << 20)),
    ],
)
def test_sizes_as_people_write_them(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "64KB", "1.5MiB", "-1", "1MiB,,2MiB", "MiB"])
def test_a_wrong_size_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="sizes"):
        parse_sizes(text)


@pytest.mark.parametrize(("nbytes", "text"), [(65536, "64 KiB"), (3 << 30, "3 GiB"), (1000, "1000 B"), (1, "1 B")])
def test_sizes_are_said_as_people_write_them(nbytes, text):
    assert say_size(nbytes) == text


def test_rounds_begin_with_uncounted_ones():
    numbers = list(rounds(5, 0.0, ManualClock()))
    assert numbers == [*range(-WARM_UP, 0), 0, 1, 2, 3, 4]


def test_rounds_go_on_for_the_budget():
    clock = ManualClock()
    counted = 0
    for number in rounds(None, 10.0, clock):
        clock.advance(1.0)
        counted += number >= 0
    assert counted == 10  # the budget begins behind the uncounted ones


def test_rounds_without_a_count_are_bounded_on_both_sides():
    clock = ManualClock()
    assert sum(number >= 0 for number in rounds(None, 0.0, clock)) == MIN_ROUNDS
    assert sum(number >= 0 for number in rounds(None, 1.0, clock)) == MAX_ROUNDS


def test_each_round_has_every_contender_once_in_an_order_drawn_anew():
    order: list[str] = []
    seconds = itertools.count()

    def contender(name: str):
        def run(_number: int) -> float:
            order.append(name)
            return float(next(seconds))

        return run

    taken = take_turns({name: contender(name) for name in "abc"}, iter(range(-1, 40)))
    in_rounds = ["".join(order[at : at + 3]) for at in range(0, len(order), 3)]
    assert len(in_rounds) == 41
    assert {*map("".join, itertools.permutations("abc"))} == set(in_rounds)
    assert sorted(itertools.chain(*taken.values())) == [float(at) for at in range(3, 123)]
    assert all(3 * number + 3 <= took < 3 * number + 6 for times in taken.values() for number, took in enumerate(times))


def test_ratios_are_of_medians_and_their_spread_is_of_single_rounds():
    ours, theirs = [2.0, 4.0, 90.0], [1.0, 2.0, 3.0]
    assert median_s(ours) == 4.0
    assert ratio(ours, theirs) == 2.0
    assert spread(ours, theirs) == (2.0, 30.0)
    assert spread([3.0], [2.0]) == (1.5, 1.5)


def test_a_stamp_is_seen_at_both_ends():
    tensor = torch.zeros(100, dtype=torch.uint8)
    write_stamp(tensor, 0x0123456789)
    assert read_stamp(tensor) == (0x0123456789, 0x0123456789)
    assert not tensor[8:-8].any()
    write_stamp(tensor[:50], 7)
    assert read_stamp(tensor) == (7, 0x0123456789)


def test_the_host_is_described():
    facts = host.describe()
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 1 << 20
    assert "torch" in facts["versions"]
    json.dumps(facts)


ROW = {
    "engine": "shm",
    "size_bytes": 65536,
    "integrity": "off",
    "ratio_to_raw": 1.5,
    "ratio_to_memcpy": 2.5,
    "ratio_to_raw_quartiles": (1.4, 1.6),
    "ratio_to_memcpy_quartiles": (2.4, 2.6),
    "connector_s": 0.003,
    "raw_s": 0.002,
    "memcpy_s": 0.0012,
    "round_trips": 4.5,
    "round_trips_quartiles": (4.4, 4.6),
    "round_trip_s": 0.0001,
    "rounds": 9,
}


@pytest.fixture
def measured(monkeypatch):
    """Let nothing be measured; return what was asked for."""
    asked: list[tuple[str, tuple[int, ...], int | None]] = []

    def measure(engine: str, sizes: Sequence[int], count: int | None, _clock: Clock) -> Iterator[dict[str, object]]:
        asked.append((engine, tuple(sizes), count))
        yield {**ROW, "engine": engine}

    monkeypatch.setattr("moonrelay.cli.bench.overhead.measure", measure)
    monkeypatch.setattr("moonrelay.cli.bench.latency.measure", measure)
    return asked


@pytest.mark.parametrize("name", ["overhead", "latency"])
def test_json_has_rows_and_host(measured, name):
    result = CliRunner().invoke(command.bench, [name, "--json", "--engine", "shm", "--sizes", "64KiB", "--rounds", "9"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report) == {"rows", "host"}
    assert report["rows"][0]["engine"] == "shm"
    assert measured == [("shm", (65536,), 9)]


@pytest.mark.parametrize("name", ["overhead", "latency"])
def test_a_table_has_a_line_per_row_and_both_engines_by_default(measured, name):
    result = CliRunner().invoke(command.bench, [name])
    assert result.exit_code == 0, result.output
    assert [engine for engine, _, _ in measured] == ["mooncake", "shm"]
    assert measured[0][2] is None
    assert "mooncake" in result.stdout
    assert "64 KiB" in result.stdout


def test_a_wrong_engine_is_refused_by_name(measured):
    result = CliRunner().invoke(command.bench, ["overhead", "--engine", "tcp"])
    assert isinstance(result.exception, ConfigError)
    assert "engine='tcp'" in str(result.exception)
    assert not measured


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (
            {"what": "encode", "encoder": "large", "parameters": 334_000_000, "seconds": 4.25},
            "encode (T5 large, 334 M parameters): 4.25 s",
        ),
        (
            {"what": "store", "entry_bytes": 4 << 20, "seconds": 0.0042, "of_encode": 0.001},
            "store of 4 MiB: 4.2 ms, 0.10% of encoding",
        ),
        (
            {
                "what": "one key",
                "processes": 32,
                "encode_s": 1.0,
                "encodes": 1,
                "different": 1,
                "median_s": 1.25,
                "last_s": 2.0,
            },
            "one key, 32 processes, encoding 1 s: 1 encode, 1 different result, median 1.25 s, last 2 s",
        ),
        (
            {
                "what": "prompts",
                "exponent": 1.0,
                "memory_holds": 0.02,
                "store_holds": 0.1,
                "prompts": 1000,
                "in_memory": 0.3,
                "in_store": 0.2,
                "encoded": 0.5,
                "repeats": 0.75,
            },
            (
                "prompts, Zipf 1.0: memory holds 2% and the store 10% of 1000; 30% in memory, 20% in the store, "
                "50% encoded (75% repeats)"
            ),
        ),
        ({"every": 0, "step_s": 0.11}, "step without checkpoints: 110 ms"),
        (
            {
                "every": 5,
                "step_s": 0.111,
                "ratio": 1.01,
                "ratio_quartiles": (0.99, 1.03),
                "saved": 18,
                "ratio_of_least": 1.005,
                "call_s": 0.0001,
                "call_of_step": 0.0009,
                "state_bytes": 32 << 20,
                "skipped": 0,
            },
            (
                "k = 5: 111 ms, +1.0% (-1.0% to +3.0%), least +0.5%; the loop kept 0.1 ms a step, 0.09%; "
                "18 of 32 MiB saved, 0 skipped"
            ),
        ),
        (
            {
                "recovery": True,
                "cut_after": 33,
                "resumed_step": 30,
                "resume_s": 0.05,
                "recovered_s": 0.4,
                "started_over_s": 4.0,
                "ratio": 0.1,
            },
            "cut off after step 33: taken up at step 30 in 50 ms, there again in 0.4 s; starting over 4 s (0.1)",
        ),
    ],
)
def test_caches_and_checkpoints_are_told_in_words(row: dict[str, object], line: str) -> None:
    assert cache_table.line(row) == line


def test_an_encoder_that_is_not_there_is_named() -> None:
    done = CliRunner().invoke(command.bench, ["cache", "--encoder=huge"])
    assert isinstance(done.exception, ConfigError)
    assert "encoder" in str(done.exception)
