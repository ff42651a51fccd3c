"""The embedding cache: what a hit costs against encoding, many processes on one key, prompts as they repeat.

What is timed, round by round in turns:

- encode: a T5 encoder with random weights of a stated size, over 512 tokens, on the CPU;
- miss: `get_or_encode` of a new key whose encoding costs nothing: looking, the flight, putting it into the store;
- store: a hit by a cache whose process has not seen it; memory: a hit in the process. Both verified, in fresh memory.

The entry is what umt5-xxl gives, 512 x 4096 in bfloat16 (4 MiB), whatever the size of the encoder that is timed.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moonrelay.cli.bench.samples import median_s, rounds, take_turns
from moonrelay.clock import Clock
from moonrelay.config import child_environment
from moonrelay.errors import PluginError
from moonrelay.plugins import ADAPTERS, Registry

if TYPE_CHECKING:
    from moonrelay.connector import DiffusionConnector

Row = dict[str, object]

#: Encoders that are timed: width, depth and width of the feed-forward part, as in T5 v1.1.
ENCODERS: Final = {"small": (512, 8, 1024), "base": (768, 12, 2048), "large": (1024, 24, 2816), "xl": (2048, 24, 5120)}
TOKENS: Final = 512
ENTRY: Final = (1, TOKENS, 4096)
#: How long the encoding of the one key takes that many ask for.
ASKED_ENCODE_S: Final = 1.0
#: Prompts: how often one is asked for in the mean, how unequally, and which part of them the tiers hold.
ASKED: Final = 3
EXPONENTS: Final = (0.8, 1.0, 1.2)
TIERS: Final = ((0.02, 0.1), (0.1, 0.5))
_SMALL: Final = (1, 8, 64)
_ENDS_S: Final = 180.0


def measure(
    encoder: str, count: int | None, store: str | None, clock: Clock, *, processes: int = 32, prompts: int = 1000
) -> Iterator[Row]:
    """Yield the rows of the hits, of the askers, and of the prompts.

    Args:
        encoder: A name of `ENCODERS`.
        count: Rounds of the hits; ``None`` takes seven.
        store: The relay's URL; ``None`` for embedded ones in folders of their own.
        clock: Time.
        processes: How many ask for one key.
        prompts: How many different prompts there are.

    Raises:
        PluginError: The diffusers adapter, whose T5 is timed, is not installed.

    Blocks: for the measurement.
    """
    with ExitStack() as stack:

        def url() -> str:
            return store or f"local://{Path(stack.enter_context(tempfile.TemporaryDirectory())) / 'store'}"

        yield from _hits(encoder, count, url(), clock)
        yield _one_key(processes, url())
        for exponent in EXPONENTS:
            for tiers in TIERS:
                yield _prompts(prompts, exponent, tiers, url())


def _connected(url: str) -> DiffusionConnector:
    from moonrelay.connector import DiffusionConnector

    return DiffusionConnector("encode", "store", store_config={"url": url})


def _hits(encoder: str, count: int | None, url: str, clock: Clock) -> Iterator[Row]:
    from moonrelay.cache.embeddings import EmbeddingCache
    from moonrelay.cli.bench.cache_side import bench_key, embedding

    encode, parameters = _encoder(encoder)
    tree = embedding(ENTRY)
    numbers = itertools.count()
    with _connected(url) as conn, EmbeddingCache(conn, 1 << 28, namespace="bench") as cache:
        cache.get_or_encode(bench_key("kept"), lambda: tree)

        def in_store(_number: int) -> float:
            with EmbeddingCache(conn, 1 << 28, namespace="bench") as fresh:
                fresh.holds([bench_key("another")])  # opens the store
                return _timed(lambda: fresh.get(bench_key("kept")), clock)

        def missed(_number: int) -> float:
            key = bench_key(f"new {next(numbers)}")
            return _timed(lambda: cache.get_or_encode(key, lambda: tree), clock)

        contenders: dict[str, Callable[[int], float]] = {
            "encode": lambda _number: _timed(encode, clock),
            "miss": missed,
            "store": in_store,
            "memory": lambda _number: _timed(lambda: cache.get(bench_key("kept")), clock),
        }
        seconds = take_turns(contenders, rounds(count or 7, 0.0, clock))
        encoded = median_s(seconds["encode"])
        for name, took in seconds.items():
            yield {
                "what": name,
                "seconds": median_s(took),
                "of_encode": round(median_s(took) / encoded, 5),
                "entry_bytes": tree["embeds"].nbytes,
                "encoder": encoder,
                "parameters": parameters,
                "rounds": len(took),
            }
        cache.clear()


def _encoder(name: str) -> tuple[Callable[[], object], int]:
    """Have the diffusers adapter make the encoder; no other room may import transformers."""
    adapter: Any = Registry(ADAPTERS).load("diffusers")
    make = getattr(adapter() if isinstance(adapter, type) else adapter, "random_encoder", None)
    if make is None:
        message = "bench cache encodes with the diffusers adapter's T5, which this one lacks; install this release's"
        raise PluginError(message, plugin="diffusers")
    made: tuple[Callable[[], object], int] = make(*ENCODERS[name], TOKENS)
    return made


def _one_key(processes: int, url: str) -> Row:
    settings = {"url": url, "count": processes, "encode_s": ASKED_ENCODE_S, "shape": list(ENTRY)}
    done = subprocess.run(
        [sys.executable, "-m", "moonrelay.cli.bench.cache_side", json.dumps(settings)],
        stdout=subprocess.PIPE,
        env=child_environment({}, stands_for_us=True),
        timeout=_ENDS_S,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    seconds = sorted(answer["seconds"] for answer in answers)
    return {
        "what": "one key",
        "processes": processes,
        "answers": len(answers),
        "encodes": sum(answer["encodes"] for answer in answers),
        "different": len({answer["digest"] for answer in answers}),
        "encode_s": ASKED_ENCODE_S,
        "first_s": round(seconds[0], 3),
        "median_s": median_s(seconds),
        "last_s": round(seconds[-1], 3),
    }


def _prompts(prompts: int, exponent: float, tiers: tuple[float, float], url: str) -> Row:
    from moonrelay.cache.embeddings import EmbeddingCache
    from moonrelay.cli.bench.cache_side import bench_key, embedding

    draw = random.Random(0)
    weights = [(rank + 1) ** -exponent for rank in range(prompts)]
    asked = draw.choices(range(prompts), weights, k=ASKED * prompts)
    tree = embedding(_SMALL)
    with _connected(url) as conn, EmbeddingCache(conn, 1 << 20, namespace="size") as probe:
        probe.put(bench_key("one"), tree)
        entry = probe.counters().bytes_store_written
        memory, shared = (max(1, int(prompts * part)) * entry for part in tiers)
        with EmbeddingCache(conn, memory, store_bytes=shared, namespace="zipf") as cache:
            for number in asked:
                cache.get_or_encode(bench_key(f"prompt {number}"), lambda: tree)
            counters = cache.counters()
            cache.clear()
        probe.clear()
    return {
        "what": "prompts",
        "exponent": exponent,
        "prompts": prompts,
        "asked": len(asked),
        "repeats": round(1 - len(set(asked)) / len(asked), 3),
        "memory_holds": tiers[0],
        "store_holds": tiers[1],
        "in_memory": round(counters.hits_memory / len(asked), 3),
        "in_store": round(counters.hits_store / len(asked), 3),
        "encoded": round(counters.encodes / len(asked), 3),
    }


def _timed(work: Callable[[], object], clock: Clock) -> float:
    began = clock.monotonic()
    work()
    return clock.monotonic() - began
