"""``python -m moonrelay_vllm_omni.serve``: the front, its engine, and their end.

Owns the command line, signals and exit codes: 1 where the engine cannot be kept alive, 130 after Ctrl-C, 143 when asked
to terminate. Nothing is left running after any of them.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, Final

from moonrelay.clock import SystemClock, unix_s
from moonrelay.errors import MoonrelayError
from moonrelay_vllm_omni import plugin
from moonrelay_vllm_omni.serve.engine import HostEngine, end_children
from moonrelay_vllm_omni.serve.front import Front
from moonrelay_vllm_omni.serve.schema import SEEDS, Limits, Order
from moonrelay_vllm_omni.serve.settings import ServeConfig
from moonrelay_vllm_omni.serve.supervisor import State, Supervisor

#: By its own name: run as a command, the module's is another.
logger = logging.getLogger("moonrelay_vllm_omni.serve")

_CLOSE_S: Final = 60.0
_OPTIONS: Final = {
    "served_model_name": "what clients call the model (default: as --model)",
    "host": "address to listen on; there is no authentication, so leave it on this machine or put a proxy before it",
    "port": "port to listen on; 0 is any free one",
    "max_running": "requests in the engine at once; as many as stages keeps each at work",
    "max_waiting": "requests that may wait before these; more get 429",
    "request_timeout_s": "how long a request may take, waiting included; then 504",
    "restarts": "how many engines in a row may fail or die soon before the server ends",
    "drain_s": "how long requests may go on after Ctrl-C",
    "keep_videos_s": "how long a finished video can be fetched",
    "keep_video_bytes": "how much of them is kept in memory",
}


def parse(arguments: Sequence[str] | None = None) -> ServeConfig:
    """Return the settings of a command line; ends the process where it is wrong, as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m moonrelay_vllm_omni.serve", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="name or folder of the model")
    parser.add_argument("--deploy-config", required=True, help="the host's deploy YAML, such as one of examples/")
    parser.add_argument("--size", default="1024x1024", help="WIDTHxHEIGHT where a request names none")
    parser.add_argument("--max-pixels", type=int, default=Limits().max_pixels, help="of one image or frame")
    known = {field.name: field for field in fields(ServeConfig)}
    for name, text in _OPTIONS.items():
        default = known[name].default
        shown = "" if "default" in text or default == "" else f" (default: {default})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=text + shown)
    given = vars(parser.parse_args(arguments))
    size, max_pixels = given.pop("size"), given.pop("max_pixels")
    if not Path(given["deploy_config"]).is_file():
        parser.error(f"--deploy-config={given['deploy_config']}: there is no such file")
    try:
        limits = Limits(default_size=_size(size), max_pixels=max_pixels)
        return ServeConfig(**given, limits=limits)
    except (MoonrelayError, ValueError) as exc:
        parser.error(str(exc))


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        message = f"--size={text}: must be WIDTHxHEIGHT"
        raise ValueError(message)
    return int(width), int(height)


def serve(config: ServeConfig) -> int:
    """Serve until a signal or the engine's end; return the exit code. Must be called in the main thread."""
    import uvicorn

    from moonrelay_vllm_omni.serve.routes import application

    clock = SystemClock()
    width, height = config.limits.default_size
    warm_up = Order(prompt="warm-up", width=width, height=height, seed=0, num_inference_steps=2)
    signals: list[int] = []
    server: Any = None

    def changed() -> None:
        front.engine_changed()
        if supervisor.status().state is State.FAILED and server is not None:
            server.should_exit = True

    supervisor = Supervisor(
        lambda: HostEngine(config.model, config.deploy_config, warm_up),
        interrupt=end_children,
        clock=clock,
        attempts=config.restarts,
        changed=changed,
    )
    front = Front(
        config,
        supervisor,
        clock=clock,
        now=unix_s,
        draw_seed=lambda: secrets.randbelow(SEEDS),
    )

    class Server(uvicorn.Server):  # type: ignore[misc]
        """Says that the end is near before stages that got the same Ctrl-C are seen to die."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            supervisor.stop_soon()
            super().handle_exit(sig, frame)

    def ended(number: int, _frame: FrameType | None) -> None:
        # The server hands its signals on when it is done; one that comes later asks for haste.
        signals.append(number)
        supervisor.stop_soon()
        if len(signals) > 1:
            end_children()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ended)
    settings = uvicorn.Config(
        application(front),
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=max(1, round(config.drain_s)),
    )
    server = Server(settings)
    socket = settings.bind_socket()
    try:
        supervisor.start()
        logger.info("serving %s on http://%s:%d", config.name, *socket.getsockname()[:2])
        server.run(sockets=[socket])
    finally:
        if not supervisor.close(_CLOSE_S):
            logger.error("the engine did not end in %g s", _CLOSE_S)
        end_children()
    status = supervisor.status()
    if status.state is State.FAILED:
        logger.error("%s", status.reason)
        return 1
    return 128 + signals[0] if signals else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    config = parse(arguments)
    _log_to_stderr()
    available, text = plugin.VllmOmniAdapter().available()
    if not available:
        logger.error("%s", text)
        return 2
    return serve(config)


def _log_to_stderr() -> None:
    """Show what Moonrelay and the HTTP server say; the host has handlers of its own for its words."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s"))
    for name in ("moonrelay", "moonrelay_vllm_omni", "uvicorn"):
        shown = logging.getLogger(name)
        shown.addHandler(handler)
        shown.setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
