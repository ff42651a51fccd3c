"""Which priority classes preempt which, read from one line of settings.

Owns the line's form: ``interactive>batch``, or ``interactive>standard+batch, standard>batch``; empty is nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from moonrelay.errors import ConfigError
from moonrelay.queueing.task import PRIORITIES, Priority

#: What preempts a class, the most urgent first; a class that is not there is never preempted.
Precedence: TypeAlias = Mapping[Priority, tuple[Priority, ...]]

#: What ``--preempt`` means where nothing else is said.
INTERACTIVE_FIRST = "interactive>batch"


def read_precedence(text: str) -> Precedence:
    """Read which classes preempt which.

    Args:
        text: See the module.

    Raises:
        ConfigError: It is not understood, or a class would preempt one that is as urgent or more urgent, so that two
            jobs could take turns without end.
    """
    above: dict[Priority, set[Priority]] = {}
    for part in text.split(","):
        if not part.strip():
            continue
        upper, arrow, lower = part.partition(">")
        first = _class(upper, text)
        for name in lower.split("+") if arrow else [""]:
            second = _class(name, text)
            if PRIORITIES.index(first) >= PRIORITIES.index(second):
                message = f"preempt={text!r}: {first} is not more urgent than {second}, and cannot preempt it"
                raise ConfigError(message, field="preempt")
            above.setdefault(second, set()).add(first)
    return {lower: tuple(name for name in PRIORITIES if name in uppers) for lower, uppers in above.items()}


def _class(name: str, text: str) -> Priority:
    for known in PRIORITIES:
        if known == name.strip():
            return known
    message = f"preempt={text!r} is not understood at {name.strip()!r}; write e.g. 'interactive>standard+batch', or ''"
    raise ConfigError(message, field="preempt")
