"""The front before small doubles of the host's servers, over real sockets: one request, all stages, ways to fail."""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from lightx2v_front_client import FrontThread
from lightx2v_front_roles import RoleProcess, free_port, result_of

from moonrelay_lightx2v.front import orders, routes, stages
from moonrelay_lightx2v.front.settings import FrontConfig

pytestmark = pytest.mark.processes

Serve = Callable[..., FrontThread]
Start = Callable[..., RoleProcess]


@pytest.fixture(scope="module")
def roles() -> Iterator[dict[str, RoleProcess]]:
    """One server of each role, shared by the tests that kill none."""
    with contextlib.ExitStack() as ended:
        started = {}
        for stage in ("encoder", "transformer", "decoder"):
            started[stage] = RoleProcess(stage)
            ended.callback(started[stage].kill)
        yield started


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers of the test's own."""
    with contextlib.ExitStack() as ended:

        def one(stage: str, **settings: Any) -> RoleProcess:
            role = RoleProcess(stage, **settings)
            ended.callback(role.kill)
            return role

        yield one


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts fronts before servers."""
    with contextlib.ExitStack() as ended:

        def one(*servers: RoleProcess | dict[str, RoleProcess], **settings: Any) -> FrontThread:
            found = [role for each in servers for role in (each.values() if isinstance(each, dict) else (each,))]
            urls = {
                stage: (*(role.url for role in found if role.stage == stage), *settings.pop(f"more_{stage}", ()))
                for stage in ("encoder", "transformer", "decoder")
            }
            front = FrontThread(FrontConfig(**urls, **{"poll_interval_s": 0.1, **settings}))
            ended.callback(front.close)
            return front

        yield one


def under_way(front: FrontThread) -> int:
    """Return how many requests the front believes its servers to have."""
    assert front.front is not None
    return sum(server.under_way for stage in front.front._servers.stages for server in stage.servers)


def test_one_post_goes_to_all_stages_under_one_id_and_one_seed(roles: dict[str, RoleProcess], serve: Serve) -> None:
    front = serve(roles)
    given = {"prompt": "a fox", "infer_steps": 7, "nested": {"x": [1, 2.5, None, "ä"]}, "big": 2**70}
    raw = orders.json.dumps(given).encode()
    answer = front.http.post("/v1/tasks/video/", content=raw)
    assert answer.status_code == 200, answer.text
    task_id = answer.json()["task_id"]
    assert answer.json() == {"task_id": task_id, "task_status": "pending", "save_result_path": task_id}
    told = front.ended(task_id)
    assert (told["status"], told["error"], told["attempt"], told["lost"]) == ("completed", None, 1, [])
    assert told["save_result_path"] == f"{task_id}.mp4"
    bodies = [next(body for body in role.seen()["bodies"] if body["task_id"] == task_id) for role in roles.values()]
    assert bodies[0] == bodies[1] == bodies[2]
    seed = bodies[0].pop("seed")
    assert 1000 < seed < 2000
    assert bodies[0] == {**given, "task_id": task_id, "route": "/v1/tasks/video/"}
    result = front.http.get(f"/v1/tasks/{task_id}/result")
    assert result.status_code == 200
    assert result.content == result_of({"prompt": "a fox", "seed": seed}, 1000)
    assert result.headers["content-type"] == "video/mp4"
    assert result.headers["content-disposition"] == f'attachment; filename="{task_id}.mp4"'
    assert front.http.get("/v1/tasks/").json()[task_id] == told
    assert under_way(front) == 0


def test_a_clients_own_id_and_seed_are_kept_and_its_id_is_taken(roles: dict[str, RoleProcess], serve: Serve) -> None:
    front = serve(roles)
    assert front.post("x", task_id="mine.one", seed=0, kind="image").json()["task_id"] == "mine.one"
    assert front.ended("mine.one")["status"] == "completed"
    body = next(one for one in roles["decoder"].seen()["bodies"] if one["task_id"] == "mine.one")
    assert (body["seed"], body["route"]) == (0, "/v1/tasks/image/")
    again = front.post("x", task_id="mine.one")
    assert again.status_code == 409
    assert "task_id='mine.one' is taken" in again.json()["detail"]
    # Another front, or this one after a new start, does not know the id; the servers do.
    other = serve(roles).post("x", task_id="mine.one")
    assert other.status_code == 409, other.text
    assert "already exists" in other.json()["detail"]


def test_two_stages(start: Start, serve: Serve, roles: dict[str, RoleProcess]) -> None:
    front = serve(roles["encoder"], roles["transformer"])
    task_id = front.post("two", seed=3).json()["task_id"]
    told = front.ended(task_id)
    assert told["status"] == "completed"
    assert list(told["stages"]) == ["encoder", "transformer"]
    result = front.http.get(f"/v1/tasks/{task_id}/result")
    assert result.content == result_of({"prompt": "two", "seed": 3}, 1000)


def test_fifty_at_once_each_get_their_own_and_every_server_the_same_order(start: Start, serve: Serve) -> None:
    servers = [start(stage) for stage in ("encoder", "transformer", "decoder")]
    front = serve(*servers)

    def one(number: int) -> tuple[bytes, bytes]:
        prompt = f"number {number}"
        task_id = front.post(prompt, seed=number).json()["task_id"]
        assert front.ended(task_id)["status"] == "completed"
        content = front.http.get(f"/v1/tasks/{task_id}/result").content
        return content, result_of({"prompt": prompt, "seed": number}, 1000)

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        results = list(pool.map(one, range(50)))
    assert all(got == wanted for got, wanted in results)
    assert len({got for got, _ in results}) == 50
    ways = [[body["task_id"] for body in server.seen()["bodies"]] for server in servers]
    assert ways[0] == ways[1] == ways[2]
    assert under_way(front) == 0
    text = front.http.get("/metrics").text
    assert 'moonrelay_lightx2v_front_requests_total{outcome="completed"} 50\n' in text


def test_a_large_result_streams_and_a_client_that_goes_away_harms_nothing(
    roles: dict[str, RoleProcess], serve: Serve
) -> None:
    front = serve(roles)
    size = 32 << 20
    task_id = front.post(f"decoder: size={size}", seed=1).json()["task_id"]
    front.ended(task_id)
    with front.http.stream("GET", f"/v1/tasks/{task_id}/result") as answer:
        assert answer.headers["content-length"] == str(size)
        next(answer.iter_raw())
    assert front.http.get("/health").status_code == 200
    whole = front.http.get(f"/v1/tasks/{task_id}/result")
    assert whole.content == result_of({"prompt": f"decoder: size={size}", "seed": 1}, size)


@pytest.mark.parametrize("words", ["", ",unmeasured"])
def test_a_result_that_breaks_off_at_the_server_breaks_off_at_the_client(
    words: str, roles: dict[str, RoleProcess], start: Start, serve: Serve
) -> None:
    decoder = start("decoder")
    front = serve(roles["encoder"], roles["transformer"], decoder)
    task_id = front.post(f"decoder: size=8000000,broken{words}").json()["task_id"]
    front.ended(task_id)
    with pytest.raises(httpx.RemoteProtocolError):
        front.http.get(f"/v1/tasks/{task_id}/result")
    gone = front.http.get(f"/v1/tasks/{task_id}/result")
    assert gone.status_code == 503
    assert decoder.url in gone.json()["detail"]
    assert front.status(task_id)["status"] == "completed"


@pytest.mark.parametrize("stage", ["encoder", "transformer", "decoder"])
def test_a_stage_that_fails_is_named_with_its_words_and_the_others_give_up(
    stage: str, roles: dict[str, RoleProcess], serve: Serve
) -> None:
    front = serve(roles)
    plan = "; ".join(f"{one}: " + ("fail=out of memory" if one == stage else "hang") for one in roles)
    task_id = front.post(plan).json()["task_id"]
    told = front.ended(task_id)
    assert (told["status"], told["stage"], told["error"]) == ("failed", stage, f"{stage}: out of memory")
    assert told["error_type"] == "RuntimeError"
    assert told["stages"][stage]["error"] == "out of memory"
    for other in roles.keys() - {stage}:
        front.until(lambda other=other: task_id in roles[other].seen()["cancelled"])  # type: ignore[misc]
    answer = front.http.get(f"/v1/tasks/{task_id}/result")
    assert (answer.status_code, answer.json()) == (404, {"detail": "Task not completed"})
    assert under_way(front) == 0


def test_of_two_that_fail_the_earlier_one_is_the_cause(roles: dict[str, RoleProcess], serve: Serve) -> None:
    front = serve(roles, poll_interval_s=1.0)
    task_id = front.post("encoder: fail=the cause; transformer: fail=follows; decoder: hang").json()["task_id"]
    assert front.ended(task_id)["error"] == "encoder: the cause"


def test_a_request_that_a_stage_refuses_is_told_so_and_taken_from_the_others(
    roles: dict[str, RoleProcess], serve: Serve
) -> None:
    front = serve(roles)
    answer = front.post("transformer: refuse=400", task_id="refused")
    assert answer.status_code == 400
    assert answer.json() == {"detail": "refused by transformer", "stage": "transformer"}
    for other in ("encoder", "decoder"):
        front.until(lambda other=other: roles[other].seen()["tasks"]["refused"] != "pending")  # type: ignore[misc]
    invalid = front.post(7)
    assert invalid.status_code == 422
    assert invalid.json()["detail"][0]["loc"] == ["body", "prompt"]
    assert front.http.get("/v1/tasks/refused/status").status_code == 404
    # The servers know the id already, so the client's second try goes to them under another one.
    assert front.post("x", task_id="refused").status_code == 200
    told = front.ended("refused")
    assert told["status"] == "completed"
    assert {stage["task_id"] for stage in told["stages"].values()} == {"refused.2"}
    assert told["save_result_path"] == "refused.mp4", "a file's name, whose end tells its kind"
    assert under_way(front) == 0


def test_a_full_queue_and_another_server(start: Start, roles: dict[str, RoleProcess], serve: Serve) -> None:
    small = start("encoder", queue_size=1)
    front = serve(small, roles["transformer"], roles["decoder"])
    first = front.post("encoder: hang; decoder: hang").json()["task_id"]
    full = front.post("x")
    assert (full.status_code, full.json()["detail"]) == (503, "Task queue is full (max 1 tasks)")
    assert int(full.headers["retry-after"]) >= 1
    assert front.http.delete(f"/v1/tasks/{first}").json()["stop_status"] == "success"

    both = serve(small, roles, max_requests=3)
    held = [both.post("encoder: hang; decoder: hang").json()["task_id"] for _ in range(3)]
    urls = [both.status(task_id)["stages"]["encoder"]["url"] for task_id in held]
    assert urls.count(small.url) == 1, "the one that was full was passed over"
    assert urls.count(roles["encoder"].url) == 2
    fourth = both.post("x")
    assert fourth.status_code == 503
    assert "--max-requests" in fourth.json()["detail"]
    assert both.http.get("/v1/tasks/queue/status").json()["queue_available"] == 0
    assert both.http.delete("/v1/tasks/all/running").json()["stop_status"] == "success"
    assert {both.status(task_id)["status"] for task_id in held} == {"cancelled"}
    assert both.post("x").status_code == 200


def test_the_server_with_the_fewest_requests_comes_first(
    start: Start, roles: dict[str, RoleProcess], serve: Serve
) -> None:
    second = start("transformer")
    front = serve(roles, second)
    for _ in range(4):
        assert front.post("decoder: hang").status_code == 200
    text = front.http.get("/metrics").text
    for url in (second.url, roles["transformer"].url):
        assert f'moonrelay_lightx2v_front_server_requests{{stage="transformer",url="{url}"}} 2\n' in text
    front.http.delete("/v1/tasks/all/running")


def test_nobody_at_a_stage_is_503_and_told(roles: dict[str, RoleProcess], serve: Serve) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    front = serve(roles["encoder"], roles["decoder"], more_transformer=(nobody,))
    answer = front.post("encoder: hang", task_id="nobody")
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert f"transformer at {nobody} cannot be reached" in answer.json()["detail"]
    front.until(lambda: "nobody" in roles["encoder"].seen()["cancelled"])
    health = front.http.get("/health")
    assert health.status_code == 503
    assert health.json()["detail"] == "no server of transformer can be reached"
    assert health.json()["stages"]["encoder"] == {roles["encoder"].url: "ok"}

    # Another server of that stage is all that it takes; the one that is not there is asked last from then on.
    other = serve(roles, more_transformer=(nobody,))
    for _ in range(4):
        assert other.post("x").status_code == 200
    health = other.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert health.json()["stages"]["transformer"][nobody] != "ok"
    text = other.http.get("/metrics").text
    assert f'moonrelay_lightx2v_front_server_reachable{{stage="transformer",url="{nobody}"}} 0\n' in text


@pytest.mark.parametrize("stage", ["encoder", "transformer", "decoder"])
def test_a_server_killed_in_the_midst_and_started_again(
    stage: str, roles: dict[str, RoleProcess], start: Start, serve: Serve
) -> None:
    victim = start(stage)
    front = serve(*(role for role in roles.values() if role.stage != stage), victim, restart_wait_s=60.0)
    task_id = front.post(f"{stage}: hang=first; decoder: hang=first", seed=5, task_id=f"killed-{stage}").json()[
        "task_id"
    ]
    front.until(lambda: front.status(task_id)["stages"][stage]["status"] == "processing")
    victim.kill()
    front.until(lambda: front.status(task_id)["lost"] != [])
    told = front.status(task_id)
    assert told["status"] == "pending"
    assert victim.url in told["lost"][0]
    with contextlib.closing(front.http.get("/health")) as health:
        assert health.status_code == 503
    again = victim.again()
    try:
        told = front.ended(task_id)
        assert (told["status"], told["attempt"]) == ("completed", 2), told
        wire_ids = {view["task_id"] for view in told["stages"].values()}
        assert len(wire_ids) == 1
        assert re.fullmatch(rf"{task_id}\.\d", wire_ids.pop())
        result = front.http.get(f"/v1/tasks/{task_id}/result")
        assert result.content == result_of({"prompt": f"{stage}: hang=first; decoder: hang=first", "seed": 5}, 1000)
        assert told["save_result_path"] == f"{task_id}.mp4"
        text = front.http.get("/metrics").text
        assert f'moonrelay_lightx2v_front_lost_total{{stage="{stage}"}} 1\n' in text
        assert under_way(front) == 0
    finally:
        again.kill()


def test_a_killed_servers_requests_go_to_the_other_one(
    roles: dict[str, RoleProcess], start: Start, serve: Serve
) -> None:
    first, second = start("transformer"), start("transformer")
    front = serve(roles["encoder"], roles["decoder"], first, second)
    plan = "transformer: work=1; decoder: work=1.5"
    ids = [front.post(plan).json()["task_id"] for _ in range(4)]
    first.kill()
    told = [front.ended(task_id) for task_id in ids]
    assert {one["status"] for one in told} == {"completed"}
    assert {one["stages"]["transformer"]["url"] for one in told if one["attempt"] == 2} == {second.url}
    assert [one["attempt"] for one in told].count(2) in (1, 2), "those of the first"


def test_a_server_that_has_forgotten(roles: dict[str, RoleProcess], start: Start, serve: Serve) -> None:
    transformer = start("transformer")
    front = serve(roles["encoder"], transformer, roles["decoder"])
    task_id = front.post("transformer: hang=first; decoder: hang=first").json()["task_id"]
    transformer.forget()
    told = front.ended(task_id)
    assert (told["status"], told["attempt"]) == ("completed", 2)
    assert "has forgotten the task" in told["lost"][0]


def test_a_second_attempt_does_not_go_by_what_the_client_called_the_first(
    roles: dict[str, RoleProcess], start: Start, serve: Serve
) -> None:
    """A role that gives the first attempt up says so under that name, to whoever waits under it."""
    transformer = start("transformer")
    front = serve(roles["encoder"], transformer, roles["decoder"])
    given = {"task_id": "roomy", "data_bootstrap_room": 7, "disagg_bootstrap_room": 7}
    front.post("transformer: hang=first; decoder: hang=first", **given)
    transformer.forget()
    told = front.ended("roomy")
    assert (told["status"], told["attempt"]) == ("completed", 2)
    bodies = {body["task_id"]: body for body in roles["decoder"].seen()["bodies"]}
    assert bodies["roomy"]["data_bootstrap_room"] == bodies["roomy"]["disagg_bootstrap_room"] == 7
    again = bodies[told["stages"]["decoder"]["task_id"]]
    assert not {"data_bootstrap_room", "disagg_bootstrap_room"} & set(again)


def test_the_cause_of_a_failure_is_a_server_that_died_after_its_part(
    roles: dict[str, RoleProcess], start: Start, serve: Serve
) -> None:
    encoder = start("encoder")
    front = serve(encoder, roles["transformer"], roles["decoder"])
    task_id = front.post("transformer: work=1,fail=the encoder is gone; decoder: hang").json()["task_id"]
    front.until(lambda: front.status(task_id)["stages"]["encoder"]["status"] == "completed")
    assert front.status(task_id)["lost"] == []
    encoder.kill()
    front.until(lambda: front.status(task_id)["lost"] != [])
    (lost,) = front.status(task_id)["lost"]
    assert encoder.url in lost
    assert "transformer: the encoder is gone" in lost
    front.http.delete(f"/v1/tasks/{task_id}")


def test_attempts_are_bounded_and_the_last_word_names_stage_and_url(
    roles: dict[str, RoleProcess], start: Start, serve: Serve
) -> None:
    transformer = start("transformer")
    front = serve(roles["encoder"], transformer, roles["decoder"], attempts=2)
    task_id = front.post("transformer: hang; decoder: hang; encoder: hang").json()["task_id"]
    transformer.forget()
    front.until(lambda: front.status(task_id)["attempt"] == 2 and len(transformer.seen()["tasks"]) == 1)
    front.until(lambda: front.status(task_id)["stages"]["transformer"]["status"] == "processing")
    transformer.forget()
    told = front.ended(task_id)
    assert (told["status"], told["stage"], told["error_type"]) == ("failed", "transformer", "StageLost")
    assert transformer.url in told["error"]
    assert "the last of 2 attempts" in told["error"]
    assert len(told["lost"]) == 2
    for other in ("encoder", "decoder"):
        front.until(lambda other=other: f"{task_id}.2" in roles[other].seen()["cancelled"])  # type: ignore[misc]


def test_a_server_that_does_not_come_back_in_time(roles: dict[str, RoleProcess], start: Start, serve: Serve) -> None:
    decoder = start("decoder")
    front = serve(roles["encoder"], roles["transformer"], decoder, restart_wait_s=0.5)
    task_id = front.post("decoder: hang").json()["task_id"]
    decoder.kill()
    told = front.ended(task_id)
    assert (told["status"], told["stage"]) == ("failed", "decoder")
    assert f"no decoder can be reached ({decoder.url})" in told["error"]


def test_a_server_that_hangs_is_lost_in_the_end(
    roles: dict[str, RoleProcess], start: Start, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "LOOK_S", 1.0)
    monkeypatch.setattr("moonrelay_lightx2v.front.front.SILENT_S", 1.5)
    first, second = start("decoder"), start("decoder")
    front = serve(roles["encoder"], roles["transformer"], first, second)
    task_id = front.post("decoder: hang=first").json()["task_id"]
    assert front.status(task_id)["stages"]["decoder"]["url"] == first.url
    first.stop()
    try:
        told = front.ended(task_id)
        assert (told["status"], told["stages"]["decoder"]["url"]) == ("completed", second.url)
        assert "does not answer" in told["lost"][0]
    finally:
        first.go_on()


def test_a_server_that_does_not_answer_the_post(
    roles: dict[str, RoleProcess], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "POST_S", 1.5)
    front = serve(roles, attempts=1)
    answer = front.post("decoder: late=5; encoder: hang", task_id="late")
    assert answer.status_code == 503
    assert "decoder at" in answer.json()["detail"]
    front.until(lambda: "late" in roles["encoder"].seen()["cancelled"])
    assert under_way(front) == 0


def test_the_deadline(roles: dict[str, RoleProcess], serve: Serve) -> None:
    front = serve(roles, request_timeout_s=2.5)
    task_id = front.post("decoder: hang; transformer: hang").json()["task_id"]
    told = front.ended(task_id)
    assert (told["status"], told["stage"], told["error_type"]) == ("failed", "transformer", "Timeout")
    assert told["error"].startswith("not done in 2.5 s (encoder completed, transformer processing, decoder processing)")
    for stage in ("transformer", "decoder"):
        front.until(lambda stage=stage: task_id in roles[stage].seen()["cancelled"])  # type: ignore[misc]


def test_the_deadline_while_a_post_is_not_answered(roles: dict[str, RoleProcess], serve: Serve) -> None:
    front = serve(roles, request_timeout_s=1.5)
    answer = front.post("decoder: late=5; encoder: hang", task_id="slow")
    assert answer.status_code == 504
    assert "--request-timeout" in answer.json()["detail"]
    assert "slow" in roles["encoder"].seen()["cancelled"]


def test_cancelled_by_its_client(roles: dict[str, RoleProcess], serve: Serve) -> None:
    front = serve(roles)
    task_id = front.post("transformer: hang; decoder: hang").json()["task_id"]
    front.until(lambda: front.status(task_id)["status"] == "processing")
    assert front.http.delete(f"/v1/tasks/{task_id}").json() == {
        "stop_status": "success",
        "reason": "Task stopped successfully.",
    }
    told = front.status(task_id)
    assert (told["status"], told["error"]) == ("cancelled", "Task cancelled by user")
    assert told["stages"]["transformer"]["status"] == "cancelled"
    for stage in ("transformer", "decoder"):
        assert task_id in roles[stage].seen()["cancelled"], "the answer comes when the stages were told"
    for other in (task_id, "nonesuch"):
        assert front.http.delete(f"/v1/tasks/{other}").json()["stop_status"] == "do_nothing"
    assert under_way(front) == 0


def test_cancelled_at_a_stage_by_somebody_else(roles: dict[str, RoleProcess], serve: Serve) -> None:
    front = serve(roles)
    task_id = front.post("encoder: hang; transformer: hang; decoder: hang").json()["task_id"]
    front.until(lambda: front.status(task_id)["status"] == "processing")
    httpx.delete(f"{roles['encoder'].url}/v1/tasks/{task_id}", trust_env=False)
    assert front.ended(task_id)["status"] in ("cancelled", "failed")
    front.until(lambda: task_id in roles["decoder"].seen()["cancelled"])


def test_cancelled_while_its_post_is_under_way(roles: dict[str, RoleProcess], serve: Serve) -> None:
    front = serve(roles)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        posting = pool.submit(front.post, "decoder: late=5; encoder: hang", task_id="hasty")
        front.until(lambda: front.http.get("/v1/tasks/hasty/status").status_code == 200)
        assert front.http.delete("/v1/tasks/hasty").json()["stop_status"] == "success"
        answer = posting.result(30)
    assert answer.status_code == 503
    assert front.status("hasty")["status"] == "cancelled"


def test_a_client_that_goes_away_after_its_post(roles: dict[str, RoleProcess], serve: Serve) -> None:
    front = serve(roles)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{front.url}/v1/tasks/video/",
            json={"prompt": "decoder: late=1", "task_id": "left"},
            timeout=0.3,
            trust_env=False,
        )
    assert front.ended("left")["status"] == "completed"


def test_ended_requests_that_are_kept_are_bounded(
    roles: dict[str, RoleProcess], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "KEPT", 3)
    front = serve(roles)
    ids = []
    for _ in range(6):
        ids.append(front.post("x").json()["task_id"])
        front.ended(ids[-1])
    front.until(lambda: list(front.http.get("/v1/tasks/").json()) == ids[3:])
    assert front.http.get(f"/v1/tasks/{ids[0]}/status").status_code == 404
    assert front.status(ids[3])["status"] == "completed"


def test_a_waiting_request_is_looked_at_ever_more_seldom(roles: dict[str, RoleProcess], serve: Serve) -> None:
    front = serve(roles, poll_interval_s=0.5)
    before = roles["decoder"].seen()["looks"]
    task_id = front.post("decoder: hang").json()["task_id"]
    began_s = time.monotonic()
    threading.Event().wait(3)
    looks = roles["decoder"].seen()["looks"] - before
    took_s = time.monotonic() - began_s
    front.http.delete(f"/v1/tasks/{task_id}")
    assert looks <= 8 + took_s / 0.5, looks


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"{", 400, "no JSON"),
        (b"[1]", 400, "must be a JSON object, not list"),
        (b"[" * 100_000, 400, "no JSON"),
        (b'{"task_id": "../x"}', 400, "task_id='../x' cannot be an id"),
        (b'{"task_id": 7}', 400, "task_id='7' cannot be an id"),
        (b'{"task_id": ""}', 400, "leave it out"),
        (b'{"task_id": "queue"}', 400, "are not 'queue'"),
    ],
)
def test_a_body_that_is_none(roles: dict[str, RoleProcess], serve: Serve, body: bytes, status: int, told: str) -> None:
    answer = serve(roles).http.post("/v1/tasks/video/", content=body)
    assert answer.status_code == status
    assert told in answer.json()["detail"]


def test_bodies_are_bounded(roles: dict[str, RoleProcess], serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    front = serve(roles)
    monkeypatch.setattr(orders, "MOST_BODY_BYTES", 5000)
    held = front.post("decoder: hang", image_path="a" * 4000)
    assert held.status_code == 200
    full = front.post("x", image_path="a" * 4000)
    assert (full.status_code, full.headers["retry-after"]) == (503, "5")
    front.http.delete("/v1/tasks/all/running")
    assert front.post("x", image_path="a" * 4000).status_code == 200
    monkeypatch.setattr(routes, "MAX_BODY_BYTES", 1000)
    large = front.http.post("/v1/tasks/video/", json={"prompt": "x" * 2000})
    assert large.status_code == 413


def test_a_client_that_sends_no_body(
    roles: dict[str, RoleProcess], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "CLIENT_S", 0.3)
    front = serve(roles)
    with socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2])), timeout=30) as raw:
        raw.sendall(b"POST /v1/tasks/video/ HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert b" 408 " in raw.recv(1000)


def test_other_routes_say_what_there_is(roles: dict[str, RoleProcess], serve: Serve) -> None:
    front = serve(roles)
    assert front.http.post("/v1/tasks/", json={"prompt": "old route"}).status_code == 200
    assert front.http.post("/v1/tasks/video", json={"prompt": "no slash"}).status_code == 200
    for answer in (front.http.get("/v1/images/generations"), front.http.post("/v1/tasks/video/form")):
        assert answer.status_code == 404
        assert "routes of tasks only" in answer.json()["detail"]
    assert front.http.put("/v1/tasks/video/").status_code == 405
    assert front.http.get("/v1/tasks/nonesuch/status").json() == {"detail": "Task not found"}
    assert front.http.get("/v1/tasks/nonesuch/result").status_code == 404


def test_the_end_of_the_front_gives_up_what_is_under_way(roles: dict[str, RoleProcess], serve: Serve) -> None:
    config = FrontConfig(**{stage: (role.url,) for stage, role in roles.items()})  # type: ignore[arg-type]
    front = FrontThread(config)
    task_id = front.post("decoder: hang").json()["task_id"]
    front.close()
    assert task_id in roles["decoder"].seen()["cancelled"]
