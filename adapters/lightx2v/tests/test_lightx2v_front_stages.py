"""Which server a request goes to, and what it means that one cannot be reached."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from lightx2v_front_roles import free_port

from moonrelay.clock import ManualClock, SystemClock
from moonrelay_lightx2v.front import stages


def test_which_server_is_chosen() -> None:
    clock = ManualClock()
    stage = stages.Stage("encoder", ("a", "b", "c"), clock)
    a, b, c = stage.servers
    assert [stage.choose() for _ in range(4)] == [a, b, c, a], "of equals the longest unused"
    a.under_way = c.under_way = 1
    assert [stage.choose(), stage.choose()] == [b, b], "the one with the fewest requests"
    b.out_until_s = clock.monotonic() + 5
    assert stage.choose() is c, "one that was unreachable comes last"
    assert stage.choose([a, c]) is b, "and comes all the same"
    assert stage.choose([a, b, c]) is None
    clock.advance(6)
    assert stage.choose() is b


def test_a_server_to_which_no_connection_comes_about_is_not_gone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "CONNECT_S", 0.3)

    async def look(url: str) -> object:
        servers = stages.Servers([("encoder", (url,))], SystemClock())
        try:
            return await servers.look(servers.stages[0].servers[0], "x")
        finally:
            await servers.close()

    with contextlib.ExitStack() as opened:
        # As many as its queue holds: who comes later hears nothing.
        full = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            caller = opened.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        seen = asyncio.run(look(f"http://127.0.0.1:{full.getsockname()[1]}"))
    assert isinstance(seen, stages.Silent), seen
    assert isinstance(asyncio.run(look(f"http://127.0.0.1:{free_port()}")), stages.Gone)
