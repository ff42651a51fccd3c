"""What a connector answers to its peers. Runs on the channel's thread; decides, never blocks."""

from __future__ import annotations

from collections.abc import Callable

from moonrelay.connector.ledger import Ledger
from moonrelay.control import messages as wire
from moonrelay.control.channel import PeerInfo, Responder
from moonrelay.errors import MoonrelayError, WireError


class RequestHandler:
    """Brings requests of peers to the ledger, and typed errors back to them.

    Args:
        ledger: The payloads and their leases.
        holds_claim: Whether a claim of this connector's own, by payload id and reader, is alive.
    """

    def __init__(self, ledger: Ledger, holds_claim: Callable[[str, str], bool]) -> None:
        self._ledger = ledger
        self._holds_claim = holds_claim

    def handle(self, peer: PeerInfo, request: wire.Request, respond: Responder) -> None:
        """Answer one request."""
        if isinstance(request, wire.Claim):
            self._ledger.claim(peer, request, respond)
            return
        try:
            reply = self._answer(request)
        except MoonrelayError as exc:
            respond.reply(wire.Failure.of(exc))
        else:
            respond.reply(reply)

    def _answer(self, request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.Renew):
            return self._ledger.renew(request)
        if isinstance(request, wire.Ack):
            return self._ledger.ack(request)
        if isinstance(request, wire.Nack):
            return self._ledger.nack(request)
        if isinstance(request, wire.Release):
            self._ledger.release(request.payload_id)
            return wire.Done()
        if isinstance(request, wire.Query):
            return self._ledger.state(request.payload_id)
        if isinstance(request, wire.HoldsClaim):
            return wire.Holding(held=self._holds_claim(request.payload_id, request.reader))
        message = f"request {type(request).__name__} is not answered by a connector"
        raise WireError(message)
