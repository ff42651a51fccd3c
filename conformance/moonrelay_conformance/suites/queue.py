"""The suite for queues: `QueueConformance`."""

from __future__ import annotations

from moonrelay_conformance.suites.queue_claims import Claims
from moonrelay_conformance.suites.queue_durable import Durable, Processes
from moonrelay_conformance.suites.queue_faults import Faults
from moonrelay_conformance.suites.queue_model import Histories
from moonrelay_conformance.suites.queue_order import Order, Rewinds
from moonrelay_conformance.suites.queue_requests import Requests


class QueueConformance(Requests, Claims, Order, Rewinds, Histories, Durable, Processes, Faults):
    """What every queue must do: see the modules that it is made of, one for each group of promises."""
