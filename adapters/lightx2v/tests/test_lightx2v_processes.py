"""Roles in processes of their own: what is left, and who hears of it, when they are killed, end, or go on for long."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightx2v_double as double
import pytest
from lightx2v_role import Role

from moonrelay.clock import Deadline, SystemClock
from support.segments import segments_of

pytestmark = pytest.mark.processes
REQUEST: dict[str, Any] = {"prompt": "a red cat", "negative_prompt": "blue dog", "seed": 7, "target_shape": []}


class Roles:
    """Starts roles, each of which knows the one before it."""

    def __init__(self, host: Path) -> None:
        self.host = host
        self.all: list[Role] = []

    def __call__(self, *names: str, after: Role | None = None, **more: Any) -> list[Role]:
        """Start roles in order; ``after`` is what the first one receives from."""
        made: list[Role] = []
        for name in names:
            section = {}
            before = made[-1] if made else after
            if before is not None:
                assert before.address is not None
                host, port = before.address
                section["bootstrap_addr"] = f"{host}:{port}"
            role = Role(name, self.host, **{"stages": 3 if "decode" in names else 2, **section, **more})
            self.all.append(role)
            made.append(role.ready())
        return made

    def close(self) -> None:
        for role in self.all:
            role.close()
        assert not segments_of(role.pid for role in self.all if role.pid not in self.killed)

    @property
    def killed(self) -> set[int]:
        return {role.pid for role in self.all if role._process.returncode not in (0, None)}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Roles]:
    roles = Roles(double.write_tree(tmp_path / "host"))
    yield roles
    roles.close()


def right(task: str = "t2v", **request: Any) -> str:
    """The digest of what one process makes of a request."""
    runner = double.runner_of(double.settings_of(None, task=task), double.native_mixin())
    made = double.Worker(runner).process(**{**REQUEST, **request})["pipeline_return"]
    (tensor,) = made.values()
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def test_three_processes_and_300_requests(start: Roles) -> None:
    """Each request's bytes are its own, and no process grows."""
    roles = start("encoder", "transformer", "decode")
    expected = [right(seed=seed) for seed in range(5)]

    def one(number: int) -> None:
        for role in roles:
            role.tell("post", task_id=f"{role.pid}-{number}", request={**REQUEST, "seed": number % 5})
        answers = [role.answer() for role in roles]
        assert [answer["status"] for answer in answers] == ["success"] * 3, answers
        assert answers[-1]["digest"] == expected[number % 5]

    for number in range(20):
        one(number)
    before = [role.do("held") for role in roles]
    for number in range(20, 320):
        one(number)
    after = [role.do("held") for role in roles]
    for role, first, last in zip(roles, before, after, strict=True):
        assert last["files"] == first["files"]
        assert last["threads"] <= first["threads"] + 2, "claims are renewed by few threads, which start when needed"
        assert not any(role.do("in_use", within_s=10).values())


def test_reordered_requests_with_ids_of_each_server(start: Roles) -> None:
    encoder, transformer = start("encoder", "transformer")
    for role, order in ((encoder, "AB"), (transformer, "BA")):
        for name in order:
            role.tell("post", task_id=f"{role.pid}{name}", request={**REQUEST, "prompt": name})
    for _ in "AB":
        assert encoder.answer()["status"] == "success"
    assert [transformer.answer()["digest"] for _ in "BA"] == [right(prompt="B"), right(prompt="A")]


def test_an_encoder_killed_before_its_offer(start: Roles) -> None:
    """Natively all roles hang for ever, and a restart does not heal."""
    encoder, transformer = start("encoder", "transformer")
    encoder.do("stop_at", point="compute")
    transformer.tell("post", task_id="a", request=REQUEST)
    encoder.tell("post", task_id="a", request=REQUEST)
    assert encoder.answer() == {"stopped": "compute"}
    encoder.kill()
    answer = transformer.answer()
    assert (answer["status"], answer["error_type"]) == ("failed", "PeerLost")
    assert encoder.address is not None
    (again,) = start("encoder", rendezvous_port=encoder.address[1])
    assert again.post("b", **REQUEST)["status"] == "success"
    assert transformer.post("b", **REQUEST)["digest"] == right()


def test_an_encoder_restarted_while_idle(start: Roles) -> None:
    """Natively the next request hangs in all roles."""
    encoder, transformer = start("encoder", "transformer")
    assert encoder.post("a", **REQUEST)["status"] == "success"
    assert transformer.post("a", **REQUEST)["digest"] == right()
    encoder.kill()
    assert encoder.address is not None
    (again,) = start("encoder", rendezvous_port=encoder.address[1])
    assert again.post("b", **REQUEST)["status"] == "success"
    assert transformer.post("b", **REQUEST)["digest"] == right()


def test_an_encoder_killed_after_its_offer(start: Roles) -> None:
    encoder, transformer = start("encoder", "transformer")
    transformer.do("stop_at", point="found")
    assert encoder.post("a", **REQUEST)["status"] == "success"
    transformer.tell("post", task_id="a", request=REQUEST)
    assert transformer.answer() == {"stopped": "found"}
    encoder.kill()
    transformer.tell("go")
    answer = transformer.answer()
    assert (answer["status"], answer["error_type"]) == ("failed", "PeerLost")
    transformer.tell("post", task_id="b", request=REQUEST)
    answer = transformer.answer()
    assert (answer["status"], answer["error_type"]) == ("failed", "PeerLost"), "nobody answers there any more"


def test_what_a_killed_encoder_relayed_is_taken(start: Roles, tmp_path: Path) -> None:
    store = {"store": f"local://{tmp_path}/store", "transfer_mode": "store"}
    encoder, transformer = start("encoder", "transformer", **store)
    transformer.do("stop_at", point="found")
    assert encoder.post("a", **REQUEST)["status"] == "success"
    transformer.tell("post", task_id="a", request=REQUEST)
    assert transformer.answer() == {"stopped": "found"}
    encoder.kill()
    transformer.tell("go")
    assert transformer.answer()["digest"] == right()


def test_a_transformer_killed_while_it_holds_its_input(start: Roles) -> None:
    """Another one that is asked the same gets it."""
    encoder, transformer = start("encoder", "transformer")
    (other,) = start("transformer", after=encoder)
    transformer.do("stop_at", point="compute")
    assert encoder.post("a", **REQUEST)["status"] == "success"
    transformer.tell("post", task_id="a", request=REQUEST)
    assert transformer.answer() == {"stopped": "compute"}
    transformer.kill()
    assert other.post("a", **REQUEST)["digest"] == right()
    assert not any(encoder.do("in_use", within_s=10).values())


def test_a_transformer_killed_while_its_decoder_waits(start: Roles) -> None:
    encoder, transformer, decoder = start("encoder", "transformer", "decode")
    transformer.do("stop_at", point="compute")
    decoder.tell("post", task_id="a", request=REQUEST)
    transformer.tell("post", task_id="a", request=REQUEST)
    assert encoder.post("a", **REQUEST)["status"] == "success"
    assert transformer.answer() == {"stopped": "compute"}
    transformer.kill()
    answer = decoder.answer()
    assert (answer["status"], answer["error_type"]) == ("failed", "PeerLost")
    assert transformer.address is not None
    (again,) = start("transformer", after=encoder, stages=3, rendezvous_port=transformer.address[1])
    assert again.post("a", **REQUEST)["status"] == "success", "it takes over what the killed one held"
    assert decoder.post("a", **REQUEST)["digest"] == right()


def test_one_shot_processes_end_when_their_part_is_taken(start: Roles) -> None:
    """Natively none of them ever ends."""
    encoder, transformer, decoder = start("encoder", "transformer", "decode")
    assert encoder.post("a", **REQUEST)["status"] == "success"
    encoder.do("end")
    deadline = Deadline(1.0, SystemClock())
    while not deadline.expired:
        assert encoder.lives, "its payload is not taken"
        threading.Event().wait(0.05)
    assert transformer.post("a", **REQUEST)["status"] == "success"
    assert encoder.ended() == 0
    transformer.do("end")
    assert decoder.post("a", **REQUEST)["digest"] == right()
    assert transformer.ended() == 0
    decoder.do("end")
    assert decoder.ended() == 0
    assert not segments_of(role.pid for role in (encoder, transformer, decoder))


def test_a_one_shot_process_does_not_wait_for_ever(start: Roles) -> None:
    (encoder,) = start("encoder", linger_s=0.5)
    assert encoder.post("a", **REQUEST)["status"] == "success"
    encoder.do("end")
    assert encoder.ended() == 0
    assert not segments_of([encoder.pid])
