"""The process that sides' processes are forked from, from inside (``python -m`` this); see `Nursery` for outside.

Owns the other end of its wire. A request is one byte with two descriptors, for the orders and the answers of a side;
what is sent is a JSON message for each process that was born, and one for each that has ended. A fork is killed by the
system when this process ends, and this one when the suite does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence

import msgspec

from moonrelay.errors import ConfigError
from moonrelay_conformance.child import die_with
from moonrelay_conformance.sides import runner


def prepare(side: str) -> None:
    """Import everything and leave it to no garbage collection: pages that nobody writes to stay shared with forks.

    What cannot be imported is left to a side's start in the fork, which answers with it.

    Raises:
        ConfigError: Something has started a thread, which no fork would have.
    """
    try:
        importlib.import_module("moonrelay_conformance.corpus.trees")
        importlib.import_module("torch")
        runner.side_class(side).prepare()
    except Exception:  # noqa: BLE001 - foreign code
        traceback.print_exc()
    if threading.active_count() > 1:
        names = ", ".join(one.name for one in threading.enumerate())
        message = f"{side} cannot be forked, for its prepare() left threads: {names}"
        raise ConfigError(message, field="side")
    gc.collect()
    gc.freeze()


def main(arguments: Sequence[str]) -> int:
    """Fork a process for each request until the wire ends; in each of them, execute orders.

    Args:
        arguments: The process id of the suite, the wire's descriptor, and the side.
    """
    suite, descriptor, side = arguments
    if not die_with(int(suite)):
        return 1
    prepare(side)
    us = os.getpid()
    children: dict[int, int] = {}
    with socket.socket(fileno=int(descriptor)) as wire:
        while True:
            ready, _, _ = select.select([wire.fileno(), *children], [], [])
            for ended in children.keys() & set(ready):
                _, status = os.waitpid(children[ended], 0)
                _tell(wire, {"ended": children.pop(ended), "code": os.waitstatus_to_exitcode(status)})
                os.close(ended)
            if wire.fileno() not in ready:
                continue
            request, handed, _, _ = socket.recv_fds(wire, 1, 2)
            if not request:
                return 0
            pid = os.fork()
            if pid == 0:
                break
            # Here too, so that it holds when the suite hears of it; it may have ended.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            children[os.pidfd_open(pid)] = pid
            for one in handed:
                os.close(one)
            _tell(wire, {"born": pid})
    for one in children:
        os.close(one)
    os.setpgid(0, 0)
    for standard, one in enumerate(handed):
        os.dup2(one, standard)
        os.close(one)
    return runner.main([str(us)])


def _tell(wire: socket.socket, message: Mapping[str, int]) -> None:
    with contextlib.suppress(OSError):  # the suite has closed it
        wire.send(msgspec.json.encode(message))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
