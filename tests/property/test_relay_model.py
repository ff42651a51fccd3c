"""The embedded relay does what the in-memory one does, whatever the order, also through two instances and restarts."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import StoreConfig
from moonrelay.errors import MoonrelayError
from moonrelay.handle import Extent
from moonrelay.relay.base import Relay
from moonrelay.relay.local import LocalRelay
from moonrelay.relay.memory import MemoryRelay

CAPACITY_BYTES = 300
keys = st.sampled_from(["ns/a", "ns/b", "ns/b/c", "other", "x.y-z_0"])
which = st.integers(0, 1)


class LocalLikeMemory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.deadline = Deadline(60.0, SystemClock())
        self.model = MemoryRelay(StoreConfig(url=None, capacity_bytes=CAPACITY_BYTES))
        self.model.start()
        self.relays = [self.opened(), self.opened()]

    def opened(self) -> LocalRelay:
        relay = LocalRelay(StoreConfig(url=f"local://{self.root}", capacity_bytes=CAPACITY_BYTES))
        relay.start()
        return relay

    def both(self, index: int, act: Callable[[Relay], object]) -> None:
        answers: list[object] = []
        for relay in (self.model, self.relays[index]):
            try:
                answers.append(act(relay))
            except MoonrelayError as error:
                answers.append(type(error))
        assert answers[0] == answers[1]

    @rule(index=which, key=keys, data=st.binary(min_size=1, max_size=200), cut=st.integers(0, 200))
    def put(self, index: int, key: str, data: bytes, cut: int) -> None:
        buffer = (ctypes.c_char * len(data)).from_buffer_copy(data)
        base, cut = ctypes.addressof(buffer), min(cut, len(data))
        parts = [Extent(base, cut), Extent(base + cut, len(data) - cut)]
        self.both(index, lambda relay: relay.put(key, parts, self.deadline))

    @rule(index=which, key=keys, nbytes=st.integers(1, 200))
    def get(self, index: int, key: str, nbytes: int) -> None:
        def act(relay: Relay) -> object:
            buffer = (ctypes.c_char * nbytes)()
            return relay.get(key, [Extent(ctypes.addressof(buffer), nbytes)], self.deadline), buffer.raw

        self.both(index, act)

    @rule(index=which, key=keys, value=st.binary(min_size=1, max_size=100))
    def put_if_absent(self, index: int, key: str, value: bytes) -> None:
        self.both(index, lambda relay: relay.put_if_absent(key, value, self.deadline))

    @rule(index=which, gone=st.lists(keys, max_size=3))
    def remove(self, index: int, gone: list[str]) -> None:
        self.both(index, lambda relay: relay.remove(gone, self.deadline))

    @rule(index=which)
    def reopen(self, index: int) -> None:
        self.relays[index].close()
        self.relays[index] = self.opened()

    @invariant()
    def same_keys_and_values(self) -> None:
        for prefix in ("", "ns/", "ns/b"):
            self.both(0, lambda relay, prefix=prefix: relay.keys(prefix, self.deadline))
        for key in self.model.keys("", self.deadline):
            self.both(1, lambda relay, key=key: relay.get_bytes(key, self.deadline))

    @invariant()
    def counted_right_and_nothing_left(self) -> None:
        sizes = [path.stat().st_size for path in (self.root / "objects").iterdir()]
        assert int.from_bytes((self.root / "lock").read_bytes(), "little") == sum(sizes) <= CAPACITY_BYTES
        assert not list((self.root / "tmp").iterdir())

    def teardown(self) -> None:
        for relay in (self.model, *self.relays):
            relay.close()
        shutil.rmtree(self.root)


TestLocalLikeMemory = LocalLikeMemory.TestCase
TestLocalLikeMemory.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
