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
_HEADER = "program|twin|low|bf16|twin|ratio|fp16|twin|ratio".split("|")
Row = dict[str, Any]


def page(rows: dict[str, Row]) -> str:
    """Returns the page: counts, what is not at its best, every program."""
    below = {key: why for key, row in rows.items() if (why := shortfalls(row))}
    shares = {key: row.get("share") for key, row in rows.items()}
    wide = [key for key, x in shares.items() if x is not None and x < 0.995]
    versions = ", ".join(f"{name} {environment.version(name)}" for name in PACKAGES)
    ran = [row for row in rows.values() if all(f"{x}_error" in row for x in HALVES)]
    hand = [row for row in ran if row["twin"] == "hand-set"]
    told = [[key, why] for key, why in below.items()]
    kept = [
        [key, f"{shares[key]:.2f}", _cell("; ".join(rows[key]["wide_products"]))]
        for key in wide
    ]
    return f"""# Programs nobody here wrote

{made_by()}, {versions}.

Each program is a loss that was written for float32. The figures are those of its
gradient: *low* is the share of the FLOPs of matmuls in half precision, the others are
relative L2 distances to the gradient without amp. The twin is the same model with the
`dtype=` that its authors provide, or else the program with its matmuls cast, by an
interpreter that knows nothing of amp (`benchmarks/twin.py`): their operands and results
are rounded to half precision, forward and backward, and nothing else is. A ratio above
1 says that amp is farther from float32 than the twin. All matmuls of half precision are
added up in float32, which XLA for the CPU does not always do.

{len(rows)} programs, {len(ran)} ran in both dtypes,
{sum(bool(row["problems"]) for row in rows.values())} with a problem;
{len(hand)} have a hand-set twin. {len(rows) - len(below)} are at their best.

Errors are root mean squares over {DRAWS} draws of the numbers, ratios are geometric
means. A program is not at its best if its ratio is above {WORSE} and more than two
standard errors above 1, or if a matmul is in float32 that a cast of all matmuls would
cast.

## Not at their best

amp rounds the values between matmuls too; a twin whose matmuls are cast rounds none.

{markdown_table(["program", "what"], told)}

## Matmuls that stay in float32

{markdown_table(["program", "low", "why"], kept, words=3)}

## All programs

{markdown_table(_HEADER, [_line(key, row) for key, row in rows.items()])}
"""


def shortfalls(row: Row) -> str:
    """Returns what is below its best in a program: a problem, a share, a ratio."""
    found = [_cell(problem) for problem in row["problems"]]
    missing = row.get("low_in_twin", 0) - row.get("low", 0)
    if missing > 0:
        found.append(
            f"{missing} matmuls in float32 that a cast of all matmuls would cast"
        )
    for name in HALVES:
        ratio, spread = row.get(f"{name}_ratio", 0.0), row.get(f"{name}_spread", 0.0)
        if ratio > max(WORSE, math.exp(2 * spread)):
            error = ratio * (math.exp(spread) - 1)
            found.append(f"{name} error {ratio:.2f} ± {error:.2f} of its twin's")
    return "; ".join(found)


def _line(key: str, row: Row) -> list[str]:
    figures = [(f"{n}_{k}", f) for n in HALVES for k, f in _FORMS.items()]
    return [key, row.get("twin", "")] + [
        "" if row.get(k) is None else format(row[k], form)
        for k, form in [("share", ".2f"), *figures]
    ]


_FORMS = {"error": ".1e", "twin": ".1e", "ratio": ".2f"}


def _cell(text: str) -> str:
    return text.replace("|", "/")
