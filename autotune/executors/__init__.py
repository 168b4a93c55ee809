"""Where probes run: the contract, and one place per module."""
