"""The page of a run."""

import datetime
import math
import platform
from collections.abc import Sequence
from typing import Any

from benchmarks import environment
from benchmarks.corpus import draws
from benchmarks.show import markdown_table

PACKAGES = """
    jax jaxlib flax optax transformers equinox diffrax optimistix lineax jaxopt distrax
    rlax numpyro jraph penzai e3nn-jax dm-haiku dm-pix jaxkan ott-jax tinygp
    blackjax flaxmodels
""".split()

_HEADER = "program|twin|products low|bf16|twin|ratio|fp16|twin|ratio".split("|")
_ALL = 0.995  # a share that rounds to 1.00
Row = dict[str, Any]


def page(rows: dict[str, Row], left_out: Sequence[str] = ()) -> str:
    """Returns the page: counts, what is not at its best and why, every program.

    Args:
      rows: the figures of each program.
      left_out: the programs that were not run.
    """
    below = {key: why for key, row in rows.items() if (why := shortfalls(row))}
    wide = {key: row for key, row in rows.items() if _share(row) < _ALL}
    versions = ", ".join(
        f"{name} {environment.version(name) or '(not installed)'}" for name in PACKAGES
    )
    ran = [row for row in rows.values() if "share" in row]
    hand = [row for row in ran if row["twin"] == "hand-set"]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    problems = sum(bool(row["problems"]) for row in rows.values())
    minutes = sum(row.get("seconds", 0) for row in rows.values()) / 60
    peak = max((row.get("peak_gib", 0) for row in rows.values()), default=0)
    told = [[key, why, _why(key, rows[key])] for key, why in below.items()]
    kept = [[key, f"{row['share']:.2f}", _kept(row)] for key, row in wide.items()]
    missing = f"\nNot run this time: {', '.join(left_out)}.\n" if left_out else ""
    return f"""# Programs nobody here wrote

Written by `make test-corpus` on {today} ({environment.machine()}, Python
{platform.python_version()}). Versions: {versions}.

Each program is a loss that was written for float32. The figures are those of its
gradient: *products low* is the share of the FLOPs of matrix products in half precision,
the others are relative L2 distances to the gradient without amp. The twin is the same
model with the `dtype=` that its authors provide, or else the program with its products
cast, by an interpreter that knows nothing of amp (`benchmarks/twin.py`): their operands
and results are rounded to half precision, forward and backward, and nothing else is. A
ratio above 1 says that amp is farther from float32 than the twin. All products of half
precision are added up in float32, which XLA for the CPU does not always do.

{len(rows)} programs, {len(ran)} ran in both dtypes, {problems} with a problem;
{len(hand)} have a hand-set twin. {len(rows) - len(below)} are at their best.

Errors are root mean squares over several draws of the numbers, ratios are geometric
means: {draws.STEP} draws, up to {draws.MOST} where the ratio is near {draws.WORSE}. A
program is not at its best if its ratio is above {draws.WORSE} and more than two
standard errors above 1, or if a product is in float32 that the twin casts. The ratio
*by hand* is that of the program without amp, whose parameters and data are cast to
half.

The run took {minutes:.0f} minutes of CPU and {peak:.1f} GiB of memory.
{missing}
## Not at their best

{_counts(list(below), rows)}

{markdown_table(["program", "what", "why"], told, words=3)}

## Products that stay in float32

{markdown_table(["program", "products low", "why"], kept, words=3)}

## All programs

{markdown_table(_HEADER, [_line(key, row) for key, row in rows.items()])}
"""


def shortfalls(row: Row) -> str:
    """Returns what is below its best in a program: a problem, a share, a ratio."""
    found = [problem.replace("|", "/") for problem in row["problems"]]
    missing = row.get("low_in_twin", 0) - row.get("low", 0)
    if missing > 0:
        found.append(f"{missing} products in float32 that the twin casts")
    for name in ("bf16", "fp16"):
        if f"{name}_by_hand" in row:
            ratio, spread = row[f"{name}_ratio"], row[f"{name}_spread"]
            error = ratio * (math.exp(spread) - 1)
            found.append(f"{name} error {ratio:.2f} ± {error:.2f} of its twin's")
    return "; ".join(found)


def _share(row: Row) -> float:
    """Returns the share of products in half; 1 if there are none, or it did not run."""
    share = row.get("share")
    return 1.0 if share is None else float(share)


def _line(key: str, row: Row) -> list[str]:
    figures = []
    for name in ("bf16", "fp16"):
        ratio = row.get(f"{name}_ratio")
        figures += [_number(row.get(f"{name}_error"), ".1e")]
        figures += [_number(row.get(f"{name}_twin"), ".1e"), _number(ratio, ".2f")]
    share = _number(row.get("share"), ".2f")
    return [key, row.get("twin", ""), share, *figures]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _counts(below: Sequence[str], rows: dict[str, Row]) -> str:
    """Tells how programs that are not at their best fare by hand."""
    by_hand = [
        row[f"{name}_by_hand"] >= row[f"{name}_ratio"]
        for row in (rows[key] for key in below)
        for name in ("bf16", "fp16")
        if row.get(f"{name}_by_hand") is not None
    ]
    open_ = [key for key in below if key not in REASONS]
    return f"""amp rounds the values that it keeps between products, and the twin none.
By hand, which rounds more, the error is at least that of amp in {sum(by_hand)} of
{len(by_hand)} comparisons.

Not explained: {", ".join(open_) or "none"}."""


def _why(key: str, row: Row) -> str:
    """Returns what explains a shortfall: a note, and the ratio by hand."""
    found = [REASONS[key]] if key in REASONS else []
    for name in ("bf16", "fp16"):
        if row.get(f"{name}_by_hand") is not None:
            found.append(f"{name} {row[f'{name}_by_hand']:.2f} by hand")
    return "; ".join(found).replace("|", "/")


def _kept(row: Row) -> str:
    return "; ".join(row.get("wide_products", ())).replace("|", "/")


_STREAM = "the authors' dtype= leaves the residual stream in float32, amp does not"
_FOREIGN = "a product inside of a primitive of lineax, which runs as it is written"
_LABELS = (
    "the gradient of the labels' logits is rounded before it is added to the others"
)
# Why a program is not at its best, for those that were looked at.
REASONS = {
    "optax.losses/softmax_cross_entropy_with_integer_labels": _LABELS,
    "transformers/ViTModel": _STREAM,
    "transformers/ViTForImageClassification": _STREAM,
    "diffrax/Kvaerno3": _FOREIGN,
} | {
    f"optimistix/{name}": _FOREIGN
    for name in "root_find(Newton) root_find(Chord) least_squares(LevenbergMarquardt) "
    "least_squares(GaussNewton) least_squares(Dogleg)".split()
}
