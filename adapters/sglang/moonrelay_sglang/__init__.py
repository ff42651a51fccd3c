"""Moonrelay in SGLang's disaggregated diffusion: the payloads between its roles, and how its head hands out work.

Importing this package imports neither torch nor SGLang. What users and the host call is `moonrelay_sglang.plugin`.
"""
