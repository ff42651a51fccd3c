"""The protocols that a target implements: host adapters, transfer engines, relays and queues."""
