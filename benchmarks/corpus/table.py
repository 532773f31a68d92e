"""The page of a run."""

import datetime
import importlib.metadata
import platform
from collections.abc import Sequence
from typing import Any

from benchmarks import environment

PACKAGES = """
    jax jaxlib flax optax transformers equinox diffrax optimistix lineax jaxopt distrax
    rlax numpyro jraph penzai e3nn-jax dm-haiku dm-pix jaxkan ott-jax tinygp
    blackjax flaxmodels
""".split()

_HEAD = (
    "| program | twin | products low | bf16 | twin | ratio | fp16 | twin | ratio |\n"
    "| --- | --- | --: | --: | --: | --: | --: | --: | --: |\n"
)
_ALL = 0.995  # a share that rounds to 1.00
Row = dict[str, Any]


def page(rows: dict[str, Row], left_out: Sequence[str] = ()) -> str:
    """Returns the page: counts, what is not at its best and why, every program.

    Args:
      rows: the figures of each program.
      left_out: the programs that were not run.
    """
    below = {key: why for key, row in rows.items() if (why := shortfalls(row))}
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    ran = [row for row in rows.values() if "share" in row]
    hand = [row for row in ran if row["twin"] == "hand-set"]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        "# Programs nobody here wrote",
        "",
        f"Written by `make test-corpus` on {today} "
        f"({environment.machine()}, Python {platform.python_version()}). "
        f"Versions: {versions}.",
        "",
        "Each program is a loss that was written for float32. The figures are those of "
        "its gradient: *products low* is the share of the FLOPs of matrix products in "
        "half precision, the others are relative L2 distances to the gradient without "
        "amp. The twin is the same model with the `dtype=` that its authors provide, "
        "or else amp with a policy that lowers products and nothing else. A ratio "
        "above 1 says that amp is farther from float32 than the twin.",
        "",
        f"{len(rows)} programs, {len(ran)} ran in both dtypes, "
        f"{sum(bool(row['problems']) for row in rows.values())} with a problem; "
        f"{len(hand)} have a hand-set twin. "
        f"{len(rows) - len(below)} are at their best.",
        "",
        "`n with arithmetic in float32` is the ratio when amp gets a policy that keeps "
        "additions, subtractions, products, quotients and negations of arrays in "
        "float32: near 1, their rounding is the reason.",
        "",
        *(["Not run this time: " + ", ".join(left_out) + ".", ""] if left_out else []),
        "## Not at their best",
        "",
        "| program | what | why |",
        "| --- | --- | --- |",
        *(f"| {key} | {why} | {_why(key, rows[key])} |" for key, why in below.items()),
        "",
        "## All programs",
        "",
        _HEAD + "\n".join(_line(key, row) for key, row in rows.items()),
    ]
    return "\n".join(lines) + "\n"


def shortfalls(row: Row) -> str:
    """Returns what is below its best in a program: a problem, a share, a ratio."""
    found = [problem.replace("|", "/") for problem in row["problems"]]
    if row.get("share") is not None and row["share"] < _ALL:
        found.append(f"products low {row['share']:.2f}")
    for name in ("bf16", "fp16"):
        ratio = _ratio(row, name)
        if ratio is not None and ratio > 1.1:
            found.append(f"{name} error {ratio:.2f} of its twin's")
    return "; ".join(found)


def _ratio(row: Row, name: str) -> float | None:
    error, twin = row.get(f"{name}_error"), row.get(f"{name}_twin")
    if error is None or twin is None:
        return None
    if error < 1e-6:  # as good as float32
        return 1.0 if twin < 1e-6 else error / twin
    return error / twin if twin else float("inf")


def _line(key: str, row: Row) -> str:
    figures = []
    for name in ("bf16", "fp16"):
        ratio = _ratio(row, name)
        figures += [_number(row.get(f"{name}_error"), ".1e")]
        figures += [_number(row.get(f"{name}_twin"), ".1e"), _number(ratio, ".2f")]
    share = _number(row.get("share"), ".2f")
    return f"| {' | '.join([key, row.get('twin', ''), share, *figures])} |"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _why(key: str, row: Row) -> str:
    """Returns what explains a shortfall: what `explain` says, an experiment, a note."""
    found = [REASONS[key]] if key in REASONS else []
    if row.get("share") is not None and row["share"] < _ALL:
        found += row.get("wide_products", ())
    for name in ("bf16", "fp16"):
        wide, twin = row.get(f"{name}_wide"), row.get(f"{name}_twin")
        if wide is not None and twin:
            found.append(f"{name} {wide / twin:.2f} with arithmetic in float32")
    return "; ".join(found).replace("|", "/")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


_SOFTMAX = "a softmax stores its exponentials in half; in float32, the ratio is 1"
_STREAM = "the authors' dtype= leaves the residual stream in float32, amp does not"
_OPTIMIZER = (
    "amp is around the optimizer here, too: its small step sizes times half gradients "
    "leave the range of float16. In a train step, amp is around the loss only"
)
# Why a program is not at its best, for those that were looked at.
REASONS = {
    "jax.scipy/ndtri": "rounding a probability near 1, where the function is steep",
    "jax.scipy/interpolate.RegularGridInterpolator": "coordinates of 8 in half",
    "dm_pix/rgb_to_grayscale": "the sigmoid before it stays in half",
    "optax/dadapt_adamw": _OPTIMIZER,
    "optax/simplified_ademamix": _OPTIMIZER,
    "optax.losses/safe_softmax_cross_entropy": (
        "a softmax stores its exponentials in half, that of the float32 targets, too"
    ),
    "transformers/ViTModel": _STREAM,
    "transformers/ViTForImageClassification": _STREAM,
} | {
    f"optax.losses/{name}": _SOFTMAX
    for name in "convex_kl_divergence generalized_kl_divergence kl_divergence "
    "multiclass_generalized_dice_loss poly_loss_cross_entropy "
    "ranking_softmax_loss".split()
}
