"""Diffusion pipelines divided into stages, for vLLM-Omni's own models.

`registration` owns which stages a pipeline has and what each hands over, `handover` what a stage is asked for besides,
and a module per model what its stages compute. Payloads go by the connector, never through this package.
"""
