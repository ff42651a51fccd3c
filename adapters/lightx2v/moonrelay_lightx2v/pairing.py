"""Which names a request goes by, so that each role hands on, and gets, what belongs to it.

The rule. A request whose client gave ``data_bootstrap_room`` (or ``disagg_bootstrap_room``) goes by that number and by
nothing else. Any other one goes by its ``task_id``, where a server runs it, and by a digest of everything that it asks
for. So clients that send one id to all roles are paired by it; and clients that send one body to all roles, as the
host's example scripts do, are paired by what they ask for: two requests that ask for the very same, seed included, get
the very same bytes, and whose are whose makes no difference to anybody. Nothing is ever paired by the order of arrival.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Final

Names = tuple[str, ...]

#: Fields by which the host's clients name a request; the first one that is there counts.
_ROOMS: Final = ("data_bootstrap_room", "disagg_bootstrap_room")
TASK_ID: Final = "task_id"
#: Every field that names a request, or says where it is to be computed: none decides what comes out of it.
IDS: Final = (
    *_ROOMS,
    TASK_ID,
    "disagg_decoder_bootstrap_room",
    "disagg_phase1_receiver_engine_rank",
    "disagg_phase2_sender_engine_rank",
)
#: Where a result goes. (`return_result_tensor` too: whether it is written at all.)
_RESULTS: Final = (
    "save_result_path",
    "save_action_path",
    "presigned_url",
    "return_result_tensor",
    "_return_pipeline_result",
)
#: What a role computes itself, from the input.
_DERIVED: Final = (
    "latent_shape",
    "original_shape",
    "resized_shape",
    "original_size",
    "auto_height",
    "auto_width",
    "auto_hight",
    "image_shapes",
    "txt_seq_lens",
    "image_encoder_output",
    "prompt_enhanced",
)
_LEFT_OUT: Final = frozenset({*IDS, *_RESULTS, *_DERIVED, "task"})


def names_of(request: Mapping[str, Any] | None, asked: Any, *, by_content: bool = True) -> Names:
    """Return the names of a request, most exact first; empty where it has none.

    Args:
        request: What the server was asked, as it hands it to the runner; ``None`` without a server.
        asked: The host's ``input_info``: a dataclass of what was asked.
        by_content: Whether a request without a room also goes by what it asks for.

    Returns:
        One to two of ``room:N``, ``task:ID``, ``same:DIGEST``.

    Threads: any.
    """
    given = dict(request or {})
    for name in _ROOMS:
        if given.get(name) is not None:
            return (f"room:{given[name]}",)
    task = given.get(TASK_ID)
    names = () if task is None else (f"task:{task}",)
    if not by_content:
        return names
    digest = _digest({**_fields(asked), **given})
    return names if digest is None else (*names, f"same:{digest}")


def said(names: Names) -> str:
    """Return a request's name for people."""
    return names[0] if names else "a request without a name"


def _fields(asked: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(asked) and not isinstance(asked, type):
        return {field.name: getattr(asked, field.name, None) for field in dataclasses.fields(asked)}
    return dict(vars(asked)) if hasattr(asked, "__dict__") else {}


def _digest(fields: Mapping[str, Any]) -> str | None:
    """Return a digest of what a request asks for; ``None`` where a value has no exact form."""
    seen = hashlib.blake2b(digest_size=16, person=b"moonrelay-same")
    for name in sorted(fields):
        value = fields[name]
        if name in _LEFT_OUT or value is None or value == "" or (isinstance(value, (list, tuple)) and not value):
            continue  # an absent one and an empty one ask for the same
        try:
            form = _form(value)
        except TypeError:
            return None
        seen.update(b"%d:%s%d:%s" % (len(name), name.encode(), len(form), form))
    return seen.hexdigest()


def _form(value: Any) -> bytes:
    if isinstance(value, (bool, int, str)):
        return f"{type(value).__name__}:{value}".encode("utf-8", "surrogatepass")
    if isinstance(value, float):
        return f"float:{value.hex()}".encode()
    if isinstance(value, (list, tuple)):
        parts = [_form(item) for item in value]
        return b"list:" + b"".join(b"%d:%s" % (len(part), part) for part in parts)
    if isinstance(value, Mapping):
        return b"map:" + _form([[str(name), value[name]] for name in sorted(value, key=str)])
    if value is None:
        return b"none"
    raise TypeError(type(value).__name__)
