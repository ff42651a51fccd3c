"""One HTTP address before LightX2V's encoder, transformer and decoder servers: ``moonrelay lightx2v-front``.

The host has its users POST the same body to every role and poll the last one. `settings` owns what the front is told,
`stages` the servers behind it, `orders` what was asked of it, `front` the way of a request, `routes` HTTP, `command`
the process. Nothing here imports the host: its servers are reached by HTTP alone.
"""
