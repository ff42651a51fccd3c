"""The other ways into the real host: by our launcher, by a script's import line, and a config that does not name us.

For the first two our entry point is hidden from the host, as if it were older than its plugins.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from lightx2v_cluster import REQUEST, OneShot, Process
from lightx2v_right import Right
from lightx2v_scenarios import RED

pytestmark = [pytest.mark.lightx2v, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1200)]

#: Found by every Python that has its folder on its path, before anything else is imported.
HIDES_US = """\
import importlib.metadata

_own = importlib.metadata.entry_points


def entry_points(**wanted):
    found = _own(**wanted)
    if wanted.get("group") != "lightx2v.platform_plugins":
        return found
    return importlib.metadata.EntryPoints(one for one in found if not one.value.startswith("moonrelay_lightx2v"))


importlib.metadata.entry_points = entry_points
"""
#: The host says so of our entry point.
LOADED = "Loaded LightX2V platform plugin: moonrelay\n"
SCRIPT = """\
import json
import sys

import moonrelay_lightx2v.enable  # before lightx2v
from lightx2v import LightX2VPipeline

config, request = json.loads(sys.argv[1]), json.loads(sys.argv[2])
pipeline = LightX2VPipeline(task="t2v", **config["pipeline"])
pipeline.config_json = config["config_json"]  # else the host loses the length of the video
pipeline.create_generator(config_json=config["config_json"])
pipeline.generate(**request)
print("Video saved successfully")
"""


def without_our_entry_point(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(HIDES_US)
    return {**environment, "PYTHONPATH": os.pathsep.join((str(folder), environment["PYTHONPATH"]))}


class Launched(OneShot):
    """``python -m moonrelay_lightx2v lightx2v.infer`` for each role."""

    def _process(self, name: str, said: list[str]) -> Process:
        command = ["-m", "moonrelay_lightx2v", "lightx2v.infer", *said]
        return Process(name, command, self.folder, self._environment_of(name))


class Scripted(OneShot):
    """A script with the host's ``LightX2VPipeline`` for each role."""

    def _process(self, name: str, said: list[str]) -> Process:
        script = self.folder / "generate.py"
        script.write_text(SCRIPT)
        given = dict(zip(said[::2], said[1::2], strict=True))
        config = {
            "pipeline": {"model_path": given["--model_path"], "model_cls": given["--model_cls"]},
            "config_json": given["--config_json"],
        }
        request = {**REQUEST, **RED, "save_result_path": str(self._result_of(name))}
        del request["infer_steps"], request["target_video_length"]  # the JSON's
        return Process(
            name, [str(script), json.dumps(config), json.dumps(request)], self.folder, self._environment_of(name)
        )

    def start(self, **_request: Any) -> Scripted:  # type: ignore[override]
        for process in self.processes.values():
            process.start()
        return self


@pytest.mark.parametrize("way", [Launched, Scripted])
def test_a_host_without_our_entry_point_is_ours_by_one_word(
    wan: Path, environment: dict[str, str], tmp_path: Path, right: Right, way: type[OneShot]
) -> None:
    hidden = without_our_entry_point(environment, tmp_path / "hidden")
    with way(wan, tmp_path / "roles", hidden, connector="moonrelay").start(**RED) as runs:
        video = runs.video()
        codes = runs.exit_codes(60.0)
    assert video, {name: process.tail() for name, process in runs.processes.items()}
    assert not any(LOADED in process.text() for process in runs.processes.values())
    assert video == right(**RED).video
    # The host's own transfer would leave processes that never end.
    assert codes == {"encoder": 0, "transformer": 0, "decode": 0}


def test_a_config_that_does_not_name_us_runs_the_hosts_own_transfer(
    wan: Path, environment: dict[str, str], tmp_path: Path, right: Right
) -> None:
    with OneShot(wan, tmp_path, environment, connector=None).start(**RED) as runs:
        video = runs.video()
        said = {name: process.text() for name, process in runs.processes.items()}
        codes = runs.exit_codes(5.0)
    assert video == right(**RED).video
    assert all(LOADED in text for text in said.values()), said
    assert codes == dict.fromkeys(codes), "the host's own never end"
