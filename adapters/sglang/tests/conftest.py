"""The host where it is there, and which tests need it."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cpu_support.install import installed
from sglang_backends import CLUSTERS
from sglang_cluster import FIRST_TIMEOUT_S, REQUESTS, Cluster, Monolith, key_of

HOST_IS_THERE = find_spec("sglang") is not None
#: Files whose every test needs the host; only `nox -s sglang` has it.
_PATTERNS = ("test_stock_*.py", "test_sglang_host_*.py")
HOST_FILES = sorted(path.name for pattern in _PATTERNS for path in Path(__file__).parent.glob(pattern))
collect_ignore = [] if HOST_IS_THERE else HOST_FILES


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "sglang" and not HOST_IS_THERE:
        message = "sglang is not installed here, so its tests cannot run; use nox -s sglang"
        raise pytest.UsageError(message)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of one cluster one after the other: a start takes a minute. Files and backends keep their order.

    Those of a file that says so are the last ones in their cluster.
    """
    here = Path(__file__).parent
    places = [
        place
        for place, item in enumerate(items)
        # The hook is given the items of all folders, and a fixture of another one may have that name.
        if here in item.path.parents and "cluster" in getattr(item, "fixturenames", ())
    ]
    known = list(CLUSTERS)

    def order(item: Any) -> tuple[int, bool]:
        return known.index(item.callspec.params["backend"]), getattr(item.module, "LAST_IN_ITS_CLUSTER", False)

    inside = sorted((items[place] for place in places), key=order)
    for place, item in zip(places, inside, strict=True):
        items[place] = item


def pytest_report_header() -> str | None:
    if HOST_IS_THERE:
        return None
    return f"sglang is not installed: {', '.join(HOST_FILES)} are left to nox -s sglang"


@pytest.fixture(scope="session")
def host() -> None:
    """The host imported into this process, without its imports' warnings, which no test of ours can mend."""
    if not installed():
        pytest.fail("the host has no CPU support here; run `python -m cpu_support.install`, as nox -s sglang does")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("sglang.multimodal_gen.runtime.disaggregation.scheduler_mixin")


@pytest.fixture(scope="session")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Wan, built once and in a process of its own: it imports another host."""
    if not installed():
        pytest.fail("the host has no CPU support here; run `python -m cpu_support.install`, as nox -s sglang does")
    folder = tmp_path_factory.mktemp("sglang-model")
    build = "import sys; from pathlib import Path; from cpu_support import tiny_wan; tiny_wan.build(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(folder)], timeout=300, check=True)
    (model,) = folder.iterdir()
    return model


@pytest.fixture(scope="session")
def right(wan: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """The videos of `REQUESTS` as the undivided host makes them, by `sglang_cluster.key_of`."""
    service = Monolith(wan, tmp_path_factory.mktemp("monolith"))
    try:
        return {key_of(**one): service.ask(**one, within_s=FIRST_TIMEOUT_S) for one in REQUESTS}
    finally:
        service.end()


class Clusters:
    """One warm cluster at a time: the next layout ends the one before."""

    def __init__(self, model: Path, folders: pytest.TempPathFactory) -> None:
        self._model = model
        self._folders = folders
        self._layout: Mapping[str, Any] | None = None
        self._cluster: Cluster | None = None

    def of(self, layout: Mapping[str, Any]) -> Cluster:
        if self._cluster is None or layout != self._layout:
            self.end()
            folder = self._folders.mktemp(f"cluster-{layout['backend']}")
            self._cluster = Cluster(self._model, folder, **layout).start()
            self._layout = layout
            self._cluster.warm()
        return self._cluster

    def end(self) -> None:
        if self._cluster is not None:
            self._cluster.end()
            self._cluster = None


@pytest.fixture(scope="session")
def clusters(
    wan: Path,
    right: Mapping[str, bytes],  # the undivided host has gone when the first one starts
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Clusters]:
    made = Clusters(wan, tmp_path_factory)
    yield made
    made.end()


@pytest.fixture
def cluster(backend: str, clusters: Clusters, request: pytest.FixtureRequest) -> Cluster:
    """A warm cluster with a backend: as the module's `LAYOUT` says, or as all tests of that backend have it.

    Tests share it; see `pytest_collection_modifyitems` for their order.
    """
    return clusters.of({**request.module.LAYOUT, **CLUSTERS[backend]})
