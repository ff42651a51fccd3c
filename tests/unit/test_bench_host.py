"""``moonrelay bench host``: the frame, with lanes over files. No host is needed, and no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moonrelay.cli.bench import command, host_rounds
from moonrelay.cli.bench.host_lanes import CONSUMER, PRODUCER, HostBench, HostPayload, Lane, Room, choose, host_bench
from moonrelay.cli.bench.host_pair import Close, Copy, Discard, Get, LaneFailed, Open, Put, Worker
from moonrelay.cli.bench.host_payload import SMALLEST, Payloads, check_size, sizes_of, smallest_of
from moonrelay.cli.bench.host_rounds import LaneReport, Report, Row, measure, turn_passes
from moonrelay.clock import SystemClock
from moonrelay.errors import ConfigError, IntegrityError, PluginError
from support.host_lanes import LANES, FileBench

SIZE = 4096


def lanes(*names: str) -> tuple[Lane, ...]:
    return choose(LANES, ",".join(names))


# -- payloads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [SMALLEST, 65536, 3 << 20])
def test_a_payload_is_a_dict_whose_tensors_have_the_size(nbytes):
    payload = Payloads(4 << 20).make(nbytes, 7)
    tensors = [value for value in payload.values() if isinstance(value, torch.Tensor)]
    assert sum(value.numel() * value.element_size() for value in tensors) == nbytes
    assert {str(value.dtype) for value in tensors} == {"torch.bfloat16", "torch.float16", "torch.int64"}


def test_the_same_payload_is_made_in_another_process_and_another_one_for_another_stamp():
    ours, theirs = Payloads(2 << 20), Payloads(2 << 20)
    theirs.check(ours.make(2 << 20, 5), 2 << 20, 5)
    with pytest.raises(IntegrityError, match="latents differs"):
        theirs.check(ours.make(2 << 20, 6), 2 << 20, 5)


def changed(payload, field, value):
    return {**payload, field: value}


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("latents", lambda value: value.float()),
        ("latents", lambda value: value.reshape(-1)),
        ("latents", lambda value: value.flip(2)),
        ("prompt_embeds_mask", lambda value: value.tolist()),
        ("height", lambda value: value + 1),
        ("more", lambda _: 1),
    ],
    ids=["dtype", "shape", "order", "type", "plain value", "fields"],
)
def test_whatever_differs_is_seen(field, change):
    payloads = Payloads(SIZE)
    payload = {
        name: value.clone() if hasattr(value, "clone") else value for name, value in payloads.make(SIZE, 1).items()
    }
    payloads.check(payload, SIZE, 1)
    with pytest.raises(IntegrityError):
        payloads.check(changed(payload, field, change(payload.get(field))), SIZE, 1)


def test_every_tile_differs_from_the_next():
    raw = Payloads(3 << 20).raw(3 << 20).view(3, -1)
    assert not torch.equal(raw[0], raw[1])
    assert not torch.equal(raw[1], raw[2])


@pytest.mark.parametrize("nbytes", [1, SMALLEST - 16, SMALLEST + 1])
def test_a_size_that_is_none_of_a_payload_is_refused(nbytes):
    with pytest.raises(ConfigError, match=str(nbytes)):
        check_size(nbytes)


# -- lanes ------------------------------------------------------------------------------------------------------------


def test_lanes_are_chosen_by_name_in_the_order_of_the_report():
    assert choose(LANES, "") == LANES
    assert [lane.name for lane in choose(LANES, "ours, theirs")] == ["theirs", "ours"]
    with pytest.raises(ConfigError, match="'our' is none; use some of theirs"):
        choose(LANES, "our")


class Adapter:
    def __init__(self, offer: object = FileBench, reason: str = "") -> None:
        self.offer, self.reason = offer, reason

    def available(self) -> tuple[bool, str]:
        return not self.reason, self.reason

    def host_bench(self) -> object:
        return self.offer


@pytest.fixture
def adapter(monkeypatch):
    def enter(found: object) -> None:
        monkeypatch.setattr("moonrelay.cli.bench.host_lanes.Registry.load", lambda _self, _name: found)

    return enter


def test_an_adapters_object_or_class_gives_its_lanes(adapter):
    adapter(Adapter)
    assert host_bench("some") is FileBench
    adapter(Adapter())
    assert host_bench("some") is FileBench


def test_an_adapter_without_lanes_or_without_its_host_is_refused(adapter):
    adapter(object())
    with pytest.raises(ConfigError, match="nothing to measure"):
        host_bench("some")
    adapter(Adapter(reason="the host is not installed; pip install it"))
    with pytest.raises(PluginError, match="pip install it"):
        host_bench("some")
    adapter(Adapter(offer=FileBench()))
    with pytest.raises(PluginError, match="no subclass of HostBench"):
        host_bench("some")


def test_an_unknown_adapter_is_refused_by_name():
    with pytest.raises(PluginError, match="vllm-omni"):
        host_bench("vllm-omnj")


# -- one process ------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends(tmp_path):
    room = Room(largest=SIZE, shared={"folder": str(tmp_path)})
    return tuple(Worker(FileBench(), side, room, SystemClock()) for side in (PRODUCER, CONSUMER))


def test_a_payload_goes_from_end_to_end(ends, tmp_path):
    producer, consumer = ends
    assert producer.do(Open(lane="ours", fixed=True)).notes == ("a note of ours",)
    consumer.do(Open(lane="ours", fixed=True))
    put = producer.do(Put(key="k", nbytes=SIZE, stamp=9))
    got = consumer.do(Get(key="k", nbytes=SIZE, stamp=9, ticket=put.ticket))
    assert put.began_s + put.took_s <= got.began_s
    assert got.took_s > 0
    assert consumer.do(Discard(key="k")).cpu_s >= got.cpu_s
    assert not (tmp_path / "k").exists()
    for end in ends:
        end.do(Close())
        end.do(Close())
    assert {path.name for path in tmp_path.iterdir()} == {"closed-ours-producer", "closed-ours-consumer"}


def test_other_bytes_are_no_pass(ends):
    for end in ends:
        end.do(Open(lane="other-bytes", fixed=True))
    put = ends[0].do(Put(key="k", nbytes=SIZE, stamp=9))
    with pytest.raises(IntegrityError, match="prompt_embeds differs"):
        ends[1].do(Get(key="k", nbytes=SIZE, stamp=9, ticket=put.ticket))


def test_the_unit_is_one_copy_and_needs_no_lane(ends):
    assert ends[1].do(Copy(nbytes=SIZE)).took_s > 0
    with pytest.raises(LaneFailed, match="no lane is open"):
        ends[1].do(Discard(key="k"))


# -- two processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    told: list[str] = []
    report = measure(FileBench, LANES, (SIZE, 8192), 1, folder, told.append)
    return report, told, folder


@pytest.mark.processes
def test_good_lanes_are_measured_beside_bad_ones(measured):
    report, _, _ = measured
    assert [(row.lane, row.size_bytes) for row in report.rows] == [
        ("theirs", SIZE),
        ("mended", SIZE),
        ("ours", SIZE),
        ("theirs", 8192),
        ("mended", 8192),
        ("ours", 8192),
    ]
    for row in report.rows:
        assert row.passes == turn_passes(row.size_bytes)
        assert 0 < row.put_s < row.sum_s < row.usable_s
        assert row.copy_s > 0
        assert row.cpu_s > 0


@pytest.mark.processes
def test_what_does_not_run_is_said_with_its_reason(measured):
    report, told, folder = measured
    known = {one.lane: one for one in report.lanes}
    assert [one.lane for one in report.lanes] == [lane.name for lane in LANES]
    assert known["mended"].as_released == "producer: LookupError: the innermost reason"
    assert known["mended"].error == ""
    assert "prompt_embeds differs" in known["other-bytes"].error
    assert known["refuses"].as_released == known["refuses"].error == "producer: LookupError: the innermost reason"
    assert "the last words" in known["dies"].error
    assert known["theirs"].as_released == known["ours"].as_released == "runs"
    assert known["ours"].notes == ("a note of ours",)
    assert told[0] == "mended as released"
    assert sorted(told[1:]) == sorted(f"round 1 of 1: {lane.name}" for lane in LANES)
    left = {path.name for path in folder.iterdir() if not path.name.startswith("closed-")}
    # What a lane was given and did not give back lies there; what all of them need was started and ended.
    assert "started" not in left


def test_turns_are_short_for_large_payloads():
    assert [turn_passes(nbytes) for nbytes in (1 << 16, 1 << 20, 64 << 20, 512 << 20)] == [10, 10, 3, 1]


def test_a_lane_that_failed_has_no_further_turns(monkeypatch, tmp_path):
    turns: list[str] = []

    def turn(_self: object, one: host_rounds._Known, _sizes: object) -> None:
        turns.append(one.lane.name)
        one.error = "no" if one.lane.name == "theirs" else ""

    monkeypatch.setattr(host_rounds._Runs, "turn", turn)
    report = measure(FileBench, lanes("theirs", "ours"), (SIZE,), 3, tmp_path)
    assert turns.count("theirs") == 1
    assert turns.count("ours") == 3
    assert report.rows == ()


# -- what is shown ----------------------------------------------------------------------------------------------------


def row(lane: str, sum_s: float, cpu_s: float) -> Row:
    return Row(
        lane=lane,
        size_bytes=65536,
        put_s=sum_s / 4,
        get_s=sum_s * 3 / 4,
        sum_s=sum_s,
        usable_s=sum_s * 1.1,
        first_s=2 * sum_s,
        cpu_s=cpu_s,
        copy_s=0.001,
        copy_cpu_s=0.001,
        ratio_to_copy=sum_s / 0.001,
        sum_quartiles_s=(sum_s, sum_s),
        passes=5,
    )


REPORT = Report(
    lanes=tuple(
        LaneReport(
            lane=lane.name,
            says=lane.says,
            ours=lane.ours,
            as_released="runs" if not lane.fix else "LookupError: [not] markup",
            fix=lane.fix,
            error="" if lane.name in ("theirs", "mended", "ours") else "broke",
            notes=("a note",),
        )
        for lane in LANES
    ),
    rows=(row("theirs", 0.5, 0.8), row("mended", 3.0, 3.0), row("ours", 0.1, 0.2)),
)


@pytest.fixture
def reported(monkeypatch, adapter):
    asked: list[tuple[type[HostBench], tuple[str, ...], tuple[int, ...], int]] = []

    def measured_without_measuring(bench, chosen, sizes, rounds, folder: Path, _tell):
        assert folder.is_dir()
        asked.append((bench, tuple(lane.name for lane in chosen), tuple(sizes), rounds))
        return REPORT

    adapter(Adapter)
    monkeypatch.setattr(host_rounds, "measure", measured_without_measuring)
    return asked


def test_json_has_lanes_rows_and_the_machine(reported):
    arguments = ["host", "some", "--json", "--sizes", "64KiB", "--rounds", "9", "--lanes", "ours,theirs"]
    result = CliRunner().invoke(command.bench, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report) == {"lanes", "rows", "host"}
    assert report["host"]["against"] == "none 1.0"
    assert [one["lane"] for one in report["rows"]] == ["theirs", "mended", "ours"]
    assert reported == [(FileBench, ("theirs", "ours"), (65536,), 9)]


def test_tables_say_what_ran_and_how_many_times_faster_ours_is(reported):
    result = CliRunner().invoke(command.bench, ["host", "some"])
    assert result.exit_code == 0, result.output
    assert "LookupError: [not] markup" in result.stdout
    assert "broke" in result.stdout
    assert "5.0 (4.0)" in result.stdout
    assert "30.0 (15.0)" in result.stdout
    assert reported[0][2] == (64 << 10, 1 << 20, 64 << 20, 512 << 20)


def test_wrong_arguments_are_refused_before_anything_starts(reported):
    for arguments, text in (
        (["--lanes", "nine"], "'nine' is none"),
        (["--sizes", "17"], "17 bytes"),
        (["--sizes", "x"], "'x'"),
    ):
        result = CliRunner().invoke(command.bench, ["host", "some", *arguments])
        assert isinstance(result.exception, ConfigError)
        assert text in str(result.exception)
    assert not reported


# -- payloads of a host's own -----------------------------------------------------------------------------------------

OWN = (
    HostPayload(name="big", nbytes=4096, tensors={"a": ("bfloat16", (2, 512)), "b": ("float32", (512,))}, values={}),
    HostPayload(
        name="small",
        nbytes=1024,
        tensors={"a": ("bfloat16", (2, 128)), "b": ("float32", (128,))},
        values={"shape": "2 x 128"},
    ),
)


class OwnBench(FileBench):
    payloads = OWN


def test_a_payload_of_a_hosts_own_has_its_shapes_and_every_byte_counts():
    payloads = Payloads(4096, OWN)
    made = payloads.make(1024, 5)
    assert {name: (value.dtype, tuple(value.shape)) for name, value in made.items() if name != "shape"} == {
        "a": (torch.bfloat16, (2, 128)),
        "b": (torch.float32, (128,)),
    }
    assert made["shape"] == "2 x 128"
    payloads.check(made, 1024, 5)
    changed = {**made, "b": made["b"].clone()}
    changed["b"].view(torch.uint8)[-1] ^= 1
    with pytest.raises(IntegrityError, match="b differs"):
        payloads.check(changed, 1024, 5)
    with pytest.raises(IntegrityError, match="shape differs"):
        payloads.check({**made, "shape": "128 x 2"}, 1024, 5)
    kept = {name: value.clone() if name != "shape" else value for name, value in made.items()}
    with pytest.raises(IntegrityError, match="differs"):
        payloads.check(kept, 1024, 6)


def test_payloads_of_a_hosts_own_are_chosen_by_name():
    assert sizes_of("", OWN) == (4096, 1024)
    assert sizes_of("small", OWN) == (1024,)
    assert smallest_of(OWN) == 1024
    assert smallest_of(()) == SMALLEST
    with pytest.raises(ConfigError, match="use some of big, small"):
        sizes_of("1KiB", OWN)


def test_a_hosts_own_payloads_go_through_its_lanes_and_are_named_in_the_figures(tmp_path):
    lanes = tuple(lane for lane in LANES if lane.name in ("mended", "ours"))
    report = measure(OwnBench, lanes, (4096, 1024), 1, tmp_path)
    assert {(row.lane, row.payload, row.size_bytes) for row in report.rows} == {
        (lane, one.name, one.nbytes) for lane in ("mended", "ours") for one in OWN
    }
    assert not any(one.error for one in report.lanes)
