"""``moonrelay lightx2v-front``: the command line, the address, signals and exit codes.

Loads its HTTP libraries when it runs, so that its help needs none of them.
"""

from __future__ import annotations

import logging
import secrets
import signal
import socket
from ipaddress import ip_address
from types import FrameType
from typing import Annotated, Any, Final

import typer

from moonrelay.clock import SystemClock, unix_s
from moonrelay.errors import ConfigError, PluginError
from moonrelay_lightx2v.front.settings import FrontConfig

logger = logging.getLogger(__name__)

#: For answers under way after a signal.
_DRAIN_S: Final = 2


def front(
    encoder: Annotated[list[str], typer.Option(help="URL of an encoder's server; once for each.")],
    transformer: Annotated[list[str], typer.Option(help="URL of a transformer's server; once for each.")],
    decoder: Annotated[
        list[str] | None,
        typer.Option(help="URL of a decoder's server; once for each. None: the transformer is the last stage."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. There is no authentication: keep others out by other means.")
    ] = FrontConfig.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any free one.")] = FrontConfig.port,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds that a request may take, queues and new starts included.")
    ] = FrontConfig.request_timeout_s,
    max_requests: Annotated[
        int, typer.Option(help="Requests under way at once; more get 503.")
    ] = FrontConfig.max_requests,
    attempts: Annotated[
        int, typer.Option(help="How often a request is started, where a stage's server dies or forgets it.")
    ] = FrontConfig.attempts,
    poll_interval: Annotated[
        float, typer.Option(help="Longest pause between two looks at a request's stages, in seconds.")
    ] = FrontConfig.poll_interval_s,
    restart_wait: Annotated[
        float, typer.Option(help="Seconds that a request which starts anew waits for a server to be back.")
    ] = FrontConfig.restart_wait_s,
) -> None:
    """One HTTP address before LightX2V's encoder, transformer and decoder servers.

    Serves the host's own routes for tasks: one POST goes to every stage under one task_id and one seed, and its status,
    result and end are told for all of them. SIGTERM and Ctrl-C give up what is under way, at the servers too.
    """
    config = FrontConfig(
        encoder=tuple(encoder),
        transformer=tuple(transformer),
        decoder=tuple(decoder or ()),
        host=host,
        port=port,
        request_timeout_s=request_timeout,
        max_requests=max_requests,
        attempts=attempts,
        poll_interval_s=poll_interval,
        restart_wait_s=restart_wait,
    )
    raise typer.Exit(serve(config))


def serve(config: FrontConfig) -> int:
    """Serve until a signal; return the exit code: 0 after SIGTERM, 130 after Ctrl-C. To be called in the main thread.

    Raises:
        PluginError: A library is missing.
        ConfigError: The address cannot be listened on.
    """
    try:
        import uvicorn

        from moonrelay_lightx2v.front.front import Front
        from moonrelay_lightx2v.front.routes import application
    except ModuleNotFoundError as exc:
        message = f"lightx2v-front needs the library {exc.name}: pip install 'moonrelay[lightx2v]'"
        raise PluginError(message, command="lightx2v-front") from exc
    from moonrelay_lightx2v.front.orders import SEEDS

    signals: list[int] = []
    server: Any = None

    def make() -> Front:
        return Front(
            config,
            clock=SystemClock(),
            now=unix_s,
            draw_id=lambda: secrets.token_hex(10).upper(),
            draw_seed=lambda: secrets.randbelow(SEEDS),
        )

    def ended(number: int, _frame: FrameType | None) -> None:
        signals.append(number)  # the server hands its own on when it is done
        if server is not None:
            server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ended)
    listening = _listen(config)
    with listening:
        server = uvicorn.Server(
            uvicorn.Config(
                application(make),
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_DRAIN_S,
                server_header=False,
            )
        )
        address, bound = listening.getsockname()[:2]
        url = f"http://{f'[{address}]' if ':' in address else address}:{bound}"
        typer.echo(f"serving {' + '.join(name for name, _ in config.stages)} on {url}")
        if not _is_this_machine(address):
            logger.warning("%s can be reached by others, and there is no authentication", url)
        if not signals:
            server.run(sockets=[listening])
    return 130 if signals and signals[0] == signal.SIGINT else 0 if signals else 1


def _listen(config: FrontConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=1024)
    except OSError as exc:
        message = (
            f"host={config.host!r}, port={config.port}: cannot be listened on: {exc}; use another --host or --port"
        )
        raise ConfigError(message, field="port") from exc


def _is_this_machine(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False
