"""The hooks: which there are, that none is missed, and that another backend is left alone. Without the host."""

from __future__ import annotations

import argparse
import importlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moonrelay.errors import ConfigError, PluginError
from moonrelay.plugins import ADAPTERS, Registry
from moonrelay_sglang import flags, plugin, worker_hooks


class FakeRegistry:
    """The host's registry of hooks."""

    def __init__(self) -> None:
        self.registered: list[tuple[str, Callable[..., Any], str]] = []
        self._patched: set[str] = set()

    def register(self, target: str, hook: Callable[..., Any], kind: str) -> None:
        self.registered.append((target, hook, kind))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    """A host of a supported version, of which there is only the registry."""
    found = FakeRegistry()
    name = "sglang.multimodal_gen.runtime.platforms.plugins"
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    module: Any = sys.modules[name]
    module.HookRegistry = found
    module.HookType = SimpleNamespace(AROUND="around", AFTER="after")
    monkeypatch.setattr(plugin, "host_is_there", lambda: True)
    monkeypatch.setattr(plugin, "host_version", lambda: "0.5.23")
    return found


def test_without_the_host_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "host_is_there", lambda: False)
    plugin.register()
    assert plugin.SglangAdapter().available()[0] is False


def test_every_hook_is_registered_and_there(registry: FakeRegistry) -> None:
    plugin.register()
    assert [target for target, _, _ in registry.registered] == [hook.target for hook in plugin.HOOKS]
    assert len({hook.target for hook in plugin.HOOKS}) == len(plugin.HOOKS)
    for hook in plugin.HOOKS:
        module, _, name = hook.ours.partition(":")
        assert callable(getattr(importlib.import_module(f"moonrelay_sglang.{module}"), name))


def test_a_hook_is_imported_when_it_is_called(registry: FakeRegistry) -> None:
    plugin.register()
    stop = next(hook for target, hook, _ in registry.registered if target.endswith(".stop"))
    called: list[object] = []
    server = SimpleNamespace()
    stop(called.append, server)
    assert called == [server]


@pytest.mark.parametrize("found", ["0.5.22", "0.5.24", "0.6.0", "1.5.23", "main", None])
def test_another_version_is_refused_and_said(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: str | None
) -> None:
    monkeypatch.setattr(plugin, "host_version", lambda: found)
    with caplog.at_level(logging.ERROR):
        plugin.register()
    assert registry.registered == []
    assert plugin.SUPPORTED in caplog.text
    assert plugin.SglangAdapter().available() == (False, plugin.version_refusal(found))


def test_supported_versions() -> None:
    assert plugin.version_refusal("0.5.23") is None
    assert plugin.version_refusal("0.5.23.post1") is None


def test_a_hook_that_was_not_applied_is_named(registry: FakeRegistry) -> None:
    registry._patched = {hook.target for hook in plugin.HOOKS}
    plugin.verify()
    registry._patched.remove(plugin.HOOKS[3].target)
    with pytest.raises(PluginError, match=plugin.HOOKS[3].target) as caught:
        plugin.verify()
    assert plugin.SUPPORTED in str(caught.value)
    assert "0.5.23" in str(caught.value)


def parser_of_the_host(_cls: type, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--disagg-transfer-backend", choices=["auto", "mock", "mooncake"], default="auto")
    parser.add_argument("--disagg-dispatch-policy", choices=["round_robin", "max_free_slots"])


def test_the_flags_take_our_values(registry: FakeRegistry) -> None:
    registry._patched = {hook.target for hook in plugin.HOOKS}
    parser = argparse.ArgumentParser()
    flags.around_add_cli_args(parser_of_the_host, object, parser)
    for policy in ("round_robin", "credits", "priority", "affinity"):
        found = parser.parse_args(["--disagg-transfer-backend", "moonrelay", "--disagg-dispatch-policy", policy])
        assert (found.disagg_transfer_backend, found.disagg_dispatch_policy) == ("moonrelay", policy)
    assert parser.parse_args([]).disagg_transfer_backend == "auto"


def test_with_a_hook_missing_the_flags_refuse_us(
    registry: FakeRegistry, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    with caplog.at_level(logging.ERROR):
        flags.around_add_cli_args(parser_of_the_host, object, parser)
    assert "is not in place" in caplog.text
    with pytest.raises(SystemExit):
        parser.parse_args(["--disagg-transfer-backend", "moonrelay"])
    assert "moonrelay" in capsys.readouterr().err
    assert parser.parse_args(["--disagg-transfer-backend", "mooncake"]).disagg_transfer_backend == "mooncake"


def stock(**more: Any) -> Any:
    """The host's scheduler with its own backend."""
    return SimpleNamespace(server_args=SimpleNamespace(disagg_transfer_backend="auto", disagg_role="denoiser"), **more)


@pytest.mark.parametrize(
    ("hook", "given"),
    [
        (worker_hooks.around_init_state, (stock().server_args, 0)),
        (worker_hooks.around_init_transfer, ()),
        (worker_hooks.around_event_loop, ()),
        (worker_hooks.around_cleanup, ()),
        (worker_hooks.around_forward_and_stage, (object(), "r")),
        (worker_hooks.around_decoder_compute, (object(), "r")),
        (worker_hooks.around_init_request_scheduler, (object(),)),
        (worker_hooks.around_transfer_message, ([b"__transfer__", b"{}"],)),
    ],
)
def test_another_backend_is_left_alone(hook: Callable[..., Any], given: tuple[Any, ...]) -> None:
    called: list[tuple[Any, ...]] = []

    def original(*args: Any) -> None:
        called.append(args)

    scheduler = stock(gpu_id=0)
    hook(original, scheduler, *given)
    assert called == [(scheduler, *given)]
    assert vars(scheduler).keys() == {"server_args", "gpu_id"}


def test_another_backends_encoder_is_left_alone() -> None:
    called: list[Any] = []
    scheduler = stock()
    worker_hooks.around_encoder_step(
        lambda *args, **kwargs: called.append((args, kwargs)), scheduler, print, frames=[b"r", b"work"]
    )
    assert called == [((scheduler, print), {"frames": [b"r", b"work"]})]


@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks_go_the_hosts_way(rank: int) -> None:
    called: list[Any] = []
    scheduler = SimpleNamespace(server_args=SimpleNamespace(disagg_transfer_backend="moonrelay"), gpu_id=rank)
    worker_hooks.around_init_transfer(called.append, scheduler)
    assert called == [scheduler]


def test_a_role_without_a_hook_or_with_wrong_settings_does_not_start(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = SimpleNamespace(disagg_transfer_backend="moonrelay", disagg_role="denoiser")
    called: list[Any] = []

    def original(*args: Any) -> None:
        called.append(args)

    with pytest.raises(PluginError, match="is not in place"):
        worker_hooks.around_init_state(original, object(), chosen, 0)
    registry._patched = {hook.target for hook in plugin.HOOKS}
    monkeypatch.setenv("MOONRELAY_SGLANG", '{"enigne": "shm"}')
    with pytest.raises(ConfigError, match="did you mean 'engine'"):
        worker_hooks.around_init_state(original, object(), chosen, 0)
    assert called == []
    monkeypatch.delenv("MOONRELAY_SGLANG")
    worker_hooks.around_init_state(original, "scheduler", chosen, 0)
    assert called == [("scheduler", chosen, 0)]


TERMINATED = """
import os, signal
from moonrelay_sglang import worker_hooks
with worker_hooks._terminable():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        print("cleaned")
"""


class FakeWorker:
    def __init__(self) -> None:
        self.closed = False
        self.said: list[str] = []

    def stop(self) -> None:
        self.said.append("stop")

    def close(self) -> None:
        self.closed = True
        self.said.append("close")


class Looping:
    """The host's scheduler, with its cleanup hooked as the host would."""

    def __init__(self) -> None:
        self._moonrelay_worker = FakeWorker()
        self.said = self._moonrelay_worker.said

    def _cleanup_disagg(self) -> None:
        worker_hooks.around_cleanup(lambda _self: self.said.append("host"), self)


@pytest.mark.parametrize("error", [RuntimeError("three errors in a row"), KeyboardInterrupt(), None])
def test_however_the_loop_ends_it_is_cleaned_up_once(error: BaseException | None) -> None:
    scheduler = Looping()

    def loop(_scheduler: Any) -> None:
        if error is not None:
            raise error
        scheduler._cleanup_disagg()

    if error is None:
        worker_hooks.around_event_loop(loop, scheduler)
    else:
        with pytest.raises(type(error)):
            worker_hooks.around_event_loop(loop, scheduler)
    assert scheduler.said == ["stop", "host", "close"]


@pytest.fixture
def died(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals by which this process would have ended."""
    found: list[int] = []
    monkeypatch.setattr(worker_hooks, "_die_by", found.append)
    return found


def test_a_sigterm_cleans_up_and_ends(died: list[int]) -> None:
    scheduler = Looping()
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as caught:
            worker_hooks.around_event_loop(lambda _self: os.kill(os.getpid(), signal.SIGTERM), scheduler)
        assert caught.value.code == 143
        assert died == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert scheduler.said == ["stop", "host", "close"]


@pytest.mark.processes
def test_a_launchers_sigterm_ends_its_role_first(died: list[int]) -> None:
    role = multiprocessing.get_context("spawn").Process(target=signal.pause, daemon=True)
    role.start()
    chosen = SimpleNamespace(disagg_transfer_backend="moonrelay")
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit):
            worker_hooks.around_launch_role(lambda _args: os.kill(os.getpid(), signal.SIGTERM), chosen)
    finally:
        signal.signal(signal.SIGTERM, before)
    role.join(20)
    assert role.exitcode == -signal.SIGTERM
    assert died == [signal.SIGTERM]


@pytest.mark.processes
def test_a_second_sigterm_does_not_break_the_cleaning_up() -> None:
    run = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout, run.returncode) == ("cleaned\n", -signal.SIGTERM), run.stderr


def test_a_handler_of_somebody_elses_stays() -> None:
    scheduler = Looping()
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        worker_hooks.around_event_loop(lambda _self: os.kill(os.getpid(), signal.SIGTERM), scheduler)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_moonrelay_knows_the_adapter() -> None:
    assert Registry(ADAPTERS).load("sglang") is plugin.SglangAdapter
