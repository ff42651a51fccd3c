"""A small payload, in units of one ZeroMQ round trip.

What is timed: from the call of ``publish`` in the producer to the return of ``receive`` in the consumer (the handle's
way through a pipe, claim, read, proof and acknowledgement included), against one message of a plain DEALER socket that
a plain ROUTER socket of the producer's process sends back. Both over TCP on the loopback, taking turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import zmq

from moonrelay.cli.bench.link import Setup
from moonrelay.cli.bench.samples import median_s, ratio, rounds, spread, take_turns
from moonrelay.cli.bench.sides import Consumer, Passed
from moonrelay.clock import Clock
from moonrelay.errors import PeerLost

INTEGRITIES = ("off", "full")
BUDGET_S = 4.0
ROUND_TRIP = "zeromq"
_MESSAGE = bytes(128)
_ECHO_TIMEOUT_MS = 10_000

Row = dict[str, object]


def measure(engine: str, sizes: Sequence[int], count: int | None, clock: Clock) -> Iterator[Row]:
    """Yield one row for each size and integrity. Arguments and errors as `moonrelay.cli.bench.overhead.measure`."""
    setup = Setup(engine=engine, integrities=INTEGRITIES, largest=max(sizes))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with Consumer(setup) as consumer:
            dealer = context.socket(zmq.DEALER)
            dealer.connect(consumer.producer.echo)
            for nbytes in sizes:
                yield from _rows(engine, consumer, dealer, nbytes, count, clock)
    finally:
        context.destroy(linger=0)


def _rows(
    engine: str, consumer: Consumer, dealer: zmq.Socket[bytes], nbytes: int, count: int | None, clock: Clock
) -> Iterator[Row]:
    passes: dict[str, list[Passed]] = {name: [] for name in INTEGRITIES}

    def contender(name: str) -> Callable[[int], float]:
        def run(number: int) -> float:
            passed = consumer.pass_on(name, nbytes, number + 1000)
            if number >= 0:
                passes[name].append(passed)
            return passed.total_s

        return run

    seconds = take_turns(
        {ROUND_TRIP: lambda _number: round_trip(dealer, clock), **{name: contender(name) for name in INTEGRITIES}},
        rounds(count, BUDGET_S, clock),
    )
    for integrity in INTEGRITIES:
        ours = seconds[integrity]
        yield {
            "engine": engine,
            "size_bytes": nbytes,
            "integrity": integrity,
            "round_trips": ratio(ours, seconds[ROUND_TRIP]),
            "round_trips_quartiles": spread(ours, seconds[ROUND_TRIP]),
            "connector_s": median_s(ours),
            "round_trip_s": median_s(seconds[ROUND_TRIP]),
            "publish_s": median_s([one.offer_s for one in passes[integrity]]),
            "receive_s": median_s([one.take_s for one in passes[integrity]]),
            "handle_hop_s": median_s([one.hop_s for one in passes[integrity]]),
            "rounds": len(ours),
        }


def round_trip(dealer: zmq.Socket[bytes], clock: Clock) -> float:
    """Send one message and wait for its return; return the seconds it took.

    Raises:
        PeerLost: It did not come back.
    """
    began = clock.monotonic()
    dealer.send(_MESSAGE)
    if not dealer.poll(_ECHO_TIMEOUT_MS):
        message = "the echo does not answer"
        raise PeerLost(message)
    dealer.recv()
    return clock.monotonic() - began
