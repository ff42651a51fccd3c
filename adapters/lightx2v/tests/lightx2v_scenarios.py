"""What the tests do to a `lightx2v_cluster.Cluster`, and what they then see: the same for the host's transfer and ours.

No function judges. Each returns what was observed; the test says what is right, or what the host is known to do. All
waits are bounded by ``within_s``: a task that has not ended by then is observed as pending or processing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightx2v_cluster import WITHIN_S, Cluster, OneShot, Outcome, wait_for

Request = Mapping[str, Any]
#: By the process that was given the request.
Outcomes = Mapping[str, Outcome]

RED: Request = {"prompt": "a red cat runs on the moon", "seed": 1}
BLUE: Request = {"prompt": "two blue dog fights on the sea", "seed": 2}
#: More latents than the JSON's height and width say.
LARGE: Request = {"prompt": "a big dog", "seed": 3, "target_shape": [96, 96]}
#: No generator takes that seed: the transformer fails, when it has received what the encoder made.
UNSEEDED: Request = {"prompt": "a small cat", "seed": 1 << 70}


@dataclass(frozen=True)
class Lost:
    """See `transformer_killed`: the request that it was working on, and the one after the restart."""

    lost: Outcomes
    next: Outcomes


@dataclass(frozen=True)
class Pair:
    """See `one_after_the_other` and `posts_in_another_order`."""

    first: Outcomes
    second: Outcomes


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    threads: int
    descriptors: int


@dataclass(frozen=True)
class Many:
    """See `many`: how many requests ended how, and what each process held after the first ones and at the end."""

    statuses: Mapping[str, int]
    digests: frozenset[str | None]
    before: Mapping[str, Held]
    after: Mapping[str, Held]


@dataclass(frozen=True)
class Run:
    """See `run_once`."""

    video: bytes | None
    exit_codes: Mapping[str, int | None]


def request(cluster: Cluster, asked: Request = RED, within_s: float = WITHIN_S) -> Outcomes:
    """One request, as the host's examples post it."""
    return cluster.wait_all(cluster.post_all(**asked), within_s)


def run_once(runs: OneShot, asked: Request = RED, exit_within_s: float = 30.0) -> Run:
    """``python -m lightx2v.infer`` for each role: the video, and how the processes end."""
    with runs.start(**asked):
        video = runs.video()
        return Run(video, runs.exit_codes(exit_within_s))


def transformer_killed(
    cluster: Cluster, asked: Request = RED, then: Request = BLUE, within_s: float = WITHIN_S, name: str = "transformer"
) -> Lost:
    """Kill the transformer while it waits for a request's encoder; let that go on; restart it and ask for another."""
    tasks = {role: cluster.post(role, **asked) for role in ("decode", name)}
    wait_for(lambda: all(cluster.status(*task).status == "processing" for task in tasks.items()), within_s)
    cluster.kill(name)
    del tasks[name]
    tasks["encoder"] = cluster.post("encoder", **asked)
    lost = cluster.wait_all(tasks, within_s)
    cluster.restart(name)
    return Lost(lost, request(cluster, then, within_s))


def encoder_restarted(cluster: Cluster, asked: Request = RED, within_s: float = WITHIN_S) -> Outcomes:
    """Restart the encoder while nothing is under way; then one request."""
    cluster.restart("encoder")
    return request(cluster, asked, within_s)


def one_after_the_other(
    cluster: Cluster, first: Request = LARGE, second: Request = RED, within_s: float = WITHIN_S
) -> Pair:
    """A request that may fail at some role, for which others may still wait; then another one.

    What becomes of the first one is looked at once more when the second one has ended.
    """
    tasks = cluster.post_all(**first)
    cluster.wait_all(tasks, within_s)
    after = request(cluster, second, within_s)
    return Pair(cluster.wait_all(tasks, 0.0), after)


def failed_where_nobody_waits(
    cluster: Cluster, first: Request = LARGE, second: Request = RED, within_s: float = WITHIN_S
) -> Pair:
    """A request that fails at the transformer and that the decoder never heard of; then another one."""
    tasks = {name: cluster.post(name, **first) for name in ("transformer", "encoder")}
    return Pair(cluster.wait_all(tasks, within_s), request(cluster, second, within_s))


def posts_in_another_order(
    cluster: Cluster, first: Request = RED, second: Request = BLUE, within_s: float = WITHIN_S
) -> Pair:
    """Two requests that the transformer hears of in the other order than encoder and decoder do."""
    tasks: dict[str, list[str]] = {"first": [], "second": []}
    given = {"first": first, "second": second}
    for name in reversed(cluster.processes):
        for one in ("second", "first") if name.startswith("transformer") else ("first", "second"):
            tasks[one].append(cluster.post(name, **given[one]))
    names = [*reversed(cluster.processes)]
    firsts, seconds = (dict(zip(names, tasks[one], strict=True)) for one in ("first", "second"))
    return Pair(cluster.wait_all(firsts, within_s), cluster.wait_all(seconds, within_s))


def nobody_sends(cluster: Cluster, asked: Request = RED, within_s: float = WITHIN_S) -> Outcomes:
    """A request that only the decoder is given."""
    return cluster.wait_all({"decode": cluster.post("decode", **asked)}, within_s)


def many(cluster: Cluster, asked: Request = RED, number: int = 300, warm_up: int = 10) -> Many:
    """That many requests, one after the other; threads and descriptors after the first ones and after all."""
    for _ in range(warm_up):
        cluster.ask(**asked)
    before = _held(cluster)
    statuses: dict[str, int] = {}
    digests = set()
    for _ in range(number):
        seen = cluster.ask(**asked)
        statuses[seen.status] = statuses.get(seen.status, 0) + 1
        digests.add(seen.digest)
    return Many(statuses, frozenset(digests), before, _held(cluster))


def _held(cluster: Cluster) -> dict[str, Held]:
    return {name: Held(cluster.threads(name), cluster.descriptors(name)) for name in cluster.processes}
