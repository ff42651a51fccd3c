"""What the front is told at its start."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from moonrelay.config import require_positive
from moonrelay.errors import ConfigError

ENCODER: Final = "encoder"
TRANSFORMER: Final = "transformer"
DECODER: Final = "decoder"

#: Ten days: longer than anything that is waited for, and a number that every timer takes.
_LONGEST_S: Final = 864_000.0


@dataclass(frozen=True, kw_only=True)
class FrontConfig:
    """Settings of the front.

    Attributes:
        encoder: Base URLs of the encoders' servers.
        transformer: Those of the transformers'.
        decoder: Those of the decoders'; empty where the transformer decodes too.
        host: Address to listen on. There is no authentication.
        port: Port to listen on; 0 is any free one.
        request_timeout_s: How long a request may take from its POST on, queues and new starts included.
        max_requests: Requests under way at once; more get 503.
        attempts: How often a request is started, where a stage's server dies or forgets it.
        poll_interval_s: Longest pause between two looks at a request's stages.
        restart_wait_s: How long a request that starts anew waits for a server of the stage that was lost.
    """

    encoder: tuple[str, ...]
    transformer: tuple[str, ...]
    decoder: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    request_timeout_s: float = 3600.0
    max_requests: int = 100
    attempts: int = 2
    poll_interval_s: float = 1.0
    restart_wait_s: float = 120.0

    def __post_init__(self) -> None:
        require_positive(self, "request_timeout_s", "max_requests", "attempts", "poll_interval_s", "restart_wait_s")
        for name in ("request_timeout_s", "poll_interval_s", "restart_wait_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value <= _LONGEST_S):
                message = f"{name}={value!r} must be {_LONGEST_S:g} s at most"
                raise ConfigError(message, field=name)
        if not 0 <= self.port <= 65_535:
            message = f"port={self.port} must be between 0 and 65535"
            raise ConfigError(message, field="port")
        for name in (ENCODER, TRANSFORMER, DECODER):
            urls = tuple(base_url(name, url) for url in getattr(self, name))
            if not urls and name != DECODER:
                message = f"{name} is missing: give the URL of its server, such as --{name} http://127.0.0.1:8002"
                raise ConfigError(message, field=name)
            object.__setattr__(self, name, urls)
        ((url, count),) = Counter(url for _, urls in self.stages for url in urls).most_common(1)
        if count > 1:
            message = f"{url} is given {count} times; every server has one role, so name it once"
            raise ConfigError(message, value=url)

    @property
    def stages(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The stages in the order in which a request passes them, each with its URLs."""
        found = ((ENCODER, self.encoder), (TRANSFORMER, self.transformer), (DECODER, self.decoder))
        return tuple((name, urls) for name, urls in found if urls)


def base_url(stage: str, text: str) -> str:
    """Return a server's URL without a slash at its end.

    Raises:
        ConfigError: It is none; the message says what it should be like.
    """
    wanted = f"it must be like http://127.0.0.1:8002, without user, query or fragment (--{stage})"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as exc:
        message = f"{stage}={text!r} is no URL: {exc}; {wanted}"
        raise ConfigError(message, field=stage) from None
    plain = not (parts.query or parts.fragment or "@" in parts.netloc) and not any(c.isspace() for c in text)
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not plain:
        message = f"{stage}={text!r} is no server's URL; {wanted}"
        raise ConfigError(message, field=stage)
    return text.rstrip("/")
