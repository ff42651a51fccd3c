"""The host where it is there, and which tests need it."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

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


@pytest.fixture(scope="module")
def cluster(
    backend: str,
    wan: Path,
    right: Mapping[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Cluster]:
    """A warm cluster with a backend, as the module's `LAYOUT` says; the undivided host has gone when it starts."""
    folder = tmp_path_factory.mktemp(f"cluster-{backend}")
    said = {**request.module.LAYOUT, **CLUSTERS[backend]}
    one = Cluster(wan, folder, **said)
    one.start()
    try:
        one.registered()
        one.warm()
        yield one
    finally:
        one.end()
