"""All programs of the corpus."""

from collections.abc import Iterator

from benchmarks.corpus import functions, libraries, transformers_models
from benchmarks.corpus.program import Program

_FILES = (functions, transformers_models, libraries)


def all_programs() -> Iterator[Program]:
    """Yields the programs of every file."""
    for file in _FILES:
        yield from file.programs()
