"""Asking Optuna for candidates and telling it what became of them."""
