"""All programs of the corpus."""

from collections.abc import Callable, Iterator

from benchmarks.corpus import functions, libraries, solvers, transformers_models
from benchmarks.corpus.program import Case

# The solvers, which take long to trace, come last.
_FILES = (functions, libraries, transformers_models, solvers)


def all_programs() -> Iterator[tuple[str, str, Callable[[], Case]]]:
    """Yields the package, the name and the maker of each program."""
    for file in _FILES:
        for source, table in file.TABLES.items():
            for name, make in table().items():
                yield source, name, make
