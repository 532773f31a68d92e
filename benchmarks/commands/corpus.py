"""`corpus`: programs that nobody here wrote, under amp and beside their twins.

The figures of each program are kept in `corpus.partial` as soon as they are there:
`--resume` goes on where a run was stopped.
"""

import json
import pathlib
import sys
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
    asked.folder.mkdir(parents=True, exist_ok=True)
    for number, key in enumerate(chosen, 1):
        if key not in rows:
            rows[key] = _measured(made[key])
            kept = {"versions": versions, "rows": rows}
            partial.write_text(json.dumps(kept, indent=1))
            print(f"{number}/{len(chosen)} {key}: {_told(rows[key])}", flush=True)
            request.free_memory()
    if out or not only:
        path = pathlib.Path(out or asked.folder / "corpus.md")
        write_page(path, table.page({key: rows[key] for key in made if key in rows}))
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


def _told(row: dict[str, Any]) -> str:
    ratios = [f"{n} {row[f'{n}_ratio']:.2f}" for n in HALVES if f"{n}_ratio" in row]
    return ", ".join([f"{row.get('seconds', 0.0):.1f} s", *ratios, *row["problems"]])


def _measured(make: Callable[[], Case]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return measure(make())
        except Exception as error:
            return {"problems": [f"fails without amp: {request.reason(error)}"]}
