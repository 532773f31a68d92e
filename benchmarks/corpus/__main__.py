"""Runs the corpus and writes `benchmarks/results/corpus.md`.

    python -m benchmarks.corpus [--only PART_OF_A_NAME] [--out FILE]

The exit code is 1 if a program fails under amp or returns other dtypes.
"""

import argparse
import gc
import json
import os
import pathlib
import sys
import time
import warnings

# Compiling takes most of the time. Excess precision would hide roundings.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_allow_excess_precision=false "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false "
    + os.environ.get("XLA_FLAGS", "")
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402

from benchmarks.corpus import programs, table  # noqa: E402
from benchmarks.corpus.measure import measure  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the corpus.")
    parser.add_argument("--only", default="", help="part of SOURCE/NAME")
    parser.add_argument("--out", help="the page; by default only if all are run")
    parser.add_argument("--cache", help="a JSON file: what stands in it is not run")
    asked = parser.parse_args()
    cache = pathlib.Path(asked.cache) if asked.cache else None
    rows = json.loads(cache.read_text()) if cache and cache.exists() else {}
    made = {f"{source}/{name}": make for source, name, make in programs.all_programs()}
    for key, make in made.items():
        if asked.only not in key or key in rows:
            continue
        began = time.monotonic()
        rows[key] = _measured(make)
        print(f"{time.monotonic() - began:5.1f} s {key} {rows[key]}", flush=True)
        if cache:
            cache.write_text(json.dumps(rows, indent=1))
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


def _measured(make):
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
