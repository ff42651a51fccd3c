"""``moonrelay cache``: what the shared caches of a deployment hold in its store, and clearing them.

Owns the rendering. It reads and removes records of caches only: payloads, leases and checkpoints are not its own, and
no entry's bytes pass through it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

from moonrelay.cli.sizes import say_size
from moonrelay.clock import Deadline, SystemClock

if TYPE_CHECKING:
    from moonrelay.cache.shared import SharedStore

cache = typer.Typer(no_args_is_help=True)

#: Longest time that a command may take, in seconds.
TIMEOUT_S: Final = 60.0
#: Digits of a digest that a table shows.
_SHORT: Final = 16

_Store = Annotated[
    str | None,
    typer.Option(
        help="Relay: local:///folder or mooncake://host:port; or MOONRELAY_STORE_URL.", show_default="this user's own"
    ),
]
_Namespace = Annotated[
    str | None,
    typer.Option(help="The deployment's prefix in the store; or MOONRELAY_STORE_NAMESPACE.", show_default="moonrelay"),
]
_Name = Annotated[str, typer.Option(help="Which cache: its word in the store.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@cache.command()
def stats(
    store: _Store = None, namespace: _Namespace = None, name: _Name = "embeddings", as_json: _Json = False
) -> None:
    """Say how full a cache is in the store."""
    with opened(store, namespace, name) as (shared, url):
        usage = shared.usage(_soon())
    found: dict[str, object] = {
        "store": url,
        "cache": name,
        "entries": usage.entries,
        "bytes": usage.nbytes,
        # An empty store's bound is said by the first process that puts something there.
        "capacity_bytes": usage.capacity_bytes if usage.generations else None,
        "generations": usage.generations,
    }
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    bound = f" of {say_size(usage.capacity_bytes)}" if usage.generations else ""
    typer.echo(f"{name} in {url}: {usage.entries} entries, {usage.nbytes} B{bound}, {usage.generations} generations")


@cache.command("ls")
def list_entries(
    store: _Store = None, namespace: _Namespace = None, name: _Name = "embeddings", as_json: _Json = False
) -> None:
    """List a cache's entries in the store, the newest generation first. No prompt is kept there, so none is shown."""
    with opened(store, namespace, name) as (shared, url):
        entries = list(shared.entries(_soon()))
    if as_json:
        rows = [
            {"digest": one.digest, "bytes": one.nbytes, "generation": one.generation, "label": dict(one.label)}
            for one in entries
        ]
        typer.echo(json.dumps({"store": url, "cache": name, "entries": rows}, indent=2))
        return
    for one in entries:
        label = " ".join(f"{key}={value}" for key, value in sorted(one.label.items()))
        typer.echo(f"{one.digest[:_SHORT]}  generation {one.generation}  {one.nbytes} B  {label}")
    typer.echo(f"{len(entries)} entries in {url}")


@cache.command()
def clear(
    store: _Store = None, namespace: _Namespace = None, name: _Name = "embeddings", as_json: _Json = False
) -> None:
    """Remove all of a cache's entries from the store, for all processes; what is put meanwhile may stay.

    What workers hold in their own memory stays there, and is as exact as it was.
    """
    with opened(store, namespace, name) as (shared, url):
        deadline = _soon()
        usage = shared.usage(deadline)
        shared.clear(deadline)
    if as_json:
        typer.echo(json.dumps({"store": url, "cache": name, "removed": usage.entries, "bytes": usage.nbytes}, indent=2))
        return
    typer.echo(f"{name} in {url}: removed {usage.entries} entries, {usage.nbytes} B")


@contextmanager
def opened(store: str | None, namespace: str | None, name: str) -> Iterator[tuple[SharedStore, str]]:
    """Open the shared tier of a cache.

    Yields:
        The tier, and the URL of its store.

    Blocks: while the store is connected to.

    Raises:
        ConfigError: The URL or a name is wrong.
        PluginError, PeerLost: The store cannot be reached.
    """
    from moonrelay.cache.embeddings import shared_prefix
    from moonrelay.cache.shared import SharedStore
    from moonrelay.config import StoreConfig, build
    from moonrelay.plugins import RELAYS, Registry
    from moonrelay.relay import parse_url
    from moonrelay.relay.base import Relay

    given = {key: value for key, value in (("url", store), ("namespace", namespace)) if value is not None}
    config = build(StoreConfig, given, env_prefix="STORE")
    prefix = shared_prefix(config.namespace, name)
    scheme = "local" if config.url is None else parse_url(config.url).scheme
    relay = Registry(RELAYS).load_class(scheme, Relay)(config)  # type: ignore[type-abstract]
    try:
        relay.start()
        yield SharedStore(relay, prefix, config.capacity_bytes, SystemClock()), relay.url
    finally:
        relay.close()


def _soon() -> Deadline:
    return Deadline(TIMEOUT_S, SystemClock())
