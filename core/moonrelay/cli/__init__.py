"""The command line: a thin shell; every command is a module of its own, imported when it is called."""
