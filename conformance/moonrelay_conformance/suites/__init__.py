"""The suites: classes of tests, one module per promise group, for each kind of target."""
