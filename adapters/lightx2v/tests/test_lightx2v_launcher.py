"""``python -m moonrelay_lightx2v``: the host's programs as they are, with the plugin in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightx2v_double
import pytest

from moonrelay_lightx2v import __main__ as launcher

HERE = Path(__file__).parent
#: A host that is older than its plugins: it loads none.
OLD = {"lightx2v_platform/set_ai_device.py": ""}

pytestmark = pytest.mark.processes


def launch(where: Path, *arguments: str, program: str = "moonrelay_lightx2v") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", program, *arguments],
        # The checkout's packages are installed, or are on this process's path.
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(where), str(HERE), *filter(None, sys.path)])},
        cwd=where,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def said(ran: subprocess.CompletedProcess[str]) -> Any:
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {
        **OLD,
        "lightx2v/broken.py": "import nothing_of_that_name\n",
        "lightx2v/loud.py": "raise SystemExit(7)\n",
    }
    return lightx2v_double.write_tree(tmp_path_factory.mktemp("old-host"), changes=changes)


@pytest.mark.parametrize(
    ("module", "file"), [("lightx2v.infer", "lightx2v/infer.py"), ("lightx2v.server", "lightx2v/server/__main__.py")]
)
def test_a_program_runs_with_the_plugin_and_its_own_arguments(old: Path, module: str, file: str) -> None:
    given = ["--config_json", "a b.json", "-h", "--x=1"]
    found = said(launch(old, module, *given))
    assert found == {
        "program": module.partition(".")[2],
        "argv": [str(old / file), *given],
        # Ours, and the host's own below it.
        "mixin": ["lightx2v.disagg.disagg_mixin.DisaggMixin"] * 2,
    }
    # As without us, but for the mixin.
    assert said(launch(old, *given, program=module)) == {**found, "mixin": found["mixin"][:1]}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((), "no module given"),
        (("--config_json", "a.json"), "'--config_json' is no module of LightX2V"),
        (("json.tool",), "'json.tool' is no module of LightX2V"),
        (("lightx2vx.infer",), "'lightx2vx.infer' is no module of LightX2V"),
        (("lightx2v.inver",), "no module lightx2v.inver"),
        (("lightx2v.inver.more",), "no module lightx2v.inver.more"),
        (("lightx2v.infer.more",), "no module lightx2v.infer.more"),
        (("lightx2v.utils",), "lightx2v.utils is a package without a program"),
        (("lightx2v",), "lightx2v is a package without a program"),
    ],
)
def test_a_wrong_use_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], why: str
) -> None:
    with lightx2v_double.installed(tmp_path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [])
        assert launcher.main(given) == 2
    assert capsys.readouterr() == ("", f"moonrelay_lightx2v: {why}; {launcher._USAGE}\n")


def test_a_wrong_use_ends_with_2(old: Path) -> None:
    ran = launch(old, "lightx2v.inver", "--config_json", "a.json")
    line = f"moonrelay_lightx2v: no module lightx2v.inver; {launcher._USAGE}\n"
    assert (ran.returncode, ran.stderr, ran.stdout) == (2, line, "")


def test_without_the_host_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "find_spec", missing)
        patch.setattr(sys, "argv", [])
        patch.setattr(sys, "meta_path", list(sys.meta_path))
        assert launcher.main(["lightx2v.infer"]) == 2
    assert "put a checkout of LightX2V on PYTHONPATH" in capsys.readouterr().err


def missing(name: str) -> None:
    if "." in name:
        message = "No module named 'lightx2v'"
        raise ModuleNotFoundError(message, name="lightx2v")


def test_help_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher.main(["--help"]) == 0
    assert capsys.readouterr() == (f"{launcher._USAGE}\n", "")


def test_what_the_program_raises_is_its_own(old: Path) -> None:
    broken = launch(old, "lightx2v.broken")
    assert broken.returncode == 1
    assert "No module named 'nothing_of_that_name'" in broken.stderr.splitlines()[-1]
    assert launch(old, "lightx2v.loud").returncode == 7


def test_a_host_that_cannot_be_imported_says_why_itself(tmp_path: Path) -> None:
    text = "raise RuntimeError(\"AI device for platform 'cuda' is not available\")\n"
    where = lightx2v_double.write_tree(tmp_path, changes={"lightx2v/__init__.py": text})
    ran = launch(where, "lightx2v.infer")
    assert ran.returncode == 1
    assert "AI device for platform 'cuda' is not available" in ran.stderr.splitlines()[-1]
    where = lightx2v_double.write_tree(tmp_path, changes={"lightx2v/__init__.py": "import triton_of_no_name\n"})
    ran = launch(where, "lightx2v.infer")
    assert ran.returncode == 1
    assert "triton_of_no_name" in ran.stderr.splitlines()[-1]


def test_in_a_host_with_plugins_it_is_no_different(tmp_path: Path) -> None:
    where = lightx2v_double.write_tree(tmp_path, entry_point="moonrelay_lightx2v.plugin:register")
    assert len(said(launch(where, "lightx2v.infer"))["mixin"]) == 2
    # There the entry point is enough.
    assert len(said(launch(where, program="lightx2v.infer"))["mixin"]) == 2


def test_a_plugin_that_is_not_in_place_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text("import lightx2v.models.runners.wan.wan_runner\n")
    where = lightx2v_double.write_tree(tmp_path, changes=OLD)
    script = "import early; from moonrelay_lightx2v.__main__ import main; main(['lightx2v.infer'])"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(where), str(HERE), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 1
    assert "came too late" in ran.stderr.splitlines()[-1]
    assert ran.stdout == ""


@pytest.mark.lightx2v
def test_the_real_program_starts_with_the_plugin(environment: dict[str, str]) -> None:
    """Up to its usage, which it writes after it has imported everything."""
    for module in ("lightx2v.infer", "lightx2v.server"):
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "moonrelay_lightx2v", module, "--help"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert "--model_cls" in ran.stdout
