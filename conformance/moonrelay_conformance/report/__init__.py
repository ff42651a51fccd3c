"""Reports that people read: tables in Markdown and HTML, and the matrix of several targets."""
