"""``moonrelay demo``: prompts become videos through three pools of processes, next to the undivided pipeline.

Owns the demonstration: its children, what is shown while it runs, and what it leaves in the output folder. Payload
bytes never pass through the demo's own process; it submits tasks, watches the queue and compares digests.
"""

from moonrelay.cli.demo.command import demo

__all__ = ["demo"]
