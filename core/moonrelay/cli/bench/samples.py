"""Figures: sizes as people write them, rounds that take turns, medians and ratios. No I/O."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from moonrelay.cli.sizes import parse_size
from moonrelay.clock import Clock

#: Rounds that are not counted: connections, page tables and caches get warm.
WARM_UP = 2
MIN_ROUNDS = 7
MAX_ROUNDS = 200


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes of a list such as ``64KiB,1MiB``, in bytes.

    Raises:
        ConfigError: Something else; the message names it.
    """
    return tuple(parse_size(part.strip(), "sizes") for part in text.split(","))


def rounds(count: int | None, budget_s: float, clock: Clock) -> Iterator[int]:
    """Yield the numbers of the rounds to be counted, after `WARM_UP` negative ones that are not.

    Args:
        count: How many; ``None`` goes on for ``budget_s``, at least `MIN_ROUNDS` and at most `MAX_ROUNDS`.
        budget_s: Seconds.
        clock: Time.
    """
    yield from range(-WARM_UP, 0)
    ends_at = clock.monotonic() + budget_s
    done = 0
    while done < (MAX_ROUNDS if count is None else count):
        if count is None and done >= MIN_ROUNDS and clock.monotonic() >= ends_at:
            return
        yield done
        done += 1


def take_turns(contenders: Mapping[str, Callable[[int], float]], numbers: Iterator[int]) -> dict[str, list[float]]:
    """Let every contender run once per round, in an order drawn anew: what one leaves in the caches favours no other.

    Args:
        contenders: By name, what runs one contender once (given the round's number) and returns the seconds it took.
        numbers: The rounds; negative ones are not counted.

    Returns:
        The seconds by contender, in the order of the rounds.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    draw = random.Random(0)
    for number in numbers:
        for name in draw.sample(names, len(names)):
            took = contenders[name](number)
            if number >= 0:
                seconds[name].append(took)
    return seconds


def median_s(seconds: Sequence[float]) -> float:
    """Return the median, rounded to a tenth of a microsecond."""
    return round(statistics.median(seconds), 7)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the ratio of two medians."""
    return round(statistics.median(ours) / statistics.median(theirs), 3)


def spread(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return the quartiles of the ratios of the single rounds: what the noise of the machine makes of the ratio."""
    pairs = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    if len(pairs) < 2:
        return round(pairs[0], 3), round(pairs[0], 3)
    low, _, high = statistics.quantiles(pairs, n=4)
    return round(low, 3), round(high, 3)
