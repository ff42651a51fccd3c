"""``moonrelay bench``: what the connector costs, against what it is built on, in one run on this machine.

Owns the measurements. Each compares contenders that take turns, round by round, in the same two processes over the same
memory, so that another load on the machine meets all of them. Importing it loads neither torch nor mooncake.
"""

from moonrelay.cli.bench.command import bench

__all__ = ["bench"]
