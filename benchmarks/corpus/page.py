"""The page of a run."""

import math
from typing import Any

from benchmarks import environment
from benchmarks.corpus.measure import DRAWS, HALVES
from benchmarks.show import made_by, markdown_table

PACKAGES = """
    flax optax transformers equinox diffrax optimistix lineax jaxopt distrax numpyro
    dm-pix ott-jax
""".split()
WORSE = 1.1  # a ratio above it is a shortfall
_FORMS = {"error": ".1e", "reference": ".1e", "ratio": ".2f"}
Row = dict[str, Any]


def page(rows: dict[str, Row]) -> str:
    """Returns the page: counts, what is not at its best, every program."""
    below = [[key, why] for key, row in rows.items() if (why := shortfalls(row))]
    wide = [
        [key, f"{row['share']:.2f}", _cell("; ".join(row["why_float32"]))]
        for key, row in rows.items()
        if row.get("share") is not None and row["share"] < 0.995
    ]
    versions = ", ".join(f"{name} {environment.version(name)}" for name in PACKAGES)
    ran = [row for row in rows.values() if all(f"{x}_error" in row for x in HALVES)]
    header = "program|reference|low|bf16|reference|ratio|fp16|reference|ratio".split(
        "|"
    )
    return f"""# Programs nobody here wrote

{made_by()}, {versions}.

Each program is a loss that was written for float32. The figures are those of its
gradient: *low* is the share of the FLOPs of matmuls in half precision, the others are
relative L2 distances to the gradient without amp. The reference is the same model with
the `dtype=` that its authors provide, or else the program with its matmuls cast, by an
interpreter that knows nothing of amp (`benchmarks/matmuls.py`): their operands and
results are rounded to half precision, forward and backward, and nothing else is. A
ratio above 1 says that amp is farther from float32 than the reference. All matmuls of
half precision are added up in float32, which XLA for the CPU does not always do.

{len(rows)} programs, {len(ran)} ran in both dtypes,
{sum(bool(row["problems"]) for row in rows.values())} with a problem;
{sum(row["by_hand"] for row in ran)} have a dtype set by hand.
{len(rows) - len(below)} are at their best.

Errors are root mean squares over {DRAWS} draws of the numbers, ratios are geometric
means. A program is not at its best if its ratio is above {WORSE} and more than two
standard errors above 1, or if a matmul is in float32 that a cast of all matmuls would
cast.

## Not at their best

amp rounds the values between matmuls too; a reference whose matmuls are cast rounds
none.

{markdown_table(["program", "what"], below)}

## Matmuls that stay in float32

{markdown_table(["program", "low", "why"], wide, words=3)}

## All programs

{markdown_table(header, [_line(key, row) for key, row in rows.items()])}
"""


def shortfalls(row: Row) -> str:
    """Returns what is below its best in a program: a problem, a share, a ratio."""
    found = [_cell(problem) for problem in row["problems"]]
    missing = row.get("could_be_low", 0) - row.get("low", 0)
    if missing > 0:
        text = "matmuls in float32 that a cast of all matmuls would cast"
        found.append(f"{missing} {text}")
    for name in HALVES:
        ratio, spread = row.get(f"{name}_ratio", 0.0), row.get(f"{name}_spread", 0.0)
        if ratio > max(WORSE, math.exp(2 * spread)):
            error = ratio * (math.exp(spread) - 1)
            found.append(f"{name} error {ratio:.2f} ± {error:.2f} of its reference's")
    return "; ".join(found)


def _line(key: str, row: Row) -> list[str]:
    reference = "by hand" if row.get("by_hand") else "matmuls cast"
    forms = {f"{n}_{key}": form for n in HALVES for key, form in _FORMS.items()}
    figures = [(row.get(k), form) for k, form in ({"share": ".2f"} | forms).items()]
    texts = ["" if x is None else format(x, form) for x, form in figures]
    return [key, reference, *texts]


def _cell(text: str) -> str:
    return text.replace("|", "/")
