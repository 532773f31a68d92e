"""`corpus`: programs that nobody here wrote, under amp and in half precision by hand.

The figures of each program are written as soon as they are there: `--resume` goes on
where a run was stopped.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

from benchmarks import request
from benchmarks.corpus.measure import HALVES, measure
from benchmarks.corpus.page import page
from benchmarks.corpus.programs import Program, all_programs
from benchmarks.request import Request
from benchmarks.results import FOLDER, Results
from benchmarks.show import write_page


def run(asked: Request, only: str) -> None:
    """Writes corpus.md into the folder of results, of all programs or of `only` some.

    A page of some is not written among the results of all. The exit code is 1 if a
    program fails under amp or returns other dtypes.
    """
    # Compiling takes most of the time. Excess precision would hide roundings.
    request.on_cpu(
        "--xla_backend_optimization_level=0",
        "--xla_allow_excess_precision=false",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_fusion_emitters=false",
    )
    results = Results.open(asked.folder, "corpus", "cpu")
    made = all_programs()
    chosen = [key for key in made if any(part in key for part in only.split(","))]
    for number, key in enumerate(chosen, 1):
        if not (asked.resume and results.has(key, "amp")):
            row = _measured(made[key])
            results.put(key, "amp", row)
            print(f"{number}/{len(chosen)} {key}: {_told(row)}", flush=True)
            request.free_memory()
    rows = {key: results.cells[key]["amp"] for key in chosen}
    if not only or asked.folder != FOLDER:
        write_page(asked.folder / "corpus.md", page(rows))
    failed = [key for key, row in rows.items() if row["problems"]]
    print(f"{len(rows)} programs, {len(failed)} with problems")
    if failed:
        sys.exit(f"with problems: {', '.join(failed)}")


def _told(row: dict[str, Any]) -> str:
    ratios = [f"{n} {row[f'{n}_ratio']:.2f}" for n in HALVES if f"{n}_ratio" in row]
    return ", ".join([f"{row.get('seconds', 0.0):.1f} s", *ratios, *row["problems"]])


def _measured(make: Callable[[], Program]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return measure(make())
        except Exception as error:
            return {"problems": [f"fails without amp: {request.reason(error)}"]}
