"""For scripts: ``import moonrelay_lightx2v.enable`` before ``import lightx2v`` does what the entry point does.

Needed only where the host is older than its plugins, or moonrelay is on the path without being installed. Importing
this raises `PluginError` where it comes too late.
"""

from moonrelay_lightx2v import plugin

plugin.enable()
