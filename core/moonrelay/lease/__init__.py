"""Fenced ownership of payloads: policies, the lease table (pure state), and the reaper that keeps its times."""

from moonrelay.lease.policies import DeleteOnConsume, Pinned, Policy, Shared, Ttl, terms
from moonrelay.lease.reaper import Job, Reaper
from moonrelay.lease.states import Available, Claim, Effects, LeaseState, LeaseStatus, Readiness, Reclaim
from moonrelay.lease.table import LeaseTable

__all__ = [
    "Available",
    "Claim",
    "DeleteOnConsume",
    "Effects",
    "Job",
    "LeaseState",
    "LeaseStatus",
    "LeaseTable",
    "Pinned",
    "Policy",
    "Readiness",
    "Reaper",
    "Reclaim",
    "Shared",
    "Ttl",
    "terms",
]
