"""The host where it is there, and which tests need it.

LightX2V is not on the package registry: who has it runs these tests with the Python that can import it. Nothing is put
into that Python's environment; the host's processes find the CPU support by their search path.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import lightx2v_model
import lightx2v_qwen_model
import pytest
from lightx2v_cpu.install import place
from lightx2v_right import Right

HOST_IS_THERE = find_spec("lightx2v") is not None
MISSING = "lightx2v cannot be imported here; run MOONRELAY_LIGHTX2V_PYTHON=<a python that can> nox -s lightx2v"


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "lightx2v" and not HOST_IS_THERE:
        raise pytest.UsageError(MISSING)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HOST_IS_THERE:
        return
    skip = pytest.mark.skip(reason=MISSING)
    for item in items:
        if item.get_closest_marker("lightx2v"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that is to run the host."""
    return place(tmp_path_factory.mktemp("lightx2v-cpu"))


@pytest.fixture(scope="session")
def wan(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny text-to-video model."""
    return lightx2v_model.build(tmp_path_factory.mktemp("lightx2v-model") / "wan", environment)


@pytest.fixture(scope="session")
def wan_i2v(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny image-to-video model; its roles need `lightx2v_model.WITHOUT_IMAGE_ENCODER`."""
    return lightx2v_model.build(tmp_path_factory.mktemp("lightx2v-model") / "wan-i2v", environment, "i2v")


@pytest.fixture(scope="session")
def qwen_image(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny text-to-image model; its roles need `lightx2v_qwen_model.CONFIG`."""
    return lightx2v_qwen_model.build(tmp_path_factory.mktemp("lightx2v-model") / "qwen-image", environment)


@pytest.fixture(scope="session")
def right(wan: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Right]:
    made = Right(wan, tmp_path_factory.mktemp("lightx2v-all-in-one"), environment)
    yield made
    made.end()
