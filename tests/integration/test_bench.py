"""``moonrelay bench`` as a user runs it: the shape of its JSON, at tiny sizes. Speed is never asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from moonrelay.cli.bench.link import Offer, Offered, Setup
from moonrelay.cli.bench.raw import raw_engine
from moonrelay.cli.bench.sides import Consumer
from moonrelay.errors import ConfigError, IntegrityError
from support.segments import abandoned_segments

pytestmark = pytest.mark.processes
ENGINES = ["shm", pytest.param("mooncake", marks=pytest.mark.mooncake)]
RATIOS = {"overhead": ("ratio_to_raw", "ratio_to_memcpy"), "latency": ("round_trips",)}
SECONDS = {"overhead": ("connector_s", "raw_s", "memcpy_s"), "latency": ("connector_s", "round_trip_s")}


def bench(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "moonrelay.cli.main", "bench", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert isinstance(report, dict)
    return report


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["overhead", "latency"])
def test_the_report_has_a_row_for_each_size_and_integrity(name: str, engine: str) -> None:
    report = bench(name, "--engine", engine, "--sizes", "4KiB,1MiB", "--rounds", "2")
    assert set(report) == {"rows", "host"}
    kinds = [(row["engine"], row["size_bytes"], row["integrity"]) for row in report["rows"]]
    assert kinds == [(engine, size, integrity) for size in (4096, 1 << 20) for integrity in ("off", "full")]
    for row in report["rows"]:
        assert row["rounds"] == 2
        assert all(row[field] > 0 for field in (*RATIOS[name], *SECONDS[name]))
    assert {"cpu", "cores", "load_1min", "versions"} <= set(report["host"])


def test_the_cache_report_has_hits_one_key_and_prompts() -> None:
    rows = bench("cache", "--encoder=small", "--rounds=1", "--processes=4", "--prompts=40")["rows"]
    hits = {row["what"]: row for row in rows if "entry_bytes" in row}
    assert set(hits) == {"encode", "miss", "store", "memory"}
    assert hits["encode"]["of_encode"] == 1.0
    assert all(row["seconds"] > 0 and row["entry_bytes"] == 4 << 20 for row in hits.values())
    [one] = [row for row in rows if row["what"] == "one key"]
    assert (one["processes"], one["answers"], one["encodes"], one["different"]) == (4, 4, 1, 1)
    prompts = [row for row in rows if row["what"] == "prompts"]
    assert len(prompts) == 6
    for row in prompts:
        assert row["in_memory"] + row["in_store"] + row["encoded"] == pytest.approx(1.0, abs=0.002)
        assert row["encoded"] >= 1 - row["repeats"] - 0.001


def test_the_checkpoint_report_has_each_distance_and_a_recovery() -> None:
    plain, *kept, recovery = bench("checkpoint", "--step-ms=2", "--rounds=1")["rows"]
    assert (plain["every"], plain["rounds"]) == (0, 1)
    assert [row["every"] for row in kept] == [1, 5, 10]
    assert all(row["ratio"] > 0 and row["call_s"] > 0 and row["saved"] > 0 and row["failed"] == 0 for row in kept)
    assert 0 < recovery["resumed_step"] <= recovery["cut_after"]
    assert recovery["recovered_s"] > recovery["resume_s"] > 0


@pytest.mark.alone  # other tests kill owners of segments meanwhile
def test_nothing_is_left_behind() -> None:
    before = abandoned_segments()
    bench("overhead", "--engine", "shm", "--sizes", "4KiB", "--rounds", "1")
    assert abandoned_segments() <= before


def test_other_bytes_than_were_offered_end_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    with Consumer(Setup(engine="shm", integrities=("off",), largest=4096)) as consumer:
        assert consumer.pass_on("off", 4096, 5).total_s > 0
        offer = consumer.producer.offer

        def another(contender: str, nbytes: int, stamp: int) -> Offered:
            return offer(contender, nbytes, stamp + 1)

        monkeypatch.setattr(consumer.producer, "offer", another)
        with pytest.raises(IntegrityError, match="raw"):
            consumer.pass_on("raw", 4096, 6)


def test_an_engine_without_a_raw_form_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="engine='memory'"):
        raw_engine("memory")


def test_orders_are_small_messages() -> None:
    import msgspec

    assert len(msgspec.msgpack.encode(Offer(contender="raw", nbytes=1 << 28, stamp=1))) < 128
