"""`corpus`: programs that nobody here wrote, under amp and beside their twins.

The figures of each program are kept in `corpus.partial` as soon as they are there:
`--resume` goes on where a run was stopped.
"""

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

from benchmarks import environment, request, results
from benchmarks.corpus import table
from benchmarks.corpus.case import Case
from benchmarks.corpus.measure import HALVES, measure
from benchmarks.corpus.programs import all_programs
from benchmarks.request import Request
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
    partial, versions = asked.folder / "corpus.partial", environment.versions()
    kept = json.loads(partial.read_text()) if asked.resume and partial.exists() else {}
    rows = kept["rows"] if kept.get("versions") == versions else {}
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
    found = {key: rows[key] for key in made if key in rows}
    if not only or asked.folder != results.FOLDER:
        write_page(asked.folder / "corpus.md", table.page(found))
    failed = [key for key, row in found.items() if row["problems"]]
    print(f"{len(found)} programs, {len(failed)} with problems")
    if failed:
        sys.exit(f"with problems: {', '.join(failed)}")


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
