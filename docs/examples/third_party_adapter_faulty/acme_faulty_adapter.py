"""Acme's adapter with one fault: its host tidies the lists of tensors that it receives up, and leaves ``None`` out.

Nothing raises, every tensor arrives bit for bit, and most pipelines would run. The stage then takes the second tensor
for the first one that was not there. The suite's `test_structure_is_kept` tells.
"""

from __future__ import annotations

from typing import Any

from acme_relay_adapter import AcmeAdapter, AcmeHost, AcmeSide, AcmeTarget


class TidyHost(AcmeHost):
    def fetch(self, baton: str, *, wait_s: float) -> Any:
        return _tidy(super().fetch(baton, wait_s=wait_s))


def _tidy(tree: Any) -> Any:
    if type(tree) is list and all(value is None or hasattr(value, "dtype") for value in tree):
        return [value for value in tree if value is not None]  # the fault
    if type(tree) is list:
        return [_tidy(value) for value in tree]
    if type(tree) is dict:
        return {key: _tidy(value) for key, value in tree.items()}
    return tree


class FaultySide(AcmeSide):
    host_class = TidyHost


class FaultyTarget(AcmeTarget):
    name = "acme-faulty"
    side = "acme_faulty_adapter:FaultySide"


class FaultyAdapter(AcmeAdapter):
    name = "acme-faulty"

    def conformance_target(self) -> FaultyTarget:
        return FaultyTarget()
