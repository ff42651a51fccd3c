"""What every engine of one process must do, and what is special about each; no service, no second process."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moonrelay.config import TransferConfig
from moonrelay.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    PeerLost,
    PluginError,
    RegistrationError,
    TransferFailed,
)
from moonrelay.handle import EngineAddress, Region
from moonrelay.transfer import mooncake
from moonrelay.transfer.base import OperationState
from moonrelay.transfer.faulty import Fault, FaultyEngine, Scripted
from moonrelay.transfer.mapping import Mapping, map_memory
from moonrelay.transfer.memory import MemoryEngine
from moonrelay.transfer.mooncake import MooncakeEngine
from moonrelay.transfer.shm import PREFIX, ShmEngine, sweep_orphans

SIZE = 64 * 1024


@pytest.fixture(params=["memory", "shm", "faulty"])
def name(request):
    return request.param


@pytest.fixture
def make(name, tmp_path):
    classes = {"memory": MemoryEngine, "shm": ShmEngine, "faulty": FaultyEngine}
    made = []

    def build(**settings):
        options = {"directory": str(tmp_path)} if name == "shm" else {}
        made.append(classes[name](TransferConfig(engine=name, options=options, **settings)))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


@pytest.fixture
def pair(make):
    producer, consumer = make(), make()
    producer.start()
    consumer.start()
    return producer, consumer


def fill(region: Region, seed: int = 1) -> bytes:
    content = bytes((n * seed + 3) % 256 for n in range(region.nbytes))
    ctypes.memmove(region.base, content, region.nbytes)
    return content


def test_read_copies_exactly_the_range(pair):
    producer, consumer = pair
    source, target = producer.allocate(SIZE), consumer.allocate(SIZE)
    content = fill(source)
    ctypes.memset(target.base, 0, SIZE)
    operation = consumer.read(producer.address, source, source.base + 100, target.base + 7, 1000)
    assert operation.poll() is OperationState.DONE
    assert operation.poll() is OperationState.DONE
    assert operation.error is None
    assert ctypes.string_at(target.base, SIZE) == bytes(7) + content[100:1100] + bytes(SIZE - 1007)


def test_an_engine_reads_its_own_memory(pair):
    engine, _ = pair
    source, target = engine.allocate(SIZE), engine.allocate(SIZE)
    content = fill(source)
    assert engine.read(engine.address, source, source.base, target.base, SIZE).poll() is OperationState.DONE
    assert ctypes.string_at(target.base, SIZE) == content


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 2), (0, SIZE + 1), (SIZE - 1, 2), (SIZE, 1), (0, 0), (10, -5), (1 << 62, 1)]
)
def test_a_range_outside_the_region_is_refused_and_nothing_is_written(pair, offset, nbytes):
    producer, consumer = pair
    source, target = producer.allocate(SIZE), consumer.allocate(SIZE)
    fill(source)
    ctypes.memset(target.base, 0, SIZE)
    operation = consumer.read(producer.address, source, source.base + offset, target.base, nbytes)
    assert operation.poll() is OperationState.FAILED
    assert isinstance(operation.error, RegistrationError)
    assert operation.error.retryable is False
    assert ctypes.string_at(target.base, SIZE) == bytes(SIZE)


def test_a_region_said_to_be_larger_than_it_is_is_refused(pair):
    producer, consumer = pair
    source, target = producer.allocate(SIZE), consumer.allocate(SIZE)
    lie = Region(key=source.key, base=source.base, nbytes=2 * SIZE)
    operation = consumer.read(producer.address, lie, source.base + SIZE, target.base, SIZE)
    assert operation.poll() is OperationState.FAILED
    assert isinstance(operation.error, RegistrationError)


def test_what_was_released_cannot_be_read(pair):
    producer, consumer = pair
    source, target = producer.allocate(SIZE), consumer.allocate(SIZE)
    producer.release(source)
    producer.release(source)
    operation = consumer.read(producer.address, source, source.base, target.base, 1)
    assert operation.poll() is OperationState.FAILED


def test_a_closed_peer_cannot_be_read(pair):
    producer, consumer = pair
    source, target = producer.allocate(SIZE), consumer.allocate(SIZE)
    producer.close()
    operation = consumer.read(producer.address, source, source.base, target.base, 1)
    assert operation.poll() is OperationState.FAILED
    assert isinstance(operation.error, PeerLost)


def test_the_same_address_with_another_nonce_is_another_peer(pair):
    producer, consumer = pair
    source, target = producer.allocate(SIZE), consumer.allocate(SIZE)
    address = producer.address
    other = EngineAddress(engine=address.engine, address=address.address, nonce="0" * 32)
    assert consumer.read(other, source, source.base, target.base, 1).poll() is OperationState.FAILED


def test_two_engines_have_two_nonces(pair):
    assert pair[0].address.nonce != pair[1].address.nonce


def test_nothing_works_before_start_or_after_close(make):
    engine = make()
    with pytest.raises(ClosedError, match="not started"):
        _ = engine.address
    with pytest.raises(ClosedError):
        engine.allocate(SIZE)
    engine.start()
    engine.start()
    region = engine.allocate(SIZE)
    address = engine.address
    engine.close()
    engine.close()
    for call in (
        lambda: engine.allocate(SIZE),
        lambda: engine.read(address, region, region.base, region.base, 1),
        lambda: engine.register(region.base, 10),
        engine.start,
    ):
        with pytest.raises(ClosedError):
            call()
    fill(region)  # stays mapped until it is released
    engine.release(region)


def test_close_without_start(make):
    engine = make()
    engine.close()
    with pytest.raises(ClosedError):
        engine.start()


def test_a_pool_on_a_gpu_is_refused_by_name(make):
    with pytest.raises(ConfigError, match="device='cuda:0'"):
        make(device="cuda:0").start()


def test_memory_that_the_system_does_not_have_is_a_capacity_error(make):
    engine = make()
    engine.start()
    with pytest.raises(CapacityError):
        engine.allocate(1 << 60)


# memory


def test_memory_registers_foreign_memory_without_overlap():
    producer, consumer = MemoryEngine(TransferConfig()), MemoryEngine(TransferConfig())
    producer.start()
    consumer.start()
    source, target = ctypes.create_string_buffer(b"hello"), ctypes.create_string_buffer(5)
    address = ctypes.addressof(source)
    region = producer.register(address, 5)
    for wrong in ((address, 5), (address + 4, 10), (address - 1, 2)):
        with pytest.raises(RegistrationError):
            producer.register(*wrong)
    operation = consumer.read(producer.address, region, address, ctypes.addressof(target), 5)
    assert operation.poll() is OperationState.DONE
    assert target.raw == b"hello"
    producer.unregister(region)
    producer.unregister(region)
    assert consumer.read(producer.address, region, address, ctypes.addressof(target), 5).poll() is OperationState.FAILED
    with pytest.raises(RegistrationError):
        producer.register(address, 0)
    producer.register(address, 5)


def test_a_forgotten_memory_engine_is_no_peer():
    producer, consumer = MemoryEngine(TransferConfig()), MemoryEngine(TransferConfig())
    producer.start()
    consumer.start()
    address, region = producer.address, producer.allocate(SIZE)
    del producer
    gc.collect()
    target = consumer.allocate(SIZE)
    operation = consumer.read(address, region, region.base, target.base, 1)
    assert isinstance(operation.error, PeerLost)


# shm


def segments(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def shm(tmp_path):
    made = []

    def build() -> ShmEngine:
        made.append(ShmEngine(TransferConfig(engine="shm", options={"directory": str(tmp_path)})))
        made[-1].start()
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def test_shm_names_are_ours_private_and_gone_after_close(shm, tmp_path):
    engine = shm()
    regions = [engine.allocate(SIZE) for _ in range(2)]
    assert segments(tmp_path) == sorted(region.key for region in regions)
    assert all(name.startswith("moonrelay-") for name in segments(tmp_path))
    assert all((path.stat().st_mode & 0o777) == 0o600 for path in tmp_path.iterdir())
    engine.release(regions[0])
    assert segments(tmp_path) == [regions[1].key]
    engine.close()
    assert segments(tmp_path) == []


def test_shm_refuses_heap_memory_and_says_what_to_do(shm):
    engine = shm()
    assert engine.registers_foreign_memory is False
    with pytest.raises(RegistrationError, match=r"conn\.empty"):
        engine.register(1 << 40, 100)


@pytest.mark.parametrize(
    "key",
    ["", "passwd", "../../etc/passwd", "{good}/../{good}", "{good}\n", "{good}\0", "./{good}", PREFIX, "{good}" * 40],
)
def test_shm_opens_no_name_that_is_not_a_segment_of_the_peer(shm, tmp_path, key):
    producer, consumer = shm(), shm()
    source, target = producer.allocate(SIZE), consumer.allocate(SIZE)
    (tmp_path / "passwd").write_bytes(bytes(SIZE))
    wrong = Region(key=key.replace("{good}", source.key), base=source.base, nbytes=SIZE)
    operation = consumer.read(producer.address, wrong, source.base, target.base, 1)
    assert operation.poll() is OperationState.FAILED
    assert isinstance(operation.error, RegistrationError)


def test_shm_follows_no_link(shm, tmp_path):
    producer, consumer = shm(), shm()
    source, target = producer.allocate(SIZE), consumer.allocate(SIZE)
    link = source.key[:-1] + "99"
    (tmp_path / link).symlink_to(tmp_path / source.key)
    wrong = Region(key=link, base=source.base, nbytes=SIZE)
    operation = consumer.read(producer.address, wrong, source.base, target.base, 1)
    assert isinstance(operation.error, PeerLost)


def test_shm_readers_let_go_of_what_their_peer_closed(shm):
    consumer = shm()
    target = consumer.allocate(SIZE)
    for turn in range(3):
        producer = shm()
        source = producer.allocate(SIZE)
        fill(source)
        assert consumer.read(producer.address, source, source.base, target.base, 9).poll() is OperationState.DONE
        assert len(consumer._cached) == 1, turn
        if turn == 2:
            consumer.forget(producer.address)
            assert not consumer._cached
        producer.close()


def test_shm_maps_a_peer_read_only(shm, tmp_path):
    producer, consumer = shm(), shm()
    source, target = producer.allocate(SIZE), consumer.allocate(SIZE)
    consumer.read(producer.address, source, source.base, target.base, 9)
    mapped = consumer._cached[source.key]
    line = next(
        line for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(f"{mapped.address:x}-")
    )
    assert line.split()[1] == "r--s"


def test_shm_sweep_takes_only_what_nobody_holds(shm, tmp_path):
    living = shm().allocate(SIZE)
    nonce = "a" * 32
    orphan = tmp_path / f"{PREFIX}1-{nonce}-1"
    locked = tmp_path / f"{PREFIX}1-{nonce}-2"
    foreign = tmp_path / f"{PREFIX}notes"
    for path in (orphan, locked, foreign):
        path.write_bytes(b"x")
    with locked.open("rb+") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert sweep_orphans(tmp_path) == [orphan.name]
        assert segments(tmp_path) == sorted([living.key, locked.name, foreign.name])
    assert sweep_orphans(tmp_path) == [locked.name]
    assert sweep_orphans(tmp_path / "absent") == []


def test_shm_start_sweeps(shm, tmp_path):
    (tmp_path / f"{PREFIX}1-{'b' * 32}-1").write_bytes(b"x")
    shm()
    assert segments(tmp_path) == []


def test_shm_folder_must_exist(tmp_path):
    engine = ShmEngine(TransferConfig(options={"directory": str(tmp_path / "absent")}))
    with pytest.raises(ConfigError, match="directory"):
        engine.start()


def test_shm_commit_maps_pages_at_once(shm):
    nbytes = 16 << 20
    engine = shm()
    region = engine.allocate(nbytes)
    # As a slot lies: neither its begin nor its end at a page.
    engine.commit(region, 256, nbytes // 2 - 512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ctypes.memset(region.base + 256, 1, nbytes // 2 - 512)
    committed = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    ctypes.memset(region.base + nbytes // 2, 1, nbytes // 2)
    other = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before - committed
    assert other >= nbytes // 2 // mmap.PAGESIZE // 16
    if committed > other // 2:
        assert not map_memory(1 << 16).populate(0, 1 << 16), "the system can, and it was not done"


def test_shm_commit_reserves_pages(shm, tmp_path):
    engine = shm()
    region = engine.allocate(1 << 20)
    blocks = (tmp_path / region.key).stat().st_blocks
    engine.commit(region, 0, 1 << 19)
    assert (tmp_path / region.key).stat().st_blocks >= blocks + (1 << 19) // 512
    engine.close()
    engine.commit(region, 1 << 19, 1 << 19)  # its file is gone: nothing to do


def test_shm_without_room_is_a_capacity_error_not_a_dead_process(shm, monkeypatch):
    def full(*_args: int) -> None:
        raise OSError(28, "No space left on device")

    engine = shm()
    region = engine.allocate(SIZE)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match="No space") as caught:
        engine.commit(region, 0, SIZE)
    assert caught.value.context["fits"] is True


def test_shm_leaves_no_descriptor(shm):
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(5):
        producer, consumer = shm(), shm()
        source, target = producer.allocate(SIZE), consumer.allocate(SIZE)
        assert consumer.read(producer.address, source, source.base, target.base, 9).poll() is OperationState.DONE
        consumer.close()
        producer.close()
    assert count() == before


# mapping


def test_memory_is_unmapped_when_its_last_user_lets_go():
    mapping = map_memory(1 << 20)
    address = mapping.address
    assert mapping.holds(address, 1 << 20)
    assert not mapping.holds(address, (1 << 20) + 1)
    assert not mapping.holds(address - 1, 1)

    def mapped() -> bool:
        ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)

    assert isinstance(mapping, Mapping)
    assert mapped()
    del mapping
    assert not mapped()


# faulty


def test_faults_by_name():
    config = TransferConfig(engine="faulty", options={"faults": ["fail", "none", "delay:0.25"]})
    engine = FaultyEngine(config)
    assert [engine.script(n, 1) for n in range(4)] == [
        Scripted(Fault.FAIL),
        Scripted(Fault.NONE),
        Scripted(Fault.DELAY, 0.25),
        Scripted(Fault.NONE),
    ]


@pytest.mark.parametrize("faults", ["fail", 3, ["fial"], ["delay:soon"]])
def test_unknown_faults_are_refused(faults):
    with pytest.raises(ConfigError, match="faults"):
        FaultyEngine(TransferConfig(options={"faults": faults}))


def test_faulty_wraps_by_name_and_passes_options_on(tmp_path):
    engine = FaultyEngine(TransferConfig(options={"inner": "shm", "directory": str(tmp_path)}))
    engine.start()
    assert engine.registers_foreign_memory is False
    assert engine.address.engine == "shm"
    region = engine.allocate(SIZE)
    assert segments(tmp_path) == [region.key]
    engine.close()


# mooncake, with a library that is not there


class FakeLibrary:
    """Answers like the wheel; using a handle twice, or anything after its end, is an error."""

    def __init__(self) -> None:
        self.answers: dict[int, list[int]] = {}
        self.started: list[tuple[str, int]] = []
        self.probe = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.refuse = False
        self.registered: set[int] = set()

    def initialize(self, *_args: str) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 15001

    def register_memory(self, address: int, nbytes: int) -> int:
        if address in self.registered:
            return -7
        self.registered.add(address)
        return 0

    def unregister_memory(self, address: int) -> int:
        self.registered.discard(address)
        return 0

    def send_probe(self, _peer: str) -> int:
        assert self.may_answer.wait(20)
        return self.probe

    def batch_transfer_async_read(self, peer: str, _local: list[int], _remote: list[int], nbytes: list[int]) -> int:
        if self.refuse:
            return 0
        self.started.append((peer, nbytes[0]))
        handle = len(self.started)
        self.answers[handle] = [0, 0, 1] if nbytes[0] else [1]
        return handle

    def transfer_check_status(self, handle: int) -> int:
        return self.answers[handle].pop(0)  # IndexError: used after its end


@pytest.fixture
def library(monkeypatch):
    made = FakeLibrary()
    holder = [made]
    monkeypatch.setattr(mooncake, "_load", lambda _config: holder.pop() if holder else FakeLibrary())
    return made


@pytest.fixture
def cake(library):
    engine = MooncakeEngine(TransferConfig())
    engine.start()
    yield engine
    del library
    engine.close()


REGION = Region(key="", base=1 << 20, nbytes=SIZE)


def peer_at(address: str, nonce: str) -> EngineAddress:
    return EngineAddress(engine="mooncake", address=address, nonce=nonce)


def until_contact(engine: MooncakeEngine) -> None:
    for dialer in list(engine._dialers):
        dialer.join(10)


def read(engine: MooncakeEngine, peer: EngineAddress):
    return engine.read(peer, REGION, REGION.base, 1 << 30, 100)


def test_a_handle_is_asked_until_its_end_and_never_after(cake, library):
    operation = read(cake, peer_at("10.0.0.1:15002", "n1"))
    until_contact(cake)
    states = [operation.poll() for _ in range(7)]
    assert states == sorted(states, key=lambda state: state is OperationState.DONE)
    assert states[3:] == [OperationState.DONE] * 4
    assert not library.answers[2]
    # First contact was an empty read.
    assert library.started == [("10.0.0.1:15002", 0), ("10.0.0.1:15002", 100)]


@pytest.mark.parametrize("ending", [[0, -1], [-2, -2, -1]])
def test_a_failed_read_is_terminal_and_the_librarys_own_timeout_is_not(cake, library, ending):
    operation = read(cake, peer_at("10.0.0.1:15002", "n1"))
    until_contact(cake)
    operation.poll()
    library.answers[2] = list(ending)
    states = [operation.poll() for _ in range(len(ending) + 2)]
    assert states == [OperationState.RUNNING] * (len(ending) - 1) + [OperationState.FAILED] * 3
    assert isinstance(operation.error, TransferFailed)
    assert operation.error.retryable


def test_a_peer_that_does_not_answer_is_lost_and_dialed_again(cake, library):
    library.probe = -102
    peer = peer_at("10.0.0.1:15002", "n1")
    operation = read(cake, peer)
    until_contact(cake)
    assert operation.poll() is OperationState.FAILED
    assert isinstance(operation.error, PeerLost)
    assert not library.started
    library.probe = 0
    again = read(cake, peer)
    until_contact(cake)
    assert [again.poll() for _ in range(4)][-1] is OperationState.DONE


def test_a_read_that_cannot_begin_is_lost_and_the_peer_dialed_again(cake, library):
    peer = peer_at("10.0.0.1:15002", "n1")
    first = read(cake, peer)
    until_contact(cake)
    assert [first.poll() for _ in range(4)][-1] is OperationState.DONE
    library.refuse = True
    second = read(cake, peer)
    assert second.poll() is OperationState.FAILED
    assert isinstance(second.error, PeerLost)
    library.refuse = False
    third = read(cake, peer)
    until_contact(cake)
    assert [third.poll() for _ in range(4)][-1] is OperationState.DONE


def test_what_was_given_up_before_first_contact_never_begins(cake, library):
    peer = peer_at("10.0.0.1:15002", "n1")
    library.may_answer.clear()
    operation = read(cake, peer)
    assert operation.poll() is OperationState.RUNNING
    operation.abandon()
    library.may_answer.set()
    until_contact(cake)
    assert operation.poll() is OperationState.FAILED
    assert [nbytes for _, nbytes in library.started] == [0]


def test_a_new_life_at_an_old_address_is_dialed_by_another_name(cake, library):
    for nonce in ("n1", "n2", "n3"):
        operation = read(cake, peer_at("[::1]:15002", nonce))
        until_contact(cake)
        while operation.poll() is OperationState.RUNNING:
            pass
    names = [peer for peer, nbytes in library.started if nbytes]
    assert names == ["[::1]:15002", "[::1]:015002", "[::1]:0015002"]


def test_close_ends_what_runs_and_never_asks_again(cake, library):
    running = read(cake, peer_at("a:1", "n1"))
    until_contact(cake)
    assert running.poll() is OperationState.RUNNING
    waiting = read(cake, peer_at("a:1", "n1"))
    asked = {handle: len(left) for handle, left in library.answers.items()}
    cake.close()
    cake.close()
    # The fixture's reference stands for a library still stuck in a call: it may write, so nothing is quiet yet.
    assert running.poll() is OperationState.RUNNING
    assert {handle: len(left) for handle, left in library.answers.items()} == asked
    assert waiting.poll() is OperationState.RUNNING


def test_after_the_library_is_gone_everything_is_quiet(monkeypatch):
    monkeypatch.setattr(mooncake, "_load", lambda _config: FakeLibrary())
    engine = MooncakeEngine(TransferConfig())
    engine.start()
    operation = read(engine, peer_at("a:1", "n1"))
    until_contact(engine)
    assert operation.poll() is OperationState.RUNNING
    engine.close()
    assert operation.poll() is OperationState.FAILED
    assert isinstance(operation.error, ClosedError)
    with pytest.raises(ClosedError):
        read(engine, peer_at("a:1", "n1"))


def test_memory_stays_mapped_while_the_library_may_write_it(cake, library):
    region = cake.allocate(SIZE)
    cake.close()
    cake.release(region)
    assert region.base in cake._memory
    assert region.base in library.registered  # closed: the library is not called any more


def test_address_of_ipv6_has_brackets(library):
    engine = MooncakeEngine(TransferConfig(hostname="::1"))
    engine.start()
    assert engine.address.address == "[::1]:15001"
    engine.close()


def test_registering_twice_names_the_overlap(cake):
    region = cake.register(1 << 40, 100)
    with pytest.raises(RegistrationError, match="overlaps"):
        cake.register(1 << 40, 100)
    cake.unregister(region)
    cake.register(1 << 40, 100)
    with pytest.raises(RegistrationError, match="nothing"):
        cake.register(1 << 41, 0)


def test_a_failed_start_is_a_config_error_and_asks_no_port(monkeypatch):
    class Broken(FakeLibrary):
        def initialize(self, *_args: str) -> int:
            return -1

        def get_rpc_port(self) -> int:
            raise AssertionError

    monkeypatch.setattr(mooncake, "_load", lambda _config: Broken())
    engine = MooncakeEngine(TransferConfig(protocol="rdma"))
    with pytest.raises(ConfigError, match="rdma"):
        engine.start()
    engine.close()


def test_a_missing_wheel_gives_the_true_reason_and_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(PluginError, match=r"mooncake-cpu.*libibverbs") as caught:
        MooncakeEngine(TransferConfig()).start()
    assert isinstance(caught.value.__cause__, ImportError)
    assert str(caught.value.__cause__) in caught.value.message


@pytest.mark.parametrize(
    ("call", "code", "error"),
    [
        ("initialize", -1, ConfigError),
        ("register", -7, RegistrationError),
        ("register", -99, RegistrationError),
        ("probe", -102, PeerLost),
        ("submit", 0, PeerLost),
        ("status", -1, TransferFailed),
    ],
)
def test_codes_become_our_errors(call, code, error):
    found = mooncake.translate(call, code, peer="a:1")
    assert type(found) is error
    assert str(code) in found.message
    assert found.context == {"peer": "a:1"}


def test_importing_the_package_loads_neither_torch_nor_mooncake():
    code = (
        "import sys, moonrelay.transfer\n"
        "from moonrelay.transfer import faulty, memory, mooncake, shm\n"
        "print([name for name in ('torch', 'mooncake') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
