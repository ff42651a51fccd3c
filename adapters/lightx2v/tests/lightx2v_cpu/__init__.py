"""What LightX2V needs to run on a CPU, beside a torch without CUDA, which it does not bring. For tests only.

A plugin of the host's own kind: an entry point of ``lightx2v.platform_plugins`` that registers a platform ``cpu`` and
mends what the host calls there. It acts only where the environment says ``PLATFORM=cpu``; see `install` for how a
process gets it. Nothing of the transfer between roles is touched. Importing this package imports nothing.
"""
