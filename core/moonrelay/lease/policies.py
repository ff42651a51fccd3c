"""Lease policies: who may read a payload, how often, and for how long it is kept.

Owns the built-in policies and the one function that turns what a user wrote into `moonrelay.handle.LeaseTerms`. A
plugin's policy is any class with a method ``terms(default_ttl_s)``, found in the entry-point group
``moonrelay.policies``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeGuard, runtime_checkable

from moonrelay.errors import ConfigError
from moonrelay.handle import LeaseTerms

#: Largest number of readers of a `Shared` lease; above it a typing mistake is likelier than a wish.
MAX_READERS = 1_000_000


@runtime_checkable
class Policy(Protocol):
    """What a lease policy is: something that can state its terms."""

    def terms(self, default_ttl_s: float | None) -> LeaseTerms:
        """Return the terms; ``default_ttl_s`` is the connector's ``lease_ttl_s``.

        Raises:
            ConfigError: An argument of the policy is wrong.
        """
        ...


@dataclass(frozen=True, slots=True)
class DeleteOnConsume:
    """One reader at a time; gone when one has acknowledged.

    Attributes:
        ttl_s: Seconds the payload is kept when nobody reads it; ``None`` takes the connector's ``lease_ttl_s``.
    """

    ttl_s: float | None = None

    def terms(self, default_ttl_s: float | None) -> LeaseTerms:
        ttl_s = default_ttl_s if self.ttl_s is None else self.ttl_s
        return LeaseTerms(policy="delete_on_consume", readers=1, ttl_s=_ttl(ttl_s, "DeleteOnConsume"))


@dataclass(frozen=True, slots=True)
class Shared:
    """A given number of readers, also at the same time; gone when that many have acknowledged.

    Attributes:
        readers: How many acknowledgements consume the payload.
        ttl_s: As for `DeleteOnConsume`.
    """

    readers: int
    ttl_s: float | None = None

    def terms(self, default_ttl_s: float | None) -> LeaseTerms:
        readers = self.readers
        if isinstance(readers, bool) or not isinstance(readers, int) or not 1 <= readers <= MAX_READERS:
            message = f"Shared.readers={readers!r} must be a whole number from 1 to {MAX_READERS}"
            raise ConfigError(message, field="readers")
        ttl_s = default_ttl_s if self.ttl_s is None else self.ttl_s
        return LeaseTerms(policy="shared", readers=readers, ttl_s=_ttl(ttl_s, "Shared"))


@dataclass(frozen=True, slots=True)
class Ttl:
    """Any number of readers until the time is over.

    Attributes:
        ttl_s: Seconds the payload is kept.
    """

    ttl_s: float

    def terms(self, default_ttl_s: float | None) -> LeaseTerms:
        if self.ttl_s is None:
            message = "Ttl.ttl_s=None must be a number of seconds; use Pinned() to keep a payload until it is released"
            raise ConfigError(message, field="ttl_s")
        return LeaseTerms(policy="ttl", readers=0, ttl_s=_ttl(self.ttl_s, "Ttl"))


@dataclass(frozen=True, slots=True)
class Pinned:
    """Any number of readers until released."""

    def terms(self, default_ttl_s: float | None) -> LeaseTerms:
        return LeaseTerms(policy="pinned", readers=0, ttl_s=None)


BUILTIN: Mapping[str, Callable[..., Policy]] = {
    "delete_on_consume": DeleteOnConsume,
    "shared": Shared,
    "ttl": Ttl,
    "pinned": Pinned,
}

#: How a policy's name becomes its class: a mapping, or a function that raises `PluginError` for an unknown name.
Resolve: TypeAlias = Mapping[str, Callable[..., object]] | Callable[[str], Callable[..., object]]


def terms(policy: object, default_ttl_s: float | None, *, resolve: Resolve | None = None) -> LeaseTerms:
    """Turn what a user wrote as ``lease=`` into terms.

    Args:
        policy: A policy object, or the name of one that needs no arguments.
        default_ttl_s: Seconds for policies that name none; ``None`` means without end.
        resolve: Where names other than the built-in ones are looked up; called only for those.

    Raises:
        ConfigError: Not a policy, an unknown name, or a wrong argument; names field, value and remedy.
    """
    if isinstance(policy, str):
        policy = _by_name(policy, resolve)
    elif isinstance(policy, type):
        message = f"lease={policy.__name__} is a class; pass an instance, {policy.__name__}(…)"
        raise ConfigError(message, field="lease")
    if not _is_policy(policy):
        message = (
            f"lease={policy!r:.80} is not a lease policy; use a name or one of DeleteOnConsume, Shared, Ttl, Pinned"
        )
        raise ConfigError(message, field="lease")
    made = policy.terms(default_ttl_s)
    if not isinstance(made, LeaseTerms):
        message = f"lease={policy!r:.80} gave {type(made).__name__} instead of LeaseTerms; correct its terms() method"
        raise ConfigError(message, field="lease")
    check(made)
    return made


def check(made: LeaseTerms) -> None:
    """Raise `ConfigError` when terms make no sense (a plugin's policy may have made them)."""
    if isinstance(made.readers, bool) or not isinstance(made.readers, int) or not 0 <= made.readers <= MAX_READERS:
        message = f"lease terms of {made.policy!r}: readers={made.readers!r} must be 0 (any number) to {MAX_READERS}"
        raise ConfigError(message, field="readers")
    _ttl(made.ttl_s, made.policy)


def _is_policy(value: object) -> TypeGuard[Policy]:
    # What isinstance would say, at a fiftieth of its time.
    return callable(getattr(value, "terms", None))


def _look_up(name: str, resolve: Resolve | None) -> Callable[..., object] | None:
    if resolve is None:
        return None
    return resolve.get(name) if isinstance(resolve, Mapping) else resolve(name)


def _by_name(name: str, resolve: Resolve | None) -> Policy:
    made = BUILTIN.get(name) or _look_up(name, resolve)
    if made is None:
        known = sorted({*BUILTIN, *(resolve if isinstance(resolve, Mapping) else ())})
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        message = f"lease={name!r} is not a lease policy; {hint}"
        raise ConfigError(message, field="lease")
    try:
        policy = made()
    except TypeError as exc:
        cls = getattr(made, "__name__", name)
        message = f"lease={name!r} needs arguments ({exc}); pass an instance, {cls}(…)"
        raise ConfigError(message, field="lease") from exc
    if not _is_policy(policy):
        message = f"lease={name!r} resolves to {type(policy).__name__}, which has no terms() method; correct the plugin"
        raise ConfigError(message, field="lease")
    return policy


def _ttl(ttl_s: float | None, owner: str) -> float | None:
    if ttl_s is None:
        return None
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)) or not ttl_s > 0 or math.isinf(ttl_s):
        message = f"{owner}.ttl_s={ttl_s!r} must be a finite number of seconds above 0 (None: without end)"
        raise ConfigError(message, field="ttl_s")
    return float(ttl_s)
