"""LightX2V's disaggregation on Moonrelay: its runners hand over through a `DiffusionConnector`, chosen by one JSON key.

Importing this loads neither torch nor the host. See the adapter's README.
"""
