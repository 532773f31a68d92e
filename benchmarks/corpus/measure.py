"""Runs one program under amp, beside the same program in half precision without amp.

That reference has its dtypes set by hand, or its matmuls cast (`matmuls.py`). One draw
of the numbers tells little: which of two programs is nearer to float32 changes with
them. Each further draw multiplies every float among parameters and data by
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
from benchmarks.corpus.programs import Program
from benchmarks.matmuls import MATMULS, cast_matmuls, count_cast, exact_matmuls
from benchmarks.request import reason

HALVES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
DRAWS = 8
# Powers of two, tried in turn until the float16 gradients are finite.
_SCALES = {"fp16": (2.0**12, 2.0**6, 1.0)}
_EXACT = 1e-6  # an error below it is as good as float32

Leaves = list[np.ndarray]


def measure(program: Program) -> dict[str, Any]:
    """Returns the figures of a program; what fails stands in `problems`."""
    began = time.process_time()
    given = (program.params, *program.args)
    plain = jax.jit(exact_matmuls(_gradient(program.loss)))
    calls = [_drawn(given, number) for number in range(DRAWS)]
    pairs = [(call, _run(plain, call)) for call in calls]
    if not _finite(pairs[0][1]):
        return {"problems": ["not finite without amp"]}
    pairs = [pair for pair in pairs if _finite(pair[1])]
    found: dict[str, Any] = {"by_hand": program.hand is not None}
    problems: list[str] = []
    for name in (*HALVES, "float32"):
        try:
            if name in HALVES:
                found |= _half(program, plain, pairs, name)
            else:
                _check_float32(program, plain, pairs[0])
        except Exception as error:
            problems.append(f"{name}: {reason(error)}")
    return found | {"problems": problems, "seconds": time.process_time() - began}


def _half(program: Program, plain: Any, pairs: list[Any], name: str) -> dict[str, Any]:
    """Returns the errors in a half precision beside those of the reference.

    The ratio is a geometric mean; the spread is the standard error of its logarithm.
    """
    dtype = HALVES[name]
    lowered = _gradient(flax_amp.amp(program.loss, compute_dtype=dtype))
    gradient = jax.jit(exact_matmuls(lowered))
    if _types(gradient, pairs[0][0]) != _types(plain, pairs[0][0]):
        raise TypeError("other dtypes than without amp")
    ours = [_error(gradient, call, grads, name) for call, grads in pairs]
    if not np.isfinite(ours).all():
        raise ValueError("gradients are not finite")
    found = _matmuls(program, dtype) | {f"{name}_error": _root_mean_square(ours)}
    reference, theirs = jax.jit(_reference(program, dtype)), list[float]()
    with contextlib.suppress(Exception):  # its authors may never have tried
        theirs = [_error(reference, call, grads, name) for call, grads in pairs]
    if not theirs or not np.isfinite(theirs).all():
        return found
    logs = np.log(np.maximum(ours, _EXACT) / np.maximum(theirs, _EXACT))
    return found | {
        f"{name}_reference": _root_mean_square(theirs),
        f"{name}_ratio": float(np.exp(np.mean(logs))),
        f"{name}_spread": float(np.std(logs, ddof=1) / math.sqrt(len(logs))),
    }


def _reference(program: Program, dtype: Any) -> Any:
    if program.hand is None:
        return cast_matmuls(_gradient(program.loss), dtype)
    return exact_matmuls(_gradient(program.hand(dtype)))


def _matmuls(program: Program, dtype: Any) -> dict[str, Any]:
    """Returns how many matmuls are in half precision, and how many could be."""
    given = (program.params, *program.args)
    explain: Any = flax_amp.explain(program.loss, compute_dtype=dtype, backward=False)
    told: flax_amp.debug.Explanation = explain(*given)
    return {
        "share": told.low_share,
        "low": sum(
            e.times for e in told.equations if e.primitive in MATMULS and e.is_low
        ),
        "could_be_low": count_cast(jax.make_jaxpr(program.loss)(*given)),
    }


def _check_float32(program: Program, plain: Any, pair: tuple[Any, Leaves]) -> None:
    call, expected = pair
    unchanged = _gradient(flax_amp.amp(program.loss, compute_dtype=jnp.float32))
    same = jax.jit(exact_matmuls(unchanged))
    if plain.lower(*call, 1.0).as_text() == same.lower(*call, 1.0).as_text():
        return  # equal programs need no run
    error = relative_error(_run(same, call), expected)
    if not error < 1e-5:
        raise ValueError(f"differs from no amp by {error:.1e}")


def _gradient(loss: Any) -> Any:
    """Returns the gradient of a program, times a scale."""

    def scaled(params: Any, *rest: Any) -> Any:
        *args, scale = rest
        return loss(params, *args).astype(jnp.float32) * scale

    return jax.grad(scaled)


def _run(gradient: Any, call: Any, scale: float = 1.0) -> Leaves:
    leaves = jax.tree.leaves(gradient(*call, scale))
    return [np.asarray(x, np.float64) / scale for x in leaves]


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
