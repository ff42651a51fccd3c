"""The directory of keys over a real embedded store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omni_peer import store_keys

from moonrelay.clock import Deadline, ManualClock, SystemClock
from moonrelay.config import StoreConfig
from moonrelay.errors import ClosedError, WireError
from moonrelay.handle import LeaseTerms, StageHandle
from moonrelay.payload import StagePayload, flatten
from moonrelay_vllm_omni.directory import INLINE_BYTES, Edge, KeyDirectory, decode_record

EDGE = Edge(from_stage="0", to_stage="1", key="r1_0_0")


def soon() -> Deadline:
    return Deadline(10.0, SystemClock())


def handle(number: int, *, tensors: int = 1, ttl_s: float | None = 5.0) -> StageHandle:
    tree = {f"a tensor with a long name {index}": torch.zeros(index + 1) for index in range(tensors)}
    flat = flatten(StagePayload(request_id="r1", kind="stage", data=tree))
    return StageHandle(
        id=f"{number:032x}",
        request_id="r1",
        kind="stage",
        attempt=0,
        tree=flat.tree,
        tensors=flat.specs,
        chunks=flat.chunks,
        digest="off",
        lease=LeaseTerms(policy="delete_on_consume", readers=1, ttl_s=ttl_s),
    )


@pytest.fixture
def config(place: Path) -> StoreConfig:
    return StoreConfig(url=f"local://{place / 'store'}", namespace="ns")


@pytest.fixture
def directory(config: StoreConfig) -> Iterator[KeyDirectory]:
    made = KeyDirectory(config, SystemClock())
    yield made
    made.close()


def test_a_key_that_nobody_put_is_absent(directory: KeyDirectory) -> None:
    assert directory.find(EDGE, soon()) is None


def test_another_process_finds_what_was_written(directory: KeyDirectory, config: StoreConfig) -> None:
    directory.write(EDGE, handle(1), soon())
    other = KeyDirectory(config, SystemClock())
    try:
        assert other.find(EDGE, soon()) == handle(1)
    finally:
        other.close()


def test_edges_and_keys_do_not_clash(directory: KeyDirectory) -> None:
    edges = [
        Edge(from_stage=a, to_stage=b, key=key)
        for a, b in (("0", "1"), ("1", "2"), ("0", "2"), ("01", "2"), ("0", "12"))
        for key in ("k", "k_0", "K", "k/0", "ключ", "\ud800")
    ]
    for number, edge in enumerate(edges):
        directory.write(edge, handle(number), soon())
    for number, edge in enumerate(edges):
        assert directory.find(edge, soon()) == handle(number)


def test_writing_the_same_again_changes_nothing(directory: KeyDirectory, place: Path) -> None:
    directory.write(EDGE, handle(1), soon())
    before = store_keys(place)
    directory.write(EDGE, handle(1), soon())
    assert store_keys(place) == before


def test_the_last_payload_counts(directory: KeyDirectory, place: Path) -> None:
    directory.write(EDGE, handle(1), soon())
    directory.write(EDGE, handle(2), soon())
    assert directory.find(EDGE, soon()) == handle(2)
    assert len(store_keys(place)) == 1


def test_a_handle_too_large_for_a_record_lies_beside_it(directory: KeyDirectory, place: Path) -> None:
    large = handle(1, tensors=300)
    assert len(large.to_bytes()) > INLINE_BYTES
    directory.write(EDGE, large, soon())
    assert directory.find(EDGE, soon()) == large
    assert len(store_keys(place)) == 2
    directory.write(EDGE, handle(2, tensors=301), soon())
    assert directory.find(EDGE, soon()) == handle(2, tensors=301)
    assert len(store_keys(place)) == 2
    directory.drop(EDGE, handle(2).id, soon())
    assert store_keys(place) == []


def test_dropping_one_payload_leaves_another(directory: KeyDirectory) -> None:
    directory.write(EDGE, handle(1), soon())
    directory.write(EDGE, handle(2), soon())
    directory.drop(EDGE, handle(1).id, soon())
    assert directory.find(EDGE, soon()) == handle(2)
    directory.drop(EDGE, handle(2).id, soon())
    directory.drop(EDGE, handle(2).id, soon())
    assert directory.find(EDGE, soon()) is None


def test_a_sweep_removes_what_outlived_its_payload(config: StoreConfig, place: Path) -> None:
    clock = ManualClock(SystemClock().monotonic())  # the store stamps its files with the machine's own
    directory = KeyDirectory(config, clock, default_ttl_s=4.0, grace_s=1.0)
    try:
        directory.write(EDGE, handle(1, ttl_s=5.0), soon())
        directory.write(Edge(from_stage="0", to_stage="1", key="large"), handle(2, tensors=300, ttl_s=20.0), soon())
        directory.write(Edge(from_stage="0", to_stage="1", key="kept"), handle(3, ttl_s=None), soon())
        assert directory.sweep(soon()) == 0
        clock.advance(6.5)
        assert directory.sweep(soon()) == 1
        assert directory.find(EDGE, soon()) is None
        clock.advance(20.0)
        assert directory.sweep(soon()) == 1, "the record first, its handle once nothing names it"
        assert directory.sweep(soon()) == 1
        assert len(store_keys(place)) == 1
    finally:
        directory.close()


def test_a_sweep_removes_what_is_lost_whatever_its_age(directory: KeyDirectory, place: Path) -> None:
    directory.write(EDGE, handle(1), soon())
    directory.write(Edge(from_stage="0", to_stage="1", key="large"), handle(2, tensors=300), soon())
    directory.write(Edge(from_stage="0", to_stage="1", key="well"), handle(3), soon())
    assert directory.sweep(soon(), lost=lambda _: True) == 0, "too young to be asked after"
    assert directory.sweep(soon(), lost=lambda one: one.id != handle(3).id, ask_after_s=0.0) == 2
    assert directory.find(EDGE, soon()) is None
    assert directory.find(Edge(from_stage="0", to_stage="1", key="well"), soon()) == handle(3)


def test_a_malformed_record_is_a_typed_error_and_can_be_replaced(directory: KeyDirectory) -> None:
    directory.start()
    key = f"ns.keys/r/{EDGE.digest}"
    directory._relay.put_if_absent(key, b"\xffnonsense", soon())
    with pytest.raises(WireError):
        directory.find(EDGE, soon())
    directory.drop(EDGE, handle(1).id, soon())
    directory.write(EDGE, handle(1), soon())
    assert directory.find(EDGE, soon()) == handle(1)


@pytest.mark.parametrize("raw", [b"", b"\x80", b"\xc0", b"\x81\xa1x\x01", b"\x82\xaageneration\xa1g\xa7version\x02"])
def test_other_bytes_are_no_record(raw: bytes) -> None:
    with pytest.raises(WireError):
        decode_record(raw)


def test_nothing_is_done_after_close(directory: KeyDirectory) -> None:
    directory.close()
    directory.close()
    with pytest.raises(ClosedError):
        directory.find(EDGE, soon())


@pytest.mark.mooncake
def test_the_directory_over_a_mooncake_store(tmp_path: Path) -> None:
    from moonrelay.relay.cluster import MooncakeCluster

    with MooncakeCluster(tmp_path / "mooncake") as cluster:
        config = StoreConfig(url=cluster.url, namespace="ns")
        one, other = KeyDirectory(config, SystemClock(), grace_s=0.0), KeyDirectory(config, SystemClock())
        try:
            assert other.find(EDGE, soon()) is None
            one.write(EDGE, handle(1), soon())
            assert other.find(EDGE, soon()) == handle(1)
            other.write(EDGE, handle(2, tensors=300), soon())
            assert one.find(EDGE, soon()) == handle(2, tensors=300)
            one.drop(EDGE, handle(1).id, soon())
            assert one.find(EDGE, soon()) == handle(2, tensors=300)
            assert one.sweep(soon()) == 0, "its time is not over"
            one.drop(EDGE, handle(2).id, soon())
            assert other.find(EDGE, soon()) is None
        finally:
            one.close()
            other.close()
