"""What SGLang needs to serve diffusion models on a CPU, which its wheel does not bring. For tests only.

Put into an environment by ``python -m cpu_support.install`` (see there); then every Python process of that environment
finds it, the host's spawned ones too. Importing this package imports nothing.
"""
