"""Programs that nobody here wrote, run under amp: `python -m benchmarks corpus`."""
