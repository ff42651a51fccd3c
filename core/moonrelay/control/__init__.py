"""The small message channel between two peers (ZeroMQ, msgspec). Payload bytes never travel here."""

from moonrelay.control.channel import Handler, PeerChannel, PeerInfo, Responder

__all__ = ["Handler", "PeerChannel", "PeerInfo", "Responder"]
