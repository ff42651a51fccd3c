"""What lets the conformance suite run without the host: its base class lends our manager nothing."""

from __future__ import annotations

import pytest

from moonrelay_sglang import conformance
from moonrelay_sglang.manager import PayloadManager, manager_class

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("host")]


def test_the_hosts_class_lends_ours_no_method() -> None:
    from sglang.multimodal_gen.runtime.disaggregation.transport.manager import DiffusionTransferManager

    ours = manager_class()
    assert issubclass(ours, DiffusionTransferManager)
    assert conformance.class_of_manager().__mro__[1:] == ours.__mro__[1:], "the suite runs what a worker runs"
    inherited = [name for name in vars(DiffusionTransferManager) if name not in vars(PayloadManager)]
    assert inherited == []
    # Nor has the class that joins them anything of its own.
    assert {name for name in vars(ours) if not name.startswith("__")} == set()
