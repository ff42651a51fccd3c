"""What was asked of the front, and how it stands: one `Order` for each request, kept for a while after its end.

Owns ids: which may be given, which are taken, and the id under which a request that starts anew goes to the servers.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from moonrelay_lightx2v.front.errors import BadRequest, FrontIsFull, IdTaken
from moonrelay_lightx2v.front.stages import COMPLETED, ENDED, PENDING, PROCESSING, Seen, Server

#: Ended requests that are told of; the host's server keeps as many.
KEPT: Final = 1000
#: Of all bodies of requests under way; images are sent inside of them.
MOST_BODY_BYTES: Final = 1 << 30
#: The host draws from these.
SEEDS: Final = 2**32

#: By which a client pairs the parts of a request itself.
_ROOMS: Final = ("data_bootstrap_room", "disagg_bootstrap_room")
#: Of the host's routes: ``queue/status`` is no task's.
_NO_ID: Final = "queue"
#: It becomes part of a path at every server, and a file's name at one.
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@=+~-]{0,199}")


@dataclass(slots=True, eq=False)
class View:
    """How one stage stands with a request.

    Attributes:
        stage: Its name.
        server: Who has the task; ``None`` where nobody does.
        status: As the host's server says it.
        error: Its text.
        error_type: Its type.
        save_result_path: Where the result lies there.
        unreached: Looks in a row that found nobody.
        silent_since_s: Since when it has said nothing that makes sense.
        lost: Why it cannot end the task any more; empty where it can.
    """

    stage: str
    server: Server | None = None
    status: str = PENDING
    error: str = ""
    error_type: str = ""
    save_result_path: str | None = None
    unreached: int = 0
    silent_since_s: float | None = None
    lost: str = ""

    def saw(self, seen: Seen) -> None:
        self.unreached, self.silent_since_s = 0, None
        if self.status not in ENDED:
            self.status, self.error, self.error_type = seen.status, seen.error, seen.error_type
            self.save_result_path = seen.save_result_path

    def told(self, task_id: str) -> dict[str, Any]:
        return {
            "url": self.server.url if self.server else None,
            "task_id": task_id if self.server else None,
            "status": self.status,
            "error": self.error or self.lost or None,
        }


class Order:
    """One request.

    Args:
        task_id: As clients know it.
        path: The host's route for it.
        fields: The body, with a seed.
        stages: Names, in order.
        size: Of the body, in bytes.
        now: Unix seconds.

    Threads: belongs to one event loop.
    """

    def __init__(
        self, task_id: str, path: str, fields: Mapping[str, Any], stages: tuple[str, ...], size: int, now: int
    ) -> None:
        self.id = task_id
        self.path = path
        self.size = size
        self.state = PENDING
        self.stage = ""
        self.error = ""
        self.error_type = ""
        self.attempt = 1
        self.lost: list[str] = []
        self.started = now
        self.ended: int | None = None
        self.wire_id = task_id
        self.save_result_path = str(fields.get("save_result_path") or task_id)
        self.views = tuple(View(stage) for stage in stages)
        self.placed: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        #: Servers that have the task, or may have it, under ``wire_id``.
        self.held: dict[str, Server] = {}
        self.task: asyncio.Task[None] | None = None
        self.why_cancelled = "Task cancelled by user"
        self._fields: Mapping[str, Any] | None = fields

    @property
    def over(self) -> bool:
        return self.state in ENDED

    def renew(self, wire_id: str) -> bytes:
        """Begin under another id, and return the body for the servers."""
        assert self._fields is not None, "the body is forgotten at the end"
        self.wire_id = wire_id
        self.reset()
        fields = {**self._fields, "task_id": wire_id}
        if wire_id != self.id:
            # Else the file has the new id's name, whose ".2" the host would take for its kind.
            fields["save_result_path"] = self.save_result_path
            # A room of the client's goes before the id: what the attempt before left under it is not this one's.
            for room in _ROOMS:
                fields.pop(room, None)
        return json.dumps(fields).encode()

    def reset(self) -> None:
        """Be as no stage has it."""
        self.views = tuple(View(view.stage) for view in self.views)
        self.state, self.stage = PENDING, ""

    def hold(self, server: Server) -> None:
        """Note that a server has the task, or may have it."""
        server.under_way += 1
        self.held[server.stage] = server

    def drop(self, server: Server) -> None:
        """Note that a server does not have it."""
        if self.held.get(server.stage) is server:
            del self.held[server.stage]
            server.under_way -= 1

    def standing(self) -> None:
        """Say from the stages' states how the whole stands."""
        busy = [view for view in self.views if view.status == PROCESSING]
        begun = [view for view in self.views if view.status != PENDING]
        self.state = PROCESSING if begun else PENDING
        self.stage = (busy or begun or [self.views[0]])[0].stage

    def end(self, state: str, now: int, *, stage: str = "", error: str = "", error_type: str = "") -> None:
        """End it; the first end counts."""
        if self.over:
            return
        self.state, self.stage, self.error, self.error_type, self.ended = state, stage, error, error_type, now
        last = self.views[-1]
        if state == COMPLETED and last.save_result_path is not None:
            self.save_result_path = last.save_result_path
        self._fields = None

    def told(self) -> dict[str, Any]:
        """Return what clients are told: the host's fields, and what only a front knows."""
        return {
            "task_id": self.id,
            "status": self.state,
            "start_time": _time(self.started),
            "end_time": None if self.ended is None else _time(self.ended),
            "error": self.error or None,
            "error_type": self.error_type,
            "save_result_path": self.save_result_path,
            "stage": self.stage or None,
            "attempt": self.attempt,
            "lost": list(self.lost),
            "stages": {view.stage: view.told(self.wire_id) for view in self.views},
        }


class Book:
    """All requests under way, and the last `KEPT` that ended.

    Args:
        stages: Names, in order.
        most: Requests under way at once.
        now: Unix seconds.
        draw_id: An id for a request that gives none.
        draw_seed: A seed for a request that gives none.
    """

    def __init__(
        self,
        stages: tuple[str, ...],
        most: int,
        *,
        now: Callable[[], int],
        draw_id: Callable[[], str],
        draw_seed: Callable[[], int],
    ) -> None:
        self._stages = stages
        self._most = most
        self._now = now
        self._draw_id = draw_id
        self._draw_seed = draw_seed
        self._under_way: dict[str, Order] = {}
        self._ended: OrderedDict[str, Order] = OrderedDict()
        self._bytes = 0
        #: How many ids of a client's id the servers have seen.
        self._spent: OrderedDict[str, int] = OrderedDict()
        self.outcomes: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Order]:
        yield from list(self._ended.values())
        yield from list(self._under_way.values())

    @property
    def under_way(self) -> tuple[Order, ...]:
        return tuple(self._under_way.values())

    def door(self) -> None:
        """Raise `FrontIsFull` where no more requests may be under way."""
        if len(self._under_way) >= self._most:
            raise FrontIsFull(f"{self._most} requests are under way, as many as may be; ask again, or --max-requests")

    def enter(self, path: str, fields: Mapping[str, Any], size: int) -> Order:
        """Take a request in.

        Raises:
            BadRequest: Its id cannot be one.
            IdTaken: Its id is another's.
            FrontIsFull: Too many are under way, or too large ones.
        """
        self.door()
        if self._bytes + size > MOST_BODY_BYTES:
            raise FrontIsFull(f"the bodies of the requests under way have {self._bytes} bytes; ask again later")
        task_id = self._id_of(fields)
        seeded = dict(fields)
        seeded.setdefault("seed", self._draw_seed())
        order = Order(task_id, path, seeded, self._stages, size, self._now())
        self._under_way[task_id] = order
        self._bytes += size
        return order

    def next_wire_id(self, order: Order) -> str:
        """Return an id that no server has seen: the client's own, else ``<id>.2`` and so on."""
        while True:
            number = self._spent.pop(order.id, 0) + 1
            self._spent[order.id] = number
            if len(self._spent) > 2 * KEPT + self._most:
                self._spent.popitem(last=False)
            wire_id = order.id if number == 1 else f"{order.id}.{number}"
            if wire_id == order.id or self.get(wire_id) is None:
                return wire_id

    def leave(self, order: Order) -> None:
        """Keep a request that has ended as one that is told of."""
        self._out(order)
        self.outcomes[order.state] += 1
        self._ended[order.id] = order
        while len(self._ended) > KEPT:
            self._ended.popitem(last=False)

    def refuse(self, order: Order) -> None:
        """Forget a request that no server took: its client was told."""
        self._out(order)
        self.outcomes["refused"] += 1

    def get(self, task_id: str) -> Order | None:
        """Return the request with that id."""
        return self._under_way.get(task_id) or self._ended.get(task_id)

    def _out(self, order: Order) -> None:
        if self._under_way.pop(order.id, None) is not None:
            self._bytes -= order.size

    def _id_of(self, fields: Mapping[str, Any]) -> str:
        if "task_id" not in fields:
            return self._draw_id()
        given = fields["task_id"]
        if not (isinstance(given, str) and _ID.fullmatch(given)) or given == _NO_ID:
            message = (
                f"task_id={str(given)[:80]!r} cannot be an id: use 1 to 200 letters, digits and ._:@=+~- "
                f"that begin with a letter or digit and are not {_NO_ID!r}, or leave it out"
            )
            raise BadRequest(message)
        if self.get(given) is not None or any(order.wire_id == given for order in self._under_way.values()):
            raise IdTaken(f"task_id={given!r} is taken by another task; use another, or leave it out")
        return given


def _time(unix: int) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat()
