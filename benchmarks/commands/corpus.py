"""`corpus`: programs that nobody here wrote, under amp and beside their twins.

The figures of each program are kept in `corpus.partial` as soon as they are there:
`--resume` goes on where a run was stopped.
"""

import json
import pathlib
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from benchmarks import environment, request
from benchmarks.corpus import functions, libraries, solvers, table, transformers_models
from benchmarks.corpus.measure import HALVES, measure
from benchmarks.corpus.program import Case
from benchmarks.request import Request
from benchmarks.show import write_page

# The solvers, which take long to trace, come last.
_FILES = (functions, libraries, transformers_models, solvers)


def run(asked: Request, only: str, out: str) -> None:
    """Writes corpus.md into the folder of results.

    Args:
      asked: folder of the request, and whether to resume.
      only: parts of names, separated by commas; empty for all programs.
      out: another place for the page; without it, the page is written if all are run.

    Raises:
      SystemExit: if a program fails under amp or returns other dtypes.
    """
    # Compiling takes most of the time. Excess precision would hide roundings.
    request.on_cpu(
        "--xla_backend_optimization_level=0",
        "--xla_allow_excess_precision=false",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_fusion_emitters=false",
    )
    partial, versions = asked.folder / "corpus.partial", environment.versions()
    rows = _read(partial, versions) if asked.resume else {}
    made = all_programs()
    chosen = [key for key in made if any(part in key for part in only.split(","))]
    began = time.monotonic()
    for number, key in enumerate(chosen, 1):
        if key in rows:
            continue
        rows[key] = _measured(made[key])
        partial.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1))
        _print(f"{number}/{len(chosen)}", time.monotonic() - began, key, rows[key])
        request.free_memory()
    rows = {key: rows[key] for key in made if key in rows}
    if out or not only:
        page = table.page(rows, [key for key in made if key not in rows])
        write_page(pathlib.Path(out or asked.folder / "corpus.md"), page)
    failed = [key for key, row in rows.items() if row["problems"]]
    print(f"{len(rows)} programs, {len(failed)} with problems")
    if failed:
        sys.exit(f"with problems: {', '.join(failed)}")


def all_programs() -> dict[str, Callable[[], Case]]:
    """Returns what makes each program, by package and name."""
    return {
        f"{source}/{name}": make
        for file in _FILES
        for source, programs in file.TABLES.items()
        for name, make in programs().items()
    }


def _read(partial: pathlib.Path, versions: dict[str, str]) -> dict[str, Any]:
    """Returns the rows that were measured with the same versions and sources."""
    kept = json.loads(partial.read_text()) if partial.exists() else {}
    return kept["rows"] if kept.get("versions") == versions else {}


def _print(number: str, since: float, key: str, row: dict[str, Any]) -> None:
    seconds, peak = row.get("seconds", 0.0), row.get("peak_gib", 0.0)
    ratios = [f"{n} {row[f'{n}_ratio']:.2f}" for n in HALVES if f"{n}_ratio" in row]
    print(
        f"{number} after {since:.0f} s: {key}: {seconds:.1f} s of CPU, "
        f"{peak:.1f} GiB at most so far; {', '.join(ratios + row['problems'])}",
        flush=True,
    )


def _measured(make: Callable[[], Case]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case = make()
        except Exception as error:
            return {"problems": [f"cannot be made: {request.reason(error)}"]}
        try:
            return measure(case)
        except Exception as error:
            return {"problems": [f"fails without amp: {request.reason(error)}"]}
