"""An OpenAI-compatible front over the host's engine, for pipelines that are divided into stages.

The host's own server ends at its start where several diffusion stages and no language stage are given, and it does not
start a dead stage again. `schema` owns what a request may say, `gate` how many are let in, `jobs` videos in the making,
`supervisor` the engine's life, `engine` the host, `front` the routes; ``python -m moonrelay_vllm_omni.serve`` runs it.
"""
