"""A Mooncake store of our own on loopback: master and pool daemon from the wheel, for demo and tests."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from moonrelay.clock import Clock


class MooncakeCluster:
    """``mooncake_master`` and ``mooncake_client`` as children that die with this process.

    Args:
        folder: Where logs go; made when absent.
        pool_bytes: Size of the pool (mapped lazily).
        lease_ttl_s: How long a read protects an object from unforced removal.
        start_timeout_s: Until when both must answer.
        clock: For deadlines; the system's by default.
    """

    def __init__(
        self,
        folder: Path,
        *,
        pool_bytes: int = 1 << 30,
        lease_ttl_s: float = 20.0,
        start_timeout_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None: ...

    def start(self) -> None:
        """Start both and wait until they answer. Idempotent. Raises PluginError or PeerLost with the log's tail."""

    @property
    def url(self) -> str:
        """``mooncake://127.0.0.1:<rpc>?metrics=127.0.0.1:<http>`` for `StoreConfig.url`."""
        raise NotImplementedError

    @property
    def pids(self) -> dict[str, int]:
        """``{"master": pid, "client": pid}`` of what runs."""
        raise NotImplementedError

    def kill_master(self) -> None:
        """SIGKILL the master and wait until it is gone; for fault tests."""

    def kill_client(self) -> None:
        """SIGKILL the pool daemon and wait until it is gone; for fault tests."""

    def close(self) -> None:
        """End both. Idempotent, also half-built."""

    def __enter__(self) -> MooncakeCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
