"""The place of the host's mixin: taken as it is imported, or refused where a config asks for us; with the double."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import logging
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import lightx2v_double
import pytest
from lightx2v_double import Worker, installed, native_mixin, settings_of

from moonrelay.errors import PluginError
from moonrelay.plugins import ADAPTERS, Registry
from moonrelay_lightx2v import config as settings
from moonrelay_lightx2v import mixin, plugin

MIXIN_FILE = "lightx2v/disagg/disagg_mixin.py"
SERVICE_FILE = "lightx2v/disagg/services/base.py"
RUNNER_FILE = "lightx2v/models/runners/base_runner.py"
WAN = "lightx2v.models.runners.wan.wan_runner"
MOVED_BASE = "import lightx2v_double\nDefaultRunner = lightx2v_double.default_runner(lightx2v_double.base_runner())"

Host = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """`lightx2v_double.installed` in a folder of this test's, with our plugin unless it says others."""

    def start(**given: Any) -> AbstractContextManager[None]:
        return installed(tmp_path / "host", **{"plugins": (plugin.register,), **given})

    return start


def there(name: str = plugin.MIXIN_MODULE) -> Any:
    return importlib.import_module(name)


def runner(role: str | None = "encoder", connector: str | None = "moonrelay", **more: Any) -> Any:
    """A runner of the imported host, before its modules are there."""
    disagg = {} if connector is None else {"connector": connector}
    return there(WAN).WanRunner(settings_of(role, disagg=disagg, **more))


def planted() -> list[Any]:
    """Return the finders of ours that wait for more than the host's services, which few processes have."""
    ours = [finder for finder in sys.meta_path if isinstance(finder, plugin.PostImport)]
    return [finder for finder in ours if finder.waiting != {plugin.SERVICE_MODULE}]


# -- taking its place -------------------------------------------------------------------------------------------------


def test_the_hosts_runners_are_made_of_ours(host: Host) -> None:
    with host():
        there("lightx2v")
        found = there().DisaggMixin
        assert plugin.is_active()
        assert plugin.why_not_active() is None
        assert there(WAN).WanRunner.__mro__[1] is found
        native = found.__mro__[1]
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(found, name) == getattr(native, name)
        assert found.__name__ == "DisaggMixin"
        assert not getattr(native, mixin.MARK, False)
        # The watch over runners lets ours through.
        for role in ("encoder", "transformer", "decode"):
            assert runner(role).config["disagg_mode"] == role


def test_the_mark_is_the_mixins() -> None:
    assert plugin._MARK == mixin.MARK
    assert plugin._CONNECTOR == settings.CONNECTOR


def test_registering_imports_nothing_and_gives_nothing(host: Host) -> None:
    with host(plugins=()):
        assert plugin.register() is None  # type: ignore[func-returns-value]
        assert not any(name.startswith("lightx2v.") for name in sys.modules)


def test_importing_the_plugin_loads_only_the_standard_library() -> None:
    script = (
        "import sys; import moonrelay_lightx2v.plugin as plugin; plugin.register();"
        "print([name for name in sys.modules if name.partition('.')[0] in ('moonrelay', 'msgspec', 'zmq', 'torch')])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout == "[]\n"


def test_the_finder_is_there_once_and_goes_when_it_is_done(host: Host) -> None:
    with host(plugins=(plugin.register, plugin.register)):
        plugin.register()
        plugin.enable()
        assert len(planted()) == 1
        assert sys.meta_path[0] is planted()[0]
        before = list(sys.meta_path)
        there("lightx2v")
        assert planted() == []
        assert sys.meta_path == before
        there(plugin.SERVICE_MODULE)
        assert sys.meta_path == before[1:]
        found = there().DisaggMixin
        plugin.register()
        plugin.enable()
        assert planted() == []
        assert there().DisaggMixin is found


def test_the_module_is_as_its_own_loader_leaves_it(host: Host) -> None:
    with host():
        there("lightx2v")
        for name in (plugin.MIXIN_MODULE, plugin.RUNNER_MODULE):
            spec = there(name).__spec__
            assert type(spec.loader) is importlib.machinery.SourceFileLoader
            assert there(name).__loader__ is spec.loader
            assert spec.origin == there(name).__file__
            assert "DisaggMixin" in inspect.getsource(there())


def test_looking_for_the_module_does_not_use_the_hook_up(host: Host) -> None:
    with host():
        there("lightx2v_platform.set_ai_device")
        spec = plugin.PostImport({"json.tool": print}).find_spec("json.tool", json.__path__)
        assert spec is not None
        # As runpy and pkgutil do, which take the code and run it themselves.
        assert spec.loader is not None
        assert spec.loader.get_code("json.tool") is not None  # type: ignore[attr-defined]
        there("lightx2v")
        assert plugin.is_active()


def test_a_failed_import_can_be_tried_again(host: Host) -> None:
    text = lightx2v_double.TREE[MIXIN_FILE]
    with host(changes={MIXIN_FILE: f"import sys\nif not hasattr(sys, 'again'): raise ImportError('pyverbs')\n{text}"}):
        with pytest.raises(ImportError, match="pyverbs"):
            there("lightx2v")
        assert len(planted()) == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "again", True, raising=False)
            there("lightx2v")
        assert plugin.is_active()
        assert planted() == []


def test_it_works_in_any_thread(host: Host) -> None:
    with host():
        failed: list[BaseException] = []

        def load() -> None:
            try:
                there("lightx2v")
                assert plugin.is_active()
            except BaseException as exc:
                failed.append(exc)

        threads = [threading.Thread(target=load) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failed == []
        assert planted() == []


class Taking(MetaPathFinder):
    """A hook of somebody else's on the same module: takes its name out, and asks all finders."""

    def __init__(self) -> None:
        self.todo = {plugin.MIXIN_MODULE}
        self.seen: list[bool] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.todo:
            return None
        self.todo.discard(name)
        spec: Any = importlib.util.find_spec(name)
        own = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            own(module)
            self.seen.append(hasattr(module, "DisaggMixin"))

        spec.loader.exec_module = exec_module
        return spec


@pytest.mark.parametrize("first", [True, False])
def test_another_hook_on_the_same_module_works_too(host: Host, first: bool) -> None:
    other = Taking()

    def plant() -> None:
        sys.meta_path.insert(0, other)

    with host(plugins=(plugin.register, plant) if first else (plant, plugin.register)):
        there("lightx2v")
        assert plugin.is_active()
        assert other.seen == [True]
        assert other in sys.meta_path


def test_two_finders_of_ours_both_do_their_work(host: Host) -> None:
    """As two threads plant them that register at once, or two plugins that each brought a copy of this."""
    called: list[str] = []

    def plant() -> None:
        for name in ("one", "two"):
            hooks = {plugin.MIXIN_MODULE: lambda module, name=name: called.append(name)}
            sys.meta_path.insert(0, plugin.PostImport(hooks))

    with host(plugins=(plant,)):
        there("lightx2v")
        assert sorted(called) == ["one", "two"]
        assert planted() == []
        assert type(there().__spec__.loader) is importlib.machinery.SourceFileLoader


def test_a_finder_of_the_old_kind_is_passed_over(host: Host) -> None:
    with host():
        there("lightx2v_platform.set_ai_device")
        finder = plugin.PostImport({"json.tool": print})
        sys.meta_path[:0] = [finder, types.SimpleNamespace()]  # type: ignore[list-item]
        spec = finder.find_spec("json.tool", json.__path__)
        assert spec is not None
        assert spec.name == "json.tool"


def test_a_module_that_nobody_finds_is_missing(host: Host) -> None:
    with host(plugins=()):
        plugin.register()
        finder = planted()[0]
        assert finder.find_spec(plugin.MIXIN_MODULE, []) is None
        assert finder.find_spec("lightx2v.utils", []) is None


@pytest.mark.parametrize("connector", [None, "native"])
def test_another_connector_runs_the_hosts_own_code(host: Host, connector: str | None) -> None:
    with host():
        there("lightx2v")
        wire = lightx2v_double.Wire()
        sent = runner("encoder", connector)
        with sent.config.temporarily_unlocked():
            sent.config["disagg_config"]["wire"] = wire
        sent.init_modules()
        assert Worker(sent).process("1", prompt="a cat")["status"] == "success"
        assert sent.calls == ["init_disagg", "send_encoder_outputs"]
        assert wire.receive(1, 0)["image_encoder_output"] is None


# -- a host that we do not know ---------------------------------------------------------------------------------------


def altered(change: str) -> dict[str, str]:
    return {MIXIN_FILE: f"{lightx2v_double.TREE[MIXIN_FILE]}\n{change}\n"}


UNKNOWN = [
    pytest.param("del DisaggMixin.release_disagg", "release_disagg is missing", id="missing"),
    pytest.param(
        "DisaggMixin.send_encoder_outputs = lambda self, inputs, latent_shape, room=None: None",
        "send_encoder_outputs(inputs, latent_shape, room=None) instead of send_encoder_outputs(inputs, latent_shape)",
        id="more",
    ),
    pytest.param("DisaggMixin.send_transformer_outputs = lambda self, *, latents: None", "(latents)", id="keyword"),
    pytest.param("DisaggMixin.receive_encoder_outputs = lambda self, *rooms: None", "(*rooms)", id="any"),
    pytest.param("DisaggMixin.init_disagg = 3", "init_disagg is missing", id="no-init"),
]


@pytest.mark.parametrize(("change", "said"), UNKNOWN)
def test_a_mixin_that_is_not_known_is_left_and_a_config_that_names_us_is_refused(
    host: Host, caplog: pytest.LogCaptureFixture, change: str, said: str
) -> None:
    with host(changes=altered(change)), caplog.at_level(logging.ERROR):
        there("lightx2v")
        assert not plugin.is_active()
        assert said in caplog.text
        with pytest.raises(PluginError, match="does not know this LightX2V") as caught:
            runner()
        assert said in str(caught.value)
        assert plugin.SUPPORTED in str(caught.value)
        with pytest.raises(PluginError, match="does not know"):
            plugin.enable()
        if "init_disagg" not in change:
            native = runner(connector=None)
            native.init_disagg(native.config)
            assert native.calls == ["init_disagg"]


def test_the_guard_holds_without_the_base_of_runners(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    moved = {RUNNER_FILE: "", "lightx2v/models/runners/default_runner.py": MOVED_BASE}
    with host(changes={**altered("del DisaggMixin.release_disagg"), **moved}), caplog.at_level(logging.ERROR):
        there("lightx2v")
        there(plugin.RUNNER_MODULE)
        assert "no BaseRunner" in caplog.text
        chosen = runner()
        with pytest.raises(PluginError, match="release_disagg is missing"):
            chosen.init_modules()
        assert not hasattr(chosen, "calls")
        other = runner(connector=None)
        other.init_disagg(config=other.config)
        assert other.calls == ["init_disagg"]
        with pytest.raises(PluginError, match="release_disagg is missing"):
            other.init_disagg(config=chosen.config)


def test_a_module_without_the_class_is_said(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    changes = {MIXIN_FILE: "Renamed = object", "lightx2v/__init__.py": "import lightx2v_platform.set_ai_device"}
    with host(changes=changes), caplog.at_level(logging.ERROR):
        there()
        assert "there is no DisaggMixin" in caplog.text
        with pytest.raises(PluginError, match="there is no DisaggMixin"):
            plugin.enable()


def test_a_mixin_that_has_moved_is_found_out_by_the_runner(host: Host) -> None:
    """The module we wait for is never imported."""
    moved = lightx2v_double.TREE[MIXIN_FILE]
    runner_file = "lightx2v/models/runners/wan/wan_runner.py"
    changes = {
        "lightx2v/models/runners/mixins.py": moved,
        runner_file: lightx2v_double.TREE[runner_file].replace(plugin.MIXIN_MODULE, "lightx2v.models.runners.mixins"),
        "lightx2v/__init__.py": f"import lightx2v_platform.set_ai_device\nimport {WAN}\n",
    }
    with host(changes=changes):
        there("lightx2v")
        assert plugin.MIXIN_MODULE not in sys.modules
        with pytest.raises(PluginError, match=r"model_cls='wan2\.1' cannot be disaggregated.*WanRunner"):
            runner()
        assert runner(connector=None).config["disagg_mode"] == "encoder"
        # One process: nothing is to be handed over.
        alone = settings_of(None, disagg_config={"connector": "moonrelay"})
        assert there(WAN).WanRunner(alone).config.get("disagg_mode") is None


def test_a_runner_without_the_mixin_is_refused(host: Host) -> None:
    with host():
        there("lightx2v")
        base = there(plugin.RUNNER_MODULE).BaseRunner
        alone = type("AloneRunner", (base,), {})
        with pytest.raises(PluginError, match="AloneRunner"):
            alone(settings_of("transformer", disagg={"connector": "moonrelay"}, model_cls="alone"))
        with pytest.raises(PluginError, match="AloneRunner"):
            alone(config=settings_of("transformer", disagg={"connector": "moonrelay"}))
        assert alone(settings_of("transformer")).finished == 0
        init = base.__init__
        plugin.register()
        assert base.__init__ is init


# -- the host's other way to disaggregate ------------------------------------------------------------------------------

SERVICES = """
from lightx2v.disagg.services.base import BaseService

class EncoderService(BaseService):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def run(self, stop_event=None):
        return "encoding"

class ControllerService(BaseService):
    def __init__(self):
        super().__init__()

    def run(self, config):
        return "controlling"
"""


@pytest.mark.parametrize("late", [False, True])
def test_services_refuse_a_config_that_names_us(host: Host, late: bool) -> None:
    """They hand over by code of their own: silently the host's, if nobody looked."""
    ours = {"disagg_mode": "encoder", "disagg_config": {"connector": "moonrelay", "bootstrap_addr": "127.0.0.1"}}
    other = {"disagg_mode": "encoder", "disagg_config": {"bootstrap_addr": "127.0.0.1"}}
    with host(plugins=() if late else (plugin.register,), changes={"lightx2v/disagg/services/roles.py": SERVICES}):
        there("lightx2v" if not late else "lightx2v_platform.set_ai_device")
        if late:
            there("lightx2v.disagg.services.roles")
            plugin.register()
            plugin.register()
        roles = there("lightx2v.disagg.services.roles")
        for refused in (
            lambda: roles.EncoderService(ours),
            lambda: roles.EncoderService(config=ours),
            lambda: roles.ControllerService().run(ours),
            lambda: type("Sub", (roles.EncoderService,), {})(ours),
        ):
            with pytest.raises(PluginError, match=r"Service hands over by code of its own.*lightx2v\.server"):
                refused()
        assert roles.EncoderService(other).config is other
        assert roles.EncoderService(other).run() == "encoding"
        assert roles.ControllerService().run(other) == "controlling"


def test_the_hosts_own_look_at_services_stays(host: Host) -> None:
    looks = "def __init_subclass__(cls, **given):\n        BaseService.made.append((cls.__name__, given))"
    text = f"{lightx2v_double.TREE[SERVICE_FILE]}\n    made = []\n    {looks}\n"
    with host(changes={SERVICE_FILE: text}):
        there("lightx2v")
        base = there(plugin.SERVICE_MODULE).BaseService
        made = types.new_class("One", (base,), {"by": 1}, lambda body: body.update(run=lambda self, config: "ran"))
        assert base.made == [("One", {"by": 1})]
        with pytest.raises(PluginError, match="LightX2V's One"):
            made().run({"disagg_config": {"connector": "moonrelay"}})


def test_services_without_their_base_are_said(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    with host(changes={SERVICE_FILE: "Renamed = object"}), caplog.at_level(logging.ERROR):
        there("lightx2v")
        there(plugin.SERVICE_MODULE)
        assert "no BaseService" in caplog.text


# -- where we are broken ----------------------------------------------------------------------------------------------


def failing(_native: type) -> type:
    raise ValueError("not today")


@pytest.mark.parametrize("broken", ["mixin", "torch", "dispatching"])
def test_a_broken_plugin_is_said_where_a_config_asks_for_it(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    if broken == "dispatching":
        monkeypatch.setattr(mixin, "dispatching", failing)
        said = "ValueError: not today"
    elif broken == "torch":
        module = types.ModuleType("moonrelay_lightx2v.mixin")
        module.__getattr__ = lambda name: importlib.import_module("torch_that_is_not_here")  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, "moonrelay_lightx2v.mixin", module)
        said = "ModuleNotFoundError: No module named 'torch_that_is_not_here'"
    else:
        monkeypatch.setitem(sys.modules, "moonrelay_lightx2v.mixin", None)
        said = "moonrelay_lightx2v.mixin"
    with host(), caplog.at_level(logging.ERROR):
        there("lightx2v")
        assert said in caplog.text
        assert not plugin.is_active()
        with pytest.raises(PluginError, match="could not take the place") as caught:
            runner().init_modules()
        assert said in str(caught.value)
        assert "moonrelay doctor" in str(caught.value)
        with pytest.raises(PluginError, match="could not take the place"):
            plugin.enable()
        native = runner(connector=None)
        native.init_disagg(native.config)
        assert native.calls == ["init_disagg"]


def test_a_core_that_is_broken_too_is_no_way_round(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moonrelay_lightx2v.mixin", None)
    with host():
        there("lightx2v")
        monkeypatch.setitem(sys.modules, "moonrelay.errors", None)
        with pytest.raises(RuntimeError, match="could not take the place"):
            runner()


# -- too late ---------------------------------------------------------------------------------------------------------


def test_after_the_host_but_before_its_runners_the_place_is_taken_at_once(host: Host) -> None:
    with host(plugins=(), changes={"lightx2v/__init__.py": ""}):
        native = there().DisaggMixin
        plugin.enable()
        assert plugin.is_active()
        assert there().DisaggMixin.__mro__[1] is native
        there(WAN)
        assert planted() == []
        assert there(WAN).WanRunner.__mro__[1] is there().DisaggMixin


def test_after_its_runners_it_is_refused_and_guarded(host: Host) -> None:
    with host(plugins=()):
        there("lightx2v")
        native = there().DisaggMixin
        for _ in range(2):
            with pytest.raises(PluginError, match=r"too late.*WanRunner.*moonrelay_lightx2v\.enable before"):
                plugin.enable()
        assert planted() == []
        assert there().DisaggMixin is native
        with pytest.raises(PluginError, match="too late"):
            runner()
        other = runner(connector=None)
        with pytest.raises(PluginError, match="too late"):
            other.init_disagg(settings_of("encoder", disagg={"connector": "moonrelay"}))
        other.init_disagg(other.config)
        assert other.calls == ["init_disagg"]


def test_a_module_that_has_the_name_is_too_late_as_well(host: Host) -> None:
    with host(plugins=(), changes={"lightx2v/__init__.py": ""}):
        there("lightx2v.utils").DisaggMixin = there().DisaggMixin
        with pytest.raises(PluginError, match=r"too late: lightx2v\.utils"):
            plugin.enable()


def test_registering_too_late_raises_nothing(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    with host(plugins=()), caplog.at_level(logging.ERROR):
        there("lightx2v")
        plugin.register()
        assert "too late" in caplog.text


def test_one_line_of_a_script_is_enough(host: Host) -> None:
    with host(plugins=()), pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "moonrelay_lightx2v.enable", raising=False)
        there("moonrelay_lightx2v.enable")
        there("lightx2v")
        assert plugin.is_active()


# -- the adapter's object ---------------------------------------------------------------------------------------------


def test_moonrelay_knows_the_adapter() -> None:
    assert Registry(ADAPTERS).load("lightx2v") is plugin.Lightx2vAdapter


@pytest.fixture
def checkout(host: Host) -> Iterator[None]:
    with host(plugins=()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin.importlib.metadata, "version", no_version)
        yield


def no_version(name: str) -> str:
    raise plugin.importlib.metadata.PackageNotFoundError(name)


@pytest.mark.usefixtures("checkout")
def test_the_version_of_a_checkout_is_read_without_importing_it() -> None:
    adapter = plugin.Lightx2vAdapter()
    assert adapter.host_version() == "0.1.0"
    assert adapter.available() == (True, "lightx2v 0.1.0")
    assert "lightx2v" not in sys.modules


def test_an_installed_hosts_version_is_its_distributions(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    with host(plugins=()):
        monkeypatch.setattr(plugin.importlib.metadata, "version", lambda _: "0.2.0")
        assert plugin.host_version() == "0.2.0"


def test_a_checkout_without_a_version_is_available(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.importlib.metadata, "version", no_version)
    with host(plugins=(), changes={"lightx2v/__init__.py": ""}):
        assert plugin.Lightx2vAdapter().available() == (True, "lightx2v without version")


def test_without_the_host_it_is_not_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lightx2v").mkdir()
    monkeypatch.setattr(plugin, "find_spec", lambda _: None)
    usable, why = plugin.Lightx2vAdapter().available()
    assert not usable
    assert "PYTHONPATH" in why
    # A folder of that name is no host.
    namespace = importlib.machinery.ModuleSpec("lightx2v", None, is_package=True)
    monkeypatch.setattr(plugin, "find_spec", lambda _: namespace)
    assert plugin.Lightx2vAdapter().host_version() is None
    assert plugin.host_folder() is None


# -- the double against the real host ---------------------------------------------------------------------------------


def test_the_double_is_a_mixin_that_we_know() -> None:
    assert plugin.differences(native_mixin()) == ()
    assert plugin.differences(None) == ("there is no DisaggMixin",)


ASK = """
import inspect, json, sys
import lightx2v
from lightx2v.disagg.disagg_mixin import DisaggMixin
from lightx2v.disagg.services.base import BaseService
from lightx2v.models.runners.base_runner import BaseRunner
from lightx2v.models.runners.default_runner import DefaultRunner
from lightx2v.models.runners.qwen_image.qwen_image_runner import QwenImageRunner
from lightx2v.models.runners.wan.wan_runner import WanRunner
from lightx2v.utils.input_info import init_empty_input_info
from lightx2v.utils.lockable_dict import LockableDict
from moonrelay_lightx2v import plugin

def parameters(method):
    return [one.name for one in inspect.signature(method).parameters.values()]

native = DisaggMixin.__mro__[1] if plugin.is_active() else DisaggMixin
config = LockableDict({"section": {"a": 1}})
config.lock()
print(json.dumps({
    "active": plugin.is_active(),
    "why": plugin.why_not_active(),
    "different": plugin.differences(native),
    "methods": {name: parameters(getattr(native, name)) for name in plugin.CONTRACT},
    "bases": {one.__name__: [base.__name__ for base in one.__mro__ if base.__name__ in
              ("DisaggMixin", "DefaultRunner", "BaseRunner")] for one in (WanRunner, QwenImageRunner)},
    "runner": {f"{one.__name__}.{name}": parameters(getattr(one, name)) for one, name in (
        (WanRunner, "run_pipeline"), (QwenImageRunner, "run_pipeline"), (DefaultRunner, "set_config"),
        (QwenImageRunner, "set_config"), (BaseRunner, "apply_disagg_request_overrides"), (BaseRunner, "__init__"),
        (WanRunner, "run_vae_decoder"), (QwenImageRunner, "set_target_shape"), (QwenImageRunner, "set_img_shapes"))},
    "wrapped": bool(getattr(WanRunner.run_pipeline, "_gc_freeze_wrapped", False)
                    or getattr(WanRunner.run_pipeline.__wrapped__, "_gc_freeze_wrapped", False)),
    "requests": {task: sorted(init_empty_input_info(task).__dataclass_fields__) for task in sys.argv[1].split(",")},
    "sections": [config.locked, config.section.locked, config.section.a],
    "services": [BaseService.__name__, parameters(BaseService.__init__), BaseService.__init_subclass__.__module__],
    "files": [inspect.getsourcefile(one) for one in (WanRunner, QwenImageRunner)],
}))
"""


def answer(environment: dict[str, str], where: Path | None = None) -> Any:
    """What a process says that imports the host, or the double written into a folder."""
    paths = [] if where is None else [str(where), str(Path(__file__).parent)]
    # The checkout's packages are installed, or are on this process's path.
    path = os.pathsep.join([*paths, environment.get("PYTHONPATH", ""), *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK, ",".join(lightx2v_double.INPUTS)],
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_the_double_answers_as_the_host_is_asked(tmp_path: Path) -> None:
    folder = lightx2v_double.write_tree(tmp_path, entry_point="moonrelay_lightx2v.plugin:register")
    said = answer({}, folder)
    assert said["active"]
    assert said["sections"] == [True, True, 1]
    assert said["wrapped"]


@pytest.mark.lightx2v
def test_the_double_is_as_the_host(environment: dict[str, str], tmp_path: Path) -> None:
    folder = lightx2v_double.write_tree(tmp_path, entry_point="moonrelay_lightx2v.plugin:register")
    ours, hosts = answer(environment, folder), answer(environment)
    assert hosts["active"], hosts["why"]
    assert hosts["different"] == []
    for about in ("methods", "bases", "runner", "wrapped", "sections", "services"):
        assert ours[about] == hosts[about]
    for task, fields in ours["requests"].items():
        assert set(fields) <= set(hosts["requests"][task])
    read = set()
    for file in hosts["files"]:
        read |= read_of_the_mixin(Path(file).read_text(encoding="utf-8"))
    assert read == lightx2v_double.READ_BY_RUNNERS


def read_of_the_mixin(source: str) -> set[str]:
    """Return the attributes of the mixin's state that a runner's source names: ``_disagg…`` and ``_p2…``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        name = None
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        if name is not None and name.startswith(("_disagg", "_p2")):
            found.add(name)
    return found


def test_what_runners_read_is_seen_in_their_source() -> None:
    assert read_of_the_mixin("self._disagg_p2_sender\ngetattr(self, '_p2_receive_meta', {})\nself.config") == {
        "_disagg_p2_sender",
        "_p2_receive_meta",
    }
