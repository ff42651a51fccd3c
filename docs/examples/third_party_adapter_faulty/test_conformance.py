"""The same test as that of the good adapter; it fails by `test_structure_is_kept`."""

from acme_faulty_adapter import FaultyTarget

from moonrelay_conformance.suites.adapter import AdapterConformance


class TestAcmeFaulty(AdapterConformance):
    target = FaultyTarget
