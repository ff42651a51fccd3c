"""The SQLite backend's own matters: URLs, files, versions, boots, several connections, bells."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from moonrelay.clock import ManualClock
from moonrelay.errors import ConfigError, DeadlineExceeded, IntegrityError, MoonrelayError, VersionError
from moonrelay.handle import LeaseTerms, StageHandle
from moonrelay.payload import ChunkPlan
from moonrelay.queueing import Pipeline, StageQueue, StageSpec, StageTask, schema, sqlite
from moonrelay.queueing.wakeup import Bell
from moonrelay.tree import encode_tree


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "queue.db"


def connect(path: Path, **kwargs: object) -> StageQueue:
    return StageQueue.connect(f"sqlite:///{path}", **kwargs)  # type: ignore[arg-type]


class TestUrl:
    @pytest.mark.parametrize(
        "url",
        [
            "sqlite://",
            "sqlite:///",
            "sqlite://run/queue.db",
            "sqlite:///:memory:",
            "sqlite:///queue.db?mode=ro",
            "sqlite:///queue.db#x",
            "sqlite:///no/such/folder/queue.db",
            "sqlite:////tmp",
            "sqlite:///a%00b",
        ],
    )
    def test_what_names_no_file_is_refused(self, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError) as caught:
            StageQueue.connect(url)
        assert caught.value.context["field"] == "url"
        assert list(tmp_path.iterdir()) == []

    def test_relative_and_absolute_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "run").mkdir()
        with StageQueue.connect("sqlite:///run/a%20b.db") as one:
            assert (tmp_path / "run" / "a b.db").is_file()
            monkeypatch.chdir("/")
            one.submit(StageTask(stage="encode", request_id="r1"))
            with StageQueue.connect(one.url) as other:
                assert [view.request_id for view in other.requests()] == ["r1"]

    def test_a_folder_without_rights_is_a_config_error(self, tmp_path: Path) -> None:
        (tmp_path / "queue.db").symlink_to(tmp_path / "gone" / "queue.db")
        with pytest.raises(ConfigError):
            connect(tmp_path / "queue.db")


class TestFile:
    def test_it_outlives_its_connections(self, path: Path) -> None:
        with connect(path) as queue:
            queue.submit(StageTask(stage="encode", request_id="r1", payload={"n": 1}))
        with connect(path) as queue:
            with queue.register_worker("encode").claim(timeout_s=5) as job:
                assert job is not None
                assert job.task.payload == {"n": 1}
                job.complete(result=2)
            assert queue.result("r1", timeout_s=5) == 2

    def test_nothing_else_is_left_beside_it(self, path: Path) -> None:
        with connect(path) as queue, queue.register_worker("encode") as worker:
            assert worker.take(timeout_s=0.01) is None
            assert stat.S_ISFIFO(next(path.with_name("queue.db-bells").iterdir()).stat().st_mode)
        assert list(path.parent.iterdir()) == [path]

    def test_what_is_no_database_is_told(self, path: Path) -> None:
        path.write_bytes(b"not a database" * 100)
        with pytest.raises(IntegrityError, match="not a SQLite database"):
            connect(path)
        assert list(path.parent.iterdir()) == [path]

    def test_damage_is_told(self, path: Path) -> None:
        with connect(path) as queue:
            for number in range(200):
                queue.submit(StageTask(stage="encode", request_id=f"r{number}", payload="x" * 500))
        raw = bytearray(path.read_bytes())
        raw[8192:] = b"\xa5" * (len(raw) - 8192)
        path.write_bytes(raw)
        with pytest.raises(IntegrityError), connect(path) as queue:
            queue.requests()

    def test_a_truncated_file_is_told(self, path: Path) -> None:
        with connect(path):
            pass
        os.truncate(path, 5000)
        with pytest.raises(IntegrityError), connect(path) as queue:
            queue.requests()

    def test_another_programs_database_is_left_alone(self, path: Path) -> None:
        db = sqlite3.connect(path)
        db.execute("CREATE TABLE theirs (x)")
        db.close()
        with pytest.raises(ConfigError, match="another program"):
            connect(path)

    def test_another_version_is_refused_naming_both(self, path: Path) -> None:
        connect(path).close()
        db = sqlite3.connect(path)
        db.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
        db.close()
        with pytest.raises(VersionError, match=f"version {schema.VERSION + 1}, this is version {schema.VERSION}"):
            connect(path)

    def test_a_missing_table_is_told(self, path: Path) -> None:
        connect(path).close()
        db = sqlite3.connect(path)
        db.execute("DROP TABLE event")
        db.close()
        with pytest.raises(IntegrityError, match="no such table"), connect(path) as queue:
            queue.submit(StageTask(stage="encode", request_id="r1"))

    def test_a_lock_that_stays_is_a_typed_error(self, path: Path) -> None:
        with connect(path, config={"busy_timeout_s": 0.05}) as queue:
            db = sqlite3.connect(path, isolation_level=None)
            db.execute("BEGIN IMMEDIATE")
            with pytest.raises(DeadlineExceeded, match="locked") as caught:
                queue.submit(StageTask(stage="encode", request_id="r1"))
            assert caught.value.retryable
            db.execute("ROLLBACK")
            db.close()
            queue.submit(StageTask(stage="encode", request_id="r1"))

    def test_the_pipeline_is_stored_and_agreed_on(self, path: Path) -> None:
        mine = Pipeline([StageSpec(name="a", kind="admission", downstream="b"), StageSpec(name="b")])
        with connect(path, pipeline=mine):
            with connect(path) as other:
                assert other.pipeline == mine
            with pytest.raises(ConfigError) as caught:
                connect(path, pipeline=Pipeline([StageSpec(name="a")]))
            assert caught.value.context["field"] == "pipeline"

    def test_a_stage_handle_comes_back_as_one_and_bytes_as_bytes(self, path: Path) -> None:
        handle = make_handle()
        with connect(path) as queue, queue.register_worker("decode", slots=2) as worker:
            queue.submit(StageTask(stage="decode", request_id="r1", handle=handle))
            queue.submit(StageTask(stage="decode", request_id="r2", handle=handle.to_bytes()))
            for wanted in (handle, handle.to_bytes()):
                with worker.claim(timeout_s=5) as job:
                    assert job is not None
                    assert job.task.handle == wanted
                    job.complete(result=1)

    def test_a_handle_that_cannot_be_read_fails_its_request_only(self, path: Path) -> None:
        config = {"retry_delay_s": 0.0}
        with connect(path, config=config) as queue, queue.register_worker("decode", heartbeat=False) as worker:
            queue.submit(StageTask(stage="decode", request_id="r1", handle=make_handle(), max_attempts=2))
            queue.submit(StageTask(stage="decode", request_id="r2"))
            db = sqlite3.connect(path)
            db.execute("UPDATE stage SET handle = x'00' WHERE request_id = 'r1'")
            db.commit()
            db.close()
            job = worker.take(timeout_s=5)
            assert job is not None
            assert job.request_id == "r2"
            with pytest.raises(MoonrelayError) as caught:
                queue.result("r1", timeout_s=5)
            assert caught.value.context["state"] == "dead"


class TestBoot:
    def test_a_file_of_an_earlier_boot_is_carried_over(self, path: Path) -> None:
        before, after = ManualClock(900_000.0), ManualClock(50.0)
        queue = connect(path, clock=before)
        for request_id, deadline_s in (("running", None), ("waiting", 30)):
            queue.submit(StageTask(stage="encode", request_id=request_id, deadline_s=deadline_s))
        worker = queue.register_worker("encode", heartbeat=False)
        job = worker.take(timeout_s=0)
        assert job is not None
        db = sqlite3.connect(path)
        db.execute("UPDATE meta SET value = x'00' WHERE name = 'boot'")
        db.commit()
        db.close()
        with connect(path, clock=after) as later:
            views = {view.request_id: view for view in later.requests()}
            assert views["running"].state == "queued"
            assert views["waiting"].deadline_in_s == 30
            assert later.stats().workers == ()
            again = later.register_worker("encode", heartbeat=False).take(timeout_s=0)
            assert again is not None
            assert (again.request_id, again.attempt, again.token > job.token) == ("running", 2, True)
            after.advance(31)
            assert {view.request_id: view.state for view in later.requests()}["waiting"] == "failed"
        queue.close()

    def test_the_same_boot_changes_nothing(self, path: Path) -> None:
        with connect(path) as queue:
            worker = queue.register_worker("encode")
            with connect(path) as other:
                assert [view.worker_id for view in other.stats().workers] == [worker.worker_id]


class TestTwoConnections:
    def test_a_waiter_hears_of_the_others_commit(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sqlite, "_FIRST_POLL_S", 60.0)  # so that only the bell can be in time
        config = {"poll_s": 60.0}
        with connect(path, config=config) as one, connect(path, config=config) as other:
            got: list[object] = []
            with one.register_worker("encode") as worker:
                thread = threading.Thread(target=lambda: got.append(worker.take(timeout_s=30)))
                thread.start()
                while not (bells := list(path.with_name("queue.db-bells").glob("[0-9]*"))):
                    assert thread.is_alive()
                assert len(bells) == 1
                other.submit(StageTask(stage="encode", request_id="r1"))
                thread.join(30)
                assert got[0] is not None

    def test_a_lost_wake_up_is_healed_by_polling(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with connect(path, config={"poll_s": 0.05}) as one, connect(path) as other:
            monkeypatch.setattr(Bell, "ring", lambda _self: None)
            got: list[object] = []
            thread = threading.Thread(target=lambda: got.append(one.result("r1", timeout_s=30)))
            other.submit(StageTask(stage="encode", request_id="r1"))
            thread.start()
            with other.register_worker("encode").claim(timeout_s=5) as job:
                assert job is not None
                job.complete(result=5)
            thread.join(30)
            assert got == [5]

    def test_without_fifos_it_polls(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_args: object) -> None:
            raise PermissionError(1, "no FIFOs here")

        monkeypatch.setattr(os, "mkfifo", refuse)
        self.test_a_lost_wake_up_is_healed_by_polling(path, monkeypatch)


class TestBell:
    def test_rings_reach_others_and_not_oneself(self, tmp_path: Path) -> None:
        one, other = Bell(tmp_path / "bells"), Bell(tmp_path / "bells")
        one.hang_up()
        other.hang_up()
        one.ring()
        assert other.wait(0.0)
        assert not other.wait(0.0)
        assert not one.wait(0.0)
        for _ in range(100):
            one.ring()
        assert other.wait(0.0)
        assert not other.wait(0.0)  # a hundred rings are one
        one.close()
        other.close()
        one.close()
        assert not (tmp_path / "bells").exists()

    def test_a_dead_waiters_bell_is_cleared_away(self, tmp_path: Path) -> None:
        folder = tmp_path / "bells"
        bell = Bell(folder)
        bell.hang_up()
        os.mkfifo(folder / "1-dead")
        os.mkfifo(folder / ".4194304-draft")  # above the largest pid
        os.mkfifo(folder / f".{os.getpid()}-draft")  # being made just now
        bell.ring()
        assert sorted(entry.name.partition("-")[0] for entry in folder.iterdir()) == [
            f".{os.getpid()}",
            str(os.getpid()),
        ]
        (folder / f".{os.getpid()}-draft").unlink()
        bell.close()

    def test_a_full_bell_does_not_block_the_ringer(self, tmp_path: Path) -> None:
        one, other = Bell(tmp_path / "bells"), Bell(tmp_path / "bells")
        other.hang_up()
        fd = other._fd
        assert fd is not None
        try:
            while True:
                os.write(fd, b"\0" * 4096)
        except BlockingIOError:
            pass
        one.ring()
        other.wake_self()
        assert other.wait(0.0)
        one.close()
        other.close()


def make_handle() -> StageHandle:
    tree, _leaves = encode_tree({"steps": 4}, "data")
    return StageHandle(
        id="0" * 32,
        request_id="r1",
        kind="latent",
        attempt=0,
        tree=tree,
        tensors=(),
        chunks=ChunkPlan(dim=None, sizes=(1,)),
        digest="off",
        lease=LeaseTerms(policy="delete_on_consume", readers=1, ttl_s=None),
    )
