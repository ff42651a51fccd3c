"""The front on HTTP with an engine of the test's own: bodies, forms, statuses and clients that go away.

Needs what the host brings (starlette, httpx), not the host's engine.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest
from serve_double import House, until

from moonrelay_vllm_omni.serve import media
from moonrelay_vllm_omni.serve.supervisor import State

pytestmark = pytest.mark.vllm_omni

IMAGES = "/v1/images/generations"


def served(tmp_path: Path, check: Callable[[House, Any], Awaitable[None]], makes: str = "image", **more: Any) -> None:
    """Run a check against a front, with a client that calls it without a socket."""
    from moonrelay_vllm_omni.serve.routes import application

    async def run() -> None:
        house = House(tmp_path, makes, **more)
        transport = httpx.ASGITransport(application(house.front))
        async with house, httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            await check(house, client)

    asyncio.run(asyncio.wait_for(run(), 60.0))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "no JSON"),
        (b"", "no JSON"),
        (b"[]", "must be a JSON object, not list"),
        (b'{"prompt": "a", "seed": NaN}', "seed=nan"),
        (b"[" * 100_000, "no JSON"),
        (b"\xff\xfe", "no JSON"),
    ],
)
def test_bodies_that_say_nothing(tmp_path: Path, content: bytes, told: str) -> None:
    async def check(house: House, client: Any) -> None:
        answer = await client.post(IMAGES, content=content)
        assert answer.status_code == 400
        assert told in answer.json()["error"]["message"]
        assert house.engine.orders == []

    served(tmp_path, check)


def test_a_body_that_is_too_long(tmp_path: Path) -> None:
    async def check(_house: House, client: Any) -> None:
        for path, kind in ((IMAGES, "application/json"), ("/v1/videos", "application/x-www-form-urlencoded")):
            answer = await client.post(path, content=b"a" * (1 << 20) + b"b", headers={"content-type": kind})
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")

    served(tmp_path, check)


def test_what_is_not_there_is_told_in_openais_form(tmp_path: Path) -> None:
    async def check(_house: House, client: Any) -> None:
        for answer, status in (
            (await client.get("/v1/nonesuch"), 404),
            (await client.get(IMAGES), 405),
            (await client.get("/v1/videos/video_1"), 404),
            (await client.get("/v1/videos/video_1/content"), 404),
            (await client.delete("/v1/videos/video_1"), 404),
            (await client.get("/v1/models/gpt"), 404),
        ):
            assert answer.status_code == status
            assert answer.json()["error"].keys() == {"message", "type", "code", "param"}
        assert (await client.get("/v1/models/tiny")).json()["id"] == "tiny"

    served(tmp_path, check)


def test_an_image(tmp_path: Path) -> None:
    async def check(_house: House, client: Any) -> None:
        answer = await client.post(IMAGES, json={"prompt": "a", "n": 2})
        assert answer.status_code == 200
        assert len(answer.json()["data"]) == 2
        numbers = (await client.get("/metrics")).text
        assert f'moonrelay_serve_answers_total{{route="{IMAGES}",status="200"}} 1' in numbers
        assert "process_cpu_seconds_total" in numbers, "the host's registry is told too"

    served(tmp_path, check)


def test_refusals_say_when_to_come_again(tmp_path: Path) -> None:
    async def check(house: House, client: Any) -> None:
        house.engine.held = asyncio.Event()
        first = asyncio.ensure_future(client.post(IMAGES, json={"prompt": "a"}))
        second = asyncio.ensure_future(client.post(IMAGES, json={"prompt": "b"}))
        await until(lambda: house.front.health()[1]["waiting"] == 1)
        full = await client.post(IMAGES, json={"prompt": "c"})
        assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(full.headers["retry-after"]) >= 1
        house.engines.go.clear()
        house.engine.die(2)
        sick = await client.get("/health")
        assert (sick.status_code, sick.json()["dead_stages"]) == (503, [2])
        assert int(sick.headers["retry-after"]) >= 1
        down = await client.post(IMAGES, json={"prompt": "c"})
        assert (down.status_code, down.json()["error"]["code"]) == (503, "engine_unavailable")
        assert int(down.headers["retry-after"]) >= 1
        house.engine.held.set()
        assert (await first).json()["error"]["code"] == "stage_died"
        await until(house.engine.closed.is_set)
        house.clock.advance(5.0)
        house.engines.go.set()
        assert (await second).status_code == 200
        await house.reaches(State.READY)
        assert (await client.get("/health")).status_code == 200

    served(tmp_path, check, max_running=1, max_waiting=1)


def test_a_defect_of_ours_is_told_in_openais_form(tmp_path: Path) -> None:
    async def check(house: House, client: Any) -> None:
        house.engine.fails = ZeroDivisionError("oh")  # type: ignore[assignment]
        answer = await client.post(IMAGES, json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")

    served(tmp_path, check)


def test_a_client_that_goes_away_gives_its_request_up(tmp_path: Path) -> None:
    from moonrelay_vllm_omni.serve.routes import application

    async def run() -> None:
        async with House(tmp_path, max_running=1) as house:
            house.engine.held = asyncio.Event()
            body = json.dumps({"prompt": "a", "n": 2}).encode()
            gone = asyncio.Event()
            messages = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive() -> Any:
                if messages:
                    return messages.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            sent: list[Any] = []

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {
                "type": "http",
                "asgi": {"version": "3.0"},
                "http_version": "1.1",
                "method": "POST",
                "path": IMAGES,
                "raw_path": IMAGES.encode(),
                "query_string": b"",
                "headers": [],
            }
            call = asyncio.ensure_future(application(house.front)(scope, receive, send))
            await until(lambda: len(house.engine.orders) == 1)
            gone.set()
            await call
            assert sent[0]["status"] == 499
            assert house.engine.cancelled == 1
            assert (house.front.health()[1]["running"], house.front.health()[1]["waiting"]) == (0, 0)
            assert len(house.engine.orders) == 1, "the second image was never begun"

    asyncio.run(asyncio.wait_for(run(), 60.0))


def test_videos_by_json_and_by_both_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "mp4", lambda frames, fps: f"{frames[0].shape}@{fps}".encode())
    asked = {"prompt": "a", "seconds": "1", "size": "32x16"}

    async def check(house: House, client: Any) -> None:
        many = {name: (None, value) for name, value in asked.items()}
        for way in ({"json": asked}, {"data": asked}, {"files": many}):
            made = await client.post("/v1/videos", **way)
            assert made.status_code == 200, made.text
            assert (made.json()["size"], made.json()["seconds"]) == ("32x16", "1.0625")
            where = f"/v1/videos/{made.json()['id']}"
            await until(lambda where=where: house.front.video(where.rpartition("/")[2])["status"] == "completed")
            content = await client.get(f"{where}/content")
            assert (content.headers["content-type"], content.content) == ("video/mp4", b"(17, 16, 32, 3)@16")
            other = await client.get(f"{where}/content?variant=thumbnail")
            assert (other.status_code, other.json()["error"]["param"]) == (400, "variant")
        assert len((await client.get("/v1/videos")).json()["data"]) == 3
        assert (await client.delete(where)).json()["deleted"] is True
        with_file = await client.post("/v1/videos", data=asked, files={"input_reference": ("a.png", b"png")})
        assert (with_file.status_code, with_file.json()["error"]["param"]) == (400, "input_reference")
        broken = await client.post(
            "/v1/videos", content=b"--a\r\nbroken", headers={"content-type": "multipart/form-data; boundary=a"}
        )
        assert broken.status_code == 400
        nameless = await client.post("/v1/videos", content=b"x", headers={"content-type": "multipart/form-data"})
        assert nameless.status_code == 400

    served(tmp_path, check, "video")


def test_an_mp4_holds_its_frames() -> None:
    ramp = np.linspace(0.0, 1.0, 64, dtype=np.float32)
    frames = np.broadcast_to(ramp[None, None, None, :, None], (1, 5, 32, 64, 3)).copy()
    with av.open(io.BytesIO(media.mp4([frames], 8))) as video:
        decoded = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
        assert video.streams.video[0].average_rate == 8
    assert [one.shape for one in decoded] == [(32, 64, 3)] * 5
    assert abs(decoded[2].astype(float) - frames[0, 2] * 255).mean() < 6
