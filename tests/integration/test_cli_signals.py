"""Ctrl-C and SIGTERM on a real command: its exit code, and that what it started has ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

COMMAND = '''
import subprocess, sys, threading
import typer

def wait() -> None:
    """Start a child and wait; end the child on the way out, as every command does."""
    child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait(60)"])
    try:
        typer.echo(f"ready {child.pid}")
        sys.stdout.flush()
        threading.Event().wait(60)
    finally:
        child.kill()
        child.wait()
'''

PROGRAM = """
import sys
sys.path[:] = {path!r}
from moonrelay.cli.main import LazyCommand, main
main(["wait"], [LazyCommand(name="wait", target="mr_waiting:wait", help="Wait.")])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_and_its_child(tmp_path: Path, number: signal.Signals, code: int) -> None:
    (tmp_path / "mr_waiting.py").write_text(COMMAND)
    program = PROGRAM.format(path=[str(tmp_path), *(path for path in sys.path if path)])
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 30)
        assert ready, "the command did not start"
        word, child = process.stdout.readline().split()
        assert word == "ready"
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == code
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(child), 0)
