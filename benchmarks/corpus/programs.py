"""All programs of the corpus."""

from collections.abc import Iterator

from benchmarks.corpus import functions, libraries, solvers, transformers_models
from benchmarks.corpus.program import Program

# The solvers, which take long to trace, come last.
_FILES = (functions, libraries, transformers_models, solvers)


def all_programs() -> Iterator[Program]:
    """Yields the programs of every file."""
    for file in _FILES:
        yield from file.programs()
