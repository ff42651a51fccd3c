"""Reports for people: the terminal, one page, the matrix of several reports, and its committed form."""
