"""Runs one program under amp and beside its twins."""

import dataclasses
import math
import resource
import time
from typing import Any

import jax
import jax.numpy as jnp

import flax_amp
from benchmarks.commands.error import relative_error
from benchmarks.corpus import draws
from benchmarks.corpus.draws import Draws
from benchmarks.corpus.program import Case, Loss
from benchmarks.products import PRODUCTS
from benchmarks.request import reason
from benchmarks.twin import cast_products, count_cast

HALVES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}


def measure(case: Case) -> dict[str, Any]:
    """Returns the figures of a program; what fails stands in `problems`."""
    began = time.process_time()
    problems: list[str] = []
    found: dict[str, Any] = {"problems": problems}
    runs = Draws(case)
    if not draws.finite(next(iter(runs))[1]):
        return {"problems": ["not finite without amp"]}
    found["twin"] = "hand-set" if case.hand else "cast products"
    for name, dtype in HALVES.items():
        try:
            found |= _half(case, runs, name, dtype, problems)
        except Exception as error:
            problems.append(f"{name}: {reason(error)}")
    try:
        _same_in_float32(case, runs, problems)
    except Exception as error:
        problems.append(f"float32: {reason(error)}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return found | {"seconds": time.process_time() - began, "peak_gib": peak}


def _half(
    case: Case, runs: Draws, name: str, dtype: Any, problems: list[str]
) -> dict[str, Any]:
    lowered = flax_amp.amp(case.loss, compute_dtype=dtype)
    if _shapes(runs, lowered) != _shapes(runs, case.loss):
        problems.append(f"{name}: other dtypes than without amp")
    found = _products(case, dtype)
    twin = case.hand(dtype) if case.hand else cast_products(case.loss, dtype)
    works = runs.works(twin)
    try:
        compared = runs.compare(lowered, twin if works else None, dtype)
    except draws.NotFiniteError:
        problems.append(f"{name}: gradients are not finite")
        return found
    found |= {f"{name}_{k}": v for k, v in dataclasses.asdict(compared).items()}
    if compared.is_worse:
        found[f"{name}_by_hand"] = _by_hand(case, runs, dtype, twin)
    return found


def _by_hand(case: Case, runs: Draws, dtype: Any, twin: Loss) -> float | None:
    """Returns the ratio of the program without `amp`, cast by hand, if it works."""
    by_hand = _cast(case.loss, dtype)
    if case.hand or not runs.works(by_hand):
        return None
    try:
        return runs.compare(by_hand, twin, dtype, draws.STEP).ratio
    except draws.NotFiniteError:
        return math.inf


def _cast(loss: Loss, dtype: Any) -> Loss:
    """Returns a loss with all that it is given in half: mixed precision by hand."""

    def lower(x: Any) -> Any:
        is_wide = getattr(x, "dtype", None) == jnp.float32
        return jnp.asarray(x, dtype) if is_wide else x

    return lambda *args: loss(*jax.tree.map(lower, args))


def _products(case: Case, dtype: Any) -> dict[str, Any]:
    """Returns how many products are in half precision, and why the others are not."""
    explain: Any = flax_amp.explain(case.loss, compute_dtype=dtype, backward=False)
    explained: flax_amp.debug.Explanation = explain(case.params, *case.args)
    wide = [p for p in explained.problems if p.kind == "float32 product"]
    reasons = sorted({p.message for p in wide} | set(explained.notes))
    low = [e for e in explained.equations if e.primitive in PRODUCTS and e.is_low]
    return {
        "share": explained.totals.low_share,
        "wide_products": reasons,
        "low": sum(e.times for e in low),
        "low_in_twin": count_cast(jax.make_jaxpr(case.loss)(case.params, *case.args)),
    }


def _same_in_float32(case: Case, runs: Draws, problems: list[str]) -> None:
    same = flax_amp.amp(case.loss, compute_dtype=jnp.float32)
    both = [runs.gradient(loss) for loss in (case.loss, same)]
    texts = [fn.lower(*runs.first, 1.0).as_text() for fn in both]
    if texts[0] != texts[1]:  # equal programs need no run
        error = relative_error(*(draws.run(fn, runs.first) for fn in both))
        if not error < 1e-5:
            problems.append(f"float32: differs from no amp by {error:.1e}")


def _shapes(runs: Draws, loss: Loss) -> Any:
    found = runs.gradient(loss).eval_shape(*runs.first, 1.0)
    leaves, structure = jax.tree.flatten(found)
    return structure, [(x.shape, x.dtype) for x in leaves]
