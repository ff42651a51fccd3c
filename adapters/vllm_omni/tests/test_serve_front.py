"""The front without HTTP and without the host: places, videos in the making, and an engine that dies under requests."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from serve_double import House, until

from moonrelay_vllm_omni.serve import front as front_module
from moonrelay_vllm_omni.serve import media
from moonrelay_vllm_omni.serve.errors import (
    BadRequest,
    EngineUnavailable,
    GenerationFailed,
    NotFound,
    NotReady,
    QueueIsFull,
    RequestTimedOut,
    ServeError,
    StageDied,
)
from moonrelay_vllm_omni.serve.supervisor import State


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60.0))


def colour(item: dict[str, Any]) -> int:
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(item["b64_json"]))))
    (value,) = np.unique(pixels)
    return int(value)


@pytest.fixture
def _plain_mp4(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyAV comes with the host, and is not here."""
    monkeypatch.setattr(front_module.media, "mp4", lambda frames, fps: f"{np.asarray(frames[0]).shape}@{fps}".encode())


def test_images_come_as_png_with_their_seeds(tmp_path: Path) -> None:
    async def check() -> None:
        async with House(tmp_path) as house:
            answer = await house.front.images({"prompt": "a fox", "n": 3, "seed": 5})
            assert [item["seed"] for item in answer["data"]] == [5, 6, 7]
            assert [colour(item) for item in answer["data"]] == [5, 6, 7]
            assert (answer["created"], answer["size"], answer["output_format"]) == (1_700_000_000, "32x32", "png")
            assert (await house.front.images({"prompt": "a"}))["data"][0]["seed"] == 77
            assert (house.front.health()[1]["running"], house.front.health()[1]["waiting"]) == (0, 0)

    run(check())


def test_more_than_may_wait_are_refused_and_places_come_back(tmp_path: Path) -> None:
    async def check() -> None:
        async with House(tmp_path, max_running=1, max_waiting=2) as house:
            house.engine.held = asyncio.Event()
            under_way = asyncio.ensure_future(house.front.images({"prompt": "a", "n": 3}))
            await until(lambda: len(house.engine.orders) == 1)
            health = house.front.health()[1]
            assert (health["running"], health["waiting"]) == (1, 2)
            with pytest.raises(QueueIsFull, match="3 requests are under way or wait, of 3") as refusal:
                await house.front.images({"prompt": "a"})
            assert refusal.value.status == 429
            assert refusal.value.retry_after_s is not None
            under_way.cancel()
            await asyncio.wait({under_way})
            house.engine.held = None
            assert house.engine.cancelled == 1
            answer = await house.front.images({"prompt": "a", "n": 3, "seed": 1})
            assert len(answer["data"]) == 3
            assert len(house.engine.orders) == 4, "those that waited were never begun"

    run(check())


def test_one_of_several_images_that_fails_gives_up_the_others(tmp_path: Path) -> None:
    async def check() -> None:
        async with House(tmp_path) as house:
            house.engine.fails = GenerationFailed("out of memory")
            house.engine.fails_first = {6}
            house.engine.held = asyncio.Event()
            with pytest.raises(GenerationFailed, match="out of memory"):
                await house.front.images({"prompt": "a", "n": 3, "seed": 5})
            assert house.engine.cancelled == 2
            house.engine.held = None
            assert house.front.health()[1]["running"] == 0
            house.engine.fails = None
            await house.front.images({"prompt": "a", "n": 3})

    run(check())


def test_a_request_has_its_time(tmp_path: Path) -> None:
    async def check() -> None:
        async with House(tmp_path, request_timeout_s=0.05) as house:
            house.engine.held = asyncio.Event()
            with pytest.raises(RequestTimedOut, match=r"not done in 0\.05 s") as failure:
                await house.front.images({"prompt": "a"})
            assert failure.value.status == 504
            assert house.engine.cancelled == 1
            house.engine.held = None
            await house.front.images({"prompt": "a"})

    run(check())


def test_a_stage_that_dies_fails_what_runs_and_the_next_request_works(tmp_path: Path) -> None:
    async def check() -> None:
        async with House(tmp_path, max_running=1) as house:
            first = house.engine
            first.held = asyncio.Event()
            runs = asyncio.ensure_future(house.front.images({"prompt": "a"}))
            waits = asyncio.ensure_future(house.front.images({"prompt": "b", "seed": 8}))
            await until(lambda: len(first.orders) == 1)
            house.engines.go.clear()
            first.die(2)
            first.held.set()
            with pytest.raises(StageDied, match="stage 2") as failure:
                await runs
            assert failure.value.status == 503
            # At once, not when the watch next looks.
            with pytest.raises(EngineUnavailable, match="stage 2 died") as refusal:
                await house.front.images({"prompt": "c"})
            assert refusal.value.retry_after_s is not None
            status, body, after_s = house.front.health()
            assert (status, body["status"], body["dead_stages"]) == (503, "restarting", [2])
            assert after_s is not None
            await until(first.closed.is_set)
            house.clock.advance(5.0)
            house.engines.go.set()
            assert colour((await waits)["data"][0]) == 8, "who only waited is served by the next engine"
            status, body, _ = house.front.health()
            assert (status, body["status"], body["restarts"], body["dead_stages"]) == (200, "ok", 1, [])
            await house.front.images({"prompt": "d"})

    run(check())


def test_health_looks_by_itself(tmp_path: Path) -> None:
    async def check() -> None:
        async with House(tmp_path) as house:
            house.engine.die(1)
            status, body, _ = house.front.health()
            assert (status, body["dead_stages"]) == (503, [1])
            assert "moonrelay_serve_ready 0" in house.front.metrics()

    run(check())


def test_where_the_engine_is_given_up_those_who_wait_are_told(tmp_path: Path) -> None:
    async def check() -> None:
        async with House(tmp_path, max_running=1) as house:
            first = house.engine
            first.held = asyncio.Event()
            runs = asyncio.ensure_future(house.front.images({"prompt": "a"}))
            waits = asyncio.ensure_future(house.front.images({"prompt": "b"}))
            await until(lambda: len(first.orders) == 1)
            house.engines.failures = [OSError("no memory")] * 9
            first.die(2)
            first.held.set()
            with pytest.raises(StageDied):
                await runs
            while house.supervisor.status().state is not State.FAILED:
                house.clock.advance(30.0)
                await asyncio.sleep(0.01)
            with pytest.raises(EngineUnavailable, match="no memory") as refusal:
                await waits
            assert refusal.value.retry_after_s is None

    run(check())


def test_the_other_kind_of_work_is_refused_with_its_route(tmp_path: Path) -> None:
    async def check() -> None:
        async with House(tmp_path) as house:
            with pytest.raises(BadRequest, match="makes images; use /v1/images/generations"):
                await house.front.create_video({"prompt": "a"})

    run(check())


@pytest.mark.usefixtures("_plain_mp4")
def test_a_video_is_made_beside_its_request(tmp_path: Path) -> None:
    async def check() -> None:
        async with House(tmp_path, "video") as house:
            house.engine.held = asyncio.Event()
            made = await house.front.create_video({"prompt": "a fox", "num_frames": 5, "fps": 8, "seed": 3})
            assert made["status"] == "queued"
            assert (made["object"], made["size"], made["seconds"], made["seed"]) == ("video", "32x32", "0.625", 3)
            await until(lambda: house.front.video(made["id"])["status"] == "in_progress")
            with pytest.raises(NotReady, match="is in_progress") as refusal:
                house.front.content(made["id"])
            assert refusal.value.status == 409
            house.engine.held.set()
            await until(lambda: house.front.video(made["id"])["status"] == "completed")
            told = house.front.video(made["id"])
            assert (told["progress"], told["error"], told["expires_at"]) == (100, None, 1_700_003_600)
            assert house.front.content(made["id"]) == b"(5, 32, 32, 3)@8"
            assert [one["id"] for one in house.front.videos()["data"]] == [made["id"]]
            assert (await house.front.delete_video(made["id"]))["deleted"] is True
            with pytest.raises(NotFound):
                house.front.video(made["id"])
            assert house.front.videos()["data"] == []

    run(check())


@pytest.mark.usefixtures("_plain_mp4")
def test_a_video_that_is_deleted_is_given_up_and_its_place_free(tmp_path: Path) -> None:
    async def check() -> None:
        async with House(tmp_path, "video", max_running=1, max_waiting=1) as house:
            house.engine.held = asyncio.Event()
            first = await house.front.create_video({"prompt": "a"})
            await until(lambda: len(house.engine.orders) == 1)
            second = await house.front.create_video({"prompt": "b"})
            with pytest.raises(QueueIsFull):
                await house.front.create_video({"prompt": "c"})
            await house.front.delete_video(second["id"])
            third = await house.front.create_video({"prompt": "c"})
            await house.front.delete_video(third["id"])  # before its first step
            await house.front.delete_video(first["id"])
            assert house.engine.cancelled == 1
            assert (house.front.health()[1]["running"], house.front.health()[1]["waiting"]) == (0, 0)

    run(check())


@pytest.mark.usefixtures("_plain_mp4")
def test_a_video_that_fails_says_why(tmp_path: Path) -> None:
    async def check() -> None:
        async with House(tmp_path, "video") as house:
            house.engine.fails = GenerationFailed("out of memory")
            made = await house.front.create_video({"prompt": "a"})
            await until(lambda: house.front.video(made["id"])["status"] == "failed")
            assert house.front.video(made["id"])["error"] == {"code": "generation_failed", "message": "out of memory"}
            with pytest.raises(NotReady, match="failed: out of memory"):
                house.front.content(made["id"])

    run(check())


@pytest.mark.usefixtures("_plain_mp4")
def test_finished_videos_are_kept_so_long_and_so_much(tmp_path: Path) -> None:
    async def check() -> None:
        async with House(tmp_path, "video", keep_video_bytes=40, keep_videos_s=100.0) as house:
            ids = []
            for number in range(3):
                made = await house.front.create_video({"prompt": str(number)})
                ids.append(made["id"])
                await until(lambda made=made: house.front.video(made["id"])["status"] == "completed")
                house.clock.advance(1.0)
            assert [one["id"] for one in house.front.videos()["data"]] == [ids[2], ids[1]], "18 bytes each"
            house.clock.advance(98.5)
            assert [one["id"] for one in house.front.videos()["data"]] == [ids[2]]
            house.clock.advance(1.0)
            with pytest.raises(NotFound, match="kept for 100 s"):
                house.front.content(ids[2])

    run(check())


def test_the_end_gives_up_what_is_under_way(tmp_path: Path) -> None:
    async def check() -> None:
        house = House(tmp_path, "video")
        async with house:
            house.engine.held = asyncio.Event()
            await house.front.create_video({"prompt": "a"})
            await until(lambda: len(house.engine.orders) == 1)
        assert house.engine.cancelled == 1
        assert house.engine.closed.is_set()

    run(check())


def test_models_and_numbers(tmp_path: Path) -> None:
    async def check() -> None:
        async with House(tmp_path, served_model_name="fox") as house:
            assert [one["id"] for one in house.front.models()["data"]] == ["fox"]
            assert house.front.model("fox")["object"] == "model"
            with pytest.raises(NotFound, match="'tiny' is not served here; 'fox' is"):
                house.front.model("tiny")
            house.front.answered("/health", 200)
            text = house.front.metrics()
            assert 'moonrelay_serve_answers_total{route="/health",status="200"} 1' in text
            assert "moonrelay_serve_ready 1" in text

    run(check())


def test_pixels_of_every_form_become_a_file() -> None:
    whole = np.array([[[0.0, 0.5, 1.0]]], np.float32)
    for frames in ([whole], [whole[None]], [whole[None, None]], [Image.fromarray(np.uint8([[[0, 128, 255]]]))]):
        assert np.asarray(Image.open(io.BytesIO(media.png(frames)))).tolist() == [[[0, 128, 255]]]
    for wrong in ([], [np.zeros(3)], [np.zeros((4, 4))], [np.zeros((2, 4, 4, 3))]):
        with pytest.raises(ServeError, match="the decode stage gave"):
            media.png(wrong)
