"""Who may import whom, what is never called, and how long a module may be.

The rules are functions from a module's name and source to complaints, so that a planted violation shows that each one
bites. They read the installed package, so they hold for the wheel too.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CONTROL_PLANE = ("lease", "queueing", "control")
DATA_PLANE = ("transfer", "relay", "cache")
ABOVE = ("orchestrator", "cli")
ROOMS = (*CONTROL_PLANE, *DATA_PLANE, "connector", *ABOVE)

#: Adapter package to the top-level modules that only it may import, and only inside functions.
HOSTS = {
    "moonrelay_diffusers": ("diffusers", "transformers", "accelerate", "tokenizers"),
    "moonrelay_vllm_omni": ("vllm", "vllm_omni"),
    "moonrelay_sglang": ("sglang",),
    "moonrelay_lightx2v": ("lightx2v", "lightx2v_platform"),
}
ALL_HOSTS = {module for modules in HOSTS.values() for module in modules}
#: Never imported when a module of the core is.
HEAVY = {"torch", "mooncake", "redis", "matplotlib", "imageio", "PIL", "numpy", *ALL_HOSTS}

#: Of these, the ones whose types may be named at the top of a module, where only a type checker reads.
TYPES_ALLOWED = HEAVY - ALL_HOSTS - {"mooncake", "redis"}

#: The conformance suite: loaded by pytest everywhere, so it loads nothing heavy but where its tests and sides run.
SUITE = "moonrelay_conformance"
SUITE_HEAVY = (f"{SUITE}.suites.", f"{SUITE}.sides.")
#: What offers itself to the suite does so in a method of this name, where it may import it.
OFFER = "conformance_target"

LONGEST_MODULE = 600

BANNED_CALLS = {
    "time.sleep": ("moonrelay.clock",),
    "time.time": ("moonrelay.clock",),
    "time.time_ns": ("moonrelay.clock",),
    "datetime.datetime.now": (),
    "os.environ": ("moonrelay.config",),
    "os.getenv": ("moonrelay.config",),
    "os.putenv": ("moonrelay.config",),
    # Before anything of an engine is made, and where no thread runs: it refuses otherwise.
    "os.fork": ("moonrelay_conformance.sides.forking", "moonrelay.cli.bench.cache_side"),
    "logging.basicConfig": ("moonrelay.cli",),
    "sys.path.insert": (),
    "sys.path.append": (),
}
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
BANNED_NAMES = {"eval", "exec", "print", "breakpoint"}


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    function: str
    type_checking: bool

    @property
    def in_function(self) -> bool:
        return bool(self.function)

    @property
    def top(self) -> str:
        return self.target.partition(".")[0]


def imports_of(module: str, tree: ast.Module, *, is_package: bool) -> Iterator[Import]:
    """Yield every import, ``from a import b`` as ``a.b`` (a module or not: a prefix decides)."""

    def walk(node: ast.AST, function: str, type_checking: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, function, type_checking)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*kept, base]) if base else ".".join(kept)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, function, type_checking)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from walk(child, function, True)
            for child in node.orelse:
                yield from walk(child, function, type_checking)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for child in ast.iter_child_nodes(node):
                yield from walk(child, getattr(node, "name", "lambda"), type_checking)
        else:
            for child in ast.iter_child_nodes(node):
                yield from walk(child, function, type_checking)

    yield from walk(tree, "", False)


def room_of(module: str) -> str:
    """Return the room of a module of the core: a room's name, ``base``, or ``init`` for the package itself."""
    parts = module.split(".")
    if len(parts) == 1:
        return "init"
    return parts[1] if parts[1] in ROOMS else "base"


def forbidden_rooms(room: str) -> set[str]:
    if room == "base":
        return set(ROOMS)
    if room in CONTROL_PLANE:
        return {*DATA_PLANE, "connector", *ABOVE}
    if room in DATA_PLANE:
        return {*CONTROL_PLANE, "connector", *ABOVE}
    if room in ("connector", "init"):
        return set(ABOVE)
    return set()


def is_light(module: str) -> bool:
    """Return whether importing a module may load nothing heavy."""
    package = module.partition(".")[0]
    return package == "moonrelay" or (package == SUITE and not module.startswith(SUITE_HEAVY))


def may_import_the_suite(module: str, found: Import) -> bool:
    """Return whether the suite may be imported there: by its command, by an offer to it, by an adapter's target."""
    package = module.partition(".")[0]
    if package != "moonrelay" and module == f"{package}.conformance":
        return True
    if module == "moonrelay.cli.conformance":
        return found.in_function or found.type_checking
    return found.function == OFFER or found.type_checking


#: The benchmarks' baseline is Mooncake without us.
RAW_BASELINE = "moonrelay.cli.bench.raw"


def import_complaints(module: str, source: str, *, is_package: bool = False) -> list[str]:
    complaints: list[str] = []
    package = module.partition(".")[0]
    core = package == "moonrelay"
    room = room_of(module) if core else ""
    for found in imports_of(module, ast.parse(source), is_package=is_package):
        where = f"{module}:{found.line}"
        if found.top in BANNED_MODULES:
            complaints.append(f"{where}: imports {found.top}")
        if found.type_checking and found.top in {*TYPES_ALLOWED, SUITE}:
            continue
        if found.top in ALL_HOSTS:
            if found.top not in HOSTS.get(package, ()):
                complaints.append(f"{where}: imports the host {found.top}; only its adapter may")
            elif not found.in_function:
                complaints.append(f"{where}: imports the host {found.top} outside a function")
        elif found.top in HEAVY and not found.in_function and is_light(module):
            complaints.append(f"{where}: imports {found.top} outside a function")
        if found.top == SUITE != package:
            if not may_import_the_suite(module, found):
                complaints.append(f"{where}: imports the conformance suite")
            continue
        if not core:
            if found.top.startswith("moonrelay_") and found.top != package:
                complaints.append(f"{where}: an adapter imports the adapter {found.top}")
            continue
        if found.top.startswith("moonrelay_") and room != "cli":
            complaints.append(f"{where}: the core imports the adapter {found.top}")
        if found.top == "mooncake" and room not in DATA_PLANE and module != RAW_BASELINE:
            complaints.append(f"{where}: imports mooncake; only the data plane may")
        if found.top == "torch" and room in CONTROL_PLANE:
            complaints.append(f"{where}: the control plane imports torch")
        if found.top == "moonrelay":
            target_room = room_of(found.target)
            if target_room in forbidden_rooms(room):
                complaints.append(f"{where}: {room} imports {found.target}")
    return complaints


def _dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def call_complaints(module: str, source: str) -> list[str]:
    """Complain of what is never called, however it was imported, of ``global``, and of threads without a name."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    complaints: list[str] = []
    for node in ast.walk(tree):
        where = f"{module}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Global):
            complaints.append(f"{where}: global state ({', '.join(node.names)})")
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
            head, dot, rest = _dotted(node).partition(".")
            full = names.get(head, head if dot else "") + dot + rest
            allowed = BANNED_CALLS.get(full)
            if allowed is not None and not any(module == own or module.startswith(f"{own}.") for own in allowed):
                complaints.append(f"{where}: uses {full}")
        if isinstance(node, ast.Call):
            called = _dotted(node.func)
            if called in BANNED_NAMES and not (called == "print" and module.startswith("moonrelay.cli.")):
                complaints.append(f"{where}: calls {called}")
            head, dot, rest = called.partition(".")
            if names.get(head, head) + dot + rest == "threading.Thread":
                complaints += _thread_complaints(where, node)
    return complaints


def _thread_complaints(where: str, call: ast.Call) -> Iterator[str]:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    daemon = given.get("daemon")
    if not (isinstance(daemon, ast.Constant) and daemon.value is True):
        yield f"{where}: a thread that is no daemon"
    name = given.get("name")
    if isinstance(name, ast.JoinedStr) and name.values:
        name = name.values[0]
    if name is None:
        yield f"{where}: a thread without a name"
    elif isinstance(name, ast.Constant) and not str(name.value).startswith("moonrelay-"):
        yield f"{where}: a thread whose name does not begin with moonrelay-"


def shape_complaints(module: str, source: str) -> list[str]:
    complaints = []
    lines = source.count("\n") + 1
    if lines > LONGEST_MODULE:
        complaints.append(f"{module}: {lines} lines; {LONGEST_MODULE} at most, it is asking to be two")
    if source.strip() and not ast.get_docstring(ast.parse(source)):
        complaints.append(f"{module}: does not open with what it owns")
    return complaints


def sources() -> dict[str, Path]:
    """Return module name to file, of the packages that this Python imports."""
    found: dict[str, Path] = {}
    for package in ("moonrelay", SUITE, *HOSTS):
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        root = Path(next(iter(spec.submodule_search_locations)))
        for path in sorted(root.rglob("*.py")):
            parts = [package, *path.relative_to(root).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


SOURCES = sources()


def test_the_sources_were_found() -> None:
    assert {"moonrelay", "moonrelay.errors", "moonrelay.cli.main", "moonrelay.transfer.base"} <= SOURCES.keys()


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_keeps_the_rules(module: str) -> None:
    path = SOURCES[module]
    source = path.read_text(encoding="utf-8")
    is_package = path.name == "__init__.py"
    complaints = [
        *import_complaints(module, source, is_package=is_package),
        *call_complaints(module, source),
        *shape_complaints(module, source),
    ]
    assert complaints == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("moonrelay.lease.table", "import torch"),
        ("moonrelay.lease.table", "def f():\n    import torch"),
        ("moonrelay.lease.table", "from moonrelay.transfer.base import TransferEngine"),
        ("moonrelay.lease.table", "from moonrelay.transfer import base"),
        ("moonrelay.lease.table", "from moonrelay import transfer"),
        ("moonrelay.lease.table", "from ..relay import base"),
        ("moonrelay.lease.table", "def f():\n    import moonrelay.relay.base"),
        ("moonrelay.queueing.sqlite", "from moonrelay.connector import DiffusionConnector"),
        ("moonrelay.control.channel", "def f():\n    import mooncake.engine"),
        ("moonrelay.transfer.shm", "from moonrelay.lease.table import Lease"),
        ("moonrelay.transfer.shm", "if TYPE_CHECKING:\n    from moonrelay.queueing import base"),
        ("moonrelay.relay.local", "from moonrelay.control import channel"),
        ("moonrelay.transfer.mooncake", "import mooncake.engine"),
        ("moonrelay.relay.local", "try:\n    import torch\nexcept ImportError:\n    pass"),
        ("moonrelay.payload", "import torch"),
        ("moonrelay.cli.demo.contact", "from PIL.Image import Image"),
        ("moonrelay.payload", "import moonrelay.transfer.base"),
        ("moonrelay.errors", "def f():\n    from moonrelay.lease import table"),
        ("moonrelay.connector.core", "import moonrelay.cli.main"),
        ("moonrelay", "from moonrelay.cli import main"),
        ("moonrelay.connector.core", "def f():\n    import diffusers"),
        ("moonrelay.connector.core", "def f():\n    import moonrelay_diffusers"),
        ("moonrelay_diffusers.stages", "import diffusers"),
        ("moonrelay_diffusers.stages", "if TYPE_CHECKING:\n    from transformers import T5EncoderModel"),
        ("moonrelay_diffusers.stages", "def f():\n    import sglang"),
        ("moonrelay_diffusers.stages", "import moonrelay_sglang"),
        ("moonrelay_diffusers.stages", "def f():\n    import moonrelay_conformance.sides"),
        ("moonrelay.handle", "import pickle"),
        ("moonrelay_conformance.registry", "import torch"),
        ("moonrelay_conformance.targets.base", "from torch import Tensor"),
        ("moonrelay_conformance.suites.base", "import diffusers"),
        ("moonrelay_conformance.sides.runner", "def f():\n    import diffusers"),
        ("moonrelay_conformance.registry", "def f():\n    import moonrelay_diffusers"),
        ("moonrelay_conformance.registry", "import pickle"),
        ("moonrelay.cli.conformance", "import moonrelay_conformance"),
        ("moonrelay.cli.doctor", "def f():\n    import moonrelay_conformance"),
        ("moonrelay.transfer.shm", "def f():\n    from moonrelay_conformance.targets import parts"),
        ("moonrelay_diffusers.stages", "def f():\n    import moonrelay_conformance"),
        ("moonrelay_diffusers.plugin", "from moonrelay_conformance.targets.adapter import AdapterTarget"),
    ],
)
def test_a_planted_import_is_caught(module: str, source: str) -> None:
    assert import_complaints(module, source) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("moonrelay.payload", "if TYPE_CHECKING:\n    import torch"),
        ("moonrelay.cli.demo.contact", "if TYPE_CHECKING:\n    from PIL.Image import Image"),
        ("moonrelay.payload", "def f():\n    import torch"),
        ("moonrelay.lease.table", "if TYPE_CHECKING:\n    import torch"),
        ("moonrelay.lease.table", "from moonrelay.errors import LeaseLost\nfrom moonrelay.handle import StageHandle"),
        ("moonrelay.transfer.mooncake", "def f():\n    from mooncake.engine import TransferEngine"),
        ("moonrelay.connector.core", "from moonrelay.lease import table\nfrom moonrelay.transfer import base"),
        ("moonrelay", "from moonrelay.connector import DiffusionConnector"),
        ("moonrelay.cli.demo", "import moonrelay_diffusers.plugin"),
        ("moonrelay_diffusers.conformance", "from moonrelay_conformance.targets import connector"),
        ("moonrelay_diffusers.stages", "import torch\ndef f():\n    import diffusers"),
        ("moonrelay_conformance.suites.engine", "import torch\nfrom moonrelay.transfer import base"),
        ("moonrelay_conformance.registry", "def f():\n    import torch"),
        ("moonrelay.cli.conformance", "def f():\n    from moonrelay_conformance.run import run"),
        ("moonrelay.cli.conformance", "if TYPE_CHECKING:\n    from moonrelay_conformance.results import Report"),
        ("moonrelay.transfer.shm", "class A:\n    def conformance_target(self):\n        import moonrelay_conformance"),
        ("moonrelay_diffusers.conformance", "from moonrelay_conformance.targets.adapter import AdapterTarget"),
        ("moonrelay_diffusers.plugin", "def conformance_target():\n    import moonrelay_conformance"),
    ],
)
def test_what_is_allowed_is_not_complained_of(module: str, source: str) -> None:
    assert import_complaints(module, source) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("moonrelay.lease.reaper", "import time\ntime.sleep(1)"),
        ("moonrelay.lease.reaper", "from time import sleep\nsleep(1)"),
        ("moonrelay.lease.reaper", "from time import sleep as nap\nnap(1)"),
        ("moonrelay.lease.reaper", "import time as t\nt.time()"),
        ("moonrelay.cli.demo", "import os\nos.environ['X'] = '1'"),
        ("moonrelay.cli.demo", "from os import environ\nenviron.get('X')"),
        ("moonrelay.handle", "eval('1')"),
        ("moonrelay.handle", "print('x')"),
        ("moonrelay.connector.core", "import logging\nlogging.basicConfig()"),
        ("moonrelay.connector.core", "def f():\n    global x\n    x = 1"),
        ("moonrelay.connector.core", "import threading\nthreading.Thread(target=f, daemon=True)"),
        ("moonrelay.connector.core", "import threading\nthreading.Thread(target=f, name='moonrelay-x')"),
        ("moonrelay.connector.core", "import threading\nthreading.Thread(target=f, name='mine', daemon=True)"),
        ("moonrelay.connector.core", "from threading import Thread\nThread(target=f, name=f'a-{x}', daemon=True)"),
    ],
)
def test_a_planted_call_is_caught(module: str, source: str) -> None:
    assert call_complaints(module, source) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("moonrelay.clock", "import time\ntime.time()"),
        ("moonrelay.config", "import os\nos.environ.get('X')"),
        ("moonrelay.cli.demo", "print('x')"),
        ("moonrelay.handle", "self.time.sleep(1)\nmatch.time()"),
        (
            "moonrelay.connector.core",
            "import threading\nthreading.Thread(target=f, name=f'moonrelay-{x}', daemon=True)",
        ),
    ],
)
def test_a_call_that_is_fine_is_not_complained_of(module: str, source: str) -> None:
    assert call_complaints(module, source) == []


def test_a_long_or_nameless_module_is_caught() -> None:
    assert shape_complaints("moonrelay.x", '"""Own it."""\n' + "a = 1\n" * 599) != []
    assert shape_complaints("moonrelay.x", '"""Own it."""\n' + "a = 1\n" * 598) == []
    assert shape_complaints("moonrelay.x", "a = 1\n") != []


def _loaded_by(code: str) -> set[str]:
    program = textwrap.dedent(
        f"""
        import sys
        sys.path[:] = {[path for path in sys.path if path]!r}
        {code}
        sys.stdout.write(" ".join(name for name in sys.modules))
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_importing_moonrelay_loads_nothing_heavy() -> None:
    loaded = _loaded_by("import moonrelay")
    assert "moonrelay" in loaded
    assert loaded & HEAVY == set()


def test_the_command_line_loads_nothing_heavy() -> None:
    loaded = _loaded_by("import moonrelay.cli.main; moonrelay.cli.main.make_app()")
    assert loaded & HEAVY == set()


def test_no_module_of_the_core_loads_anything_heavy() -> None:
    modules = [name for name in SOURCES if name.startswith("moonrelay.") and room_of(name) != "cli"]
    assert _loaded_by(f"import {', '.join(modules)}") & HEAVY == set()


def test_the_conformance_suite_loads_nothing_heavy_but_where_its_tests_run() -> None:
    modules = [name for name in SOURCES if name.startswith(SUITE) and not name.startswith(SUITE_HEAVY)]
    assert f"{SUITE}.registry" in modules
    assert _loaded_by(f"import {', '.join(modules)}") & HEAVY == set()


def test_the_pytest_plugin_loads_nothing_of_ours_but_itself() -> None:
    assert _loaded_by(f"import {SUITE}.plugin") & {"moonrelay", "msgspec", "zmq", *HEAVY} == set()


def test_the_check_of_loaded_modules_sees_a_module() -> None:
    assert "fractions" in _loaded_by("import fractions")
