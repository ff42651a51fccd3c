"""What all tests need of the process that runs them."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let children hear SIGINT: a shell that runs the suite in the background has them inherit that it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
