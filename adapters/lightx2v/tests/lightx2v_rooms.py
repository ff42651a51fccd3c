"""The host's own sender and receiver, without its models: a room for each payload, in one process.

``python lightx2v_rooms.py ROOM ROOM …`` carries one payload through each room and removes it again; one line of JSON
per room says what the process holds by then. ``--alone`` has a receiver whose sender is not there look once, after the
seconds that follow.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

BYTES = 1024


def carry(rooms: list[int]) -> None:
    """Carry one payload through each room."""
    from lightx2v.disagg import conn

    sender, receiver = _manager("ENCODE"), _manager("TRANSFORMER")
    for room in rooms:
        out, into = _buffer(), _buffer()
        sender.init(_args(out), room)
        receiver.init(_args(into), room)
        sending = conn.DataSender(sender, "127.0.0.1", room)
        receiving = conn.DataReceiver(receiver, "127.0.0.1", room)
        receiving.init()
        sending.send([out.data_ptr()])
        started = time.monotonic()
        while receiving.poll() != conn.DataPoll.Success:
            threading.Event().wait(0.002)
        came = time.monotonic()
        sender.remove(room)
        receiver.remove(room)
        said: dict[str, Any] = {"room": room, "same": bool((out == into).all())}
        said |= {"carry_s": came - started, "remove_s": time.monotonic() - came}
        said |= {"threads": len(os.listdir("/proc/self/task")), "descriptors": len(os.listdir("/proc/self/fd"))}
        print(json.dumps(said), flush=True)


def look_alone(room: int, after_s: float) -> None:
    """Receive from nobody, and say what the status is by then."""
    from lightx2v.disagg import conn

    receiver = _manager("TRANSFORMER")
    receiver.init(_args(_buffer()), room)
    receiving = conn.DataReceiver(receiver, "127.0.0.1", room)
    receiving.init()
    threading.Event().wait(after_s)
    print(json.dumps({"status": int(receiving.poll())}), flush=True)


def _manager(role: str) -> Any:
    from lightx2v.disagg import conn

    return conn.DataManager(conn.DisaggregationPhase.PHASE1, conn.DisaggregationMode[role])


def _buffer() -> Any:
    import torch

    return torch.randint(0, 256, (BYTES,), dtype=torch.uint8)


def _args(buffer: Any) -> Any:
    from lightx2v.disagg import conn

    lengths = [buffer.numel()]
    return conn.DataArgs(
        sender_engine_rank=0,
        receiver_engine_rank=1,
        data_ptrs=[buffer.data_ptr()],
        data_lens=lengths,
        data_item_lens=lengths,
    )


if __name__ == "__main__":
    if sys.argv[1] == "--alone":
        look_alone(int(sys.argv[2]), float(sys.argv[3]))
    else:
        carry([int(word) for word in sys.argv[1:]])
    sys.stdout.flush()
    os._exit(0)  # its threads never end
