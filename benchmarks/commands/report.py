"""`report`: tables and plots of all that is in the folder of results."""

import sys

from benchmarks.report import plots
from benchmarks.report.markdown import document
from benchmarks.report.summary import summary
from benchmarks.request import Request
from benchmarks.results import read_all


def run(asked: Request) -> None:
    """Writes README.md and the plots into the folder of results.

    Args:
      asked: of which only the folder counts.
    """
    found = read_all(asked.folder)
    if not found:
        sys.exit(f"error: there are no results in {asked.folder}")
    names = plots.draw_all(found, asked.folder)
    path = asked.folder / "README.md"
    path.write_text(document(found, names))
    print(f"{summary(found)}\n\nwrote {path}" + "".join(f", {n}" for n in names))
