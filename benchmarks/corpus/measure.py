"""Runs one program under amp and beside its twins."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, primitives

import flax_amp
from benchmarks.corpus.program import Case, Loss
from flax_amp.policy import LOW_OPS

HALVES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
# Powers of two, tried in turn until the float16 gradients are finite.
_SCALES = (2.0**12, 2.0**6, 1.0)
_PRODUCTS_ONLY = {
    key: flax_amp.use_compute_precision
    for key in vars(primitives).values()
    if isinstance(key, Primitive) and key.name in LOW_OPS
} | {"amp_default": flax_amp.use_original_precision}
# What rounds most often: with it in float32, the rest of the error is that of products.
_WIDE_ARITHMETIC = flax_amp.default_amp_policy | {
    key: flax_amp.use_original_precision
    for key in (lax.add_p, lax.sub_p, lax.mul_p, lax.div_p, lax.neg_p)
}


def measure(case: Case) -> dict[str, Any]:
    """Returns the figures of a program; what fails stands in `problems`."""
    problems: list[str] = []
    found: dict[str, Any] = {"problems": problems}
    plain = _gradient(case.loss)
    call = (case.params, *case.args)
    expected = _run(plain, call, 1.0)
    if not _finite(expected):
        return {"problems": ["not finite without amp"]}
    shapes = _shapes(plain, call)
    found["twin"] = "hand-set" if case.hand else "products only"
    for name, dtype in HALVES.items():
        try:
            found |= _half(case, name, dtype, expected, shapes, problems)
        except Exception as error:
            problems.append(f"{name}: {_short(error)}")
    try:
        _same_in_float32(case, call, expected, problems)
    except Exception as error:
        problems.append(f"float32: {_short(error)}")
    return found


def _half(
    case: Case, name: str, dtype: Any, expected: Any, shapes: Any, problems: list[str]
) -> dict[str, Any]:
    call = (case.params, *case.args)
    lowered = _gradient(flax_amp.amp(case.loss, compute_dtype=dtype))
    error = _error(lowered, call, expected, dtype)
    if _shapes(lowered, call) != shapes:
        problems.append(f"{name}: other dtypes than without amp")
    if error is None:
        problems.append(f"{name}: gradients are not finite")
    explained = flax_amp.explain(case.loss, compute_dtype=dtype, backward=False)
    twin = case.hand(dtype) if case.hand else _with(case.loss, dtype, _PRODUCTS_ONLY)
    try:
        beside = _error(_gradient(twin), call, expected, dtype)
    except Exception:  # hand-set, and wrong: amp has nothing to be compared with
        beside = None
    found = {f"{name}_error": error, f"{name}_twin": beside}
    if error and beside and error > 1.1 * beside:  # is it the rounding of arithmetic?
        wide = _gradient(_with(case.loss, dtype, _WIDE_ARITHMETIC))
        found[f"{name}_wide"] = _error(wide, call, expected, dtype)
    return found | _products(explained(*call))


def _with(loss: Loss, dtype: Any, policy: Any) -> Loss:
    return flax_amp.amp(loss, compute_dtype=dtype, amp_policy=policy)


def _products(explained: flax_amp.debug.Explanation) -> dict[str, Any]:
    """Returns the share of products in half precision, and why the others are not."""
    wide = [p for p in explained.problems if p.kind == "float32 product"]
    reasons = sorted({p.message for p in wide} | set(explained.notes))
    return {"share": explained.totals.low_share, "wide_products": reasons}


def _same_in_float32(case: Case, call: Any, expected: Any, problems: list[str]) -> None:
    plain = _gradient(case.loss)
    same = _gradient(flax_amp.amp(case.loss, compute_dtype=jnp.float32))
    texts = [jax.jit(f).lower(*call, 1.0).as_text() for f in (plain, same)]
    if texts[0] != texts[1]:  # equal programs need no run
        error = _relative(_run(same, call, 1.0), expected)
        if not error < 1e-5:
            problems.append(f"float32: differs from no amp by {error:.1e}")


def _gradient(loss: Loss) -> Callable[..., Any]:
    """Returns the function of the loss and its gradient, times a scale."""

    def scaled(params: Any, *rest: Any) -> Any:
        *args, scale = rest
        return loss(params, *args).astype(jnp.float32) * scale

    return jax.value_and_grad(scaled, allow_int=True)


def _shapes(gradient: Callable[..., Any], call: Any) -> Any:
    leaves, structure = jax.tree.flatten(jax.eval_shape(gradient, *call, 1.0))
    return structure, [(x.shape, x.dtype) for x in leaves]


def _run(gradient: Callable[..., Any], call: Any, scale: float) -> list[np.ndarray]:
    _, grads = jax.jit(gradient)(*call, scale)
    leaves = [x for x in jax.tree.leaves(grads) if x.dtype != jax.dtypes.float0]
    return [np.asarray(x, _wide(x)) / scale for x in leaves]


def _wide(x: Any) -> Any:
    return np.complex128 if jnp.iscomplexobj(x) else np.float64


def _error(
    gradient: Callable[..., Any], call: Any, expected: Any, dtype: Any
) -> float | None:
    for scale in _SCALES if dtype == jnp.float16 else (1.0,):
        grads = _run(gradient, call, scale)
        if _finite(grads):
            return _relative(grads, expected)
    return None


def _finite(leaves: list[np.ndarray]) -> bool:
    return all(bool(np.isfinite(x).all()) for x in leaves)


def _relative(actual: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Returns the relative L2 distance of two lists of arrays, over all together."""
    pairs = list(zip(actual, expected, strict=True))
    difference = sum(float(np.sum(np.abs(a - b) ** 2)) for a, b in pairs)
    size = sum(float(np.sum(np.abs(b) ** 2)) for _, b in pairs)
    return float(np.sqrt(difference / size)) if size else float(np.sqrt(difference))


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
