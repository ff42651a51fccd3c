"""What the tests of caches work with: one store and two connectors for a run, caches of one test on a word of its own.

Owns the life of all of it. Two connectors stand for two processes, where a test needs none that it can kill.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from moonrelay import DiffusionConnector
from moonrelay.cache.embeddings import EmbeddingCache
from moonrelay.cache.keys import CacheKey
from moonrelay.clock import Deadline, SystemClock
from moonrelay_conformance.corpus import trees
from moonrelay_conformance.suites.base import Suite
from moonrelay_conformance.suites.part_between import Conn
from moonrelay_conformance.suites.part_process import HelperPool, HelperProcess
from moonrelay_conformance.suites.part_shared import once_per_class
from moonrelay_conformance.targets.caches import CacheTarget
from moonrelay_conformance.targets.parts import RelayGround
from moonrelay_conformance.targets.recipe import recipe

#: Of the store; a cache gets half of it at most.
CAPACITY_BYTES = 64 << 20
NAMESPACE = "conformance"
#: A cache's own bound, where a test says nothing.
MEMORY_BYTES = 8 << 20
#: Until when what was cleared must be gone.
GONE_S = 20.0
#: A hit that is none.
NOTHING = object()
_MODULE = "moonrelay_conformance.suites.cache_peer"
_OWN = object()

#: Whole keys that differ in one thing from this.
FIELDS: dict[str, Any] = {
    "encoder": "google/umt5-xxl@0f1e",
    "prompt": "A red fox in the snow",
    "role": "positive",
    "params": {"dtype": "bfloat16", "max_length": 512, "lora": {"style@a1": 0.5, "detail@b2": 1.0}, "clip_skip": 1},
    "tokenizer": "google/umt5@77",
    "template": "Describe: {}",
}


class Encoder:
    """Encodes, counts, and gives something else at every call.

    Args:
        description: Of the tree, see `moonrelay_conformance.corpus.description`; one of its own by default.
    """

    _numbers = itertools.count(1)

    def __init__(self, description: Any = _OWN) -> None:
        self.calls = 0
        self.trees: list[Any] = []
        self._description = description
        self._lock = threading.Lock()

    def __call__(self) -> Any:
        with self._lock:
            self.calls += 1
        self.trees.append(trees.build(entry(next(self._numbers)) if self._description is _OWN else self._description))
        return self.trees[-1]

    @property
    def digest(self) -> str:
        """Digest of the newest tree, as it is now."""
        return trees.digest(self.trees[-1])


@dataclass(frozen=True, slots=True)
class CacheRun:
    """What all tests of one run share."""

    target: CacheTarget
    ground: RelayGround
    connectors: tuple[DiffusionConnector, DiffusionConnector]
    helpers: HelperPool


class CacheBench:
    """Caches of one test.

    Args:
        run: What all tests of one run share.

    Attributes:
        word: The namespace of the test's caches.
    """

    def __init__(self, run: CacheRun) -> None:
        self.target = run.target
        self.word = f"t{uuid.uuid4().hex[:12]}"
        self._run = run
        self._made: list[EmbeddingCache] = []

    def conn(self, number: int = 0) -> Conn:
        """Return a connector of the store; 0 and 1 are different ones."""
        return Conn(self._run.connectors[number])

    def cache(self, conn: Conn | None = None, capacity_bytes: int = MEMORY_BYTES, **settings: Any) -> EmbeddingCache:
        """Return a cache of this test, on the first connector unless another is given."""
        settings = {"namespace": self.word, "retry_s": 60.0, **settings}
        self._made.append(self.target.make(conn or self.conn(), capacity_bytes, **settings))
        return self._made[-1]

    def other(self, capacity_bytes: int = MEMORY_BYTES, **settings: Any) -> EmbeddingCache:
        """Return a cache of this test on the second connector, as in another process."""
        return self.cache(self.conn(1), capacity_bytes, **settings)

    def key(self, **changes: Any) -> CacheKey:
        """Return the key of `FIELDS` with changes."""
        return self.target.key(**{**FIELDS, **changes})

    def stored(self) -> list[str]:
        """Return what lies in the store of this test's, read around the cache."""
        return [name for name in self._run.ground.stored() if self.word in name]

    def until_gone(self) -> list[str]:
        """Wait until nothing of this test's lies in the store; return what does."""
        deadline = Deadline(GONE_S, SystemClock())
        while (left := self.stored()) and not deadline.expired:
            threading.Event().wait(0.05)
        return left

    def peer(self) -> HelperProcess:
        """Return a process with a connector of the same store."""
        return self._run.helpers.take()

    def close(self) -> None:
        """End processes and caches, and clear what the test stored."""
        self._run.helpers.take_back()
        for cache in self._made:
            cache.close()
        with self._run.target.make(self.conn(), 0, store_bytes=1 << 20, namespace=self.word) as cache:
            cache.clear()


class CacheSuite(Suite):
    """Base of the suite's parts: its fixtures."""

    kind: ClassVar[str] = "cache"

    @pytest.fixture
    def bench(
        self, request: pytest.FixtureRequest, target: Any, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[CacheBench]:
        """The run's store and connectors, with a word of one test."""

        def make() -> tuple[CacheRun, Callable[[], None]]:
            with contextlib.ExitStack() as stack:
                folder, logs = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("logs")
                ground = stack.enter_context(target.ground(folder, capacity_bytes=CAPACITY_BYTES))
                first, second = (
                    stack.enter_context(
                        target.connector(ground.url, capacity_bytes=CAPACITY_BYTES, namespace=NAMESPACE)
                    )
                    for _ in range(2)
                )
                helpers = HelperPool(_MODULE, logs, lambda: peer_settings(target, ground.url))
                stack.callback(helpers.close)
                return CacheRun(target, ground, (first, second), helpers), stack.pop_all().close

        bench = CacheBench(once_per_class(request, _RUN, make))
        try:
            yield bench
        finally:
            bench.close()


_RUN = pytest.StashKey[CacheRun]()


def peer_settings(target: CacheTarget, url: str) -> dict[str, Any]:
    """Return what a peer's process is started with."""
    return {"target": recipe(target), "url": url, "capacity_bytes": CAPACITY_BYTES, "namespace": NAMESPACE}


def entry(seed: int, nbytes: int = 4096) -> dict[str, Any]:
    """Describe an encoder's usual result: hidden states, a mask, and a plain value."""
    hidden = {"tensor": {"shape": [1, max(1, nbytes // 128), 64], "dtype": "bfloat16", "seed": seed}}
    return {"dict": [["embeds", hidden], ["mask", {"tensor": {"shape": [1, 4], "dtype": "int64", "seed": seed}}]]}


def built(description: Any) -> Callable[[], Any]:
    """Return an encoder that makes what ``description`` stands for."""
    return lambda: trees.build(description)


def file_lines(path: Path) -> list[str]:
    """Return the lines of a file that processes append to."""
    return path.read_text().split() if path.exists() else []


def edited(tree: Any) -> None:
    """Write into every tensor of a tree made by `entry`."""
    for tensor in tree.values():
        tensor.zero_()
