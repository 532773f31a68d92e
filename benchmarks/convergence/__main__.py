"""Runs `python -m benchmarks convergence`, by a name of its own."""

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    main(["convergence", *sys.argv[1:]])
