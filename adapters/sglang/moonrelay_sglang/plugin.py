"""The SGLang adapter as a plugin: of the host by its entry point, of Moonrelay as ``sglang``.

Owns which functions of the host are hooked, for which of its versions, and the look whether all of them are. The host
only logs a hook that it could not apply, so `verify` is called where a role or the head starts with our backend chosen,
and where its flags are offered. Registering imports nothing of the host but its registry of hooks.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from moonrelay.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moonrelay.cli.bench.host_lanes import HostBench
    from moonrelay.plugins import HostFinding
    from moonrelay_conformance.targets.adapter import AdapterTarget

logger = logging.getLogger(__name__)

#: Host versions that the adapter was tested with: from the first one, below the second.
SUPPORTED_FROM: Final = (0, 5, 23)
SUPPORTED_BELOW: Final = (0, 5, 24)
SUPPORTED: Final = ">=0.5.23,<0.5.24"

_HOST: Final = "sglang"
_REMEDY: Final = "pip install 'moonrelay[sglang]'"
_RUNTIME: Final = "sglang.multimodal_gen.runtime"
_MIXIN: Final = f"{_RUNTIME}.disaggregation.scheduler_mixin"
_WORKER: Final = f"{_MIXIN}.SchedulerDisaggMixin"
_HEAD: Final = f"{_RUNTIME}.disaggregation.orchestrator.DiffusionServer"
_ENCODING: Final = f"{_RUNTIME}.pipelines_core.stages.text_encoding.TextEncodingStage"


@dataclass(frozen=True, slots=True)
class Hook:
    """A function of the host, and the one of ours that is called in its stead.

    Attributes:
        target: The host's, dotted.
        ours: ``module:function`` of this package, imported when it is first called.
        kind: ``around`` or ``after``, in the host's terms.
    """

    target: str
    ours: str
    kind: str = "around"


#: Each looks at ``--disagg-transfer-backend`` first, and leaves the host's own behaviour alone where it is not ours.
HOOKS: Final = (
    Hook(f"{_RUNTIME}.server_args.disagg.DisaggServerArgsMixin.add_disagg_cli_args", "flags:around_add_cli_args"),
    Hook(f"{_RUNTIME}.launch_server.launch_disagg_role", "worker_hooks:around_launch_role"),
    Hook(f"{_WORKER}._init_disagg_state", "worker_hooks:around_init_state"),
    Hook(f"{_WORKER}._init_disagg_transfer_manager", "worker_hooks:around_init_transfer"),
    Hook(f"{_WORKER}._disagg_event_loop", "worker_hooks:around_event_loop"),
    Hook(f"{_WORKER}._disagg_encoder_step", "worker_hooks:around_encoder_step"),
    Hook(f"{_WORKER}._disagg_forward_and_stage", "worker_hooks:around_forward_and_stage"),
    Hook(f"{_WORKER}._disagg_decoder_compute", "worker_hooks:around_decoder_compute"),
    Hook(f"{_WORKER}._handle_transfer_msg", "worker_hooks:around_transfer_message"),
    Hook(f"{_WORKER}._cleanup_disagg", "worker_hooks:around_cleanup"),
    Hook(f"{_MIXIN}._init_disagg_request_scheduler", "worker_hooks:around_init_request_scheduler"),
    Hook(f"{_MIXIN}.extract_transfer_fields", "worker_hooks:around_extract"),
    Hook(f"{_ENCODING}.forward", "conditioning:around_forward"),
    Hook(f"{_HEAD}.__init__", "head:around_init"),
    Hook(f"{_HEAD}._handle_client_request", "head:around_client_request"),
    Hook(f"{_HEAD}._handle_role_result", "head:around_role_result"),
    Hook(f"{_HEAD}._drain_all_queues", "head:around_drain"),
    Hook(f"{_HEAD}._handle_timeouts", "head:around_timeouts"),
    Hook(f"{_HEAD}.get_stats", "head:around_stats"),
    Hook(f"{_HEAD}.stop", "head:around_stop"),
    Hook(f"{_RUNTIME}.entrypoints.http_server.create_app", "head:after_create_app", "after"),
)


def register() -> None:
    """Register the hooks with the host: its entry point. Applies none of them, the host does, later.

    Without effect on a host version that is not supported, which is said as an ERROR: its flags then do not offer our
    backend, and asking for it ends the command.

    Threads: any.
    """
    if not host_is_there():
        return
    refusal = version_refusal(host_version())
    if refusal is not None:
        logger.error("%s", refusal)
        return
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    kinds = {"around": HookType.AROUND, "after": HookType.AFTER}
    for hook in HOOKS:
        HookRegistry.register(hook.target, _late(hook.ours), kinds[hook.kind])


def verify() -> None:
    """See that all hooks are in place in this process.

    Raises:
        PluginError: One is not; names it, and the supported host versions.
    """
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry

    missing = [hook.target for hook in HOOKS if hook.target not in HookRegistry._patched]  # noqa: SLF001  nothing public says
    if missing:
        found = host_version() or "of no known version"
        message = (
            f"the hook on {missing[0]} is not in place ({len(missing)} of {len(HOOKS)} are missing) in sglang {found}; "
            f"moonrelay supports {SUPPORTED}, see the host's log for why it was not applied"
        )
        raise PluginError(message, plugin=_HOST)


def host_is_there() -> bool:
    """Return whether the host can be imported; imports nothing."""
    return find_spec(_HOST) is not None


def host_version() -> str | None:
    """Return SGLang's version, ``None`` where it is not installed."""
    try:
        return version(_HOST)
    except PackageNotFoundError:
        return None


def version_refusal(found: str | None) -> str | None:
    """Return why a host version is not supported, in one line; ``None`` where it is."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", found or "")
    if numbers is not None and SUPPORTED_FROM <= tuple(int(number) for number in numbers.groups()) < SUPPORTED_BELOW:
        return None
    return f"moonrelay supports sglang {SUPPORTED}, found {found or 'no version'}; {_REMEDY} brings a supported one"


def _late(ours: str) -> Callable[..., Any]:
    """Return a function that imports ours when it is first called: the host's own modules are not all there yet."""
    module, _, name = ours.partition(":")

    def hook(*args: Any, **kwargs: Any) -> Any:
        found = getattr(importlib.import_module(f"moonrelay_sglang.{module}"), name)
        return found(*args, **kwargs)

    hook.__name__ = hook.__qualname__ = f"moonrelay_{name}"
    return hook


class SglangAdapter:
    """SGLang as a host: its disaggregated diffusion, with payloads moved and work handed out by Moonrelay."""

    name = "sglang"
    host = "sglang"

    def host_version(self) -> str | None:
        """Return SGLang's version, ``None`` where it is not installed."""
        return host_version()

    def available(self) -> tuple[bool, str]:
        """Say whether the adapter can be used here, and why not; imports nothing heavy.

        Returns:
            ``(True, versions in words)`` or ``(False, what is missing and how to get it)``.
        """
        if not host_is_there():
            return False, f"{_HOST} not installed; {_REMEDY}"
        refusal = version_refusal(self.host_version())
        if refusal is not None:
            return False, refusal
        return True, f"{_HOST} {self.host_version()}"

    def examine(self) -> Iterator[HostFinding]:
        """Look whether the plugin is active in the host; see `moonrelay_sglang.activity.examine`."""
        from moonrelay_sglang import activity

        yield from activity.examine()

    def host_bench(self) -> type[HostBench]:
        """Return what ``moonrelay bench host sglang`` measures; see `moonrelay_sglang.bench`."""
        from moonrelay_sglang.bench import SglangBench

        return SglangBench

    def conformance_target(self) -> AdapterTarget:
        """Return what the conformance suite tests; see `moonrelay_sglang.conformance`."""
        from moonrelay_sglang.conformance import SglangTarget

        return SglangTarget()
