"""Step checkpoints over a real local relay: what is saved comes back bit for bit, or is refused by name."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moonrelay import CheckpointMismatch, ConfigError, DiffusionConnector
from moonrelay.cache.checkpoint import Checkpointer, CheckpointIdentity, CheckpointSession, StepState
from moonrelay.cache.checkpoint_identity import OVERRIDABLE, request_digest
from moonrelay.cache.checkpoint_store import Shelf
from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import CapacityError, PeerLost
from moonrelay.events import Event
from moonrelay.handle import Extent
from moonrelay.relay.base import Relay
from moonrelay.relay.sweeper import Sweeper

IDENTITY = CheckpointIdentity(
    request_id="r1",
    model="tiny@abc",
    loras={"style@1": 0.5},
    scheduler="UniPCMultistepScheduler",
    scheduler_config="c1",
    sigmas="s1",
    timesteps="t1",
    num_steps=10,
    guidance={"guidance_scale": 5.0, "guidance_scale_2": None},
    latent_shape=(1, 4, 3, 5),
    latent_dtype="float32",
    conditioning="e1",
    numerics={"threads": 1, "dtype": "float32"},
    seed=7,
)

OTHER: dict[str, object] = {
    "request_id": "r2",
    "model": "tiny@abd",
    "loras": {"style@1": 0.25},
    "scheduler": "FlowMatchEulerDiscreteScheduler",
    "scheduler_config": "c2",
    "sigmas": "s2",
    "timesteps": "t2",
    "num_steps": 11,
    "guidance": {"guidance_scale": 4.0, "guidance_scale_2": None},
    "latent_shape": (1, 4, 3, 6),
    "latent_dtype": "bfloat16",
    "conditioning": "e2",
    "numerics": {"threads": 2, "dtype": "float32"},
    "seed": 8,
    "approximate": ("unconditional_prediction",),
}


def state(step: int, seed: int = 0, **changes: Any) -> StepState:
    dice = torch.Generator().manual_seed(1000 * seed + step)
    history = torch.randn(1, 4, 3, 5, generator=dice)
    fields: dict[str, Any] = {
        "step": step,
        "latents": torch.randn(1, 4, 3, 5, generator=dice),
        "scheduler": {
            "model_outputs": [None, history.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)],
            "timestep_list": [None, torch.tensor(991)],
            "lower_order_nums": 2,
            "last_sample": torch.randn(1, 4, 3, 5, generator=dice).to(torch.bfloat16),
        },
        "generators": {"noise": dice.get_state()},
        "extra": {"mark": (1, 2.5, "x")},
    }
    return StepState(**{**fields, **changes})


def same(one: object, other: object) -> bool:
    """Compare trees: types, bits and strides."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.stride() == other.stride()
            and one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))
        )
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


class Rig:
    """A connector on a store of its own, with what was told."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.events: list[Event] = []
        self.url = f"local://{root / 'store'}"
        self.conn = DiffusionConnector(
            "denoise", "store", store_config={"url": self.url, **options}, observers=[self.events.append]
        )
        self.relay: Relay = self.conn.store()
        self.made: list[Checkpointer] = []

    def checkpointer(self, conn: Any = None, **options: Any) -> Checkpointer:
        self.made.append(Checkpointer(conn or self.conn, **{"every": 1, **options}))
        return self.made[-1]

    def save(self, checkpointer: Checkpointer, *steps: int, session: CheckpointSession | None = None) -> None:
        session = session or checkpointer.session(IDENTITY)
        for step in steps:
            assert session.after_step(step, lambda step=step: state(step))  # type: ignore[misc]
            assert checkpointer.wait_idle(30)

    def left(self) -> list[str]:
        return self.relay.keys("moonrelay/", Deadline(10, SystemClock()))

    def told(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    def shelf(self) -> Shelf:
        return Shelf(self.relay, "moonrelay")

    def close(self) -> None:
        for checkpointer in self.made:
            checkpointer.close()
        self.conn.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    try:
        yield made
    finally:
        made.close()


class Wrapped:
    """A connector whose store is in our hands."""

    def __init__(self, rig: Rig, relay: Any) -> None:
        self.settings, self.events, self.clock = rig.conn.settings, rig.conn.events, rig.conn.clock
        self._relay = relay

    def store(self) -> Any:
        return self._relay


class Troubled:
    """A relay that fails, waits or breaks off where it is told to."""

    def __init__(self, inner: Relay) -> None:
        self.inner = inner
        self.error: Exception | None = None
        self.failing: tuple[str, ...] = ()
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.break_off_before = ""

    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: Any = None) -> None:
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(30)
        try:
            self._check("put", key)
        except Exception:
            on_quiet()
            raise
        self.inner.put(key, parts, deadline, on_quiet=on_quiet)

    def put_if_absent(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        self._check("put_if_absent", key)
        return self.inner.put_if_absent(key, value, deadline)

    def remove(self, keys: Any, deadline: Deadline) -> None:
        self._check("remove", "")
        self.inner.remove(keys, deadline)

    def keys(self, prefix: str, deadline: Deadline) -> list[str]:
        self._check("keys", prefix)
        return self.inner.keys(prefix, deadline)

    def _check(self, what: str, key: str) -> None:
        if self.error is not None and (not self.failing or what in self.failing):
            raise self.error
        if self.break_off_before and f"/{self.break_off_before}/" in f"{key}/":
            raise PeerLost("the worker died here")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


# -- what is saved comes back --------------------------------------------------------------------------------------


def test_a_state_comes_back_bit_for_bit_with_its_strides(rig: Rig) -> None:
    rig.save(rig.checkpointer(), 1, 2, 3)
    session = rig.checkpointer().session(IDENTITY)
    found = session.resume()
    assert found is not None
    assert same(found.tree(), state(3).tree())
    assert session.resumed_step == 3
    [told] = rig.told("checkpoint_resumed")
    assert told.fields()["step"] == 3
    assert [event.fields()["step"] for event in rig.told("checkpoint_saved")] == [1, 2, 3]
    assert all(event.nbytes and event.duration_s is not None for event in rig.told("checkpoint_saved"))


def test_what_was_captured_is_the_callers_own(rig: Rig) -> None:
    checkpointer = rig.checkpointer()
    rig.save(checkpointer, 1)
    first, second = (rig.checkpointer().session(IDENTITY).resume() for _ in range(2))
    assert first is not None
    assert second is not None
    first.latents.zero_()
    assert same(second.tree(), state(1).tree())


def test_nothing_there_is_a_fresh_start(rig: Rig) -> None:
    session = rig.checkpointer().session(IDENTITY)
    assert session.resume() is None
    assert session.resumed_step == 0
    assert rig.events == []


def test_every_kth_step_is_saved_and_only_the_newest_kept(rig: Rig) -> None:
    checkpointer = rig.checkpointer(every=3)
    session = checkpointer.session(IDENTITY)
    begun = []
    for step in range(1, 11):
        begun.append(session.after_step(step, lambda step=step: state(step)))  # type: ignore[misc]
        assert checkpointer.wait_idle(30)
    assert [number + 1 for number, did in enumerate(begun) if did] == [3, 6, 9]
    assert {key.rsplit("/", 3)[0].rpartition("/")[2].split("-")[1] for key in rig.left() if "/c/" in key} == {"9"}
    assert [event.fields()["step"] for event in rig.told("checkpoint_dropped")] == [3, 6]
    assert checkpointer.counters().saved == 3
    assert checkpointer.counters().dropped == 2


def test_with_every_0_only_what_is_asked_for_is_saved(rig: Rig) -> None:
    checkpointer = rig.checkpointer(every=0)
    session = checkpointer.session(IDENTITY)
    assert not session.after_step(5, lambda: state(5))
    assert session.save_now(6, lambda: state(6))
    assert [saved.step for saved in rig.shelf().found(request_digest("", "r1"), Deadline(5, SystemClock()))] == [6]
    # A second time it is there already.
    assert session.save_now(6, lambda: pytest.fail("captured again"))


def test_more_can_be_kept_and_one_of_them_chosen(rig: Rig) -> None:
    checkpointer = rig.checkpointer(keep=3)
    rig.save(checkpointer, 1, 2, 3, 4)
    for step in (2, 3, 4):
        found = rig.checkpointer().session(IDENTITY).resume(step=step)
        assert found is not None
        assert same(found.tree(), state(step).tree())
    with pytest.raises(CheckpointMismatch) as caught:
        rig.checkpointer().session(IDENTITY).resume(step=1)
    assert caught.value.context["field"] == "step"
    assert "[2, 3, 4]" in str(caught.value)


# -- another run's is refused --------------------------------------------------------------------------------------


def test_the_list_of_changes_covers_every_field() -> None:
    assert OTHER.keys() == {field.name for field in dataclasses.fields(CheckpointIdentity)}


@pytest.mark.parametrize("field", [name for name in OTHER if name != "request_id"])
def test_every_field_of_the_identity_is_compared(field: str, rig: Rig) -> None:
    rig.save(rig.checkpointer(), 1)
    changed = dataclasses.replace(IDENTITY, **{field: OTHER[field]})  # type: ignore[arg-type]
    checkpointer = rig.checkpointer()
    session = checkpointer.session(changed)
    with pytest.raises(CheckpointMismatch) as caught:
        session.resume()
    assert str(caught.value.context["field"]).split(".")[0] == field
    assert caught.value.context["saved"] != caught.value.context["present"]
    assert session.resumed_step == 0
    [told] = rig.told("checkpoint_refused")
    assert str(told.fields()["field"]).split(".")[0] == field
    # It starts afresh; what was refused goes when the first of its own is whole.
    fresh = state(2, latents=torch.zeros(changed.latent_shape, dtype=getattr(torch, changed.latent_dtype)))
    assert session.after_step(2, lambda: fresh)
    assert checkpointer.wait_idle(30)
    found = rig.checkpointer().session(changed).resume()
    assert found is not None
    assert found.step == 2
    assert len({key.rsplit("/c/", 1)[0] for key in rig.left() if "/c/" in key}) == 1


def test_another_requests_checkpoint_is_not_found(rig: Rig) -> None:
    rig.save(rig.checkpointer(), 1)
    assert rig.checkpointer().session(dataclasses.replace(IDENTITY, request_id="r2")).resume() is None
    assert rig.checkpointer(scope="other queue").session(IDENTITY).resume() is None


@pytest.mark.parametrize("gone", [name for name in OTHER if name != "request_id"])
def test_a_field_that_was_not_saved_is_named(gone: str, rig: Rig) -> None:
    saved = IDENTITY.to_plain()
    del saved[gone]
    with pytest.raises(CheckpointMismatch) as caught:
        IDENTITY.require_same(saved)
    assert caught.value.context["field"] == gone


def test_a_field_that_is_not_known_is_named() -> None:
    with pytest.raises(CheckpointMismatch) as caught:
        IDENTITY.require_same({**IDENTITY.to_plain(), "weather": "fine"})
    assert caught.value.context["field"] == "weather"


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, 1.0), (0.5, "0.5"), (None, 0)], ids=["bool", "float", "text", "none"]
)
def test_values_of_different_types_differ(one: object, other: object) -> None:
    ours = dataclasses.replace(IDENTITY, numerics={"x": one})  # type: ignore[dict-item]
    with pytest.raises(CheckpointMismatch, match="numerics"):
        ours.require_same(dataclasses.replace(IDENTITY, numerics={"x": other}).to_plain())  # type: ignore[dict-item]
    ours.require_same(ours.to_plain())


@pytest.mark.parametrize("field", sorted(OVERRIDABLE - {"request_id"}))
def test_what_may_differ_does_when_it_is_named(field: str, rig: Rig) -> None:
    rig.save(rig.checkpointer(), 4)
    changed = dataclasses.replace(IDENTITY, **{field: OTHER[field]})  # type: ignore[arg-type]
    found = rig.checkpointer().session(changed).resume(override=(field,))
    assert found is not None
    assert found.step == 4


@pytest.mark.parametrize("field", sorted({*OTHER, "weather"} - OVERRIDABLE))
def test_what_the_state_hangs_on_may_not_differ(field: str, rig: Rig) -> None:
    with pytest.raises(ConfigError) as caught:
        rig.checkpointer().session(IDENTITY).resume(override=(field,))
    assert caught.value.context["field"] == "override"
    assert field in str(caught.value)


def test_another_request_goes_on_from_a_retained_checkpoint(rig: Rig) -> None:
    checkpointer = rig.checkpointer(keep=2)
    first = checkpointer.session(IDENTITY, retain=True)
    rig.save(checkpointer, 3, 6, session=first)
    first.finish()
    assert checkpointer.wait_idle(30)
    edited = dataclasses.replace(IDENTITY, request_id="r2", conditioning="e2")
    with pytest.raises(CheckpointMismatch, match="conditioning"):
        rig.checkpointer().session(edited).resume(of="r1", step=3)
    session = rig.checkpointer().session(edited)
    found = session.resume(override=("conditioning",), of="r1", step=3)
    assert found is not None
    assert same(found.tree(), state(3).tree())
    # What it saves itself is its own, and the other's stays.
    rig.save(rig.made[-1], 4, session=session)
    session.finish()
    assert rig.made[-1].wait_idle(30)
    shelf, deadline = rig.shelf(), Deadline(5, SystemClock())
    assert [saved.step for saved in shelf.found(request_digest("", "r1"), deadline)] == [6, 3]
    assert shelf.found(request_digest("", "r2"), deadline) == []


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CheckpointIdentity)])
def test_an_identity_that_says_nothing_is_refused(field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(IDENTITY, **{field: None})  # type: ignore[arg-type]
    assert caught.value.context["field"] == field


@pytest.mark.parametrize("field", ["loras", "guidance", "numerics"])
def test_values_that_are_not_plain_are_refused(field: str) -> None:
    class Text(str):
        __slots__ = ()

    for value in (Text("2.13"), object(), [1]):
        with pytest.raises(ConfigError) as caught:
            dataclasses.replace(IDENTITY, **{field: {"x": value}})  # type: ignore[arg-type]
        assert caught.value.context["field"] == field


# -- what is missing in a state is named ---------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["step", "latents", "scheduler", "generators", "extra"])
def test_a_part_that_is_missing_is_named(part: str) -> None:
    tree = state(1).tree()
    del tree[part]
    with pytest.raises(CheckpointMismatch) as caught:
        StepState.from_tree(tree, IDENTITY)
    assert caught.value.context["field"] == part


@pytest.mark.parametrize(
    ("part", "value", "field"),
    [
        ("step", 0, "step"),
        ("step", 11, "step"),
        ("step", True, "step"),
        ("latents", torch.zeros(1, 4, 3, 6), "latents"),
        ("latents", torch.zeros(1, 4, 3, 5, dtype=torch.float64), "latents"),
        ("latents", None, "latents"),
        ("scheduler", [1], "scheduler"),
        ("generators", None, "generators"),
        ("generators", {"noise": torch.zeros(3)}, "generators.noise"),
        ("generators", {"noise": None}, "generators.noise"),
        ("weather", 1, "weather"),
    ],
)
def test_a_part_that_does_not_fit_is_named(part: str, value: object, field: str) -> None:
    with pytest.raises(CheckpointMismatch) as caught:
        StepState.from_tree({**state(1).tree(), part: value}, IDENTITY)
    assert caught.value.context["field"] == field


def test_a_state_that_could_not_be_resumed_is_not_saved(rig: Rig) -> None:
    checkpointer = rig.checkpointer()
    session = checkpointer.session(IDENTITY)
    assert not session.after_step(1, lambda: state(1, latents=torch.zeros(2)))
    assert not session.after_step(2, lambda: state(2, extra=object()))
    assert checkpointer.counters().failed == 2
    assert "latents" in str(rig.told("checkpoint_failed")[0].reason)
    assert "extra" in str(rig.told("checkpoint_failed")[1].reason)
    assert rig.left() == []


# -- half-written and damaged --------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken_off", ["c/0", "c/1", "c/2", "end"])
def test_a_half_written_newer_one_hides_no_older_one(broken_off: str, rig: Rig) -> None:
    rig.save(rig.checkpointer(), 5)
    troubled = Troubled(rig.relay)
    troubled.break_off_before = broken_off
    dying = rig.checkpointer(Wrapped(rig, troubled))
    session = dying.session(IDENTITY)
    assert session.resume() is not None
    troubled.error, troubled.failing = PeerLost("dead"), ("remove",)  # it does not clean up either
    assert session.after_step(6, lambda: state(6))
    assert dying.wait_idle(30)
    found = rig.checkpointer().session(IDENTITY).resume()
    assert found is not None
    assert same(found.tree(), state(5).tree())
    # The next one that is whole takes both away.
    heir = rig.checkpointer()
    session = heir.session(IDENTITY)
    session.resume()
    rig.save(heir, 7, session=session)
    assert {key.split("/")[3].split("-")[1] for key in rig.left()} == {"7"}


@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize("place", [0, 60, -1])
def test_a_damaged_newer_one_is_passed_over(chunk: int, place: int, rig: Rig, tmp_path: Path) -> None:
    rig.save(rig.checkpointer(keep=2), 5, 6)
    [file] = (tmp_path / "store" / "objects").glob(f"*-6-*%c%{chunk}%0")
    raw = bytearray(file.read_bytes())
    raw[place] ^= 1
    file.chmod(0o600)
    file.write_bytes(raw)
    found = rig.checkpointer().session(IDENTITY).resume()
    assert found is not None
    assert same(found.tree(), state(5).tree())
    [told] = rig.told("checkpoint_refused")
    assert told.fields()["step"] == 6


def test_a_damaged_only_one_is_a_fresh_start(rig: Rig, tmp_path: Path) -> None:
    rig.save(rig.checkpointer(), 5)
    [file] = (tmp_path / "store" / "objects").glob("*%c%2%0")
    file.unlink()
    assert rig.checkpointer().session(IDENTITY).resume() is None
    assert len(rig.told("checkpoint_refused")) == 1


# -- never in the way ----------------------------------------------------------------------------------------------


def test_a_slow_store_makes_saves_be_skipped_and_one_snapshot_is_all_that_is_held(rig: Rig) -> None:
    troubled = Troubled(rig.relay)
    troubled.gate = threading.Event()
    checkpointer = rig.checkpointer(Wrapped(rig, troubled))
    session = checkpointer.session(IDENTITY)
    captured: list[int] = []

    def capture(step: int) -> StepState:
        captured.append(step)
        return state(step)

    assert session.after_step(1, lambda: capture(1))
    assert troubled.entered.wait(30)
    for step in range(2, 8):
        assert not session.after_step(step, lambda step=step: capture(step))  # type: ignore[misc]
    assert captured == [1]
    assert checkpointer.counters().skipped == 6
    assert [event.fields()["step"] for event in rig.told("checkpoint_skipped")] == [2, 3, 4, 5, 6, 7]
    troubled.gate.set()
    assert checkpointer.wait_idle(30)
    assert session.after_step(8, lambda: capture(8))
    assert checkpointer.wait_idle(30)
    found = rig.checkpointer().session(IDENTITY).resume()
    assert found is not None
    assert found.step == 8


@pytest.mark.parametrize("part", ["latents", "last_sample"])
def test_a_state_that_is_changed_while_it_is_saved_is_void(part: str, rig: Rig) -> None:
    rig.save(rig.checkpointer(), 1)
    troubled = Troubled(rig.relay)
    troubled.gate = threading.Event()
    checkpointer = rig.checkpointer(Wrapped(rig, troubled))
    session = checkpointer.session(IDENTITY)
    session.resume()
    moving = state(2)
    assert session.after_step(2, lambda: moving)
    assert troubled.entered.wait(30)
    changed = moving.latents if part == "latents" else moving.scheduler[part]
    assert isinstance(changed, torch.Tensor)
    changed.add_(1)
    troubled.gate.set()
    assert checkpointer.wait_idle(30)
    assert [event.code for event in rig.told("checkpoint_failed")] == ["integrity_error"]
    found = rig.checkpointer().session(IDENTITY).resume()
    assert found is not None
    assert same(found.tree(), state(1).tree())
    assert {key.split("/")[3].split("-")[1] for key in rig.left()} == {"1"}


def test_nothing_is_begun_while_a_lost_put_may_still_read_the_snapshot(rig: Rig) -> None:
    kept: list[Any] = []

    class Lost(Troubled):
        def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: Any = None) -> None:
            kept.append(on_quiet)
            raise CapacityError("no room, and the store still reads")

    checkpointer = rig.checkpointer(Wrapped(rig, Lost(rig.relay)))
    session = checkpointer.session(IDENTITY)
    assert session.after_step(1, lambda: state(1))
    assert checkpointer.wait_idle(30)
    assert not session.after_step(2, lambda: state(2))
    for on_quiet in kept:
        on_quiet()
    assert session.after_step(3, lambda: state(3))
    assert checkpointer.wait_idle(30)
    for on_quiet in kept[1:]:
        on_quiet()


@pytest.mark.parametrize("failing", [(), ("put",), ("put_if_absent",), ("keys",), ("remove",)], ids=str)
def test_without_the_store_the_job_goes_on(failing: tuple[str, ...], rig: Rig) -> None:
    troubled = Troubled(rig.relay)
    rig.save(rig.checkpointer(), 1)
    checkpointer = rig.checkpointer(Wrapped(rig, troubled))
    session = checkpointer.session(IDENTITY)
    if "keys" not in failing and failing:
        assert session.resume() is not None
    troubled.error, troubled.failing = PeerLost("the store is gone"), failing
    if not failing or "keys" in failing:
        assert session.resume() is None
    session.after_step(2, lambda: state(2))
    assert checkpointer.wait_idle(30)
    if failing != ("remove",):
        assert not session.save_now(3, lambda: state(3), timeout_s=10)
    session.finish()
    assert checkpointer.wait_idle(30)
    assert rig.told("checkpoint_failed")
    assert checkpointer.counters().failed == len(rig.told("checkpoint_failed"))
    assert all(event.code == "peer_lost" for event in rig.told("checkpoint_failed"))


def test_a_full_store_is_an_event(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity_bytes=4096)
    try:
        checkpointer = rig.checkpointer()
        session = checkpointer.session(IDENTITY)
        assert session.after_step(1, lambda: state(1))
        assert checkpointer.wait_idle(30)
        assert [event.code for event in rig.told("checkpoint_failed")] == ["capacity_error"]
        assert rig.left() == []  # what had been stored of it is gone
    finally:
        rig.close()


def test_a_closed_checkpointer_saves_nothing_and_says_so(rig: Rig) -> None:
    checkpointer = rig.checkpointer()
    session = checkpointer.session(IDENTITY)
    checkpointer.close()
    checkpointer.close()
    assert not session.after_step(1, lambda: state(1))
    assert not session.save_now(1, lambda: state(1))
    session.finish()


# -- the end of a request ------------------------------------------------------------------------------------------


def test_nothing_is_left_when_the_request_ends(rig: Rig) -> None:
    checkpointer = rig.checkpointer(keep=2)
    session = checkpointer.session(IDENTITY)
    rig.save(checkpointer, 1, 2, session=session)
    # One under way, and one that a worker that is dead left behind.
    rig.save(rig.checkpointer(keep=9), 3)
    assert session.after_step(4, lambda: state(4))
    session.finish()
    session.finish()
    assert checkpointer.wait_idle(30)
    assert rig.left() == []
    assert not session.after_step(5, lambda: state(5)) or checkpointer.wait_idle(30)


def test_requests_that_ended_elsewhere_are_swept_and_others_are_not(rig: Rig) -> None:
    for request_id in ("r1", "r2", "r3"):
        checkpointer = rig.checkpointer()
        session = checkpointer.session(dataclasses.replace(IDENTITY, request_id=request_id), retain=request_id == "r3")
        rig.save(checkpointer, 1, session=session)
    sweeper = rig.checkpointer()
    sweeper.sweep([])
    sweeper.sweep(["r1", "r3", "r9"])
    assert sweeper.wait_idle(30)
    left = {key.split("/")[2] for key in rig.left()}
    assert left == {request_digest("", "r2"), request_digest("", "r3")}
    # The lease of the rest ends by itself: any connector's sweeper takes them.
    anybody = Sweeper(rig.relay, "moonrelay", SystemClock())
    now = SystemClock().monotonic()
    assert [anybody.sweep(now), anybody.sweep(now + 3590)] == [0, 0]
    assert anybody.sweep(now + 3610) == 8
    anybody.sweep(now + 3611)
    assert anybody.sweep(now + 4300) == 2  # the tombstones
    assert rig.left() == []
    assert rig.checkpointer().session(dataclasses.replace(IDENTITY, request_id="r2")).resume() is None


@pytest.mark.parametrize(
    ("options", "field"),
    [({"every": -1}, "every"), ({"keep": 0}, "keep"), ({"ttl_s": 0}, "ttl_s"), ({"every": 1.5}, "every")],
)
def test_settings_are_checked(options: Mapping[str, Any], field: str, rig: Rig) -> None:
    with pytest.raises(ConfigError) as caught:
        rig.checkpointer(**options)
    assert caught.value.context["field"] == field


def test_the_step_is_not_kept_waiting(rig: Rig) -> None:
    """The call returns while the store has not even begun to answer."""
    troubled = Troubled(rig.relay)
    troubled.gate = threading.Event()
    checkpointer = rig.checkpointer(Wrapped(rig, troubled))
    session = checkpointer.session(IDENTITY)
    assert session.after_step(1, lambda: state(1))
    assert troubled.entered.wait(30)
    assert rig.told("checkpoint_saved") == []
    troubled.gate.set()
    assert checkpointer.wait_idle(30)
    assert len(rig.told("checkpoint_saved")) == 1
