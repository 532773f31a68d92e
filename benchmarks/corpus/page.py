"""The page of a run."""

import math
from typing import Any

from benchmarks.corpus.measure import DRAWS, HALVES
from benchmarks.results import made_by
from benchmarks.show import markdown_table

PACKAGES = """
    jax flax optax transformers equinox diffrax optimistix lineax jaxopt distrax numpyro
    dm-pix ott-jax
"""
WORSE = 1.1  # a ratio above it is a shortfall
_FORMS = {"error": ".1e", "reference": ".1e", "ratio": ".2f"}
Row = dict[str, Any]


def page(rows: dict[str, Row]) -> str:
    """Returns the page: counts, what is not at its best, every program."""
    below = [[key, why] for key, row in rows.items() if (why := shortfalls(row))]
    ran = [row for row in rows.values() if all(f"{x}_error" in row for x in HALVES)]
    header = "program reference low bf16 reference ratio fp16 reference ratio".split()
    return f"""# Programs nobody here wrote

{made_by(PACKAGES)}.

Errors are relative L2 distances of gradients to those without amp, root mean squares
over {DRAWS} draws of the numbers; ratios are geometric means. *low* is the share of the
FLOPs of matmuls in half precision. A program is not at its best if its ratio is above
{WORSE} and more than two standard errors above 1, or if a matmul is in float32 that a
cast of all matmuls would cast. [What the reference is](../README.md#the-corpus).

{len(rows)} programs, {len(ran)} ran in both dtypes,
{sum(bool(row["problems"]) for row in rows.values())} with a problem;
{sum(row["by_hand"] for row in ran)} have a dtype set by hand.
{len(rows) - len(below)} are at their best.

## Not at their best

{markdown_table(["program", "what"], below)}

## All programs

{markdown_table(header, [_line(key, row) for key, row in rows.items()])}
"""


def shortfalls(row: Row) -> str:
    """Returns what is below its best in a program: a problem, a share, a ratio."""
    found = [problem.replace("|", "/") for problem in row["problems"]]
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
