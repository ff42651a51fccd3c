"""The suites: classes of tests, one module per promise group, for each kind of target.

(PYTEST_DONT_REWRITE: this module is empty; the plugin asks pytest to rewrite the assertions of those beside it.)
"""
