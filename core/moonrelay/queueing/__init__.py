"""Work between stages: tasks, claims, credits and priorities.

Owns which request is where, who works on it, and what came of it. Payload bytes never travel through this package;
a task carries plain values and a handle.
"""

from moonrelay.queueing.base import StageQueue
from moonrelay.queueing.job import Job, NoJob
from moonrelay.queueing.settings import QueueConfig
from moonrelay.queueing.task import DEFAULT_PIPELINE, Pipeline, StageSpec, StageTask
from moonrelay.queueing.views import QueueEvent, QueueStats, RequestView, StageStats, WorkerView
from moonrelay.queueing.worker import Worker

__all__ = [
    "DEFAULT_PIPELINE",
    "Job",
    "NoJob",
    "Pipeline",
    "QueueConfig",
    "QueueEvent",
    "QueueStats",
    "RequestView",
    "StageQueue",
    "StageSpec",
    "StageStats",
    "StageTask",
    "Worker",
    "WorkerView",
]
