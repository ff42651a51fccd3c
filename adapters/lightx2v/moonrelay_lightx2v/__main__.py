"""``python -m moonrelay_lightx2v lightx2v.infer …``: a program of the host, with the plugin in it.

For a host that is older than its plugins, or a moonrelay on the path without its entry points. Owns nothing but the way
there: the program sees its own name and arguments.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

from moonrelay_lightx2v import plugin

_HOST: Final = "lightx2v"
_USAGE: Final = "usage: python -m moonrelay_lightx2v lightx2v.infer|lightx2v.server [arguments of it]"


def main(arguments: Sequence[str]) -> int:
    """Run a module of the host as ``python -m`` would.

    Args:
        arguments: The module's name, then its own arguments.

    Returns:
        2 where there is no such module, with one line on stderr; else what the program ends with: 0 unless it raises.

    Raises:
        PluginError: The plugin cannot be put in place.
        Exception: What the host raises.

    Blocks: as long as the program runs.
    """
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    if name in ("-h", "--help"):
        sys.stdout.write(f"{_USAGE}\n")
        return 0
    if name.partition(".")[0] != _HOST:
        return _refuse(f"{name!r} is no module of LightX2V" if name else "no module given")
    plugin.enable()
    # The host's package is imported here, and may read them.
    sys.argv = [name, *rest]
    missing = _missing(name)
    if missing is not None:
        return _refuse(missing)
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def _missing(name: str) -> str | None:
    """Return why a module cannot be run; ``None`` where it can be. What the host raises itself is not caught."""
    try:
        spec = find_spec(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise
        spec = None
    if spec is None:
        there = find_spec(_HOST) is not None
        return f"no module {name}" if there else "no module lightx2v; put a checkout of LightX2V on PYTHONPATH"
    if spec.submodule_search_locations is not None and find_spec(f"{name}.__main__") is None:
        return f"{name} is a package without a program"
    return None


def _refuse(why: str) -> int:
    sys.stderr.write(f"moonrelay_lightx2v: {why}; {_USAGE}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
