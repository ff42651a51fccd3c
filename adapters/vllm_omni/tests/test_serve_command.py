"""The front's command line: what it takes, and how it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moonrelay.errors import ConfigError
from moonrelay_vllm_omni.serve.__main__ import parse
from moonrelay_vllm_omni.serve.settings import ServeConfig


@pytest.fixture
def deploy(tmp_path: Path) -> str:
    file = tmp_path / "deploy.yaml"
    file.write_text("stages: []\n")
    return str(file)


def test_a_bare_command_line_has_the_defaults_of_the_settings(deploy: str) -> None:
    config = parse(["--model", "a/b", "--deploy-config", deploy])
    assert config == ServeConfig(model="a/b", deploy_config=deploy)
    assert config.name == "a/b"
    assert config.host == "127.0.0.1", "there is no authentication"


def test_every_option_is_a_setting(deploy: str) -> None:
    options = ["--port", "0", "--host", "::1", "--served-model-name", "fox", "--max-running", "1", "--max-waiting", "2"]
    options += ["--request-timeout-s", "1.5", "--restarts", "1", "--drain-s", "3", "--keep-videos-s", "4"]
    options += ["--keep-video-bytes", "5", "--size", "832x480", "--max-pixels", "400000"]
    config = parse(["--model", "m", "--deploy-config", deploy, *options])
    assert (config.port, config.host, config.name, config.max_running, config.max_waiting) == (0, "::1", "fox", 1, 2)
    assert (config.request_timeout_s, config.restarts, config.drain_s) == (1.5, 1, 3.0)
    assert (config.keep_videos_s, config.keep_video_bytes) == (4.0, 5)
    assert (config.limits.default_size, config.limits.max_pixels) == ((832, 480), 400_000)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--size", "big"], "--size=big: must be WIDTHxHEIGHT"),
        (["--size", "63x64"], "multiples of 16"),
        (["--size", "4096x4096"], "max_pixels"),
        (["--max-running", "0"], "max_running"),
        (["--drain-s", "-1"], "drain_s"),
        (["--port", "70000"], "port"),
        (["--max-runing", "1"], "--max-runing"),
    ],
)
def test_what_is_wrong_is_named(deploy: str, options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--model", "m", "--deploy-config", deploy, *options])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_deploy_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--deploy-config", str(tmp_path / "nonesuch.yaml")])
    assert "there is no such file" in capsys.readouterr().err


def test_help_needs_no_host() -> None:
    command = [sys.executable, "-m", "moonrelay_vllm_omni.serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "--deploy-config" in done.stdout


def test_the_parts_without_http_load_nothing_heavy() -> None:
    code = (
        "import sys; from moonrelay_vllm_omni.serve import front, engine, supervisor; "
        "print(sorted({'torch', 'vllm', 'vllm_omni', 'numpy', 'PIL', 'starlette'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_settings_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="max_waiting"):
        ServeConfig(model="m", deploy_config="d", max_waiting=0)
