"""The whole test of the adapter: everything that Moonrelay's suite knows. Run: pytest test_conformance.py"""

from acme_relay_adapter import AcmeTarget

from moonrelay_conformance.suites.adapter import AdapterConformance


class TestAcme(AdapterConformance):
    target = AcmeTarget
