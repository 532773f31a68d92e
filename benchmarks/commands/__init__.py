"""The commands of `python -m benchmarks`, a module each with a function `run`."""
