"""The messages between our head and our workers, in the host's own frames.

Owns what the host's messages carry more of when both ends are ours, and the messages that only we have. A message is
two frames, ``[b"__transfer__", JSON]``, as the host's are; a worker's result is the host's codec frames with a stamp in
their first frame. What a peer sent is checked here, and a wrong field is named. Imports nothing of the host.

The stock keys are kept, so a stock head or worker reads what it knows and overlooks the rest; messages that it would
not know are sent only to those whose registration has ``moonrelay``.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from moonrelay.errors import MoonrelayError, VersionError, WireError, from_wire

MessageT = TypeVar("MessageT")

VERSION: Final = 1
#: The first frame of the host's transfer messages.
MAGIC: Final = b"__transfer__"
#: The key of what is ours: in messages, manifests, stamped results.
KEY: Final = "moonrelay"

REGISTER: Final = "transfer_register"
STAGED: Final = "transfer_staged"
DONE: Final = "transfer_done"
ALLOC: Final = "transfer_alloc"
ALLOCATED: Final = "transfer_allocated"
PUSH: Final = "transfer_push"
PUSHED: Final = "transfer_pushed"
READY: Final = "transfer_ready"
BEAT: Final = "moonrelay_beat"
FAILED: Final = "moonrelay_failed"
FINISHED: Final = "moonrelay_finished"
RELEASE: Final = "moonrelay_release"

#: What our workers can: ``release`` takes RELEASE, ``attempts`` repeats the attempt's number in every answer, ``ready``
#: needs no ALLOC and PUSH before READY.
FEATURES: Final = ("attempts", "ready", "release")

#: Where a request may fail in a worker: taking its input over, computing, offering its result, sending it.
PHASES: Final = ("load", "compute", "stage", "send")

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0)]


class Stamp(Struct, frozen=True, kw_only=True):
    """Who a message about a request comes from.

    Attributes:
        version: Version of these messages.
        epoch: The sender's session; another one after a restart.
        attempt: Number of the attempt, as the head gave it.
    """

    version: Count
    epoch: Name
    attempt: Count = 0


class Location(Struct, frozen=True, kw_only=True):
    """Where a payload is: the value of ``moonrelay`` in a manifest.

    Attributes:
        version: Version of these messages.
        handle: The payload's handle, in base64; see `handle_bytes`.
        epoch: Session of the worker that made it.
        nbytes: Bytes of its tensors, exactly.
        attempt: In STAGED and DONE the attempt that made it, in READY the one that is to take it.
        to: In READY the session of the worker that is meant; empty means any.
    """

    version: Count
    handle: Annotated[str, Meta(min_length=1)]
    epoch: Name
    nbytes: Count
    attempt: Count = 0
    to: str = ""

    def handle_bytes(self) -> bytes:
        """Return the handle, as `StageHandle.from_bytes` takes it; raise `WireError` where it is damaged."""
        try:
            return base64.b64decode(self.handle, validate=True)
        except (binascii.Error, ValueError) as exc:
            message = "the manifest holds a damaged handle"
            raise WireError(message, field="manifest.moonrelay.handle") from exc


class Registration(Struct, frozen=True, kw_only=True):
    """What makes a worker ours: the value of ``moonrelay`` in REGISTER.

    Attributes:
        version: Version of these messages.
        epoch: The worker's session.
        instance: Its name, for people.
        slots: How many requests it takes at a time, the one it computes among them.
        labels: For affinity.
        beat_s: Pause between its BEATs.
        features: What it can, see `FEATURES`.
    """

    version: Count
    epoch: Name
    instance: Name
    slots: Annotated[int, Meta(ge=1, lt=1 << 20)]
    beat_s: Seconds
    labels: dict[str, str] = {}
    features: tuple[str, ...] = ()


class Failure(Struct, frozen=True, kw_only=True):
    """An error on its way: its code in `moonrelay.errors`, whether trying again may help, one line."""

    code: Name
    retryable: bool
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the wire form of any exception; one that is not ours is not retryable."""
        if isinstance(error, MoonrelayError):
            code, retryable, message = error.to_wire()
            return cls(code=code, retryable=retryable, message=message)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return cls(code=MoonrelayError.code, retryable=False, message=text[:2000])

    def error(self) -> MoonrelayError:
        """Return it as an exception, ready to raise; its text is the message alone, which says all."""
        error = from_wire(self.code, self.retryable, self.message)
        error.context.clear()
        return error


class InUse(Struct, frozen=True, kw_only=True):
    """What a worker holds for payloads now, as `DiffusionConnector.in_use` and the pool say."""

    payloads: Count = 0
    bytes: Count = 0
    claims: Count = 0
    slots: Count = 0


class Counters(Struct, frozen=True, kw_only=True):
    """What a worker did since it started: payloads it took over, requests that failed in it, bytes taken over.

    With a cache of embeddings, also how often it encoded a request's texts, and how often they were there already.
    """

    delivered: Count = 0
    failed: Count = 0
    bytes: Count = 0
    encoded: Count = 0
    remembered: Count = 0


# From a worker to the head.


class Register(Struct, frozen=True, kw_only=True, tag_field="msg_type", tag=REGISTER):
    """A worker is there. ``moonrelay`` is ``None`` for a stock one."""

    role: Name
    work_endpoint: str = ""
    session_id: str = ""
    pool_ptr: Count = 0
    pool_size: Count = 0
    preallocated_slots: list[Any] = []
    moonrelay: Registration | None = None


class Staged(Struct, frozen=True, kw_only=True, tag_field="msg_type", tag=STAGED):
    """An encoder's result is ready for the next role; ``manifest`` locates it."""

    request_id: Name
    manifest: dict[str, Any] = {}
    scalar_fields: dict[str, Any] = {}
    data_size: Count = 0
    session_id: str = ""
    moonrelay: Stamp | None = None


class Done(Struct, frozen=True, kw_only=True, tag_field="msg_type", tag=DONE):
    """A denoiser is done: its result is located by ``manifest``, or ``error`` says why there is none."""

    request_id: Name
    error: str | None = None
    staged_for_decoder: bool = False
    manifest: dict[str, Any] = {}
    scalar_fields: dict[str, Any] = {}
    data_size: Count = 0
    session_id: str = ""
    moonrelay: Stamp | None = None


class Beat(Struct, frozen=True, kw_only=True, tag_field="msg_type", tag=BEAT):
    """A worker lives.

    Attributes:
        moonrelay: Version of these messages.
        role: Its role.
        work_endpoint: Where it takes work.
        epoch: Its session.
        registration: Its REGISTER, for a head that was not there when it was sent.
        holding: Request ids, each with its attempt, that it accepted and has not finished.
        offered: Request ids, each with its attempt, whose results it keeps.
        in_use: What it holds for payloads.
        counters: What it did.
    """

    moonrelay: Count
    role: Name
    work_endpoint: str
    epoch: Name
    registration: Register
    holding: tuple[tuple[Name, Count], ...] = ()
    offered: tuple[tuple[Name, Count], ...] = ()
    in_use: InUse = InUse()
    counters: Counters = Counters()


class Failed(Struct, frozen=True, kw_only=True, tag_field="msg_type", tag=FAILED):
    """A request failed in a worker, which holds nothing of it any more.

    Attributes:
        moonrelay: Version of these messages.
        request_id: The request.
        attempt: Its attempt.
        epoch: The worker's session.
        phase: One of `PHASES`.
        error: What happened.
        lost_input: The input is gone for good: the stage that made it must make it again.
    """

    moonrelay: Count
    request_id: Name
    attempt: Count
    epoch: Name
    phase: Name
    error: Failure
    lost_input: bool = False


class Finished(Struct, frozen=True, kw_only=True, tag_field="msg_type", tag=FINISHED):
    """A decoder has sent the result of a request (by another socket), or a released one has come to its end."""

    moonrelay: Count
    request_id: Name
    attempt: Count
    epoch: Name


# From the head to a worker.


class Ready(Struct, frozen=True, kw_only=True, tag_field="msg_type", tag=READY):
    """Work for a denoiser, decoder or image encoder: take over what ``manifest`` locates."""

    request_id: Name
    manifest: dict[str, Any] = {}
    scalar_fields: dict[str, Any] = {}
    slot_offset: Count = 0


class Release(Struct, frozen=True, kw_only=True, tag_field="msg_type", tag=RELEASE):
    """Drop what is held for a request's attempts up to ``attempt``; the result of one under way goes nowhere.

    ``attempt`` ``None`` means all attempts, past and under way.
    """

    moonrelay: Count
    request_id: Name
    attempt: Count | None = None


class _Stamped(Struct):
    moonrelay: Stamp | None = None


ToHead: TypeAlias = Register | Staged | Done | Beat | Failed | Finished
ToWorker: TypeAlias = Ready | Release

_NAMES: Final[Mapping[str, type[ToHead | ToWorker]]] = {
    REGISTER: Register,
    STAGED: Staged,
    DONE: Done,
    BEAT: Beat,
    FAILED: Failed,
    FINISHED: Finished,
    READY: Ready,
    RELEASE: Release,
}


def encode(message: ToHead | ToWorker | Mapping[str, Any]) -> list[bytes]:
    """Return a message's two frames."""
    return [MAGIC, msgspec.json.encode(message)]


def decode(frames: Sequence[Any]) -> dict[str, Any]:
    """Return a transfer message as a dict, the host's or ours, unchecked but for its form.

    Raises:
        WireError: Not a transfer message, or no JSON object.
    """
    if not is_message(frames):
        message = "not a transfer message: two frames, the first of them b'__transfer__'"
        raise WireError(message, field="frames")
    try:
        found = msgspec.json.decode(bytes(frames[1]))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        message = f"malformed transfer message: {exc}"
        raise WireError(message, field="frames") from exc
    if not isinstance(found, dict):
        message = f"a transfer message is a JSON object, not {type(found).__name__}"
        raise WireError(message, field="frames")
    return found


def is_message(frames: Sequence[Any]) -> bool:
    """Return whether frames are a transfer message, the host's or ours."""
    return len(frames) >= 2 and bytes(frames[0]) == MAGIC


def parse(message: Mapping[str, Any], kind: type[MessageT]) -> MessageT:
    """Check a decoded message.

    Args:
        message: As `decode` returned it.
        kind: Which message it must be.

    Raises:
        WireError: It is another one, or a field is missing or wrong; names the field.
        VersionError: It speaks another version.
    """
    try:
        found = msgspec.convert(dict(message), kind)
    except msgspec.ValidationError as exc:
        text, _, path = str(exc).partition(" - at `$")
        # A missing field is named in the sentence, a wrong one by its path.
        field = path.strip("`.") or "message"
        if "`" in text and "missing" in text:
            field = ".".join(part for part in (path.strip("`."), text.split("`")[1]) if part)
        said = f"wrong {message.get('msg_type', 'message')}: {text}"
        raise WireError(said, field=field, request_id=_text(message.get("request_id"))) from exc
    _check_version(getattr(found, KEY, None), message)
    return found


def parse_any(message: Mapping[str, Any]) -> ToHead | ToWorker | None:
    """Check a decoded message of whatever kind; ``None`` for one that is not of ours (the host's ALLOC, and so on).

    Raises: as `parse`.
    """
    kind = _NAMES.get(_text(message.get("msg_type")) or "")
    return None if kind is None else parse(message, kind)


def located(manifest: object) -> Location | None:
    """Return where a manifest says that the payload is; ``None`` for a stock worker's.

    Raises:
        WireError: It is ours and damaged; names the field.
        VersionError: Of another version.
    """
    if not isinstance(manifest, Mapping) or KEY not in manifest:
        return None
    try:
        found = msgspec.convert(manifest[KEY], Location)
    except msgspec.ValidationError as exc:
        message = f"wrong manifest: {exc}"
        raise WireError(message, field=f"manifest.{KEY}") from exc
    _check_version(found, {"msg_type": "manifest"})
    return found


def manifest_of(handle: bytes, *, epoch: str, nbytes: int, attempt: int) -> dict[str, Any]:
    """Return the manifest that locates a payload, plain enough for the host's JSON."""
    where = Location(
        version=VERSION, handle=base64.b64encode(handle).decode(), epoch=epoch, nbytes=nbytes, attempt=attempt
    )
    return {KEY: msgspec.to_builtins(where)}


def for_attempt(manifest: Mapping[str, Any], attempt: int, *, to: str = "") -> dict[str, Any]:
    """Return a manifest for READY: the same payload, with the attempt that is to take it.

    Args:
        manifest: As the sender staged it; one that is not ours stays as it is.
        attempt: The attempt.
        to: Session of the worker that is meant; a successor at the same endpoint drops it. Empty means any.
    """
    ours = manifest.get(KEY)
    if not isinstance(ours, Mapping):
        return dict(manifest)
    return {**manifest, KEY: {**ours, "attempt": attempt, "to": to}}


# Work for an encoder, and results that are codec frames.


def encoder_frames(request_id: str, attempt: int, work: bytes, *, to: str = "") -> list[bytes]:
    """Return the frames of work for an encoder, ``to`` as in `for_attempt`; a stock one reads the first and last."""
    return [request_id.encode(), msgspec.json.encode({KEY: VERSION, "attempt": attempt, "to": to}), work]


def encoder_attempt(frames: Sequence[Any]) -> int:
    """Return the attempt in an encoder's work; 0 where a stock head sent it."""
    if len(frames) < 3:
        return 0
    try:
        found = msgspec.json.decode(bytes(frames[1]))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0
    attempt = found.get("attempt") if isinstance(found, dict) else None
    return attempt if isinstance(attempt, int) and attempt >= 0 else 0


def encoder_addressee(frames: Sequence[Any]) -> str:
    """Return the session that an encoder's work is meant for; empty where it does not say."""
    if len(frames) < 3:
        return ""
    try:
        found = msgspec.json.decode(bytes(frames[1]))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    to = found.get("to") if isinstance(found, dict) else None
    return to if isinstance(to, str) else ""


def stamped(frames: Sequence[Any], stamp: Stamp) -> list[Any]:
    """Return a worker's frames with a stamp: a transfer message's JSON, or the codec's first frame, gets our key.

    Both are JSON objects of which a stock head reads the keys that it knows.

    Raises:
        WireError: The frame is none.
    """
    place = 1 if is_message(frames) else 0
    try:
        content = msgspec.json.decode(bytes(frames[place]), type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, IndexError, UnicodeDecodeError) as exc:
        message = f"frames without a JSON object cannot be stamped: {exc}"
        raise WireError(message, field="frames") from exc
    content[KEY] = msgspec.Raw(msgspec.json.encode(stamp))
    return [*frames[:place], msgspec.json.encode(content), *frames[place + 1 :]]


def stamp_of(frames: Sequence[Any]) -> Stamp | None:
    """Return the stamp of a worker's frames, ``None`` where there is none.

    Raises:
        WireError: There is one, and it is damaged.
        VersionError: Of another version.
    """
    if not frames:
        return None
    try:
        found = msgspec.json.decode(bytes(frames[1 if is_message(frames) else 0]), type=_Stamped).moonrelay
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        message = f"damaged stamp of a result: {exc}"
        raise WireError(message, field=KEY) from exc
    _check_version(found, {"msg_type": "result"})
    return found


def _check_version(ours: object, message: Mapping[str, Any]) -> None:
    version = ours if isinstance(ours, int) else getattr(ours, "version", None)
    if version is not None and version != VERSION:
        what = message.get("msg_type", "message")
        said = f"{what} speaks version {version} of Moonrelay's messages, this side {VERSION}"
        raise VersionError(f"{said}; install the same Moonrelay on all roles", field=KEY)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
