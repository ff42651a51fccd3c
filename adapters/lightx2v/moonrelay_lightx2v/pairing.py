"""Which names a request goes by, so that each role hands on, and gets, what belongs to it.

The rule. A request whose client gave ``data_bootstrap_room`` (or ``disagg_bootstrap_room``) goes by that number and by
nothing else. Any other one goes by its ``task_id``, where a server runs it, and by a digest of everything that it asks
for. So clients that send one id to all roles are paired by it; and clients that send one body to all roles, as the
host's example scripts do, are paired by what they ask for: two requests that ask for the very same, seed included, get
the very same bytes, and whose are whose makes no difference to anybody. Nothing is ever paired by the order of arrival.

An id belongs to one request at a time. One that two requests go by is found by what they ask for: what was made for
another prompt, shape or image is refused by the role that received it. So is what a failed request left under its id.

Files that a request names count by what is in them: the host's servers write an image that came with a request to a
path of their own. A request of a server that names a file which this role cannot see goes by its ids alone; without a
server, where there are no ids, such a file counts by its path.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
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
#: Where a result goes, whether it is written at all, and what is done to it after the last role.
_RESULTS: Final = (
    "save_result_path",
    "save_action_path",
    "presigned_url",
    "return_result_tensor",
    "_return_pipeline_result",
    "video_frame_interpolation",
    "target_fps",
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
    "audio_num",
    "with_mask",
    "overlap_frame",
    "overlap_latent",
    "audio_clip",
)
_LEFT_OUT: Final = frozenset({*IDS, *_RESULTS, *_DERIVED, "task"})
#: What must be the same at all roles wherever it is given.
_TELL_APART: Final = ("prompt", "negative_prompt", "target_shape", "image_path")
#: Of the host: a field's value that nobody gave, by the name of its type.
_UNSET: Final = "_UnsetType"
#: An id that is longer goes by its digest.
_LONGEST_ID: Final = 200
#: A text that is longer is no path, but a file's content as text.
_LONGEST_PATH: Final = 4096
_PIECE_BYTES: Final = 1 << 20
#: A folder or file with more is no input.
_MOST_FILES: Final = 1000
_MOST_BYTES: Final = 16 << 30


class _Inexact(Exception):
    """A value has no exact form here."""


def names_of(request: Mapping[str, Any] | None, asked: Any, *, by_content: bool = True) -> Names:
    """Return the names of a request, most exact first; empty where it has none.

    Args:
        request: What the server was asked, as it hands it to the runner; ``None`` without a server.
        asked: The host's ``input_info``: a dataclass of what was asked. It counts without a server only: a server keeps
            one for all requests, with what earlier ones left in it.
        by_content: Whether a request without a room also goes by what it asks for.

    Returns:
        One to two of ``room:N``, ``task:ID``, ``same:DIGEST``.

    Threads: any. Blocks: to read the files that the request names.
    """
    if request is None:
        found = [_digest(_fields(asked), form) for form in (_content, _text)] if by_content else []
    else:
        for name in _ROOMS:
            if request.get(name) is not None:
                return (_id("room", request[name]),)
        task = request.get(TASK_ID)
        found = [None if task is None else _id("task", task), _digest(request, _content) if by_content else None]
    return tuple(dict.fromkeys(name for name in found if name is not None))


def asked_of(request: Mapping[str, Any] | None, asked: Any) -> dict[str, str]:
    """Return digests of what a request asks for, by field, to find one id that was given to two requests.

    Fields that nobody gave, or that have no exact form here, are left out; so is the seed, which a server draws itself.

    Args:
        request: As for `names_of`.
        asked: As for `names_of`.

    Blocks: to read the files that the request names.
    """
    given = _fields(asked) if request is None else request
    found: dict[str, str] = {}
    for name in _TELL_APART:
        digest = None if _is_nothing(given.get(name)) else _digest({name: given[name]}, _content)
        if digest is not None:
            found[name] = digest
    return found


def said(names: Names) -> str:
    """Return a request's name for people."""
    return names[0] if names else "a request without a name"


def _id(kind: str, value: object) -> str:
    text = str(value)
    if len(text) > _LONGEST_ID:
        text = "blake2b-" + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f"{kind}:{text}"


def _fields(asked: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(asked) and not isinstance(asked, type):
        return {field.name: getattr(asked, field.name, None) for field in dataclasses.fields(asked)}
    return dict(vars(asked)) if hasattr(asked, "__dict__") else {}


def _digest(fields: Mapping[str, Any], of_path: Callable[[str], bytes]) -> str | None:
    """Return a name for what a request asks for; ``None`` where a value has no exact form."""
    seen = hashlib.blake2b(digest_size=16, person=b"moonrelay-same")
    try:
        for name in sorted(fields):
            value = fields[name]
            if name in _LEFT_OUT or _is_nothing(value):
                continue
            form = of_path(value) if isinstance(value, str) and _names_a_file(name) else _form(value)
            seen.update(b"%d:%s%d:%s" % (len(name), name.encode(), len(form), form))
    except _Inexact:
        return None
    return f"same:{seen.hexdigest()}"


def _is_nothing(value: Any) -> bool:
    """Tell whether nobody gave it: an absent one and an empty one ask for the same."""
    empty = isinstance(value, (str, list, tuple)) and not value
    return empty or value is None or type(value).__name__ == _UNSET


def _names_a_file(name: str) -> bool:
    return name.endswith("_path") or name.startswith("src_")


def _text(value: str) -> bytes:
    return _form(value)


def _content(value: str) -> bytes:
    """Return the form of what is in the files of a field: the host's fields hold one path, or several with commas."""
    if len(value) > _LONGEST_PATH or value.startswith(("http://", "https://", "data:")):
        return _form(value)
    try:
        paths = [Path(value)] if Path(value).exists() else [Path(part) for part in value.split(",")]
        return _form([_digest_of(path) for path in paths])
    except (OSError, ValueError) as exc:
        raise _Inexact from exc


def _digest_of(path: Path) -> str:
    """Return the digest of a file, or of all files of a folder.

    Of a folder's names counts what tells them apart: the host's servers give each its own name to what came with a
    request, such as ``<random>.png`` and ``<random>_mask.png``.

    Raises:
        _Inexact: It is neither, or holds more than an input would; a client may name any path of this machine.
        OSError: It cannot be read.
    """
    seen = hashlib.blake2b(digest_size=16)
    if path.is_dir():
        parts = _files_in(path)
        names = [part.relative_to(path).as_posix() for part in parts]
        shared = len(os.path.commonprefix(names))  # noqa: RUF071 - characters are meant
        for name, part in sorted(zip(names, parts, strict=True)):
            told = name[shared:].encode("utf-8", "surrogateescape")
            seen.update(b"%d:%s%s" % (len(told), told, _digest_of_file(part).encode()))
        return seen.hexdigest()
    return _digest_of_file(path)


def _files_in(folder: Path) -> list[Path]:
    found: list[Path] = []
    for looked, part in enumerate(folder.rglob("*")):
        if looked >= _MOST_FILES:
            message = f"{folder} holds more than {_MOST_FILES} files"
            raise _Inexact(message)
        if not part.is_dir():
            found.append(part)
    return found


def _digest_of_file(path: Path) -> str:
    seen = hashlib.blake2b(digest_size=16)
    # A device or a pipe has no end, or nobody writes into it.
    left = path.stat().st_size if path.is_file() else _MOST_BYTES + 1
    if left > _MOST_BYTES:
        message = f"{path} is no file that an input could be"
        raise _Inexact(message)
    with path.open("rb") as file:
        while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
            seen.update(piece)
            left -= len(piece)
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
    raise _Inexact(type(value).__name__)
