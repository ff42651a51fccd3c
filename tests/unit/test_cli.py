"""The command line: lazy commands, exit codes, one clear line for a failure."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from moonrelay.cli import main as cli
from moonrelay.cli.main import BROUGHT_HELP, COMMANDS, LazyCommand, all_commands, main, make_app
from moonrelay.cli.probes import Machine, PluginState
from moonrelay.errors import ConfigError
from moonrelay.plugins import BUILT_IN, Registry
from moonrelay.plugins import COMMANDS as COMMANDS_GROUP

SOURCE = '''
import typer
from moonrelay.errors import ConfigError, PeerLost

def fine(count: int = 1, name: str = "x") -> None:
    """Do it."""
    typer.echo(f"did {count} {name}")

def wrong() -> None:
    raise ConfigError("window=0 must be above 0", field="window")

def lost() -> None:
    raise PeerLost("nobody answers", peer="127.0.0.1:1")

def bug() -> None:
    raise RuntimeError("a bug")

def interrupted() -> None:
    raise KeyboardInterrupt

def three() -> None:
    raise typer.Exit(3)

group = typer.Typer()

@group.command()
def one() -> None:
    typer.echo("one")

@group.command()
def two() -> None:
    raise PeerLost("in a group")
'''
NAMES = ("fine", "wrong", "lost", "bug", "interrupted", "three", "group")
PLANTED = tuple(LazyCommand(name=name, target=f"mr_planted:{name}", help=f"Help of {name}.") for name in NAMES)


def point(name: str, value: str, distribution: str = "acme-tools") -> importlib.metadata.EntryPoint:
    """An entry point of a distribution that is not installed."""
    made = importlib.metadata.EntryPoint(name, value, COMMANDS_GROUP)
    vars(made)["dist"] = SimpleNamespace(name=distribution)
    return made


def brought(*points: importlib.metadata.EntryPoint) -> Registry:
    return Registry(COMMANDS_GROUP, entry_points=lambda _group: points)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mr_planted.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mr_planted", raising=False)
    # `main` is the process's outermost frame: what it sets for the process is put back here.
    monkeypatch.setattr(cli, "set_log_level", lambda _level: None)
    before = signal.getsignal(signal.SIGTERM)
    yield  # type: ignore[misc]
    signal.signal(signal.SIGTERM, before)
    sys.modules.pop("mr_planted", None)


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(argv, PLANTED)
    code = caught.value.code
    return 0 if code is None else int(code)


@pytest.mark.usefixtures("planted")
def test_help_lists_the_commands_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(f"Help of {name}." in out for name in NAMES)
    assert "mr_planted" not in sys.modules


@pytest.mark.usefixtures("planted")
def test_a_command_gets_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fine", "--count", "3", "--name", "group") == 0
    assert capsys.readouterr().out == "did 3 group\n"


@pytest.mark.usefixtures("planted")
def test_a_commands_own_help_knows_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fine", "--help") == 0
    out = capsys.readouterr().out
    assert "Do it." in out
    assert "--count" in out


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (["wrong"], 2, "error: window=0 must be above 0 (field='window')\n"),
        (["lost"], 1, "error: nobody answers (peer='127.0.0.1:1')\n"),
        (["group", "two"], 1, "error: in a group\n"),
        (["interrupted"], 130, "interrupted\n"),
        (["three"], 3, ""),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], argv: list[str], code: int, line: str
) -> None:
    assert run(*argv) == code
    captured = capsys.readouterr()
    assert captured.err == line
    assert captured.out == ""


@pytest.mark.usefixtures("planted")
def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ConfigError):
        main(["--debug", "wrong"], PLANTED)


@pytest.mark.usefixtures("planted")
def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        main(["bug"], PLANTED)


@pytest.mark.usefixtures("planted")
def test_wrong_usage_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fine", "--count", "many") == 2
    assert run("no-such-command") == 2
    assert run("fine", "--no-such-option") == 2
    assert "no-such-option" in capsys.readouterr().err


@pytest.mark.usefixtures("planted")
def test_a_group_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("group", "one") == 0
    assert capsys.readouterr().out == "one\n"


@pytest.mark.usefixtures("planted")
def test_a_command_that_cannot_be_imported_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    missing = (LazyCommand(name="missing", target="mr_planted_not:x", help="Not there."),)
    with pytest.raises(SystemExit) as caught:
        main(["missing"], missing)
    assert caught.value.code == 1
    assert "No module named 'mr_planted_not'" in capsys.readouterr().err


def test_sigterm_unwinds_like_an_exit() -> None:
    with pytest.raises(SystemExit) as caught:
        cli._on_terminate(signal.SIGTERM, None)
    assert caught.value.code == 143


def test_an_unknown_log_level_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(make_app(["version"]), ["--log-level", "loud", "version"])
    assert result.exit_code == 2
    assert "log_level='loud'" in result.output


def test_the_log_level_is_that_of_our_loggers() -> None:
    ours, others = logging.getLogger("moonrelay"), logging.getLogger("somebody.else")
    before = (ours.level, logging.getLogger("moonrelay_diffusers").level)
    try:
        cli.set_log_level("DEBUG")
        assert ours.isEnabledFor(logging.DEBUG)
        assert not others.isEnabledFor(logging.INFO)
    finally:
        ours.setLevel(before[0])
        logging.getLogger("moonrelay_diffusers").setLevel(before[1])


def test_version() -> None:
    result = CliRunner().invoke(make_app(["version"]), ["version"])
    assert result.exit_code == 0
    assert result.output.strip() == cli.installed_version()


def test_the_commands_of_the_issue_are_there() -> None:
    assert {command.name for command in COMMANDS} >= {"demo", "doctor", "worker", "bench", "adapters"}


@pytest.mark.parametrize("command", all_commands(brought()), ids=lambda command: command.name)
def test_every_command_has_help(command: LazyCommand) -> None:
    result = CliRunner().invoke(make_app([command.name]), [command.name, "--help"])
    assert result.exit_code == 0, result.output


def test_a_command_that_an_adapter_brings_is_listed_and_not_imported(capsys: pytest.CaptureFixture[str]) -> None:
    assert BROUGHT_HELP.keys() == BUILT_IN[COMMANDS_GROUP].keys()
    commands = all_commands(brought(point("acme", "mr_nowhere:acme")))
    before = set(sys.modules)
    with pytest.raises(SystemExit):
        main(["--help"], commands)
    out = capsys.readouterr().out
    for name, text in BROUGHT_HELP.items():
        assert name in out
        assert text[:40] in out
    assert "acme" in out
    assert "From acme-tools." in out
    assert not {name for name in set(sys.modules) - before if name.startswith("moonrelay_")}


@pytest.mark.usefixtures("planted")
def test_a_third_partys_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    commands = all_commands(brought(point("acme", "mr_planted:fine")))
    with pytest.raises(SystemExit) as caught:
        main(["acme", "--count", "2"], commands)
    assert caught.value.code in (0, None)
    assert capsys.readouterr().out == "did 2 x\n"


def test_a_third_party_takes_no_name_of_ours() -> None:
    names = [*(command.name for command in COMMANDS), "version", *BUILT_IN[COMMANDS_GROUP]]
    commands = all_commands(brought(*(point(name, "mr_evil:take") for name in names)))
    assert [command.name for command in commands] == [*(c.name for c in COMMANDS), *BUILT_IN[COMMANDS_GROUP]]
    registry = commands[-1].registry
    assert registry is not None
    assert registry.describe_one("lightx2v-front").target == BUILT_IN[COMMANDS_GROUP]["lightx2v-front"]


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(
    ("points", "told"),
    [
        ([point("acme", "mr_nowhere:acme")], "command 'acme' (mr_nowhere:acme of acme-tools) cannot"),
        (
            [point("acme", "mr_planted:fine"), point("acme", "mr_planted:bug", "other-tools")],
            "command 'acme' is claimed by acme-tools and other-tools; uninstall one of them",
        ),
    ],
)
def test_a_broken_command_hurts_only_its_own_name(
    points: list[importlib.metadata.EntryPoint], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = all_commands(brought(*points))
    with pytest.raises(SystemExit) as caught:
        main(["acme"], commands)
    assert caught.value.code == 1
    assert told in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["version"], commands)
    assert not caught.value.code


STATES = [
    PluginState(
        group="moonrelay.adapters",
        name="mine",
        target="mine:Adapter",
        distribution="third-party",
        version="1.2",
        built_in=False,
        error=None,
        shadowed=(),
    ),
    PluginState(
        group="moonrelay.queues",
        name="bad",
        target="bad:Queue",
        distribution="other",
        version=None,
        built_in=False,
        error="queue 'bad' cannot be loaded: ImportError: libx.so.1",
        shadowed=(),
    ),
]


def test_adapters_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "plugins", lambda _self: STATES)
    result = CliRunner().invoke(make_app(["adapters"]), ["adapters", "--json"])
    assert result.exit_code == 0
    plugins = json.loads(result.output)["plugins"]
    assert [(plugin["name"], plugin["ok"]) for plugin in plugins] == [("mine", True), ("bad", False)]
    assert "libx.so.1" in plugins[1]["error"]


def test_adapters_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "plugins", lambda _self: STATES)
    result = CliRunner().invoke(make_app(["adapters"]), ["adapters"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "third-party 1.2" in result.output
    assert "libx.so.1" in result.output


def test_an_adapter_without_its_host_is_not_called_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    from moonrelay.cli.adapters import why_unavailable
    from moonrelay.cli.probes import PluginState

    state = PluginState(
        group="moonrelay.adapters",
        name="diffusers",
        target="",
        distribution="moonrelay",
        version=None,
        built_in=True,
        error=None,
        shadowed=(),
    )
    assert why_unavailable(state) is None
    monkeypatch.setattr("moonrelay_diffusers.plugin.find_spec", lambda name: None if name == "diffusers" else object())
    assert "pip install 'moonrelay[diffusers]'" in str(why_unavailable(state))
