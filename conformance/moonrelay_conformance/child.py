"""What every process that the suite starts does first: it cannot outlive who started it, and its wire is its own.

Owns nothing; imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import IO, Final

_PR_SET_PDEATHSIG: Final = 1


def die_with(parent: int) -> bool:
    """Let the system kill this process when ``parent`` ends, also while it is stopped; False where it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def private_wire() -> tuple[IO[bytes], IO[bytes]]:
    """Return what standard input and output were, and put harmless things in their places.

    Returns:
        The wire to read orders from, and the unbuffered one for answers.
    """
    orders = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return orders, answers
