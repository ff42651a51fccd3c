"""Acme's adapter with one fault: its host tidies trees up before it sends them, and leaves every ``None`` out.

Nothing raises, every tensor arrives bit for bit, and most pipelines would run. The next stage then takes the second
tensor for the first one that was not there. The suite's `test_structure_is_kept` tells.
"""

from __future__ import annotations

from acme_relay_adapter import AcmeAdapter, AcmeHost, AcmeSide, AcmeTarget


class TidyHost(AcmeHost):
    def send(self, key: str, tree: object, *, keep_s: float | None = None) -> str:
        return super().send(key, _tidy(tree), keep_s=keep_s)


def _tidy(tree: object) -> object:
    if type(tree) is list:
        return [_tidy(value) for value in tree if value is not None]  # the fault
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
