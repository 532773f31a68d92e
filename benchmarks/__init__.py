"""Costs of mixed precision: compiled programs, host time, errors of gradients."""
