"""All programs of the corpus."""

from collections.abc import Iterator

from benchmarks.corpus import functions, libraries, transformers_models
from benchmarks.corpus.program import Program

_FILES = (functions, libraries, transformers_models)


def all_programs() -> Iterator[Program]:
    """Yields the programs of every file."""
    for file in _FILES:
        yield from file.programs()
