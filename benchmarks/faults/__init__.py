"""Faults, for real, at checkpoints: what is lost, what is said, what goes on."""
