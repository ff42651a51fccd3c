"""What the real host's processes do with a config that cannot be: they end, and their log names the key.

Also that the settings which the host's guide tells to put there, and its own transfer never reads, are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightx2v_cluster import Cluster, OneShot, Process, wait_for

pytestmark = [pytest.mark.lightx2v, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1200)]

#: How long a process may take to import the host and to end.
ENDS_WITHIN_S = 420.0

#: By a name: whether a server or ``lightx2v.infer``, the role, its JSON, its environment, and what its log must say.
REFUSED: dict[str, tuple[type[Cluster | OneShot], str, dict[str, Any], dict[str, str], tuple[str, ...]]] = {
    "unknown-key": (
        Cluster,
        "transformer",
        {"staging_byte": 1},
        {},
        ("disagg_config has no setting 'staging_byte'; did you mean 'staging_bytes'?",),
    ),
    "unknown-key-of-one-shot": (OneShot, "encoder", {"peer_timeout": 1}, {}, ("did you mean 'peer_timeout_s'?",)),
    "unknown-connector": (Cluster, "decode", {"connector": "moonrelais"}, {}, ("connector='moonrelais' is not known",)),
    "protocol": (Cluster, "encoder", {"protocol": "carrier-pigeon"}, {}, ("protocol='carrier-pigeon'",)),
    "local-hostname": (
        Cluster,
        "encoder",
        {"local_hostname": "no-such-host.invalid"},
        {"MOONCAKE_LOCAL_HOSTNAME": ""},
        ("local_hostname='no-such-host.invalid' cannot be resolved",),
    ),
    "metadata-server": (
        Cluster,
        "encoder",
        {"metadata_server": "http://127.0.0.1:1/metadata"},
        {},
        ("metadata_server='http://127.0.0.1:1/metadata'", "P2PHANDSHAKE"),
    ),
    "device-name": (
        Cluster,
        "encoder",
        {"protocol": "rdma", "device_name": "no_such_nic_7"},
        {"MOONCAKE_PROTOCOL": "", "MOONCAKE_DEVICE_NAME": ""},
        ("protocol='rdma'", "nics='no_such_nic_7'"),
    ),
    "decentralized-queue": (Cluster, "transformer", {"decentralized_queue": True}, {}, ("decentralized_queue",)),
}
#: At once: each imports the whole host.
AT_ONCE = 3


@pytest.fixture(scope="module")
def ended(
    wan: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Process]]:
    """Every such process, ended or out of time."""
    folder = tmp_path_factory.mktemp("lightx2v-refused")
    made: dict[str, Cluster | OneShot] = {}
    for name, (kind, role, keys, variables, _) in REFUSED.items():
        made[name] = kind(
            wan,
            folder / name,
            environment,
            connector="moonrelay",
            roles=(role,) if role != "transformer" else ("transformer", "decode"),
            keys={role: keys},
            variables={role: variables},
        )
    # Mooncake's own variable is above its protocol, and is there in these tests.
    made["device-name"].processes["encoder"]._environment.pop("MC_FORCE_TCP")
    processes = {name: made[name].processes[role] for name, (_, role, _, _, _) in REFUSED.items()}
    try:
        waiting = [*processes.values()]
        while waiting:
            batch, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
            for process in batch:
                process.start()
            for process in batch:
                wait_for(lambda process=process: not process.alive, ENDS_WITHIN_S)  # type: ignore[misc]
        yield processes
    finally:
        for one in made.values():
            one.end()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_ends_the_process_with_its_name_in_the_log(ended: dict[str, Process], name: str) -> None:
    process = ended[name]
    assert process.exit_code not in (None, 0), process.tail()
    for words in REFUSED[name][-1]:
        assert words in process.text(), process.tail()


def listening(process: Process) -> set[tuple[str, int]]:
    """Return where a process listens, of IPv4."""
    sockets = {link.readlink().name for link in Path(f"/proc/{process.pid}/fd").iterdir() if link.is_symlink()}
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_rest = line.split()
        if state == "0A" and f"socket:[{line.split()[9]}]" in sockets:
            address, _, port = local.partition(":")
            found.add((".".join(str(byte) for byte in reversed(bytes.fromhex(address))), int(port, 16)))
    return found


def test_the_local_hostname_of_the_json_is_where_a_role_is_found(
    wan: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    cluster = Cluster(
        wan,
        tmp_path,
        environment,
        connector="moonrelay",
        roles=("encoder", "transformer"),
        keys={"encoder": {"local_hostname": "127.0.0.2"}},
        variables={"all": {"MOONCAKE_LOCAL_HOSTNAME": ""}},
    )
    with cluster.start(but=["transformer"]):
        ours = {port for host, port in listening(cluster.processes["encoder"]) if host == "127.0.0.2"}
    room = cluster._rooms[0]
    assert 17788 + 10 * room in ours
