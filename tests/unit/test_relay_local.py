"""The embedded relay's folder: whose it is, how full it is, what a crash leaves."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
from pathlib import Path

import pytest

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import StoreConfig
from moonrelay.errors import CapacityError, ConfigError, IntegrityError, PeerLost, TransferFailed, TransferTimeout
from moonrelay.handle import Extent
from moonrelay.relay import local
from moonrelay.relay.local import LocalRelay


def soon(seconds: float = 10.0) -> Deadline:
    return Deadline(seconds, SystemClock())


def make(root: Path, capacity_bytes: int = 1 << 20) -> LocalRelay:
    relay = LocalRelay(StoreConfig(url=f"local://{root}", capacity_bytes=capacity_bytes))
    relay.start()
    return relay


def put(relay: LocalRelay, key: str, nbytes: int) -> None:
    buffer = (ctypes.c_char * nbytes)()
    relay.put(key, [Extent(ctypes.addressof(buffer), nbytes)], soon())


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name != "lock")


def used(root: Path) -> int:
    return int.from_bytes((root / "lock").read_bytes(), "little")


def test_the_default_folder_is_this_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = LocalRelay(StoreConfig(url=None)).url
    assert url.endswith(f"/moonrelay-{os.geteuid()}")
    root = tmp_path / "default"
    monkeypatch.setattr(local, "_default_root", lambda: root)
    relay = LocalRelay(StoreConfig(url=None))
    relay.start()
    assert root.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(local.os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        make(tmp_path)
    assert files(tmp_path) == []


def test_a_link_a_file_and_an_open_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("x")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name in ("link", "file", "open"):
        with pytest.raises(ConfigError, match=name):
            make(tmp_path / name)


def test_the_count_of_used_bytes_follows_every_change(tmp_path: Path) -> None:
    relay = make(tmp_path, 1000)
    put(relay, "a", 400)
    put(relay, "b", 500)
    assert used(tmp_path) == 900
    with pytest.raises(CapacityError):
        put(relay, "c", 101)
    with pytest.raises(IntegrityError):
        put(relay, "a", 100)
    assert used(tmp_path) == 900
    relay.remove(["a", "a", "nothing"], soon())
    assert used(tmp_path) == 500
    put(relay, "c", 500)
    assert files(tmp_path) == ["objects/kb", "objects/kc"]


def test_a_dead_writers_file_is_swept_and_a_living_ones_is_not(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "tmp" / "dead").write_bytes(bytes(300))
    (tmp_path / "tmp" / "living").write_bytes(bytes(200))
    with (tmp_path / "tmp" / "living").open("rb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        make(tmp_path)
        assert files(tmp_path) == ["tmp/living"]
        assert used(tmp_path) == 200
    relay = make(tmp_path, 250)
    put(relay, "a", 250)
    assert files(tmp_path) == ["objects/ka"]


def test_a_count_that_a_crash_left_too_high_is_made_anew_before_anybody_is_refused(tmp_path: Path) -> None:
    relay = make(tmp_path, 1000)
    put(relay, "a", 400)
    (tmp_path / "lock").write_bytes((10**9).to_bytes(8, "little"))
    put(relay, "b", 600)
    assert used(tmp_path) == 1000
    (tmp_path / "lock").write_bytes(b"")
    with pytest.raises(CapacityError):
        put(relay, "c", 1)


def test_a_file_linked_but_not_yet_unlinked_counts_once(tmp_path: Path) -> None:
    relay = make(tmp_path, 1000)
    put(relay, "a", 600)
    temporary = tmp_path / "tmp" / "committing"
    os.link(tmp_path / "objects" / "ka", temporary)
    with temporary.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CapacityError):
            put(relay, "b", 500)
        assert used(tmp_path) == 600


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_file_system_is_a_capacity_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    relay = make(tmp_path)

    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(local.os, "pwritev", full)
    with pytest.raises(CapacityError):
        put(relay, "a", 100)
    assert files(tmp_path) == []
    assert used(tmp_path) == 0


def test_memory_that_is_not_mapped_is_a_typed_error_and_leaves_nothing(tmp_path: Path) -> None:
    relay = make(tmp_path)
    quiet: list[int] = []
    with pytest.raises(TransferFailed):
        relay.put("a", [Extent(4096, 100)], soon(), on_quiet=lambda: quiet.append(1))
    assert (files(tmp_path), used(tmp_path), quiet) == ([], 0, [1])
    put(relay, "a", 100)
    with pytest.raises(TransferFailed):
        relay.get("a", [Extent(4096, 100)], soon())


def test_short_reads_and_writes_are_continued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    relay = make(tmp_path)
    write, read = os.pwritev, os.preadv

    def short(views: list[memoryview]) -> list[memoryview]:
        return [views[0][:7]] if len(views) == 1 else views[:-1]

    monkeypatch.setattr(local.os, "pwritev", lambda fd, views, at: write(fd, short(views), at))
    monkeypatch.setattr(local.os, "preadv", lambda fd, views, at: read(fd, short(views), at))
    source = (ctypes.c_char * 100).from_buffer_copy(bytes(range(100)))
    target = (ctypes.c_char * 100)()
    cuts = [0, 13, 14, 60, 100]
    for buffer, move in ((source, relay.put), (target, relay.get)):
        base = ctypes.addressof(buffer)
        move("a", [Extent(base + a, b - a) for a, b in itertools.pairwise(cuts)], soon())
    assert target.raw == source.raw


def test_an_object_that_was_cut_short_is_an_integrity_error(tmp_path: Path) -> None:
    relay = make(tmp_path)
    put(relay, "a", 100)
    os.truncate(tmp_path / "objects" / "ka", 60)
    buffer = (ctypes.c_char * 100)()
    with pytest.raises(IntegrityError, match="60 bytes, not 100"):
        relay.get("a", [Extent(ctypes.addressof(buffer), 100)], soon())


def test_a_folder_that_vanished_is_a_lost_peer(tmp_path: Path) -> None:
    root = tmp_path / "store"
    relay = make(root)
    for name in ("objects", "tmp"):
        (root / name).rmdir()
    (root / "lock").unlink()
    root.rmdir()
    with pytest.raises(PeerLost):
        put(relay, "a", 1)
    with pytest.raises(PeerLost):
        relay.keys("", soon())


def test_a_stopped_holder_of_the_lock_delays_nobody_beyond_the_deadline(tmp_path: Path) -> None:
    relay = make(tmp_path)
    put(relay, "a", 10)
    with (tmp_path / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        buffer = (ctypes.c_char * 10)()
        with pytest.raises(TransferTimeout):
            relay.put("b", [Extent(ctypes.addressof(buffer), 10)], soon(0.05))
        with pytest.raises(TransferTimeout):
            relay.remove(["a"], soon(0.05))
        assert relay.get("a", [Extent(ctypes.addressof(buffer), 10)], soon())


def test_ages_are_reckoned_on_the_machines_monotonic_clock(tmp_path: Path) -> None:
    relay = make(tmp_path)
    put(relay, "a", 10)
    age = relay.age_s("a")
    assert age is not None
    assert 0 <= age < 60
    path = tmp_path / "objects" / "ka"
    now = SystemClock().monotonic()
    os.utime(path, (now - 500, now - 500))
    older = relay.age_s("a")
    assert older is not None
    assert 500 <= older < 560
    os.utime(path, (now + 9999, now + 9999))
    assert relay.age_s("a") is None, "a stamp from before the last boot tells nothing"
    assert relay.age_s("none") is None
