"""Runs one program under amp and beside its twin.

One draw of the numbers tells little: which of two programs is nearer to float32 changes
with them. Each further draw multiplies every float among parameters and data by
`exp(0.1 n)` with a normal `n`, which keeps signs and the kind of numbers.
"""

import contextlib
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flax_amp
from benchmarks.commands.error import relative_error
from benchmarks.corpus.case import Case, Loss
from benchmarks.exact import with_exact_products
from benchmarks.products import PRODUCTS
from benchmarks.request import reason
from benchmarks.twin import cast_products, count_cast

HALVES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
DRAWS = 8
# Powers of two, tried in turn until the float16 gradients are finite.
_SCALES = {"fp16": (2.0**12, 2.0**6, 1.0)}
_EXACT = 1e-6  # an error below it is as good as float32

Leaves = list[np.ndarray]


def measure(case: Case) -> dict[str, Any]:
    """Returns the figures of a program; what fails stands in `problems`."""
    began = time.process_time()
    calls = [_drawn((case.params, *case.args), number) for number in range(DRAWS)]
    plain = _gradient(case.loss)
    pairs = [(call, _run(plain, call)) for call in calls]
    if not _finite(pairs[0][1]):
        return {"problems": ["not finite without amp"]}
    pairs = [pair for pair in pairs if _finite(pair[1])]
    found: dict[str, Any] = {"twin": "hand-set" if case.hand else "cast products"}
    problems: list[str] = []
    for name in (*HALVES, "float32"):
        try:
            if name in HALVES:
                found |= _half(case, plain, pairs, name)
            else:
                _check_float32(case, plain, pairs[0])
        except Exception as error:
            problems.append(f"{name}: {reason(error)}")
    return found | {"problems": problems, "seconds": time.process_time() - began}


def _half(case: Case, plain: Any, pairs: list[Any], name: str) -> dict[str, Any]:
    """Returns the errors in a half precision beside those of the twin.

    The ratio is a geometric mean; the spread is the standard error of its logarithm.
    """
    dtype = HALVES[name]
    gradient = _gradient(flax_amp.amp(case.loss, compute_dtype=dtype))
    call, found = pairs[0][0], _products(case, dtype)
    if _types(gradient, call) != _types(plain, call):
        raise TypeError("other dtypes than without amp")
    ours = [_error(gradient, call, grads, name) for call, grads in pairs]
    if not np.isfinite(ours).all():
        raise ValueError("gradients are not finite")
    found[f"{name}_error"] = _root_mean_square(ours)
    twin = case.hand(dtype) if case.hand else cast_products(case.loss, dtype)
    beside, theirs = _gradient(twin), list[float]()
    with contextlib.suppress(Exception):  # its authors may never have tried
        theirs = [_error(beside, call, grads, name) for call, grads in pairs]
    if not theirs or not np.isfinite(theirs).all():
        return found
    logs = np.log(np.maximum(ours, _EXACT) / np.maximum(theirs, _EXACT))
    return found | {
        f"{name}_twin": _root_mean_square(theirs),
        f"{name}_ratio": float(np.exp(np.mean(logs))),
        f"{name}_spread": float(np.std(logs, ddof=1) / math.sqrt(len(logs))),
    }


def _products(case: Case, dtype: Any) -> dict[str, Any]:
    """Returns how many matmuls are in half precision, and why the others are not."""
    explain: Any = flax_amp.explain(case.loss, compute_dtype=dtype, backward=False)
    told: flax_amp.debug.Explanation = explain(case.params, *case.args)
    wide = [p for p in told.problems if p.kind == "float32 product"]
    low = [e for e in told.equations if e.primitive in PRODUCTS and e.is_low]
    return {
        "share": told.low_share,
        "wide_products": sorted({p.message for p in wide} | set(told.notes)),
        "low": sum(e.times for e in low),
        "low_in_twin": count_cast(jax.make_jaxpr(case.loss)(case.params, *case.args)),
    }


def _check_float32(case: Case, plain: Any, pair: tuple[Any, Leaves]) -> None:
    call, expected = pair
    same = _gradient(flax_amp.amp(case.loss, compute_dtype=jnp.float32))
    texts = [fn.lower(*call, 1.0).as_text() for fn in (plain, same)]
    if texts[0] != texts[1]:  # equal programs need no run
        error = relative_error(_run(same, call), expected)
        if not error < 1e-5:
            raise ValueError(f"differs from no amp by {error:.1e}")


def _gradient(loss: Loss) -> Any:
    """Returns the jitted gradient of a program, times a scale, with exact matmuls."""

    def scaled(params: Any, *rest: Any) -> Any:
        *args, scale = rest
        return loss(params, *args).astype(jnp.float32) * scale

    gradient = jax.value_and_grad(scaled, allow_int=True)
    return jax.jit(with_exact_products(gradient))


def _run(gradient: Any, call: Any, scale: float = 1.0) -> Leaves:
    _, grads = gradient(*call, scale)
    leaves = [x for x in jax.tree.leaves(grads) if x.dtype != jax.dtypes.float0]
    wide = [np.complex128 if jnp.iscomplexobj(x) else np.float64 for x in leaves]
    return [np.asarray(x, d) / scale for x, d in zip(leaves, wide, strict=True)]


def _error(gradient: Any, call: Any, expected: Leaves, name: str) -> float:
    for scale in _SCALES.get(name, (1.0,)):
        grads = _run(gradient, call, scale)
        if _finite(grads):
            return relative_error(grads, expected)
    return math.inf


def _finite(leaves: Leaves) -> bool:
    return all(bool(np.isfinite(x).all()) for x in leaves)


def _types(gradient: Any, call: Any) -> Any:
    leaves, structure = jax.tree.flatten(gradient.eval_shape(*call, 1.0))
    return structure, [(x.shape, x.dtype) for x in leaves]


def _drawn(call: Any, number: int) -> Any:
    """Returns the arguments of a program, with other floats from the second draw on."""
    rng = np.random.default_rng(number)

    def draw(x: Any) -> Any:
        if not number or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return x
        factors = np.exp(0.1 * rng.normal(size=np.shape(x)))
        return (np.asarray(x) * factors).astype(jnp.result_type(x))

    return jax.tree.map(draw, call)


def _root_mean_square(errors: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))
