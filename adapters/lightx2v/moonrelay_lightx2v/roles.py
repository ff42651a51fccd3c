"""Roles without models: runners over our mixin, called as the host's server calls its own.

Owns what the conformance suite and the bench need of a runner: a config, a request, and the mixin's methods within it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from moonrelay_lightx2v import plugin
from moonrelay_lightx2v.mixin import MARK, dispatching, end_of


class BareMixin:
    """What our mixin is a subclass of where the host is not there: a class with the host's names."""

    def init_disagg(self, config: Any) -> None:
        raise NotImplementedError

    send_encoder_outputs = receive_encoder_outputs = init_disagg
    send_transformer_outputs = receive_transformer_outputs = release_disagg = init_disagg


class _Base:
    """What the mixin's methods need of the host's own base of runners."""

    config: dict[str, Any]

    def set_config(self, config_modify: Mapping[str, Any]) -> None:
        self.config.update(config_modify)


def native_mixin() -> type:
    """Return the host's own mixin; without the host, a class with its names. Imports the host.

    Raises:
        Exception: It is there and cannot be imported.
    """
    if plugin.host_folder() is None:
        return BareMixin
    found: type = getattr(importlib.import_module(plugin.MIXIN_MODULE), plugin.MIXIN)
    return found.__mro__[1] if getattr(found, MARK, False) else found


def runner_class() -> Callable[[str, Mapping[str, Any]], Any]:
    """Return the class of runners: a role and its ``disagg_config``."""
    # Payloads are in host memory, whatever the host's device is: there they are compared.
    mixin: Any = dispatching(native_mixin(), device=lambda: "cpu")

    class Runner(mixin, _Base):  # type: ignore[misc]
        """A role: what it does with a request is given to it."""

        def __init__(self, role: str, section: Mapping[str, Any]) -> None:
            self.config = {"disagg_mode": role, "disagg_config": dict(section)}
            self.work: Callable[[Any], None] | None = None
            self.init_disagg(self.config)

        def run_pipeline(self, input_info: object) -> None:
            assert self.work is not None
            self.work(self)

    return Runner


def serve(runner: Any, task_id: str, work: Callable[[Any], None]) -> None:
    """Have a runner do a request, as the worker of the host's server does.

    Args:
        runner: Of `runner_class`.
        task_id: The request's id; what it asks for differs by it, too.
        work: What the role does with it.
    """
    runner.work = work
    runner.set_config({"task_id": task_id, "prompt": task_id, "seed": 1})
    runner.run_pipeline(None)


def link_of(runner: Any) -> Any:
    """Return the link of a runner that is ours."""
    end = end_of(runner)
    assert end is not None
    return end.link
