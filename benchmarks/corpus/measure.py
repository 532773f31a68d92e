"""Runs one program under amp and beside its twins."""

import dataclasses
import math
import resource
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, primitives

import flax_amp
from benchmarks.corpus import draws
from benchmarks.corpus.draws import Draws
from benchmarks.corpus.program import Case, Loss
from benchmarks.corpus.table import ARITHMETIC, BY_HAND
from flax_amp.policy import FOLLOW_OPS, LOW_OPS

HALVES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}


def _policy(names: Iterable[str], function: Any) -> dict[Any, Any]:
    found = (p for p in vars(primitives).values() if isinstance(p, Primitive))
    return {p: function for p in found if p.name in set(names)}


_PRODUCTS_ONLY = _policy(LOW_OPS, flax_amp.use_compute_precision) | {
    "amp_default": flax_amp.use_original_precision
}
# What rounds most often: with it in float32, the rest of the error is that of products.
_WIDE_ARITHMETIC = _policy((*FOLLOW_OPS, "exp"), flax_amp.use_original_precision)


def measure(case: Case) -> dict[str, Any]:
    """Returns the figures of a program; what fails stands in `problems`."""
    began = time.process_time()
    problems: list[str] = []
    found: dict[str, Any] = {"problems": problems}
    runs = Draws(case)
    if not draws.finite(next(iter(runs))[1]):
        return {"problems": ["not finite without amp"]}
    found["twin"] = "hand-set" if case.hand else "products only"
    for name, dtype in HALVES.items():
        try:
            found |= _half(case, runs, name, dtype, problems)
        except Exception as error:
            problems.append(f"{name}: {_short(error)}")
    try:
        _same_in_float32(case, runs, problems)
    except Exception as error:
        problems.append(f"float32: {_short(error)}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return found | {"seconds": time.process_time() - began, "peak_gib": peak}


def _half(
    case: Case, runs: Draws, name: str, dtype: Any, problems: list[str]
) -> dict[str, Any]:
    lowered = flax_amp.amp(case.loss, compute_dtype=dtype)
    if _shapes(runs, lowered) != _shapes(runs, case.loss):
        problems.append(f"{name}: other dtypes than without amp")
    found = _products(_explain(case, dtype, None))
    if found["share"] is not None and found["share"] < 1:
        only = _explain(case, dtype, _PRODUCTS_ONLY)
        found["share_of_products_only"] = only.totals.low_share
    twin = case.hand(dtype) if case.hand else _with(case.loss, dtype, _PRODUCTS_ONLY)
    works = runs.works(twin)
    try:
        compared = runs.compare(lowered, twin if works else None, dtype)
    except draws.NotFiniteError:
        problems.append(f"{name}: gradients are not finite")
        return found
    found |= {f"{name}_{k}": v for k, v in dataclasses.asdict(compared).items()}
    if compared.is_worse:
        found[f"{name}_why"] = dict(_experiments(case, runs, dtype, twin))
    return found


def _experiments(
    case: Case, runs: Draws, dtype: Any, twin: Loss
) -> Iterator[tuple[str, float]]:
    """Yields the ratio with all arithmetic in float32, and without `amp`, by hand."""
    policy = flax_amp.default_amp_policy | _WIDE_ARITHMETIC

    def ratio(loss: Loss) -> float:
        try:
            return runs.compare(loss, twin, dtype, draws.STEP).ratio
        except draws.NotFiniteError:
            return math.inf

    yield ARITHMETIC, ratio(_with(case.loss, dtype, policy))
    by_hand = _cast(case.loss, dtype)
    if not case.hand and runs.works(by_hand):
        yield BY_HAND, ratio(by_hand)


def _cast(loss: Loss, dtype: Any) -> Loss:
    """Returns a loss with all that it is given in half: mixed precision by hand."""

    def lower(x: Any) -> Any:
        is_wide = getattr(x, "dtype", None) == jnp.float32
        return jnp.asarray(x, dtype) if is_wide else x

    return lambda *args: loss(*jax.tree.map(lower, args))


def _with(loss: Loss, dtype: Any, policy: Any) -> Loss:
    return flax_amp.amp(loss, compute_dtype=dtype, amp_policy=policy)


def _explain(case: Case, dtype: Any, policy: Any) -> flax_amp.debug.Explanation:
    explained: Any = flax_amp.explain(
        case.loss, compute_dtype=dtype, amp_policy=policy, backward=False
    )
    return explained(case.params, *case.args)


def _products(explained: flax_amp.debug.Explanation) -> dict[str, Any]:
    """Returns the share of products in half precision, and why the others are not."""
    wide = [p for p in explained.problems if p.kind == "float32 product"]
    reasons = sorted({p.message for p in wide} | set(explained.notes))
    return {"share": explained.totals.low_share, "wide_products": reasons}


def _same_in_float32(case: Case, runs: Draws, problems: list[str]) -> None:
    same = flax_amp.amp(case.loss, compute_dtype=jnp.float32)
    both = [runs.gradient(loss) for loss in (case.loss, same)]
    texts = [fn.lower(*runs.first, 1.0).as_text() for fn in both]
    if texts[0] != texts[1]:  # equal programs need no run
        error = draws.relative(*(draws.run(fn, runs.first) for fn in both))
        if not error < 1e-5:
            problems.append(f"float32: differs from no amp by {error:.1e}")


def _shapes(runs: Draws, loss: Loss) -> Any:
    found = runs.gradient(loss).eval_shape(*runs.first, 1.0)
    leaves, structure = jax.tree.flatten(found)
    return structure, [(x.shape, x.dtype) for x in leaves]


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
