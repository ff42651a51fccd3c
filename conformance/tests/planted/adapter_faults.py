"""Adapters that are right until something goes wrong: an engine that lies, a message that is lost, a peer that dies."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from moonrelay.errors import CapacityError, LeaseLost, MoonrelayError
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.sides.connector_side import ConnectorSide
from moonrelay_conformance.targets.adapter import (
    Outgoing,
    PipelineRun,
    SideClaim,
    SideSettings,
    Ticket,
)
from planted.adapter_base import Catch, ChangedClaim, ChangedSide, Planted, UnprovedSide
from planted.adapter_leaks import NamePerPayload
from planted.adapter_leases import ClaimNotRenewed, NackConsumes, UsedTicket
from planted.adapters import ChunkReadyEarly

_WRONG_BYTES = "wrong bytes were delivered as a success"


class HangingSide(ConnectorSide):
    """A side that waits for ever where a transfer fails."""

    def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
        try:
            return super().receive(ticket, timeout_s=timeout_s)
        except MoonrelayError:
            threading.Event().wait()


# -- engine and relay -------------------------------------------------------------------------------------------------


class CorruptBytesPass(Planted):
    """Nobody proves what the engine says that it moved."""

    caught = Catch("test_false_success_of_the_engine_is_never_delivered", _WRONG_BYTES, param="wrong")
    Side = UnprovedSide


class ShortReadsPass(Planted):
    """Nobody proves that the engine moved everything."""

    caught = Catch("test_false_success_of_the_engine_is_never_delivered", _WRONG_BYTES, param="short")
    Side = UnprovedSide


class FalseSuccess(Planted):
    """A transfer that failed is answered with a tensor of zeros."""

    caught = Catch("test_a_failing_engine_is_an_error_and_loses_nothing", _WRONG_BYTES, param="fail]")

    class Side(ConnectorSide):
        def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
            import torch

            try:
                return super().receive(ticket, timeout_s=timeout_s)
            except MoonrelayError:
                return torch.zeros(16, dtype=torch.uint8)


class FailureConsumes(Planted):
    """A transfer that failed is acknowledged all the same, so nobody else gets the payload."""

    caught = Catch(
        "test_a_failing_engine_is_an_error_and_loses_nothing", "a failing engine lost the payload", param="fail]"
    )

    class Side(ConnectorSide):
        def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
            claim = self.claim(ticket, timeout_s=timeout_s)
            try:
                return claim.read(timeout_s=timeout_s)
            finally:
                claim.ack(timeout_s=timeout_s)


class LateFailureConsumes(Planted):
    """A transfer that failed when its bytes were there is acknowledged: they are taken for delivered."""

    caught = Catch(
        "test_a_failing_engine_is_an_error_and_loses_nothing", "a failing engine lost the payload", param="fail_after"
    )
    Side = FailureConsumes.Side


class OneFailureConsumes(Planted):
    """A transfer that failed is not tried again, and acknowledged whatever became of it."""

    caught = Catch("test_one_failure_of_the_engine_is_retried_or_told", "one failed transfer lost", param="fail]")

    class Side(FailureConsumes.Side):
        def _transfer(self) -> dict[str, Any]:
            # More failures than the connector has tries stand for a host that has one.
            given = super()._transfer()
            given["options"] = {key: self._lasting(key, value) for key, value in given["options"].items()}
            return given

        @staticmethod
        def _lasting(key: str, value: Any) -> Any:
            return value * 32 if key == "faults" else value


class OneLateFailureConsumes(Planted):
    """The same where the bytes were there when the transfer failed."""

    caught = Catch("test_one_failure_of_the_engine_is_retried_or_told", "one failed transfer lost", param="fail_after")
    Side = OneFailureConsumes.Side


class OneWrongReadPasses(Planted):
    """What is read once and seems to be there is not read again."""

    caught = Catch("test_one_failure_of_the_engine_is_retried_or_told", _WRONG_BYTES, param="wrong")
    Side = UnprovedSide


class HangOnStall(Planted):
    """A transfer that does not end is waited for."""

    caught = Catch("test_a_stalled_transfer_is_an_error_not_a_hang", "a typed error, not in hang")
    Side = HangingSide


class LateBytesLand(Planted):
    """Memory into which a transfer may still write is used for the next payload."""

    caught = Catch("test_late_bytes_never_land_in_another_payload", "landed in another payload's memory")

    class Side(ConnectorSide):
        def __init__(self, settings: SideSettings) -> None:
            super().__init__(settings)
            self.connector._claim_started = self.started  # type: ignore[method-assign]

        def started(self, claim: Any) -> None:
            type(self.connector)._claim_started(self.connector, claim)
            land = claim._land

            def landing(*given: Any) -> Any:
                made = land(*given)
                made.keep_until_quiet = lambda: lambda: None
                return made

            claim._land = landing


class CorruptPutPasses(Planted):
    """Nobody proves what the relay says that it stored."""

    caught = Catch("test_a_broken_put_is_never_delivered", _WRONG_BYTES, param="wrong")
    over = ("store",)
    Side = UnprovedSide


class CorruptGetPasses(Planted):
    """Nobody proves what the relay says that it handed out."""

    caught = Catch("test_a_broken_get_is_never_delivered", _WRONG_BYTES, param="wrong")
    over = ("store",)
    Side = UnprovedSide


class HangOnStalledRelay(Planted):
    """A relay that does not answer is waited for."""

    caught = Catch("test_a_stalled_relay_is_an_error_not_a_hang", "a typed error, not in hang")
    over = ("store",)
    Side = HangingSide


class ReadOnceOnly(Planted):
    """What is read in the relay is removed by the call that reads it, also where the call is repeated."""

    caught = Catch("test_calls_to_the_relay_that_are_repeated_do_no_harm", "lost the payload")
    over = ("store",)

    class Side(ConnectorSide):
        def start(self) -> None:
            super().start()
            relay: Any = self.connector._runtime.relay()
            inner = getattr(relay, "inner", relay)
            get = inner.get

            def once(key: str, parts: Any, deadline: Any, **given: Any) -> Any:
                try:
                    return get(key, parts, deadline, **given)
                finally:
                    inner.remove([key], deadline)

            inner.get = once


# -- control messages -------------------------------------------------------------------------------------------------


class NothingIsRepeated(Planted):
    """A message without an answer is not sent again."""

    caught = Catch("test_a_lost_control_message_changes_nothing", "and the payload with it", param="claim-1")

    class Side(ConnectorSide):
        def connector_arguments(self) -> dict[str, Any]:
            given = super().connector_arguments()
            given["control_config"]["retry_s"] = 1000.0
            return given


class LostRenewalEndsClaim(Planted):
    """A claim lapses with the first renewal that does not arrive."""

    caught = Catch("test_lost_renewals_do_not_end_a_claim", "a refusal lease_held, saw ok")
    Side = ClaimNotRenewed.Side


class LostNackConsumes(Planted):
    """A claim that was given back, and whose end was not heard of, counts as read."""

    caught = Catch("test_a_lost_nack_does_not_keep_the_payload", "a lost nack lost the payload")
    Side = NackConsumes.Side


class NotWaitedFor(Planted):
    """A reader that does not hear which chunks are final reads them all the same."""

    caught = Catch("test_lost_progress_does_not_stop_the_chunks", "ended in ok")

    class Side(UnprovedSide):
        def claim(self, ticket: Ticket, *, timeout_s: float) -> SideClaim:
            claim = super().claim(ticket, timeout_s=timeout_s)
            claim._claim.progress.complete()  # type: ignore[attr-defined]
            return claim


# -- the producer dies or stands still --------------------------------------------------------------------------------


class HangOnDeadPeer(Planted):
    """A producer that is gone is waited for."""

    caught = Catch("test_a_dead_producer_is_an_error_not_a_hang", "a typed error, not in hang")
    Side = HangingSide


class HangOnStoppedPeer(Planted):
    """A producer that stands still is waited for, longer than the reader does."""

    caught = Catch("test_a_stopped_producer_is_an_error_not_a_hang", "and hangs")
    Side = HangingSide


class ImpatientReader(Planted):
    """A producer that is silent for a moment is taken for dead."""

    caught = Catch("test_a_short_stop_of_the_producer_is_waited_for", "a short stop of its producer lost a payload")

    class Side(ConnectorSide):
        def connector_arguments(self) -> dict[str, Any]:
            given = super().connector_arguments()
            if self.settings.role == "consumer":
                given["control_config"] |= {"peer_timeout_s": 0.2, "retry_s": 0.05}
            return given


class MissingChunkInvented(Planted):
    """In the place of a chunk that does not come the one before is handed out."""

    caught = Catch(
        "test_a_producer_killed_while_it_is_read_is_an_error_not_a_hang",
        "a chunk that its producer never finished was delivered",
        param="between-chunks",
    )

    class Side(ChangedSide):
        class Claim(ChangedClaim):
            def chunks(self, *, timeout_s: float) -> Iterator[Any]:
                chunk = None
                try:
                    for chunk in super().chunks(timeout_s=timeout_s):
                        yield chunk
                except MoonrelayError:
                    yield chunk

        claims = Claim


class DeathLosesStored(Planted):
    """What is said to be relayed stays with its producer until it is read."""

    caught = Catch("test_a_relayed_payload_outlives_its_producer", "a relayed payload died with its producer")
    over = ("store",)

    class Side(ConnectorSide):
        def connector_arguments(self) -> dict[str, Any]:
            return {**super().connector_arguments(), "transfer_mode": "p2p"}


class HalfIsRelayedAsWhole(Planted):
    """A relayed payload counts as whole before its chunks are there."""

    caught = Catch("test_a_payload_relayed_in_part_is_never_delivered", _WRONG_BYTES)
    over = ("store",)

    Side = ChunkReadyEarly.Side


class HalfIsWhole(Planted):
    """A payload counts as whole when its first chunk is there."""

    caught = Catch("test_lease_scenario", "observed wrong_bytes", "half-is-no-whole")
    Side = ChunkReadyEarly.Side


class RestartedTicket(Planted):
    """A ticket names a place at its producer, and after a restart other bytes lie there."""

    caught = Catch("test_lease_scenario", "observed wrong_bytes", "restarted-producer-direct")

    class Side(UsedTicket.Side):
        slots = 1


# -- the consumer dies or stands still --------------------------------------------------------------------------------


class AckedBeforeRead(Planted):
    """A claim counts as read when it is granted: a reader that is killed takes the payload with it."""

    caught = Catch(
        "test_a_killed_reader_does_not_keep_the_payload", "a killed reader took the payload with it", param="reading"
    )

    class Side(ConnectorSide):
        def claim(self, ticket: Ticket, *, timeout_s: float) -> SideClaim:
            claim = super().claim(ticket, timeout_s=timeout_s)
            claim.ack(timeout_s=timeout_s)
            return claim


class AckedWhileRead(Planted):
    """A claim counts as read as soon as its reading begins."""

    caught = Catch(
        "test_a_killed_reader_does_not_keep_the_payload", "a killed reader took the payload with it", param="reading"
    )

    class Side(ChangedSide):
        class Claim(ChangedClaim):
            def read(self, *, timeout_s: float) -> Any:
                self.claim.ack(timeout_s=timeout_s)
                return super().read(timeout_s=timeout_s)

        claims = Claim


class AckedWithFirstChunk(Planted):
    """A claim counts as read when its first chunk is handed out."""

    caught = Catch(
        "test_a_killed_reader_does_not_keep_the_payload",
        "a killed reader took the payload with it",
        param="between-chunks",
    )

    class Side(ChangedSide):
        class Claim(ChangedClaim):
            def chunks(self, *, timeout_s: float) -> Iterator[Any]:
                for chunk in super().chunks(timeout_s=timeout_s):
                    self.claim.ack(timeout_s=timeout_s)
                    yield chunk

        claims = Claim


class KilledReaderLeavesMemory(Planted):
    """Something of a payload whose reader was killed stays in shared memory."""

    caught = Catch(
        "test_a_killed_reader_does_not_keep_the_payload", "after its reader was killed there are", param="read"
    )
    Side = NamePerPayload.Side


class KilledReaderKeeps(Planted):
    """The claim of a killed reader is given to nobody else."""

    caught = Catch(
        "test_a_killed_reader_does_not_keep_the_payload",
        "a killed reader took the payload with it",
        param="between-chunks",
    )

    class Side(ConnectorSide):
        def connector_arguments(self) -> dict[str, Any]:
            given = super().connector_arguments()
            given["control_config"]["claim_ttl_s"] = 1000.0
            return given


class LostNackKeeps(Planted):
    """A claim that was given back, and whose end was not heard of, does not lapse either."""

    caught = Catch("test_a_lost_nack_does_not_keep_the_payload", "a lost nack lost the payload")
    Side = KilledReaderKeeps.Side


class LateAckCounts(Planted):
    """A reader that has lost its claim is told that its ack was taken."""

    caught = Catch("test_a_reader_stopped_past_its_claim_is_fenced", "a refusal lease_lost, saw ok")

    class Side(ChangedSide):
        class Claim(ChangedClaim):
            def ack(self, *, timeout_s: float) -> None:
                try:
                    super().ack(timeout_s=timeout_s)
                except LeaseLost:
                    self.claim.nack()

        claims = Claim


# -- no room, and what is left ----------------------------------------------------------------------------------------


class KilledLeavesMemory(Planted):
    """Nobody clears what a killed process had in shared memory."""

    caught = Catch("test_a_killed_process_leaves_nothing_behind", "a killed process left")
    Side = NamePerPayload.Side


class OldestGivesWay(Planted):
    """Where there is no room, the oldest payload is dropped, and nobody is told."""

    caught = Catch("test_a_full_pool_loses_nothing_and_recovers", "accepted by a full pool were lost")

    class Side(ConnectorSide):
        def __init__(self, settings: SideSettings) -> None:
            super().__init__(settings)
            self.tickets: list[Ticket] = []

        def publish(self, outgoing: Outgoing) -> Ticket:
            try:
                ticket = super().publish(outgoing)
            except CapacityError:
                if not self.tickets:
                    raise
                self.release(self.tickets.pop(0), timeout_s=5.0)
                return self.publish(outgoing)
            self.tickets.append(ticket)
            return ticket


# -- as a whole -------------------------------------------------------------------------------------------------------


class GrantedTwice(Planted):
    """A claim that another reader holds is granted to a second one too."""

    caught = Catch("test_leases_behave_as_their_model", "the model allows")

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            return super().publish(msgspec.structs.replace(outgoing, lease="shared", readers=2))


class DividedOtherwise(Planted):
    """The divided pipeline gives something else than the undivided one."""

    caught = Catch("test_divided_pipeline_equals_undivided", "gave something else than the undivided one")

    def capabilities(self) -> Mapping[Capability, Support]:
        return {**super().capabilities(), Capability.PIPELINE: Support.FULL}

    def pipeline(self, folder: Path, *, timeout_s: float) -> PipelineRun:
        return PipelineRun(undivided="00", divided="01", processes=2)


class NotDivided(Planted):
    """The divided pipeline runs in one process, and so gives the same."""

    caught = Catch("test_divided_pipeline_equals_undivided", "ran in one process")

    def capabilities(self) -> Mapping[Capability, Support]:
        return {**super().capabilities(), Capability.PIPELINE: Support.FULL}

    def pipeline(self, folder: Path, *, timeout_s: float) -> PipelineRun:
        return PipelineRun(undivided="00", divided="00", processes=1)
