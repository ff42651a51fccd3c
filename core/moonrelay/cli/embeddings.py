"""A worker's embedding cache: from the option to the cache, for programs that can use one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from moonrelay.cli.sizes import parse_size
from moonrelay.config import from_environment

if TYPE_CHECKING:
    from moonrelay.cache.embeddings import EmbeddingCache
    from moonrelay.connector import DiffusionConnector
    from moonrelay.orchestrator import StageProgram

DEFAULT: Final = "256MiB"
OFF: Final = "off"


def cache_bytes(asked: str | None) -> int | None:
    """Return the bound that was asked for, by option or ``MOONRELAY_EMBEDDING_CACHE``; ``None`` for no cache.

    Raises:
        ConfigError: It is no size, and not ``off``.
    """
    text = asked or from_environment("EMBEDDING_CACHE") or DEFAULT
    return None if text == OFF else parse_size(text, "embedding_cache")


def give_cache(
    program: StageProgram, connector: DiffusionConnector, capacity_bytes: int | None, stack: ExitStack
) -> EmbeddingCache | None:
    """Make a cache and give it to a program that can use one.

    In ``p2p`` without a store's URL there is no store that the user knows of: then embeddings stay in this process.

    Args:
        program: The program.
        connector: Where entries are kept, and who is told.
        capacity_bytes: Bound of each tier; ``None`` for no cache.
        stack: Closes the cache.

    Returns:
        The cache, if there is one.

    Blocks: while the program makes its keys ready.
    """
    from moonrelay.cache.embeddings import EmbeddingCache
    from moonrelay.orchestrator import CachesEmbeddings

    if capacity_bytes is None or not isinstance(program, CachesEmbeddings):
        return None
    settings = connector.settings
    cache = EmbeddingCache(connector, capacity_bytes, shared=settings.relays or settings.store.url is not None)
    stack.enter_context(cache)
    program.use_embeddings(cache)
    return cache
