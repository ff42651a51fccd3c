"""The connector against the raw engine and against one copy.

What is timed, on the monotonic clock that all processes of a machine share:

- connector: from the call of ``publish`` in the producer to the return of ``receive`` in the consumer. That is
  publishing registered memory, the handle's way through a pipe, claim, read into the registered destination, the proof
  where integrity is ``full`` (the producer's digest included), and the acknowledgement.
- raw: from the moment at which the producer sends the address through the same pipe to the end of the raw engine's
  read, from the same memory (``shm``: memory of its own) into the same destination. No claim, no proof, no
  acknowledgement, one read at a time.
- memcpy: one ``memmove`` of that size in the consumer, on one thread, from its own memory into the same destination.

All pages were touched before. Every round runs each of them once, in an order drawn anew.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from moonrelay.cli.bench.link import Setup
from moonrelay.cli.bench.samples import median_s, ratio, rounds, spread, take_turns
from moonrelay.cli.bench.sides import MEMCPY, RAW, Consumer, Passed
from moonrelay.clock import Clock

INTEGRITIES = ("off", "full")
#: Time for one size of one engine, where the number of rounds is not given; 256 MiB takes longer.
BUDGET_S = 6.0

Row = dict[str, object]


def measure(engine: str, sizes: Sequence[int], count: int | None, clock: Clock) -> Iterator[Row]:
    """Yield one row for each size and integrity.

    Args:
        engine: ``mooncake`` or ``shm``.
        sizes: In bytes.
        count: Rounds; ``None`` takes as many as fit into `BUDGET_S`.
        clock: Time.

    Raises:
        MoonrelayError: The engine cannot be loaded, or a contender failed.

    Blocks: for the measurement.
    """
    with Consumer(Setup(engine=engine, integrities=INTEGRITIES, largest=max(sizes))) as consumer:
        for nbytes in sizes:
            yield from _rows(engine, consumer, nbytes, count, clock)


def _rows(engine: str, consumer: Consumer, nbytes: int, count: int | None, clock: Clock) -> Iterator[Row]:
    passes: dict[str, list[Passed]] = {name: [] for name in (RAW, *INTEGRITIES)}

    def contender(name: str) -> Callable[[int], float]:
        def run(number: int) -> float:
            passed = consumer.pass_on(name, nbytes, number + 1000)
            if number >= 0:
                passes[name].append(passed)
            return passed.total_s

        return run

    seconds = take_turns(
        {MEMCPY: lambda _number: consumer.copy(nbytes), **{name: contender(name) for name in passes}},
        rounds(count, BUDGET_S, clock),
    )
    for integrity in INTEGRITIES:
        ours = seconds[integrity]
        yield {
            "engine": engine,
            "size_bytes": nbytes,
            "integrity": integrity,
            "ratio_to_raw": ratio(ours, seconds[RAW]),
            "ratio_to_memcpy": ratio(ours, seconds[MEMCPY]),
            "ratio_to_raw_quartiles": spread(ours, seconds[RAW]),
            "ratio_to_memcpy_quartiles": spread(ours, seconds[MEMCPY]),
            "connector_s": median_s(ours),
            "raw_s": median_s(seconds[RAW]),
            "memcpy_s": median_s(seconds[MEMCPY]),
            "publish_s": median_s([one.offer_s for one in passes[integrity]]),
            "receive_s": median_s([one.take_s for one in passes[integrity]]),
            "handle_hop_s": median_s([one.hop_s for one in passes[integrity]]),
            "raw_read_s": round(statistics.median(one.take_s for one in passes[RAW]), 7),
            "rounds": len(ours),
        }
