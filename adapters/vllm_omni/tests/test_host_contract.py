"""The connector as the host makes it: registration, factory, the host's base class, and the host's own callers."""

from __future__ import annotations

import dataclasses
import gc
import logging
import multiprocessing
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from omni_peer import StagePeer, digest, store_keys, tree

from moonrelay_vllm_omni import plugin
from moonrelay_vllm_omni.connector import LAST_JOBS_S

pytestmark = pytest.mark.vllm_omni

Create = Callable[..., Any]
EDGE = ("0", "1")
EXAMPLES = Path(__file__).parents[1] / "examples"
IN_A_CHILD = """
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
before = "MoonrelayConnector" in OmniConnectorFactory.list_registered_connectors()
{load}
after = "MoonrelayConnector" in OmniConnectorFactory.list_registered_connectors()
print("SEEN", before, after)
"""


@pytest.fixture
def create(extra: dict[str, Any]) -> Iterator[Create]:
    """Has the host's factory make connectors; they are closed at the end."""
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
    from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

    plugin.register()
    made: list[Any] = []

    def create_one(**changes: Any) -> Any:
        connector = OmniConnectorFactory.create_connector(ConnectorSpec(plugin.NAME, {**extra, **changes}))
        made.append(connector)
        return connector

    yield create_one
    for connector in made:
        connector.close()


def got(connector: Any, key: str, metadata: object = None, edge: tuple[str, str] = EDGE) -> Any:
    found = connector.get_with_deadline(*edge, key, metadata, deadline=time.monotonic() + 30.0)
    assert found is not None
    return found[0]


def register_in_a_child(answers: Any) -> None:
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()
    answers.put(plugin.NAME in OmniConnectorFactory.list_registered_connectors())


# -- registration -----------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    "load",
    [
        "from vllm.plugins import load_general_plugins; load_general_plugins()",
        "from vllm_omni.plugins import load_omni_general_plugins; load_omni_general_plugins()",
        "from moonrelay_vllm_omni.plugin import register; register(); register()",
    ],
    ids=["vllm", "vllm_omni", "by hand"],
)
def test_each_way_of_loading_plugins_registers_it(load: str) -> None:
    code = textwrap.dedent(IN_A_CHILD.format(load=load))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    assert "SEEN False True" in done.stdout


@pytest.mark.processes
def test_a_spawned_process_has_it_too() -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=register_in_a_child, args=(answers,))
    child.start()
    try:
        assert answers.get(timeout=150) is True
    finally:
        child.join(30)
        answers.close()
        answers.join_thread()


def test_registering_again_and_from_threads_is_harmless(create: Create) -> None:
    threads = [threading.Thread(target=plugin.register) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    plugin.register()
    create()


def test_another_host_version_is_said_and_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
    from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

    monkeypatch.setattr(OmniConnectorFactory, "_registry", {})
    monkeypatch.setattr(plugin, "host_version", lambda: "0.31.0")
    with caplog.at_level(logging.ERROR):
        plugin.register()
    assert [record.levelname for record in caplog.records if plugin.SUPPORTED in record.getMessage()] == ["ERROR"]
    with pytest.raises(ValueError, match=plugin.SUPPORTED):
        OmniConnectorFactory.create_connector(ConnectorSpec(plugin.NAME, {}))


def test_the_adapter_knows_its_host() -> None:
    adapter = plugin.VllmOmniAdapter()
    assert adapter.available() == (True, f"vllm-omni {adapter.host_version()}")


def test_it_is_an_omni_connector(create: Create) -> None:
    from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase

    connector = create()
    assert isinstance(connector, OmniConnectorBase)
    assert connector.supports_raw_data is True
    assert connector.stage_id == -1
    assert create(stage_id=2).stage_id == 2


def test_a_misspelled_setting_reaches_the_user(create: Create) -> None:
    with pytest.raises(ValueError, match="did you mean 'engine'"):
        create(engin="shm")


def test_a_connector_that_was_refused_can_be_collected() -> None:
    from moonrelay_vllm_omni.host_connector import connector_class

    half_built = object.__new__(connector_class())
    half_built.close()
    del half_built


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["locked", "own thread"])
def test_a_forgotten_connector_is_closed_wherever_it_is_collected(extra: dict[str, Any], where: str) -> None:
    from moonrelay_vllm_omni.host_connector import connector_class

    connector = connector_class()(extra)
    connector.put(*EDGE, "k", tree(1))
    stages = connector.stages
    connector.itself = connector  # only the collector ends it, and that may run in any thread
    del connector
    if where == "locked":
        with stages._lock:
            gc.collect()
    else:
        stages._jobs.submit(gc.collect)
    end = time.monotonic() + 30.0
    while any(thread.name.startswith("moonrelay-omni") for thread in threading.enumerate()):
        assert time.monotonic() < end, "it was not closed"
        threading.Event().wait(0.02)
    assert stages.health()["closed"]


def test_a_process_that_forgets_its_connector_ends_at_once(extra: dict[str, Any]) -> None:
    code = (
        "import sys, time; from moonrelay_vllm_omni.host_connector import connector_class; "
        f"kept = connector_class()({extra!r}); kept.put('0', '1', 'k', {{'a': 1}}); print(time.monotonic())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    assert time.monotonic() - float(done.stdout.splitlines()[-1]) < LAST_JOBS_S, done.stderr
    assert "undone" not in done.stderr


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_host_knows_every_key_of_an_example(file: Path) -> None:
    from vllm_omni.config.stage_config import DeployConfig, StageDeployConfig, load_deploy_config

    content = yaml.safe_load(file.read_text())
    assert content.keys() <= {field.name for field in dataclasses.fields(DeployConfig)}
    for stage in content["stages"]:
        assert stage.keys() <= {field.name for field in dataclasses.fields(StageDeployConfig)}
    deploy = load_deploy_config(file)
    assert deploy.pipeline == content["pipeline"]
    assert len(deploy.stages) == len(content["stages"])


# -- what the host's callers do ---------------------------------------------------------------------------------------


def test_positional_and_keyword_calls(create: Create) -> None:
    one, other = create(), create()
    taken, nbytes, metadata = one.put("0", "1", "a", tree(1))
    assert taken
    assert nbytes > 0
    assert isinstance(metadata, dict)
    assert one.put(from_stage="0", to_stage="1", put_key="b", data=tree(2))[0]
    assert digest(got(other, "a")) == digest(tree(1))
    end = time.monotonic() + 30.0
    while (found := other.get(from_stage="0", to_stage="1", get_key="b", metadata=None)) is None:
        assert time.monotonic() < end
        threading.Event().wait(0.005)
    assert digest(found[0]) == digest(tree(2))
    assert found[1] > 0


def test_metadata_survives_the_hosts_own_messages(create: Create) -> None:
    one, other = create(), create()
    _, _, metadata = one.put(*EDGE, "k", tree(1))
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(metadata))
    assert digest(got(other, "k", msgspec.json.decode(msgspec.json.encode(back)))) == digest(tree(1))


def test_the_hosts_payload_struct_arrives_as_its_serializer_would_have_it(create: Create) -> None:
    from vllm_omni.data_entry_keys import MetaStruct, OmniPayloadStruct
    from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

    struct = OmniPayloadStruct(
        latent=torch.randn(2, 3),
        meta=MetaStruct(finished=torch.tensor(True)),
        model_outputs=[torch.ones(2), torch.zeros(0, 2)],
        speaker=["a"],
        request_id="r1",
    )
    one, other = create(), create()
    one.put(*EDGE, "k", struct)
    back = got(other, "k")
    theirs = OmniSerializer.deserialize(OmniSerializer.serialize(struct))
    assert back.keys() == theirs.keys()
    assert torch.equal(back["latent"], struct.latent)
    assert torch.equal(back["meta"]["finished"], torch.tensor(True))
    assert back["meta"].keys() == theirs["meta"].keys()
    assert [tuple(part.shape) for part in back["model_outputs"]] == [(2,), (0, 2)]


def test_a_dict_that_looks_like_an_output_stays_a_dict(create: Create) -> None:
    one, other = create(), create()
    look_alike = {"finished": True, "images": [torch.ones(2)], "final_output_type": "image", "pair": (1, None)}
    one.put(*EDGE, "k", look_alike)
    back = got(other, "k")
    assert type(back) is dict
    assert digest(back) == digest(look_alike)


def test_kv_bytes_arrive_in_a_form_that_the_kv_path_takes(create: Create) -> None:
    one, other = create(), create()
    packed = torch.arange(251, dtype=torch.uint8)
    one.put(*EDGE, "kv", packed)
    buffer = got(other, "kv")
    assert hasattr(buffer, "release")
    assert bytes(memoryview(buffer.tensor.numpy())) == bytes(range(251))
    buffer.release()
    one.put(*EDGE, "kv2", bytes(range(200)))
    assert got(other, "kv2") == bytes(range(200))


def transport(connector: Any) -> Any:
    """Return the host's own payload transport around ``connector``, as its diffusion runner has it."""
    from vllm_omni.worker.omni_connector_model_runner_mixin import (
        OmniConnectorModelRunnerMixin,
    )

    class Runner(OmniConnectorModelRunnerMixin):
        def is_data_transfer_rank(self) -> bool:
            return True

    runner = object.__new__(Runner)
    runner._omni_connector = connector
    runner._synchronous_payload_transport = False
    return runner


def test_the_hosts_receive_takes_what_was_put(create: Create) -> None:
    one, other = create(), create()
    runner = transport(other)
    _, _, key, _ = runner._stage_payload_recv_spec("r1", "0", "1")
    one.put("0", "1", key, tree(1))
    assert digest(runner.recv_stage_payload("r1", "0", "1")) == digest(tree(1))


def test_the_hosts_receive_waits_for_what_comes_later(create: Create) -> None:
    one, other = create(), create()
    runner = transport(other)
    _, _, key, _ = runner._stage_payload_recv_spec("r1", "0", "1")
    later = threading.Timer(0.5, lambda: one.put("0", "1", key, tree(1)))
    later.start()
    assert digest(runner.recv_stage_payload("r1", "0", "1")) == digest(tree(1))
    later.join()


def test_the_hosts_receive_gives_up_in_its_time(create: Create) -> None:
    other = create()
    started = time.monotonic()
    assert transport(other).recv_stage_payload("r1", "0", "1", retry_seconds=0.5) is None
    assert time.monotonic() - started < 10.0
    assert other.health()["waiting"] == 0


@pytest.mark.processes
def test_a_producer_killed_between_put_and_get_fails_the_request_in_time(
    create: Create, peer: Callable[..., StagePeer], place: Path
) -> None:
    one = peer(host=True, spill_after_s=600.0)
    other = create()
    runner = transport(other)
    _, _, key, _ = runner._stage_payload_recv_spec("r1", "0", "1")
    one.do("put", key=key, seed=1)
    end = time.monotonic() + 20.0
    while not any(".keys%r%" in name for name in store_keys(place)):
        assert time.monotonic() < end
        threading.Event().wait(0.02)
    one.kill()
    started = time.monotonic()
    assert runner.recv_stage_payload("r1", "0", "1") is None
    assert time.monotonic() - started < 15.0
    while store_keys(place) or sum(other.stages.in_use().values()):
        assert time.monotonic() < end + 20.0, "the dead producer's record was left"
        threading.Event().wait(0.05)
    # The next request is none the worse for it.
    two = create()
    _, _, key, _ = runner._stage_payload_recv_spec("r2", "0", "1")
    two.put("0", "1", key, tree(2))
    assert digest(runner.recv_stage_payload("r2", "0", "1")) == digest(tree(2))


def test_async_chunks_are_polled_as_the_host_does(create: Create) -> None:
    one, other = create(stage_id=0), create(stage_id=1)
    count = 20
    for number in range(count):
        key = f"r1_{other.stage_id - 1}_{number}"
        assert one.put(from_stage="0", to_stage="1", put_key=key, data=tree(number, 512))[0]
    seen: list[str] = []
    end = time.monotonic() + 60.0
    while len(seen) < count:
        assert time.monotonic() < end
        found = other.get("0", "1", f"r1_{other.stage_id - 1}_{len(seen)}", None)
        one.reap_consumed()
        if found is None:
            threading.Event().wait(0.002)
        else:
            seen.append(digest(found[0]))
    assert seen == [digest(tree(number, 512)) for number in range(count)]


def test_close_twice_and_from_another_thread(create: Create) -> None:
    connector = create()
    thread = threading.Thread(target=connector.close)
    thread.start()
    connector.close()
    thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        connector.put("0", "1", "k", tree(1))
    with pytest.raises(RuntimeError, match="closed"):
        connector.get("0", "1", "k")


def test_it_is_a_context_manager(create: Create) -> None:
    with create() as connector:
        connector.put("0", "1", "k", {})
    assert connector.health()["closed"]
