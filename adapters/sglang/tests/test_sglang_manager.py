"""Payloads between two roles, through the manager that the host is given; without the host."""

from __future__ import annotations

import gc
import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moonrelay.errors import Aborted, CapacityError, LeaseHeld, LeaseLost, PeerLost, UnsupportedTensor, WireError
from moonrelay.transfer.shm import sweep_orphans
from moonrelay_sglang import config, protocol
from moonrelay_sglang.config import SglangConfig
from moonrelay_sglang.manager import PayloadManager, Staged

TIMEOUT_S = 20.0
Make = Callable[..., PayloadManager]


class Flags:
    """The host's ``ServerArgs`` of one role."""

    disagg_transfer_backend = "moonrelay"

    def __init__(self, role: str) -> None:
        self.disagg_role = role


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in shared memory for one test's segments and store."""
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    folder = base / f"moonrelay-sglang-test-{secrets.token_hex(6)}"
    (folder / "segments").mkdir(parents=True, mode=0o700)
    yield folder
    sweep_orphans(folder / "segments")
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def make(place: Path) -> Iterator[Make]:
    """Makes managers that are closed at the end; keywords change the settings."""
    made: list[PayloadManager] = []

    def make_one(role: str = "encoder", *, pipeline: str = "", attempt: int = 0, **changes: Any) -> PayloadManager:
        given = {
            "engine": "shm",
            "engine_options": {"directory": str(place / "segments")},
            "pool_bytes": 4 << 20,
            "retry_s": 0.2,
            "peer_timeout_s": 1.5,
            "renew_s": 0.2,
            "claim_ttl_s": 1.0,
            "stage_timeout_s": 1.0,
            "fetch_timeout_s": TIMEOUT_S,
        }
        settings: SglangConfig = config.from_server_args(Flags(role), {**given, **changes})
        manager = PayloadManager(
            settings, epoch=secrets.token_hex(4), pipeline=pipeline, attempt_of=lambda _request: attempt
        )
        made.append(manager)
        return manager

    yield make_one
    for manager in made:
        manager.cleanup()


def stage(manager: PayloadManager, tensors: dict[str, Any], request: str = "r", **scalars: Any) -> Staged:
    staged, event = manager.stage_tensors_async(request, tensors, scalars)
    assert event is None, "on a CPU nothing is under way when it returns"
    return staged


def told(staged: Staged) -> dict[str, Any]:
    """What the host's messages make of a manifest."""
    manifest: dict[str, Any] = json.loads(json.dumps(staged.manifest))
    return manifest


def settled(*managers: PayloadManager) -> bool:
    for _ in range(200):
        if all(manager.in_use() == protocol.InUse() for manager in managers):
            return True
        threading.Event().wait(0.02)
    return False


def test_a_payload_arrives_bit_for_bit_and_everything_is_freed(make: Make) -> None:
    sender, receiver = make("encoder"), make("denoiser")
    given = {
        "latents": torch.randn(1, 16, 2, 8, 8),
        "prompt_embeds": [torch.randn(3, 5).to(torch.bfloat16), torch.empty(0, 4)],
        "scale": torch.tensor(2.5),
        "quantised": torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "view": torch.arange(12).reshape(3, 4).T,
    }
    masks = [torch.ones(2, dtype=torch.bool), None]
    staged = stage(sender, given, seed=42, size=(64, 64), prompt_attention_mask=masks, image=b"raw")
    assert staged.scalar_fields == {"seed": 42}, "what JSON keeps goes as JSON"
    assert staged.slot.size == staged.handle.nbytes
    loaded = receiver.load("r", told(staged))
    assert loaded.tensors.keys() == given.keys()
    for name in ("latents", "scale", "view"):
        assert torch.equal(loaded.tensors[name], given[name])
        assert loaded.tensors[name].shape == given[name].shape
    assert torch.equal(loaded.tensors["quantised"].view(torch.uint8), given["quantised"].view(torch.uint8))
    assert torch.equal(loaded.tensors["prompt_embeds"][0], given["prompt_embeds"][0])
    assert loaded.tensors["prompt_embeds"][1].shape == (0, 4)
    assert loaded.values["size"] == (64, 64)
    assert loaded.values["image"] == b"raw"
    assert torch.equal(loaded.values["prompt_attention_mask"][0], masks[0])
    assert loaded.values["prompt_attention_mask"][1] is None
    receiver.done("r")
    del loaded
    assert settled(sender, receiver)
    assert receiver.counters() == protocol.Counters(delivered=1, bytes=staged.handle.nbytes)


def test_a_tensor_field_arrives_as_it_is_or_is_refused(make: Make) -> None:
    sender, receiver = make("encoder"), make("denoiser")
    given = {"embeds": ({"a": torch.ones(2)}, None, {"__moonrelay__": "array", "b": 1})}
    loaded = receiver.load("r", told(stage(sender, given)))
    assert torch.equal(loaded.tensors["embeds"][0].pop("a"), torch.ones(2))
    assert loaded.tensors["embeds"] == ({}, None, {"__moonrelay__": "array", "b": 1})
    receiver.done("r")
    with pytest.raises(UnsupportedTensor, match="embeds"):
        stage(sender, {"embeds": [torch.ones(2), torch.ones(2).numpy()]}, request="s")
    del loaded
    assert settled(sender, receiver)


def test_a_reader_is_told_why_a_payload_was_withdrawn(make: Make) -> None:
    sender, receiver = make("encoder"), make("denoiser")
    manifest = told(stage(sender, {"latents": torch.ones(4)}))
    sender.free_staged("r", "the client has gone")
    with pytest.raises(Aborted, match="the client has gone"):
        receiver.load("r", manifest)


def test_a_payload_that_ends_while_it_is_staged_is_not_counted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = make("encoder")
    publish = sender._connector.publish

    def publish_and_fail(payload: Any, **how: Any) -> Any:
        handle = publish(payload, **how)
        sender._connector.abort(handle, "the store is full")  # as its mover does, in a thread of its own
        return handle

    monkeypatch.setattr(sender._connector, "publish", publish_and_fail)
    stage(sender, {"latents": torch.ones(4)})
    assert settled(sender)
    assert not sender.push_to_peer("r", "there", 0, 16)


def test_the_bytes_are_exact(make: Make) -> None:
    staged = stage(make(), {"latents": torch.zeros(1000, dtype=torch.uint8), "one": torch.zeros(1, dtype=torch.uint8)})
    assert staged.handle.nbytes == staged.slot.size == 1001


def test_tensors_may_be_written_to_once_they_are_staged(make: Make) -> None:
    sender, receiver = make("encoder"), make("denoiser")
    latents = torch.arange(1 << 19, dtype=torch.float32)
    wanted = latents.clone()
    staged = stage(sender, {"latents": latents})
    latents.fill_(-1.0)
    assert torch.equal(receiver.load("r", told(staged)).tensors["latents"], wanted)


def test_nothing_at_all_is_a_payload_too(make: Make) -> None:
    sender, receiver = make("encoder"), make("denoiser")
    loaded = receiver.load("r", told(stage(sender, {})))
    assert (loaded.tensors, loaded.values) == ({}, {})


def test_a_decoder_is_sent_what_it_reads(make: Make) -> None:
    given = {"latents": torch.ones(4), "prompt_embeds": [torch.ones(1000)], "timesteps": torch.ones(2)}
    plain = stage(make("denoiser", pipeline="WanPipeline"), given, negative_prompt_embeds=[])
    assert plain.handle.nbytes == 16
    assert plain.scalar_fields == {}
    assert stage(make("denoiser", pipeline="LTX2Pipeline"), given).handle.nbytes == 4024
    assert stage(make("denoiser", pipeline="WanPipeline", send_all=True), given).handle.nbytes == 4024
    assert stage(make("encoder", pipeline="WanPipeline"), given).handle.nbytes == 4024


def test_what_cannot_be_carried_is_refused_by_name_and_leaves_nothing(make: Make) -> None:
    sender = make()
    with pytest.raises(UnsupportedTensor, match="'session'"):
        stage(sender, {"latents": torch.ones(4)}, session=object())
    with pytest.raises(UnsupportedTensor, match="latents"):
        stage(sender, {"latents": torch.ones(4).to_sparse()})
    assert settled(sender)


def test_what_is_larger_than_the_pool_is_refused_at_once_and_the_next_one_passes(make: Make) -> None:
    sender, receiver = make("encoder"), make("denoiser")
    with pytest.raises(CapacityError):
        stage(sender, {"latents": torch.zeros(5 << 20, dtype=torch.uint8)}, "large")
    small = stage(sender, {"latents": torch.ones(4)}, "small")
    assert torch.equal(receiver.load("small", told(small)).tensors["latents"], torch.ones(4))


def test_a_full_pool_is_waited_for_and_then_refused(make: Make) -> None:
    sender, receiver = make("encoder", stage_timeout_s=0.2), make("denoiser")
    first = stage(sender, {"latents": torch.zeros(3 << 20, dtype=torch.uint8)}, "first")
    with pytest.raises(CapacityError):
        stage(sender, {"latents": torch.zeros(3 << 20, dtype=torch.uint8)}, "second")
    patient = make("encoder", stage_timeout_s=TIMEOUT_S)
    held = stage(patient, {"latents": torch.zeros(3 << 20, dtype=torch.uint8)}, "held")

    def take() -> None:
        threading.Event().wait(0.3)
        receiver.load("held", told(held))
        receiver.done("held")

    taking = threading.Thread(target=take, name="take")
    taking.start()
    later = stage(patient, {"latents": torch.ones(3 << 20, dtype=torch.uint8)}, "later")
    taking.join(TIMEOUT_S)
    assert later.handle.nbytes == 3 << 20
    sender.free_staged(first.request_id)


def test_a_stage_done_again_replaces_what_it_offered(make: Make) -> None:
    sender, receiver = make("encoder"), make("denoiser")
    before, after = stage(sender, {"latents": torch.zeros(4)}), stage(sender, {"latents": torch.ones(4)})
    with pytest.raises((Aborted, LeaseLost)):
        receiver.load("r", told(before), timeout_s=5.0)
    assert torch.equal(receiver.load("r", told(after)).tensors["latents"], torch.ones(4))
    receiver.done("r")
    assert settled(sender, receiver)


def test_given_back_another_takes_it_and_consumed_nobody_does(make: Make) -> None:
    sender, first, second = make("encoder"), make("denoiser"), make("denoiser")
    manifest = told(stage(sender, {"latents": torch.ones(4)}))
    first.load("r", manifest)
    with pytest.raises(LeaseHeld):
        second.load("r", manifest, timeout_s=0.3)
    first.give_back("r")
    assert torch.equal(second.load("r", manifest).tensors["latents"], torch.ones(4))
    second.done("r")
    with pytest.raises(LeaseLost):
        first.load("r", manifest, timeout_s=5.0)
    assert settled(sender, first, second)


def test_a_sender_that_has_gone_is_lost_at_once(make: Make) -> None:
    sender, receiver = make("encoder"), make("denoiser")
    manifest = told(stage(sender, {"latents": torch.ones(4)}))
    sender.cleanup()
    with pytest.raises((PeerLost, Aborted)):
        receiver.load("r", manifest, timeout_s=10.0)
    assert settled(receiver)


def test_a_store_outlives_its_sender(make: Make, place: Path) -> None:
    store = {"transfer_mode": "store", "store": f"local://{place / 'store'}", "drain_timeout_s": 5.0}
    sender, receiver = make("encoder", **store), make("denoiser", **store)
    manifest = told(stage(sender, {"latents": torch.ones(1000)}))
    sender.cleanup()
    assert torch.equal(receiver.load("r", manifest).tensors["latents"], torch.ones(1000))
    receiver.done("r")


def test_a_manifest_is_good_for_its_own_request_only(make: Make) -> None:
    sender, receiver = make("encoder"), make("denoiser")
    manifest = told(stage(sender, {"latents": torch.ones(4)}, "mine"))
    with pytest.raises(WireError, match="'yours' locates a payload of 'mine'"):
        receiver.load("yours", manifest)
    with pytest.raises(WireError, match="not offered by Moonrelay"):
        receiver.load("mine", {"latents": {"offset": 0}})


def test_what_a_stage_replaces_makes_room_for_what_it_made(make: Make) -> None:
    sender, role = make("encoder"), make("denoiser", stage_timeout_s=0.2)
    fields = role.load("r", told(stage(sender, {"latents": torch.zeros(3 << 20, dtype=torch.uint8)}))).tensors
    with pytest.raises(CapacityError):
        stage(role, {"latents": torch.ones(3 << 20, dtype=torch.uint8)})
    fields["latents"] = torch.ones(3 << 20, dtype=torch.uint8)
    assert stage(role, fields).handle.nbytes == 3 << 20
    role.done("r")


def left_in_a_cycle(role: PayloadManager, sender: PayloadManager) -> None:
    """Take a payload of 3 of the pool's 4 MiB over, as a stage of the host does that leaves garbage."""
    fields = role.load("before", told(stage(sender, {"latents": torch.zeros(3 << 20, dtype=torch.uint8)}, "before")))
    fields.values["itself"] = fields
    role.done("before")


@pytest.fixture
def rare_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("rare_collections")
def test_garbage_is_no_reason_to_take_nothing_over(make: Make) -> None:
    # Collecting all garbage of a test run stops every thread for a while, renewals of claims among them.
    sender, role = make("encoder", claim_ttl_s=30.0), make("denoiser", claim_ttl_s=30.0)
    left_in_a_cycle(role, sender)
    later = stage(sender, {"latents": torch.ones(2 << 20, dtype=torch.uint8)}, "later")
    assert role.load("later", told(later)).tensors["latents"].sum() == 2 << 20


@pytest.mark.usefixtures("rare_collections")
def test_garbage_is_no_reason_to_stage_nothing(make: Make) -> None:
    sender, role = make("encoder"), make("denoiser", stage_timeout_s=0.2)
    left_in_a_cycle(role, sender)
    assert stage(role, {"latents": torch.ones(2 << 20, dtype=torch.uint8)}).handle.nbytes == 2 << 20


def test_attempts_are_withdrawn_up_to_the_one_named(make: Make) -> None:
    sender = make("encoder", attempt=3)
    staged = stage(sender, {"latents": torch.ones(4)})
    found = protocol.located(staged.manifest)
    assert found is not None
    assert (found.attempt, found.nbytes, found.epoch) == (3, 16, sender.session_id)
    sender.withdraw("r", 2)
    assert sender.in_use().payloads == 1
    sender.withdraw("r", 3)
    assert settled(sender)


def test_what_a_stock_head_asks_for_is_answered(make: Make) -> None:
    sender, receiver = make("encoder"), make("denoiser")
    staged = stage(sender, {"latents": torch.ones(4)})
    pending = receiver.allocate_receive_slot("r", staged.slot.size)
    assert (pending.slot.offset, pending.slot.size, receiver.pool_data_ptr) == (0, 16, 0)
    assert sender.push_to_peer("r", receiver.session_id, 0, 16)
    assert not sender.push_to_peer("other", receiver.session_id, 0, 16)
    fields, event = receiver.load_tensors_async("r", told(staged), device="cpu:0", stream=None)
    assert event is None
    receiver.free_receive_slot("r")
    assert torch.equal(fields["latents"], torch.ones(4)), "it is still there when the host has freed its slot"
    receiver.done("r")
    assert settled(sender)
