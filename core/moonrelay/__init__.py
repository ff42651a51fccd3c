"""Moonrelay."""
