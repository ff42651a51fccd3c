"""Past the encoder: a request whose embeddings are all kept goes straight to the stage that reads them.

Owns the question before a submit, and how a task names what is kept. Bytes never pass through here: the submitter asks
whether entries stand, and the stage that takes the task reads them. What is gone by then sends the request back to the
stage that makes it, by `InputLost`; nothing is lost but the shortcut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from moonrelay.errors import InputLost, WireError
from moonrelay.queueing.base import StageQueue
from moonrelay.queueing.task import Plain, StageTask

if TYPE_CHECKING:
    from moonrelay.cache.embeddings import EmbeddingCache
    from moonrelay.cache.keys import CacheKey

#: Where a task's payload names its embeddings.
KEPT: Final = "kept_embeddings"


@dataclass(frozen=True, slots=True)
class KeyByDigest:
    """A key as a task carries it: enough to read an entry, not enough to make one."""

    digest: str
    label: Mapping[str, str]


def submit(
    queue: StageQueue,
    task: StageTask,
    *,
    ahead: StageTask | None,
    cache: EmbeddingCache | None,
    if_absent: bool = False,
) -> bool:
    """Submit a request, past its first stage where the store has all embeddings that ``ahead`` names.

    Args:
        queue: The queue.
        task: The first stage's task, as for `StageQueue.submit`.
        ahead: The task of the stage that reads embeddings, its payload with `name_kept`; ``None`` for no shortcut, as
            for a request whose keys are not complete.
        cache: Asked whether they are there; ``None`` where none is used.
        if_absent: As for `StageQueue.submit`.

    Returns:
        Whether ``ahead`` is where the request was sent. ``False`` also for one that was there already.

    Blocks: for a small read of the store per embedding.

    Raises:
        ConfigError, QueueFull: As `StageQueue.submit`.
        WireError: ``ahead`` names its embeddings in a malformed way.
    """
    kept = {} if ahead is None else kept_in(ahead.payload)
    skips = bool(kept) and cache is not None and cache.holds(kept.values())
    return queue.submit(task, if_absent=if_absent, ahead=ahead if skips else None) and skips


def name_kept(keys: Mapping[str, CacheKey]) -> dict[str, Plain]:
    """Return the part of a task's payload that names embeddings by role; `kept_in` reads it."""
    return {KEPT: {role: {"digest": key.digest, "label": dict(key.label)} for role, key in keys.items()}}


def kept_in(payload: object) -> dict[str, KeyByDigest]:
    """Return the keys by role that a payload names; empty when it names none.

    Raises:
        WireError: What stands there is malformed.
    """
    named = payload.get(KEPT) if isinstance(payload, Mapping) else None
    if named is None:
        return {}
    keys = {}
    for role, entry in named.items() if isinstance(named, Mapping) else [("", None)]:
        digest, label = (entry.get("digest"), entry.get("label")) if isinstance(entry, Mapping) else (None, None)
        if not isinstance(digest, str) or not isinstance(label, Mapping):
            message = f"{KEPT!r} of a task's payload names no embeddings; make it with name_kept"
            raise WireError(message)
        keys[str(role)] = KeyByDigest(digest, {str(name): str(value) for name, value in label.items()})
    return keys


def read_kept(payload: object, cache: EmbeddingCache | None, *, request_id: str | None = None) -> dict[str, object]:
    """Return the embeddings by role that a task's payload names, from the cache.

    Args:
        payload: The task's payload.
        cache: This worker's.
        request_id: For events and messages.

    Blocks: for one read of the store per embedding.

    Raises:
        InputLost: One is not there any more, or this worker has no cache.
        WireError: The payload is malformed.
    """
    found: dict[str, object] = {}
    for role, key in kept_in(payload).items():
        tree = None if cache is None else cache.get(key, request_id=request_id)
        if tree is None:
            why = "this worker has no cache" if cache is None else "it is not in the cache any more"
            message = f"the {role} embedding was not read: {why}"
            raise InputLost(message, request_id=request_id)
        found[role] = tree
    return found
