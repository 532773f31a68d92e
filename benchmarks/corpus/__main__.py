"""Runs the corpus and writes `benchmarks/results/corpus.md`.

    python -m benchmarks.corpus [--only PARTS,OF,NAMES] [--out FILE] [--resume]

The figures of each program are kept in `benchmarks/results/corpus.partial` as soon as
they are there: `--resume` goes on where a run was stopped. The exit code is 1 if a
program fails under amp or returns other dtypes.
"""

import argparse
import gc
import json
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

# Compiling takes most of the time. Excess precision would hide roundings.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_allow_excess_precision=false "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false "
    + os.environ.get("XLA_FLAGS", "")
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402

from benchmarks import environment  # noqa: E402
from benchmarks.corpus import programs, table  # noqa: E402
from benchmarks.corpus.measure import HALVES, measure  # noqa: E402
from benchmarks.corpus.program import Case  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the corpus.")
    parser.add_argument("--only", default="", help="parts of SOURCE/NAME")
    parser.add_argument("--out", help="the page; by default only if all are run")
    parser.add_argument(
        "--resume", action="store_true", help="leaves out what a stopped run has done"
    )
    asked = parser.parse_args()
    versions = environment.versions()
    rows = _read(versions) if asked.resume else {}
    made = {f"{source}/{name}": make for source, name, make in programs.all_programs()}
    parts = asked.only.split(",")
    chosen = [key for key in made if any(part in key for part in parts)]
    began = time.monotonic()
    for number, key in enumerate(chosen, 1):
        if key in rows:
            continue
        rows[key] = _measured(made[key])
        _PARTIAL.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1))
        _print(f"{number}/{len(chosen)}", time.monotonic() - began, key, rows[key])
        jax.clear_caches()
        gc.collect()
    rows = {key: rows[key] for key in made if key in rows}
    out = asked.out or (None if asked.only else "benchmarks/results/corpus.md")
    if out:
        pathlib.Path(out).write_text(
            table.page(rows, [key for key in made if key not in rows])
        )
    failed = [key for key, row in rows.items() if row["problems"]]
    print(f"{len(rows)} programs, {len(failed)} with problems: {', '.join(failed)}")
    return bool(failed)


_PARTIAL = pathlib.Path("benchmarks/results/corpus.partial")


def _read(versions: dict[str, str]) -> dict[str, Any]:
    """Returns the rows that were measured with the same versions and sources."""
    kept = json.loads(_PARTIAL.read_text()) if _PARTIAL.exists() else {}
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
            return {"problems": [f"cannot be made: {type(error).__name__}: {error}"]}
        try:
            return measure(case)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            return {"problems": [f"fails without amp: {text}"]}


if __name__ == "__main__":
    sys.exit(main())
