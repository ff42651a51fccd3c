"""``moonrelay lightx2v-front`` before the host's own servers on our connector: one POST, whoever dies."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from lightx2v_cluster import LOCAL, REQUEST, START_TIMEOUT_S, WITHIN_S, Cluster, Ports, Process, wait_for
from lightx2v_right import Right
from lightx2v_scenarios import BLUE, RED, Request

pytestmark = [pytest.mark.lightx2v, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]

#: Long enough at the transformer to be seen there. By its shape: the host's runner takes its steps from the JSON alone.
LONG: Request = {"prompt": "a red cat runs on the sea", "seed": 5, "target_shape": [768, 768]}
ENDED = ("completed", "failed", "cancelled")
TRANSFORMERS = ("transformer", "transformer-1")


@pytest.fixture(scope="module")
def cluster(wan: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two transformers between one encoder and one decoder."""
    second = Ports().take()
    keys: dict[str, dict[str, Any]] = {
        "all": {"peer_timeout_s": 10, "retry_s": 0.5, "staging_bytes": 1 << 28},
        "transformer-1": {"rendezvous_port": second},
        "decode": {"bootstrap_addr": [LOCAL, f"{LOCAL}:{second}"]},
    }
    roles = ("encoder", *TRANSFORMERS, "decode")
    folder = tmp_path_factory.mktemp("lightx2v-front")
    with Cluster(wan, folder, environment, connector="moonrelay", roles=roles, keys=keys).start() as started:
        yield started


class Front:
    """The front in a process of its own, and its client."""

    def __init__(self, cluster: Cluster, transformers: Sequence[str]) -> None:
        command = ["-m", "moonrelay.cli.main", "lightx2v-front", "--port", "0", "--poll-interval", "0.2"]
        command += ["--restart-wait", str(START_TIMEOUT_S), "--encoder", self._url(cluster, "encoder")]
        command += ["--decoder", self._url(cluster, "decode")]
        for name in transformers:
            command += ["--transformer", self._url(cluster, name)]
        self.names = {self._url(cluster, name): name for name in cluster.processes}
        self.process = Process("front", command, cluster.folder, os.environ)
        self.process.log.unlink(missing_ok=True)
        self.process.start()

        def serves() -> re.Match[str] | None:
            self.process.still_there()
            return re.search(r" on (http://\S+)", self.process.text())

        found = wait_for(serves, 60.0)
        assert found, self.process.tail()
        self.http = httpx.Client(base_url=found[1], timeout=60, trust_env=False)

    @staticmethod
    def _url(cluster: Cluster, name: str) -> str:
        return f"http://{LOCAL}:{cluster.http_ports[name]}"

    def post(self, asked: Request) -> str:
        answer = self.http.post("/v1/tasks/video/", json={**REQUEST, **asked})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["task_id"])

    def status(self, task: str) -> dict[str, Any]:
        return dict(self.http.get(f"/v1/tasks/{task}/status").json())

    def at_work(self, task: str) -> str:
        """Wait until a transformer works on a task; return which one."""

        def transformer() -> str | None:
            said = self.status(task)
            assert said["status"] not in ENDED, said
            seen = said["stages"]["transformer"]
            return self.names[seen["url"]] if seen["status"] == "processing" else None

        found = wait_for(transformer, WITHIN_S)
        assert found, self.status(task)
        return found

    def video(self, task: str, within_s: float = WITHIN_S) -> bytes:
        """Wait until a task is completed; return what it made."""
        assert wait_for(lambda: self.status(task)["status"] in ENDED, within_s), self.status(task)
        said = self.status(task)
        assert said["status"] == "completed", said
        answer = self.http.get(f"/v1/tasks/{task}/result")
        assert answer.status_code == 200, answer.text
        return answer.content


@contextmanager
def before(cluster: Cluster, *transformers: str) -> Iterator[Front]:
    front = Front(cluster, transformers)
    try:
        yield front
    finally:
        front.http.close()
        front.process.terminate()
        front.process.kill()


def is_busy(cluster: Cluster, name: str) -> bool:
    answer = httpx.get(f"http://{LOCAL}:{cluster.http_ports[name]}/v1/tasks/queue/status", trust_env=False, timeout=30)
    return bool(answer.json()["is_processing"])


def test_one_post_makes_the_undivided_video(cluster: Cluster, right: Right) -> None:
    with before(cluster, *TRANSFORMERS) as front:
        tasks = [(asked, front.post(asked)) for asked in (RED, BLUE, RED, BLUE)]
        for asked, task in tasks:
            assert front.video(task) == right(**asked).video
        used = {front.status(task)["stages"]["transformer"]["url"] for _, task in tasks}
    assert len(used) == 2, "both work"


def test_a_request_given_up_frees_who_waits_for_it(cluster: Cluster, right: Right) -> None:
    with before(cluster, *TRANSFORMERS) as front:
        task = front.post({**LONG, "seed": 6})
        front.at_work(task)
        assert wait_for(lambda: is_busy(cluster, "decode"), 30.0)
        assert front.http.delete(f"/v1/tasks/{task}").status_code == 200
        assert wait_for(lambda: not is_busy(cluster, "decode"), 10.0), "it waits on"
        assert front.status(task)["status"] == "cancelled"
        assert front.video(front.post(RED)) == right(**RED).video


def test_a_killed_transformers_request_is_made_by_another_one(cluster: Cluster, right: Right) -> None:
    with before(cluster, *TRANSFORMERS) as front:
        task = front.post(LONG)
        killed = front.at_work(task)
        cluster.kill(killed)
        made = front.video(task)
        said = front.status(task)
        assert said["attempt"] == 2
        assert front.names[said["stages"]["transformer"]["url"]] != killed
        assert made == right(**LONG).video
        cluster.restart(killed)
        assert front.video(front.post(RED)) == right(**RED).video


def test_a_killed_transformers_request_is_made_after_its_restart(cluster: Cluster, right: Right) -> None:
    if not cluster.processes["transformer"].alive:  # the test before failed
        cluster.restart("transformer")
    with before(cluster, "transformer") as front:
        task = front.post(LONG)
        front.at_work(task)
        cluster.restart("transformer")
        assert front.video(task) == right(**LONG).video
        assert front.status(task)["attempt"] == 2
