"""The command ``moonrelay``: finds the command asked for, and is the outermost frame of what it does.

Owns exit codes, the log level, and what happens on Ctrl-C. A command's module is imported only when it is called, so
that ``moonrelay --help`` needs none of them. Besides the core's commands there are those that adapters and third
parties bring, by the entry-point group ``moonrelay.commands``; a name that is taken is never theirs.

Exit codes: 0 done, 1 a failure, 2 a wrong setting or argument, 130 Ctrl-C, 143 asked to terminate.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.metadata
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Annotated, Final, NoReturn, TypeVar, cast

import typer

from moonrelay.config import from_environment, require_one_of
from moonrelay.errors import ConfigError, MoonrelayError, PluginError
from moonrelay.plugins import BUILT_IN, Registry
from moonrelay.plugins import COMMANDS as COMMANDS_GROUP

ResultT = TypeVar("ResultT")
Command = Callable[..., object]

LOG_LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyCommand:
    """A command whose module is imported when it is called.

    Attributes:
        name: What the user types.
        target: ``module:attribute`` of a function for typer, or of a `typer.Typer` with subcommands; empty for one that
            is looked up by its name in ``registry``.
        help: One line for ``moonrelay --help``.
        registry: Where it was found, if by an entry point.
    """

    name: str
    target: str = ""
    help: str
    registry: Registry | None = None


COMMANDS: Final = (
    LazyCommand(
        name="demo",
        target="moonrelay.cli.demo:demo",
        help="Turn prompts into videos through encode, denoise and decode processes; compare with the undivided run.",
    ),
    LazyCommand(
        name="doctor",
        target="moonrelay.cli.doctor:doctor",
        help="Say what is installed, loadable and reachable, and how to mend what is not.",
    ),
    LazyCommand(name="worker", target="moonrelay.cli.worker:worker", help="Run one worker of a stage."),
    LazyCommand(name="bench", target="moonrelay.cli.bench:bench", help="Measure the connector on this machine."),
    LazyCommand(
        name="cache",
        target="moonrelay.cli.cache:cache",
        help="Show what the shared caches hold in the store, or clear them: stats, ls, clear.",
    ),
    LazyCommand(
        name="adapters",
        target="moonrelay.cli.adapters:adapters",
        help="List adapters, engines, relays, queues, policies, observers and brought commands, and whether they load.",
    ),
    LazyCommand(
        name="conformance",
        target="moonrelay.cli.conformance:conformance",
        help="Run the conformance suite against an adapter, engine, relay, queue or cache; or join reports.",
    ),
)

#: Help for the commands that our own adapters bring, told without importing them.
BROUGHT_HELP: Final[Mapping[str, str]] = MappingProxyType(
    {"lightx2v-front": "One HTTP address before LightX2V's encoder, transformer and decoder servers."}
)


def all_commands(registry: Registry | None = None) -> tuple[LazyCommand, ...]:
    """Return the core's commands and those that are brought; a name of ours is never a third party's.

    Args:
        registry: Of the group ``moonrelay.commands``; the installed distributions' by default.
    """
    found = registry or Registry(COMMANDS_GROUP)
    ours = BUILT_IN[COMMANDS_GROUP]
    taken = {"version", *(command.name for command in COMMANDS)}
    brought = [
        LazyCommand(
            name=name,
            help=BROUGHT_HELP[name] if name in ours else f"From {found.provider(name)}.",
            registry=found,
        )
        for name in found.names()
        if name not in taken
    ]
    return (*COMMANDS, *brought)


@dataclass(slots=True)
class _Frame:
    """What the global options say to the frame round a command."""

    debug: bool = False


def make_app(argv: Sequence[str] = (), commands: Sequence[LazyCommand] | None = None) -> typer.Typer:
    """Build the command line, importing only the module of the command that ``argv`` names.

    Args:
        argv: Arguments without the program's name.
        commands: What there is to call; `all_commands` by default.
    """
    frame = _Frame()
    commands = all_commands() if commands is None else commands
    app = typer.Typer(
        name="moonrelay",
        help="Disaggregated diffusion serving over Mooncake.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def options(
        log_level: Annotated[
            str, typer.Option(help=f"One of {', '.join(LOG_LEVELS)}; or MOONRELAY_LOG_LEVEL.", show_default="warning")
        ] = "",
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
    ) -> None:
        frame.debug = debug
        _framed(frame, set_log_level)(log_level or from_environment("LOG_LEVEL") or "warning")

    @app.command(help="Print the version.")
    def version() -> None:
        typer.echo(installed_version())

    called = next((word for word in argv if word in {command.name for command in commands}), None)
    for command in commands:
        if command.name == called:
            _register(app, frame, command)
        else:
            app.command(command.name, help=command.help)(_stub)
    return app


def main(argv: Sequence[str] | None = None, commands: Sequence[LazyCommand] | None = None) -> NoReturn:
    """Run the command line and exit; the entry point ``moonrelay``.

    Args:
        argv: Arguments without the program's name; this process's by default.
        commands: What there is to call; `all_commands` by default.
    """
    signal.signal(signal.SIGTERM, _on_terminate)
    arguments = list(sys.argv[1:] if argv is None else argv)
    frame = _Frame(debug="--debug" in arguments)
    app = _framed(frame, make_app)(arguments, commands)
    _framed(frame, app)(args=arguments, prog_name="moonrelay")
    raise SystemExit(0)


def installed_version() -> str:
    """Return the installed distribution's version, ``"unknown (checkout)"`` where there is no metadata."""
    try:
        return importlib.metadata.version("moonrelay")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (checkout)"


def set_log_level(level: str) -> None:
    """Send log records to stderr: our packages' from ``level`` on, everybody else's from WARNING on.

    Raises:
        ConfigError: ``level`` is none of `LOG_LEVELS`.
    """
    chosen = _LogSettings(log_level=level.lower())
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    for name in ("moonrelay", "moonrelay_diffusers", "moonrelay_lightx2v"):
        logging.getLogger(name).setLevel(chosen.log_level.upper())


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogSettings:
    log_level: str

    def __post_init__(self) -> None:
        require_one_of(self, "log_level", LOG_LEVELS)


def _register(app: typer.Typer, frame: _Frame, command: LazyCommand) -> None:
    part = _import(command)
    if isinstance(part, typer.Typer):
        # A copy: the module's own stays as it is, for whoever calls it without this frame.
        group = copy.copy(part)
        group.registered_commands = [copy.copy(info) for info in part.registered_commands]
        for info in group.registered_commands:
            if info.callback is not None:
                info.callback = _framed(frame, info.callback)
        app.add_typer(group, name=command.name, help=command.help)
    else:
        app.command(command.name)(_framed(frame, cast("Command", part)))


def _import(command: LazyCommand) -> object:
    if command.registry is not None:
        return command.registry.load(command.name)
    module_name, _, attribute = command.target.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ImportError as exc:
        message = f"the command {command.name!r} cannot be loaded: {exc}; see `moonrelay doctor`"
        raise PluginError(message, command=command.name) from exc


def _framed(frame: _Frame, function: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """Wrap a command: its failures become one line on stderr and an exit code, Ctrl-C becomes 130.

    By the time this frame sees an exception, the command's context managers have ended what it started.
    """

    @functools.wraps(function)
    def framed(*args: object, **kwargs: object) -> ResultT:
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            sys.stderr.write("interrupted\n")
            raise SystemExit(130) from None
        except MoonrelayError as exc:
            if frame.debug:
                raise
            sys.stderr.write(f"error: {exc}\n")
            raise SystemExit(2 if isinstance(exc, ConfigError) else 1) from exc

    return framed


def _on_terminate(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)


def _stub() -> None:
    """Stand for a command that was not called."""


if __name__ == "__main__":
    main()
