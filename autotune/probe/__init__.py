"""What to run, what happened, and the append-only record of it."""
