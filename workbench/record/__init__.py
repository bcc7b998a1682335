"""What happened, as data: three append-only tables, the directory that holds them, and the run that they are of."""
