"""Deliberately broken targets, one fault each, and which test of the suite must catch it.

Importable as ``planted`` from the tests' path, also in the processes of sides: ``planted.adapters:StaleBytes``.
"""
