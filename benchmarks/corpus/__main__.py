"""Runs `python -m benchmarks corpus`, by a name of its own."""

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    main(["corpus", *sys.argv[1:]])
