"""What all tests of the suite need of the process that runs them."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let children hear SIGINT, as in tests/conftest.py, also where only the suite's tests are run."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
