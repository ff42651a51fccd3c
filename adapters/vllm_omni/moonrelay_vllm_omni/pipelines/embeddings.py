"""A stage's own embedding cache: what the deploy YAML's ``embedding_cache`` asks for.

Owns the cache's life, from the pipeline's start to its end or the process's, and which relay it has: that of the
stage's connector where it is ours. What is remembered, and under which key, is `moonrelay_vllm_omni.pipelines.
conditioning`. Importing it loads no torch.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

from moonrelay.cache.counters import CacheCounters
from moonrelay.cache.keys import CacheKey
from moonrelay.connector import DiffusionConnector
from moonrelay.connector.caching import CacheChoice, ChosenCache
from moonrelay_vllm_omni import plugin
from moonrelay_vllm_omni.config import OmniSettings, parse, stage_of

logger = logging.getLogger(__name__)

#: Name of the thread that closes a cache whose pipeline has ended.
CLOSER: Final = "moonrelay-embeddings-close"


class StageCache:
    """The embedding cache of one encode stage; a condition hook whose results are the caller's own.

    It has a connector of its own, of which nothing but the relay is started, and that when it is first asked. It is
    closed when the pipeline ends or the process does.

    Args:
        choice: What the deploy YAML asks for.
        od_config: The host's, of the stage.
        pipeline: Whose end is this one's; not kept alive.

    Raises:
        ConfigError: The store's URL is wrong, or a setting of the stage's connector.

    Threads: any.
    """

    def __init__(self, choice: CacheChoice, od_config: Any, pipeline: Any) -> None:
        settings = settings_of(od_config)
        stage = stage_of(getattr(od_config, "stage_id", None))
        self._device = getattr(pipeline, "device", None)
        self._closing = threading.Lock()
        self._closed = False
        self.connector = DiffusionConnector(
            role="vllm-omni" if stage < 0 else f"vllm-omni-{stage}",
            transfer_mode=settings.transfer_mode,
            te_config=settings.transfer,
            store_config=settings.store,
            control_config=settings.control,
            auth_key=settings.auth_key,
        )
        self._chosen = ChosenCache(choice, self.connector)
        # A finalizer runs in whatever thread collects, one of ours with its locks held, say; and at the process's end
        # no thread can be begun.
        weakref.finalize(pipeline, self._close_soon).atexit = False
        atexit.register(self.close)

    def __call__(self, key: CacheKey, encode: Callable[[], object]) -> object:
        """Return what ``encode`` gives for a key, made now or earlier, on the pipeline's device.

        Raises: What ``encode`` raises. Blocks: as `EmbeddingCache.get_or_encode`.
        """
        return self._chosen.cache.get_or_encode(key, encode, device=self._device)

    def counters(self) -> CacheCounters:
        """Return what was found and encoded so far."""
        return self._chosen.cache.counters()

    def close(self) -> None:
        """End the cache and its relay; what is in the relay stays. Idempotent. Later calls encode."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            counted = self.counters()
            self._chosen.close()
            self.connector.close()
        atexit.unregister(self.close)
        logger.info(
            "embedding cache of %s closed: %d encoded, %d from memory, %d from the store, %d troubles",
            self.connector.settings.role,
            counted.encodes,
            counted.hits_memory,
            counted.hits_store,
            counted.trouble,
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _close_soon(self) -> None:
        """Have it closed by a thread of its own; takes no lock."""
        if not sys.is_finalizing():
            _thread.start_new_thread(self._close_apart, ())

    def _close_apart(self) -> None:
        # One that the interpreter knows by name; where the process ends meanwhile, `close` runs at its end.
        threading.Thread(target=self.close, name=CLOSER, daemon=True).start()


def settings_of(od_config: Any) -> OmniSettings:
    """Return the settings of a stage's connector; the defaults, and the environment's, where it is another's.

    Args:
        od_config: The host's, of the stage.

    Raises:
        ConfigError: One of them is wrong.
    """
    host = getattr(od_config, "omni_kv_config", None)
    extra = host.get("connector_config") if isinstance(host, Mapping) else None
    ours = isinstance(extra, Mapping) and extra.get("type") == plugin.NAME
    return parse(extra if ours and isinstance(extra, Mapping) else {})
