"""Trainer adapters: the only code that knows SFT, DPO, GRPO, ... apart."""
