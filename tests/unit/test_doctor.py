"""`moonrelay doctor` on machines that are planted, and the probes against small real things."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from moonrelay.cli import probes
from moonrelay.cli.adapters import why_unavailable
from moonrelay.cli.checks import Finding, examine, import_remedy
from moonrelay.cli.doctor import report
from moonrelay.cli.probes import HostState, Machine, PluginState, Ran
from moonrelay.plugins import ADAPTERS, OBSERVERS, HostFinding

#: The loader's own words, from a Debian 12 machine without the package.
NO_IBVERBS = "ImportError: libibverbs.so.1: cannot open shared object file: No such file or directory"


class Planted(Machine):
    """A healthy machine with everything but CUDA and RDMA; tests spoil one thing each."""

    def __init__(self) -> None:
        self.python_is = (3, 11, 7)
        self.system = "Linux"
        self.versions = {
            "mooncake-transfer-engine-non-cuda": "0.3.13.post1",
            "torch": "2.13.0",
            "diffusers": "0.42.1",
            "msgspec": "0.20",
        }
        self.import_errors: dict[str, str] = {}
        self.library_errors: dict[str, str] = {}
        self.programs: dict[str, Ran] = {}
        self.torch = Ran(code=0, out=json.dumps({"version": "2.13.0", "build": None, "names": []}), err="")
        self.devices: list[str] = []
        self.memlock: int | None = 8 << 20
        self.shm: tuple[int, int] | OSError = (8 << 30, 8 << 30)
        self.bind_errors: dict[str, str] = {}
        self.sqlite_is = ("3.40.1", "wal")
        self.redis: str | OSError = "+PONG"
        self.plugin_states: list[PluginState] = []
        self.hosts: dict[str, HostState] = {}
        self.asked: list[object] = []

    def run(self, command: Sequence[str], timeout_s: float = 30.0) -> Ran:
        return self.programs.get(Path(command[0]).name, Ran(code=0, out="version 1\n", err=""))

    def python(self, code: str, *arguments: str, timeout_s: float = 120.0) -> Ran:
        return self.torch

    def python_version(self) -> tuple[int, int, int]:
        return self.python_is

    def platform(self) -> tuple[str, str, str]:
        return self.system, "x86_64", "6.1"

    def version(self, distribution: str) -> str | None:
        return self.versions.get(distribution)

    def package_folder(self, package: str) -> Path | None:
        installed = any(name.startswith(package) for name in self.versions)
        return Path("/nowhere") / package if installed else None

    def import_error(self, module: str) -> str | None:
        return self.import_errors.get(module)

    def library_error(self, soname: str) -> str | None:
        return self.library_errors.get(soname)

    def rdma_devices(self) -> list[str]:
        return self.devices

    def memlock_bytes(self) -> int | None:
        return self.memlock

    def shm_bytes(self) -> tuple[int, int]:
        if isinstance(self.shm, OSError):
            raise self.shm
        return self.shm

    def bind_error(self, host: str) -> str | None:
        return self.bind_errors.get(host)

    def sqlite(self) -> tuple[str, str]:
        return self.sqlite_is

    def redis_answer(self, host: str, port: int, *, tls: bool = False, timeout_s: float = 3.0) -> str:
        self.asked.append((host, port, tls))
        if isinstance(self.redis, OSError):
            raise self.redis
        return self.redis

    def plugins(self) -> list[PluginState]:
        return self.plugin_states

    def host(self, adapter: str, timeout_s: float = 120.0) -> HostState:
        return self.hosts[adapter]


def findings(machine: Machine, queue_url: str | None = None) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(machine, queue_url)}


def statuses(machine: Machine, queue_url: str | None = None) -> dict[str, str]:
    return {name: finding.status for name, finding in findings(machine, queue_url).items()}


def state(
    name: str,
    *,
    built_in: bool,
    error: str | None = None,
    shadowed: tuple[str, ...] = (),
    group: str = "moonrelay.transfers",
) -> PluginState:
    return PluginState(
        group=group,
        name=name,
        target="a:b",
        distribution="third",
        version="1",
        built_in=built_in,
        error=error,
        shadowed=shadowed,
    )


def test_a_healthy_machine_passes() -> None:
    found = findings(Planted())
    assert {finding.status for finding in found.values()} == {"ok", "skip"}
    assert all(not finding.remedy for finding in found.values())
    assert report(found.values(), as_json=True) == 0


def test_a_machine_without_libibverbs_says_so_and_how_to_get_it() -> None:
    machine = Planted()
    machine.library_errors["libibverbs.so.1"] = "OSError: libibverbs.so.1: cannot open shared object file: No such file"
    machine.import_errors["mooncake.engine"] = NO_IBVERBS
    machine.import_errors["mooncake.store"] = NO_IBVERBS
    machine.programs["mooncake_master"] = Ran(
        code=127,
        out="",
        err="mooncake_master: error while loading shared libraries: libibverbs.so.1: "
        "cannot open shared object file: No such file or directory\n",
    )
    found = findings(machine)
    for name in ("libibverbs.so.1", "mooncake.engine", "mooncake.store", "mooncake_master"):
        assert found[name].status == "fail"
        assert "libibverbs.so.1: cannot open shared object file" in found[name].detail
        assert found[name].remedy == "apt-get install libibverbs1"
    assert found["mooncake"].status == "ok"
    assert report(found.values(), as_json=True) == 1


def test_without_mooncake_its_libraries_are_no_failure() -> None:
    machine = Planted()
    del machine.versions["mooncake-transfer-engine-non-cuda"]
    machine.library_errors["libibverbs.so.1"] = "OSError: libibverbs.so.1: cannot open shared object file"
    found = findings(machine)
    assert found["libibverbs.so.1"].status == "warn"
    assert found["mooncake"].status == "warn"
    assert "moonrelay[mooncake-cpu]" in found["mooncake"].remedy
    assert found["mooncake_master"].status == "skip"
    assert report(found.values(), as_json=True) == 0


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (NO_IBVERBS, "apt-get install libibverbs1"),
        ("ImportError: libnuma.so.1: cannot open shared object file: No such file", "apt-get install libnuma1"),
        ("ImportError: librdmacm.so.1: cannot open shared object file: No such file", "apt-get install librdmacm1"),
        ("ImportError: libcudart.so.12: cannot open shared object file: No such file", "moonrelay[mooncake-cpu]"),
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file", "moonrelay[mooncake-cpu]"),
        ("ImportError: libstrange-2.so.7: cannot open shared object file: No such", "libstrange-2.so.7"),
        ("the import was ended by signal 6: Aborted", "MC_LOG_DIR"),
        ("ModuleNotFoundError: No module named 'mooncake.engine'", "force-reinstall"),
    ],
)
def test_each_import_error_has_its_remedy(error: str, remedy: str) -> None:
    assert remedy in import_remedy(error)


def test_an_old_python_or_another_system_fails() -> None:
    machine = Planted()
    machine.python_is, machine.system = (3, 10, 9), "Darwin"
    assert statuses(machine)["python"] == "fail"
    assert statuses(machine)["platform"] == "fail"


def test_rdma_is_skipped_without_a_device_and_memlock_matters_with_one() -> None:
    machine = Planted()
    assert statuses(machine)["rdma"] == "skip"
    assert statuses(machine)["memlock"] == "skip"
    machine.devices = ["mlx5_0"]
    machine.library_errors["librdmacm.so.1"] = "OSError: librdmacm.so.1: cannot open shared object file"
    found = findings(machine)
    assert found["rdma"].detail == "mlx5_0"
    assert found["memlock"].status == "warn"
    assert "8 MiB" in found["memlock"].detail
    assert "ulimit -l unlimited" in found["memlock"].remedy
    assert found["librdmacm.so.1"].remedy == "apt-get install librdmacm1"
    machine.memlock = None
    assert statuses(machine)["memlock"] == "ok"


def test_shared_memory_that_is_small_or_absent() -> None:
    machine = Planted()
    machine.shm = (64 << 20, 60 << 20)
    found = findings(machine)["/dev/shm"]
    assert (found.status, found.detail) == ("warn", "64 MiB, 60 MiB free")
    assert "--shm-size" in found.remedy
    machine.shm = FileNotFoundError(2, "No such file or directory", "/dev/shm")
    assert statuses(machine)["/dev/shm"] == "fail"


def test_ports_are_required_on_ipv4_and_not_on_ipv6() -> None:
    machine = Planted()
    machine.bind_errors = {"127.0.0.1": "denied", "::1": "[Errno 99] Cannot assign requested address"}
    found = findings(machine)
    assert found["ports 127.0.0.1"].status == "fail"
    assert found["ports ::1"].status == "warn"
    assert "Errno 99" in found["ports ::1"].detail


def test_torch_that_is_absent_broken_or_has_a_gpu() -> None:
    machine = Planted()
    machine.torch = Ran(code=0, out='{"version": "2.13.0", "build": "12.8", "names": ["NVIDIA H200"]}\n', err="")
    assert findings(machine)["cuda"].detail == "12.8: NVIDIA H200"
    machine.torch = Ran(code=1, out="", err="Traceback ...\nOSError: libtorch_cpu.so: broken\n")
    assert findings(machine)["torch"].detail == "OSError: libtorch_cpu.so: broken"
    assert statuses(machine)["torch"] == "fail"
    machine.torch = Ran(code=-11, out="", err="")
    assert findings(machine)["torch"].detail == "exit status -11"
    del machine.versions["torch"]
    assert statuses(machine)["torch"] == "warn"


def test_a_built_in_that_does_not_load_fails_and_a_third_partys_warns() -> None:
    machine = Planted()
    machine.plugin_states = [
        state("shm", built_in=True, error="broken"),
        state("mine", built_in=False, error="broken as well"),
        state("mooncake", built_in=True, shadowed=("third",)),
        state("fine", built_in=False),
    ]
    found = findings(machine)
    assert found["moonrelay.transfers/shm"].status == "fail"
    assert found["moonrelay.transfers/mine"].status == "warn"
    assert found["moonrelay.transfers/mooncake"].status == "warn"
    assert "third" in found["moonrelay.transfers/mooncake"].remedy
    assert found["moonrelay.transfers/fine"].status == "ok"


def test_an_adapter_speaks_for_its_host() -> None:
    machine = Planted()
    machine.versions.update({"sglang": "0.6.0", "vllm-omni": "0.29.0"})
    machine.plugin_states = [state(name, built_in=True, group=ADAPTERS) for name in ("omni", "plain")]
    inactive = HostFinding(status="fail", detail="0.29.0, plugin not active: too old", remedy="pip install it")
    machine.hosts = {
        "omni": HostState(host="vllm-omni", version="0.29.0", findings=(inactive,), error=None),
        "plain": HostState(host="diffusers", version=None, findings=(), error=None),
    }
    found = findings(machine)
    assert found["vllm-omni"] == Finding(
        name="vllm-omni", status="fail", detail="0.29.0, plugin not active: too old", remedy="pip install it"
    )
    assert "diffusers" not in found
    assert (found["sglang"].status, found["sglang"].detail) == ("skip", "0.6.0; no adapter for it is installed")
    assert (found["lightx2v"].status, found["lightx2v"].detail) == ("skip", "not installed")


@pytest.mark.parametrize(("built_in", "status"), [(True, "fail"), (False, "warn")])
def test_a_host_that_ends_the_question_is_told_with_its_last_line(built_in: bool, status: str) -> None:
    machine = Planted()
    machine.plugin_states = [state("omni", built_in=built_in, group=ADAPTERS)]
    machine.hosts["omni"] = HostState(host="vllm-omni", version="0.30.0", findings=(), error="ImportError: libcuda.so")
    found = findings(machine)["vllm-omni"]
    assert found.status == status
    assert "0.30.0" in found.detail
    assert "ImportError: libcuda.so" in found.detail
    assert "vllm-omni without Moonrelay" in found.remedy


def test_an_adapter_that_does_not_load_is_not_asked() -> None:
    machine = Planted()
    machine.plugin_states = [state("omni", built_in=True, error="broken", group=ADAPTERS)]
    found = findings(machine)
    assert found["moonrelay.adapters/omni"].status == "fail"
    assert found["vllm-omni"].status == "skip"


@pytest.mark.parametrize("sqlite", [("3.31.1", "wal"), ("3.40.1", "delete"), ("3.9.2", "wal")])
def test_an_old_sqlite_or_one_without_wal_fails(sqlite: tuple[str, str]) -> None:
    machine = Planted()
    machine.sqlite_is = sqlite
    assert statuses(machine)["sqlite"] == "fail"


def test_redis_is_looked_at_only_when_it_is_configured() -> None:
    machine = Planted()
    assert statuses(machine)["redis"] == "skip"
    assert statuses(machine, "sqlite:///x.db")["redis"] == "skip"
    assert machine.asked == []
    url = "redis://user:secret@cache:7000/0"
    assert "moonrelay[redis]" in findings(machine, url)["redis"].remedy
    machine.versions["redis"] = "5.0"
    found = findings(machine, url)["redis"]
    assert found.status == "ok"
    assert machine.asked == [("cache", 7000, False)]
    assert "secret" not in found.detail
    assert statuses(machine, "rediss://cache")["redis"] == "ok"
    assert machine.asked[-1] == ("cache", 6379, True)
    machine.redis = ConnectionRefusedError(111, "Connection refused")
    assert findings(machine, url)["redis"].status == "fail"
    assert "Connection refused" in findings(machine, url)["redis"].detail
    machine.redis = "HTTP/1.1 400 Bad Request"
    assert statuses(machine, url)["redis"] == "fail"
    assert statuses(machine, "redis://cache:port")["redis"] == "fail"


def test_the_json_report(capsys: pytest.CaptureFixture[str]) -> None:
    code = report([Finding(name="a", status="fail", detail="d", remedy="r")], as_json=True)
    assert code == 1
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "findings": [{"name": "a", "status": "fail", "detail": "d", "remedy": "r"}],
    }


def test_the_report_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    long = "[Errno 99] " + "x" * 200
    code = report(
        [
            Finding(name="a", status="ok", detail="fine"),
            Finding(name="b", status="warn", detail=long, remedy="do [this]"),
        ],
        as_json=False,
    )
    assert code == 0
    out = capsys.readouterr().out
    assert long in out
    assert "-> do [this]" in out
    assert "1 ok, 1 warn" in out


# The probes themselves, against small real things.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_true_import_error_of_a_real_child(folder: Path) -> None:
    (folder / "mr_stub_engine.py").write_text(f"raise ImportError({NO_IBVERBS.removeprefix('ImportError: ')!r})\n")
    (folder / "mr_abort.py").write_text("import os\nos.abort()\n")
    (folder / "mr_good.py").write_text("")
    machine = Machine()
    assert machine.import_error("mr_stub_engine") == NO_IBVERBS
    aborted = machine.import_error("mr_abort")
    assert aborted is not None
    assert "signal 6" in aborted
    assert machine.import_error("mr_good") is None
    assert "mr_stub_engine" not in sys.modules


def test_a_real_library_that_is_missing() -> None:
    error = Machine().library_error("libmoonrelay-is-not-there.so.1")
    assert error is not None
    assert "libmoonrelay-is-not-there.so.1: cannot open shared object file" in error
    assert Machine().library_error("libc.so.6") is None


def test_running_what_is_not_there_or_hangs() -> None:
    missing = Machine().run(["/nowhere/mooncake_master", "--version"])
    assert missing.code is None
    assert "No such file" in missing.last_line
    hung = Machine().run([sys.executable, "-c", "import threading; threading.Event().wait()"], timeout_s=0.5)
    assert hung.code is None
    assert "no answer within" in hung.last_line


def test_loopback_ports_are_really_bound() -> None:
    assert Machine().bind_error("127.0.0.1") is None
    assert Machine().bind_error("192.0.2.1") is not None


def test_sqlite_is_really_tried() -> None:
    version, mode = Machine().sqlite()
    assert version.count(".") == 2
    assert mode == "wal"


def _distribution(folder: Path, group: str, **targets: str) -> None:
    """A distribution for each name, that an entry point of it and nothing else shows."""
    for name, target in targets.items():
        info = folder / f"mr_dist_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mr-dist-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")


def test_a_plugin_that_hangs_its_process_hurts_only_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(Machine):
        def python(self, code: str, *arguments: str, timeout_s: float = 120.0) -> Ran:
            return super().python(code, *arguments, timeout_s=12.0)

    monkeypatch.setattr(probes, "GROUPS", (OBSERVERS,))
    (folder / "mr_hangs.py").write_text("import threading\nthreading.Event().wait()\n")
    _distribution(folder, OBSERVERS, hangs="mr_hangs:Observer")
    states = {state.name: state for state in Impatient().plugins()}
    assert "no answer within 12 s" in str(states["hangs"].error)
    assert states["metrics"].error is None


HOSTS = """
import os, threading
from moonrelay.plugins import HostFinding

class Active:
    host = "acme"
    def host_version(self): return "2.0"
    def examine(self):
        print("acme says hello, without an end of line", end="")
        yield HostFinding(status="ok", detail="2.0, plugin active")

class Absent:
    host = "acme"
    def host_version(self): return None
    def available(self): return False, "acme is not installed"

class TooOld(Absent):
    def host_version(self): return "1.0"
    def available(self): return False, "acme 1.0 is too old"

class Usable(TooOld):
    def available(self): return True, "acme 1.0"

class Mute: ...

class Raises(Active):
    def examine(self):
        raise ImportError("libacme.so is not there")

class Ends(Active):
    def examine(self):
        yield HostFinding(status="ok", detail="2.0, half way")
        os.abort()

class Hangs(Active):
    def examine(self):
        threading.Event().wait()
        yield
"""


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        ("Active", ("acme", "2.0", [("ok", "2.0, plugin active")], None)),
        ("Absent", ("acme", None, [("skip", "acme is not installed")], None)),
        ("TooOld", ("acme", "1.0", [("fail", "acme 1.0 is too old")], None)),
        ("Usable", ("acme", "1.0", [("ok", "acme 1.0")], None)),
        ("Mute", ("mine", None, [("ok", "cannot be asked; its adapter loads")], None)),
        ("Raises", ("acme", "2.0", [], "ImportError: libacme.so is not there")),
        ("Ends", ("acme", "2.0", [("ok", "2.0, half way")], "signal 6")),
        ("Hangs", ("acme", "2.0", [], "no answer within 8 s")),
    ],
)
def test_a_real_child_is_asked_of_the_host(
    folder: Path, adapter: str, expected: tuple[str, str | None, list[tuple[str, str]], str | None]
) -> None:
    (folder / "mr_hosts.py").write_text(HOSTS)
    _distribution(folder, ADAPTERS, mine=f"mr_hosts:{adapter}")
    answer = Machine().host("mine", timeout_s=8.0 if adapter == "Hangs" else 60.0)
    host, version, said, error = expected
    assert (answer.host, answer.version) == (host, version)
    assert [(finding.status, finding.detail) for finding in answer.findings] == said
    assert (answer.error is None) == (error is None)
    assert (error or "") in (answer.error or "")


def test_doctor_and_adapters_agree_on_every_host() -> None:
    """What the list calls unusable, the doctor does not call fine."""
    machine = Machine()
    for plugin in machine.plugins():
        if plugin.group == ADAPTERS and why_unavailable(plugin) is not None:
            answer = machine.host(plugin.name)
            assert answer.error is not None or {finding.status for finding in answer.findings}.isdisjoint({"ok"})


def test_plugins_that_end_their_process_hurt_only_their_name(folder: Path) -> None:
    (folder / "mr_bad_dist.py").write_text("import os\nos._exit(9)\n")
    (folder / "mr_good_dist.py").write_text("class Observer: ...\n")
    _distribution(folder, OBSERVERS, bad="mr_bad_dist:Observer", good="mr_good_dist:Observer")
    states = {(state.group, state.name): state for state in Machine().plugins()}
    bad = states[("moonrelay.observers", "bad")]
    assert bad.error is not None
    assert "ends the process" in bad.error
    good = states[("moonrelay.observers", "good")]
    assert (good.error, good.distribution, good.version) == (None, "mr-dist-good", "1.0")
    assert ("moonrelay.transfers", "shm") in states
    assert ("moonrelay.observers", "metrics") in states
