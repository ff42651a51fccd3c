"""The vLLM-Omni adapter as a plugin: of the host by its entry points, of Moonrelay as ``vllm-omni``.

Owns how the connector gets into the host's factory and the pipelines into its registries, once per process, and which
host versions that is done for. What the connector does is `moonrelay_vllm_omni.connector`; which pipelines there are,
`moonrelay_vllm_omni.pipelines`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from moonrelay.errors import PluginError

if TYPE_CHECKING:
    from moonrelay.cli.bench.host_lanes import HostBench
    from moonrelay.plugins import HostFinding
    from moonrelay_conformance.targets.adapter import AdapterTarget

logger = logging.getLogger(__name__)

#: Under which name a deploy YAML chooses the connector.
NAME: Final = "MoonrelayConnector"
#: Host versions that the adapter was tested with: from the first one, below the second.
SUPPORTED_FROM: Final = (0, 30)
SUPPORTED_BELOW: Final = (0, 31)
SUPPORTED: Final = ">=0.30,<0.31"

_HOST: Final = "vllm_omni"
_DISTRIBUTION: Final = "vllm-omni"
_REMEDY: Final = "pip install 'moonrelay[vllm-omni]'"

#: How the host's factory makes a connector: from a connector's ``extra``.
Constructor = Callable[[dict[str, Any]], object]


def register() -> None:
    """Make connector and pipelines known to the host: the entry point of both plugin groups. Idempotent.

    Without effect where the host is not installed: plain vLLM loads the plugins of its own group too. Where it is, its
    own plugin in that group imports it in the same processes, so this imports nothing that would not be there. An
    unsupported version is said at once, as an ERROR, and again by the constructor, which refuses.

    Threads: any.
    """
    if not host_is_there():
        return
    found = host_version()
    refusal = version_refusal(found)
    if refusal is not None:
        logger.error("%s", refusal)
    _enter(_refusing(refusal) if refusal is not None else _make)
    if refusal is None:
        _enter_pipelines()


def host_is_there() -> bool:
    """Return whether the host can be imported; imports nothing."""
    return find_spec(_HOST) is not None


def host_version() -> str | None:
    """Return vLLM-Omni's version, ``None`` where it is not installed."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return None


def version_refusal(found: str | None) -> str | None:
    """Return why a host version is not supported, in one line; ``None`` where it is."""
    numbers = re.match(r"(\d+)\.(\d+)", found or "")
    if numbers is not None and SUPPORTED_FROM <= (int(numbers[1]), int(numbers[2])) < SUPPORTED_BELOW:
        return None
    return f"moonrelay supports vllm-omni {SUPPORTED}, found {found or 'no version'}; {_REMEDY} brings a supported one"


def _enter(constructor: Constructor) -> None:
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory

    if NAME in OmniConnectorFactory.list_registered_connectors():
        return
    try:
        OmniConnectorFactory.register_connector(NAME, constructor)
    except ValueError:  # another thread was faster
        logger.debug("%s is registered already", NAME)


def _enter_pipelines() -> None:
    from moonrelay_vllm_omni import host_fixes
    from moonrelay_vllm_omni.pipelines import registration

    try:
        registration.register()
        host_fixes.bound_shutdown_of_dead_stages()
    except (ImportError, AttributeError, OSError, RuntimeError) as exc:
        # Enough of the host for its language stages, not for diffusion: torchvision, for one, may not fit torch.
        logger.warning("no pipelines in stages here: the host's diffusion engine cannot be imported: %s", exc)


def _make(extra: dict[str, Any]) -> object:
    from moonrelay_vllm_omni.host_connector import connector_class

    return connector_class()(extra)


def _refusing(reason: str) -> Constructor:
    def refuse(_extra: Mapping[str, Any]) -> object:
        raise PluginError(reason, plugin=NAME)

    return refuse


class VllmOmniAdapter:
    """vLLM-Omni as a host: its diffusion and language stages, with payloads moved by Moonrelay."""

    name = "vllm-omni"
    host = "vllm-omni"

    def host_version(self) -> str | None:
        """Return vLLM-Omni's version, ``None`` where it is not installed."""
        return host_version()

    def available(self) -> tuple[bool, str]:
        """Say whether the connector can be used here, and why not; imports nothing heavy.

        Returns:
            ``(True, versions in words)`` or ``(False, what is missing and how to get it)``.
        """
        from moonrelay_vllm_omni import activity

        if not host_is_there():
            return False, f"{_DISTRIBUTION} not installed; {_REMEDY}"
        refusal = version_refusal(self.host_version())
        if refusal is not None:
            return False, refusal
        inactive = activity.why_not_loaded()
        if inactive is not None:
            return False, f"not active in {_DISTRIBUTION} {self.host_version()}: {inactive.detail}; {inactive.remedy}"
        return True, f"{_DISTRIBUTION} {self.host_version()}"

    def examine(self) -> Iterable[HostFinding]:
        """Say whether the plugin is active in the host, as ``moonrelay doctor`` shows it.

        Blocks: as `moonrelay_vllm_omni.activity.examine`.
        """
        from moonrelay_vllm_omni import activity

        return activity.examine()

    def host_bench(self) -> type[HostBench]:
        """Return what ``moonrelay bench host vllm-omni`` measures; see `moonrelay_vllm_omni.bench`."""
        from moonrelay_vllm_omni.bench import OmniBench

        return OmniBench

    def conformance_target(self) -> AdapterTarget:
        """Return what the conformance suite tests; see `moonrelay_vllm_omni.conformance`."""
        from moonrelay_vllm_omni.conformance import VllmOmniTarget

        return VllmOmniTarget()
