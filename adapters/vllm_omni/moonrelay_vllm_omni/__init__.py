"""Moonrelay as a connector of vLLM-Omni: stage payloads between its stages' processes, directly or through a store.

Importing this package imports neither torch nor vLLM. What users and the host call is `moonrelay_vllm_omni.plugin`.
"""
