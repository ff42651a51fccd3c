"""The error hierarchy of Moonrelay: what a failure is called, on both sides of a wire.

Owns the class of every failure, whether it is worth retrying, and its wire form ``(code, retryable, message)``.
Backends translate their return codes into these classes in one place each; nothing else raises to a user.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar


def _code_of(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class MoonrelayError(Exception):
    """A failure inside Moonrelay.

    Args:
        message: One line that names what failed, the value, and the remedy.
        **context: Scalars that locate the failure (``request_id``, ``stage``, ``peer``, ``field`` ...); ``None``
            values are left out.

    Attributes:
        code: Name of the class on a wire, ``snake_case``, stable across versions.
        retryable: Whether the same call may succeed later without a change by the caller.
        context: The context given, without ``None`` values.
    """

    code: ClassVar[str] = "moonrelay_error"
    retryable: bool = False

    def __init__(self, message: str, **context: Any) -> None:
        super().__init__(message)
        self.message = message
        self.context: dict[str, Any] = {key: value for key, value in context.items() if value is not None}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "code" not in cls.__dict__:
            cls.code = _code_of(cls.__name__)

    def __str__(self) -> str:
        if not self.context:
            return self.message
        where = ", ".join(f"{key}={value!r}" for key, value in self.context.items())
        return f"{self.message} ({where})"

    def to_wire(self) -> tuple[str, bool, str]:
        """Return ``(code, retryable, message)``, the form in which a failure reaches a peer."""
        return (self.code, self.retryable, str(self))


class ConfigError(MoonrelayError):
    """A setting or an argument is wrong; the message names the field, the value and the remedy."""


class ClosedError(MoonrelayError):
    """The object was closed, or is being closed; make a new one."""


class WireError(MoonrelayError):
    """Bytes from outside are malformed, truncated, too large or not authentic."""


class VersionError(WireError):
    """A peer or a handle speaks a version, or requires a feature, that this side does not know."""


class PluginError(MoonrelayError):
    """A named engine, relay, queue, policy or adapter is unknown or cannot be loaded."""


# Control plane.


class QueueFull(MoonrelayError):
    """The queue accepts no more work for now."""

    retryable = True


class LeaseHeld(MoonrelayError, TimeoutError):
    """Another reader held the payload until the caller's deadline."""

    retryable = True


class LeaseLost(MoonrelayError):
    """The payload was consumed or the claim was given to another reader; the caller's token is fenced."""


class LeaseExpired(MoonrelayError):
    """The payload's lease ran out before it was read."""


class InputLost(MoonrelayError):
    """What a stage was to work on is not where it was kept any more; the stage before makes it again."""

    retryable = True


class NoCredit(MoonrelayError):
    """No buffer slot is free downstream."""

    retryable = True


class Aborted(MoonrelayError):
    """The producer gave the payload up; the message carries its reason."""


class Cancelled(MoonrelayError):
    """The request was cancelled by its client."""


class Preempted(MoonrelayError):
    """The worker left the job at a step boundary, for another one to go on from its checkpoint; not a failure."""

    retryable = True


class DeadlineExceeded(MoonrelayError, TimeoutError):
    """The request's or the call's deadline passed."""


# Data plane.


class TransferFailed(MoonrelayError):
    """The engine reported that bytes did not arrive; terminal and quiet."""

    retryable = True


class TransferTimeout(MoonrelayError, TimeoutError):
    """Bytes did not arrive by the deadline; the memory is quarantined until the engine is quiet."""

    retryable = True


class PeerLost(MoonrelayError, ConnectionError):
    """The peer does not answer, and nothing was relayed."""

    retryable = True


class IntegrityError(MoonrelayError):
    """Bytes arrived and are not the producer's."""


class CheckpointMismatch(MoonrelayError):
    """A checkpoint is of another run, or lacks something; ``context`` has ``field``, and ``saved`` and ``present``."""


class CapacityError(MoonrelayError):
    """The payload does not fit the pool or the store, or there is no room now."""


class RegistrationError(MoonrelayError):
    """Memory cannot be registered with the engine, or is registered already."""


class UnsupportedTensor(MoonrelayError, TypeError):
    """A value in the payload cannot be carried bit for bit; ``context['field']`` names it."""


def _leaves(root: type[MoonrelayError]) -> dict[str, type[MoonrelayError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        for code, leaf in _leaves(child).items():
            # A subclass that a room keeps to itself goes by its parent's code, and comes back as the parent.
            if not leaf.__name__.startswith("_"):
                found.setdefault(code, leaf)
    return found


def from_wire(code: str, retryable: bool, message: str) -> MoonrelayError:
    """Rebuild a failure that a peer sent.

    Args:
        code: The ``code`` of a class in this module, or of a plugin's subclass; an unknown one gives the base class.
        retryable: The peer's judgement; it overrides the class's flag.
        message: The peer's message.

    Returns:
        The error, ready to raise; ``context['remote']`` is true.
    """
    error = _leaves(MoonrelayError).get(code, MoonrelayError)(message, remote=True)
    error.retryable = retryable
    if type(error) is MoonrelayError:
        error.context["code"] = code
    return error
