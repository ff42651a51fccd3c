"""The relay room: objects between stages that outlive their writer.

Owns the object stores (``base`` is the contract; ``memory``, ``local`` and ``mooncake_store`` implement it), what the
objects of a payload mean (``records``), the removal of orphans (``sweeper``), and a Mooncake store started by ourselves
(``cluster``). Control messages, leases and tasks never pass through here. Importing this package loads no native
library.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from moonrelay.errors import ConfigError

__all__ = ["RelayUrl", "parse_url"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayUrl:
    """A relay's URL, taken apart.

    Attributes:
        scheme: Name of the relay in the entry-point group ``moonrelay.relays``.
        host: Host, IPv6 literals without brackets; empty where the URL names none.
        port: Port, ``None`` where the URL names none.
        path: Decoded path; empty where the URL names none.
        query: Options behind ``?``.
    """

    scheme: str
    host: str
    port: int | None
    path: str
    query: dict[str, str]


def parse_url(url: str) -> RelayUrl:
    """Take a relay's URL apart: ``local:///path``, ``mooncake://host:port?metrics=host:port``, ``memory://name``.

    Args:
        url: The URL; a plugin's scheme is taken apart the same way.

    Returns:
        Its parts. Whether the scheme is known, and what it needs, is the relay's to say.

    Raises:
        ConfigError: Not a URL with a scheme, a port that is no number, or an option given twice.
    """
    if not isinstance(url, str) or "://" not in url:
        message = f"store url {url!r} has no scheme; use local:///path or mooncake://host:port"
        raise ConfigError(message, field="url")
    try:
        split = urlsplit(url)
        port = split.port
        pairs = parse_qsl(split.query, keep_blank_values=True, strict_parsing=bool(split.query))
    except ValueError as error:
        message = f"store url {url!r} cannot be read: {error}"
        raise ConfigError(message, field="url") from error
    if not split.scheme or split.username is not None or split.fragment:
        message = f"store url {url!r} must be scheme://host:port/path?options, without user or fragment"
        raise ConfigError(message, field="url")
    query = dict(pairs)
    if len(query) != len(pairs):
        message = f"store url {url!r} gives an option twice"
        raise ConfigError(message, field="url")
    return RelayUrl(scheme=split.scheme, host=split.hostname or "", port=port, path=unquote(split.path), query=query)
