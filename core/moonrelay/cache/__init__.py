"""The cache room: what was computed once and decides nothing but itself, kept for whoever asks next.

Owns keys (``keys``: everything that decides the bytes, or no key at all; ``files``: whose weights), the form of an
entry (``entry``), the tier in this process (``memory``), the tier in the relay (``shared``, bounded, least recently
used out first), the single flight across processes (``flight``), and what stands before them: ``embeddings`` for
conditions, ``features`` for what a denoiser computes of them, ``checkpoint`` for the state of a denoising loop.
Payloads between stages, leases and tasks never pass through here. A cache never fails a request: what cannot be found
or read is a miss and an event. Importing this package loads no torch.
"""
