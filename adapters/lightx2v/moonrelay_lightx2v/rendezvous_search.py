"""One find, as its caller sees it: whom to ask when, what the answers mean, when a desk is lost.

Owns the state of one find, no socket: it is told what came and what time it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonrelay.clock import Deadline
from moonrelay.control.wire import Kind, Refusal, Reject, Seal, decode_reject
from moonrelay.control.wire import Refused as Unreadable
from moonrelay.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    LeaseExpired,
    LeaseLost,
    MoonrelayError,
    PeerLost,
    WireError,
)
from moonrelay_lightx2v.rendezvous_wire import (
    ADDRESS_KEYS,
    MAX_WAIT_MS,
    Closing,
    Forget,
    Here,
    Names,
    NotYet,
    Refused,
    Want,
    answer_in,
    described,
    new_token,
    pack_question,
    refusal_error,
)


@dataclass(slots=True)
class _Desk:
    """One desk, during one find.

    Attributes:
        peer: Its address, for messages.
        due_at: When to ask it next.
        asked_at: When the oldest question was asked that it has not answered; ``None`` when it has.
        nonce: Who answered there; ``None`` before the first answer.
        working: Whether it works on what is wanted, as it said last.
        over: Whether it had that, as it said last, and has it no more.
        closing: Whether it said that it closes.
        told: Whether it gave this find its answer.
    """

    peer: str
    due_at: float
    asked_at: float | None = None
    nonce: bytes | None = None
    working: bool = False
    over: bool = False
    closing: bool = False
    told: bool = False


class Search:
    """One find.

    Args:
        names: What is wanted, most exact first.
        phase: Of it.
        peers: The desks' addresses, for messages.
        seal: Packs and unpacks.
        now: Seconds on the caller's clock.
        peer_timeout_s: After how many seconds of silence a desk is lost.
        retry_s: How often the question is repeated.

    Threads: the one that finds.
    """

    def __init__(
        self,
        names: Names,
        phase: str,
        peers: Sequence[str],
        seal: Seal,
        *,
        now: float,
        peer_timeout_s: float,
        retry_s: float,
    ) -> None:
        self.token = new_token()
        self.handle: bytes | None = None
        self._names = names
        self._phase = phase
        self._seal = seal
        self._peer_timeout_s = peer_timeout_s
        self._retry_s = retry_s
        self._desks = [_Desk(peer, now) for peer in peers]

    # Asking.

    def due(self, now: float) -> list[int]:
        """Return which desks to ask now."""
        return [number for number, desk in enumerate(self._desks) if desk.due_at <= now]

    def asked(self, number: int, now: float) -> None:
        """Note that a desk was asked."""
        desk = self._desks[number]
        desk.due_at = now + self._retry_s
        if desk.asked_at is None:
            desk.asked_at = now

    def question(self, left_s: float | None) -> bytes:
        """Return the frame to ask with, ``left_s`` seconds before the deadline."""
        wait_s = self._peer_timeout_s if left_s is None else min(left_s, self._peer_timeout_s)
        want = Want(names=self._names, phase=self._phase, wait_ms=min(int(wait_s * 1000) + 1, MAX_WAIT_MS))
        return pack_question(self._seal, self.token, want)

    def has_taken(self, number: int) -> bool:
        """Return whether that desk's offer is what was found: it is told by `Caller.forget`."""
        return self.handle is not None and self._desks[number].told

    def farewell(self, number: int) -> bytes:
        """Return the frame that tells a desk, at the end, that this find is over."""
        return pack_question(self._seal, self.token, Forget(taken=self._desks[number].told))

    def next_at(self, now: float) -> float:
        """Return when there is something to do again if nothing comes."""
        silent = [desk.asked_at + self._peer_timeout_s for desk in self._desks if desk.asked_at is not None]
        # One that is silent for long already, while another answers, is no reason to look all the time.
        return min([desk.due_at for desk in self._desks] + [at for at in silent if at > now])

    # Hearing.

    def take(self, number: int, data: bytes) -> str | None:
        """Take what a desk sent; ``handle`` is there afterwards when it was that.

        Returns:
            Why the message is dropped, or ``None``.

        Raises:
            MoonrelayError: What this find ends with.
        """
        desk = self._desks[number]
        try:
            frame = self._seal.unpack(data)
        except WireError as exc:
            return str(exc)
        if isinstance(frame, Unreadable):
            if frame.why is Refusal.VERSION:
                raise self._refused(desk, frame.why, "", frame.version)
            # A desk without our key cannot be read; it says so by a rejection, which is not sealed.
            return f"not sealed with this side's key: {frame.why}"
        if frame.receiver != self.token:
            return None  # an answer to a find before this one
        try:
            heard = decode_reject(frame.body) if frame.kind is Kind.REJECT else answer_in(frame)
        except WireError as exc:
            return str(exc)
        if isinstance(heard, Reject):
            if self._seal.keyed and not frame.sealed and desk.nonce is not None:
                return "an unsealed rejection after sealed answers"
            raise self._refused(desk, heard.code, heard.message, heard.version)
        desk.asked_at = None
        if isinstance(heard, Here):
            desk.told = True
            self.handle = heard.handle
        elif isinstance(heard, Refused):
            desk.told = True
            if heard.code == LeaseExpired.code:
                text = f"what the {self._phase} stage sent has expired: {heard.message}"
                raise LeaseExpired(text, stage=self._phase, peer=desk.peer)
            text = f"the {self._phase} stage failed this request: {heard.message}"
            raise Aborted(text, stage=self._phase, peer=desk.peer, cause=heard.code)
        elif isinstance(heard, Closing):
            self._closes(desk, frame.sender)
        else:
            self._not_yet(desk, heard, frame.sender)
        return None

    def _refused(self, desk: _Desk, code: str, text: str, theirs: int) -> MoonrelayError:
        return refusal_error(code, text, phase=self._phase, peer=desk.peer, theirs=theirs)

    def _closes(self, desk: _Desk, nonce: bytes) -> None:
        if desk.nonce not in (None, nonce):
            return  # the last words of one that was followed by another already
        desk.closing = True
        if desk.working or all(other.closing for other in self._desks):
            self._lose(desk, "closes")

    def _not_yet(self, desk: _Desk, answer: NotYet, nonce: bytes) -> None:
        if desk.nonce is not None and desk.nonce != nonce and desk.working:
            self._lose(desk, "was restarted while it worked on this request")
        desk.nonce, desk.working, desk.over, desk.closing = nonce, answer.working, answer.over, False

    # Judging.

    def check(self, now: float) -> None:
        """Raise `PeerLost` when nobody is left who might answer, or who worked on it is gone."""
        silent = [desk for desk in self._desks if self._is_silent(desk, now)]
        for desk in silent:
            if desk.working:
                self._lose(desk, f"worked on this request and is silent for {self._peer_timeout_s:g} s")
        if silent and all(desk.closing or desk in silent for desk in self._desks):
            never = all(desk.nonce is None for desk in self._desks)
            how = "does not answer" if never else "is silent"
            self._lose(silent[0], f"{how} for {self._peer_timeout_s:g} s")

    def _is_silent(self, desk: _Desk, now: float) -> bool:
        return desk.asked_at is not None and now - desk.asked_at >= self._peer_timeout_s

    def _lose(self, desk: _Desk, how: str) -> None:
        peers = desk.peer if len(self._desks) == 1 else ", ".join(other.peer for other in self._desks)
        message = (
            f"the desk of the {self._phase} stage at {desk.peer} {how}; start that role, or set {ADDRESS_KEYS} to "
            f"reach it, and send the request again"
        )
        raise PeerLost(message, peer=peers, names=described(self._names))

    def given_up(self) -> Cancelled:
        """Return the error of a find that nobody wants any more."""
        message = f"{described(self._names)} was cancelled while it waited for the {self._phase} stage"
        return Cancelled(message, stage=self._phase)

    def too_late(self, deadline: Deadline) -> DeadlineExceeded | LeaseLost:
        """Return the error of a find whose time is over: `LeaseLost` where what it wanted was there before."""
        peers = ", ".join(desk.peer for desk in self._desks)
        if any(desk.over for desk in self._desks) and not any(desk.working for desk in self._desks):
            message = (
                f"what was offered as {described(self._names)} was consumed by another receiver or has ended, and was "
                f"not sent again within {deadline.timeout_s or 0:g} s; send the request to all roles again"
            )
            return LeaseLost(message, stage=self._phase, peer=peers)
        if any(desk.working for desk in self._desks):
            how = "the stage before this one still works on it; allow more time by transfer_timeout_s"
        elif any(desk.nonce is not None for desk in self._desks):
            how = (
                "the stage before this one answers and has nothing under these names; send the very same request to "
                "all roles, or one id for all: data_bootstrap_room or task_id"
            )
        else:
            how = f"no desk answered; start the role before this one, or set {ADDRESS_KEYS} to reach it"
        message = f"nobody offered {described(self._names)} within {deadline.timeout_s or 0:g} s; {how}"
        return DeadlineExceeded(message, stage=self._phase, peer=peers)
