"""What the tests share: walking jaxprs, comparing trees, tolerances."""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from flax_amp import _source, amp, default_amp_policy
from flax_amp._rewriter.stored import EVERYWHERE

HALVES = (jnp.float16, jnp.bfloat16)
# On the other versions of JAX one dtype is enough: they treat both in the same way.
both_halves = pytest.mark.parametrize(
    "dtype",
    [pytest.param(jnp.float16, marks=pytest.mark.once), jnp.bfloat16],
    ids=lambda dtype: dtype.__name__,
)

# Without the optimizations that make compiling slow.
_QUICK = {"xla_backend_optimization_level": 0}
jit = functools.partial(jax.jit, compiler_options=_QUICK)
# XLA may skip a rounding otherwise, and an error that is not seen is no error.
exact_jit = functools.partial(
    jax.jit, compiler_options=_QUICK | {"xla_allow_excess_precision": False}
)

# In float32 `amp` calls the function as it is, unless the policy asks for something
# else. This one asks it for bits that are counted, so that no number changes.
rewritten_in_float32 = functools.partial(
    amp,
    compute_dtype=jnp.float32,
    amp_policy=default_amp_policy | {jax.lax.clz_p: jnp.bfloat16},
)


def run_all(*fns: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Returns what gives the results of each function, compiled as one program."""
    return jit(lambda *args: [fn(*args) for fn in fns])


def optimizing_environment():
    """The environment for a process that trains long enough for XLA to optimize."""
    flags = os.environ["XLA_FLAGS"].split()
    kept = [flag for flag in flags if "device_count" in flag]
    return os.environ | {"XLA_FLAGS": " ".join(kept)}


# After a restore that failed, Orbax leaves tasks behind that outlive their loop.
orbax_leaves_tasks = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("settle"),
]

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")

# Relative L2 error against a float64 or float32 reference: values, gradients.
TOLERANCE = {
    jnp.dtype(jnp.float32): (1e-5, 1e-5),
    jnp.dtype(jnp.float16): (2e-3, 1e-2),
    jnp.dtype(jnp.bfloat16): (1.5e-2, 6e-2),
    jnp.dtype(jnp.float8_e4m3fn): (8e-2, 2.5e-1),  # cotangents are `float8_e5m2`
}


def equations(jaxpr: Any, outer: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Yields `(scopes, equation)` of a jaxpr and of every jaxpr inside it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        scopes = outer + _source.scope_names(eqn)
        yield scopes, eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from equations(inner, scopes)


def equations_of(
    fn: Callable[..., Any], *args: Any, primitive: str | tuple[str, ...]
) -> list[Any]:
    """Returns the equations of one or several primitives in `fn(*args)`."""
    names = (primitive,) if isinstance(primitive, str) else primitive
    found = equations(jax.make_jaxpr(fn)(*args))
    return [eqn for _, eqn in found if eqn.primitive.name in names]


def dtypes_of(
    fn: Callable[..., Any], *args: Any, primitive: str | tuple[str, ...] = MATMULS
) -> list[tuple[str, ...]]:
    """Returns the operand dtypes of each equation of a primitive in `fn(*args)`."""
    found = equations_of(fn, *args, primitive=primitive)
    return [tuple(str(v.aval.dtype) for v in eqn.invars) for eqn in found]


def assert_all_in(fn: Callable[..., Any], *args: Any, dtype: Any, count: int) -> None:
    """Asserts that `fn(*args)` runs `count` matmuls, each with operands of `dtype`."""
    name = str(jnp.dtype(dtype))
    found = dtypes_of(fn, *args)
    assert len(found) == count, f"{len(found)} matmuls, expected {count}: {found}"
    assert all(set(dtypes) == {name} for dtypes in found), found


def barriers(fn: Callable[..., Any], *args: Any) -> dict[str, int]:
    """How many barriers there are in a function compiled for each platform."""
    traced = jax.jit(fn).trace(*args)
    lowered = {p: traced.lower(lowering_platforms=(p,)) for p in EVERYWHERE}
    return {p: x.as_text().count("optimization_barrier") for p, x in lowered.items()}


def relative_error(actual: Any, expected: Any) -> float:
    """Returns the relative L2 distance of two trees, over all leaves together."""
    pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    as64 = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    difference = sum(float(np.sum((a - b) ** 2)) for a, b in as64)
    size = sum(float(np.sum(b**2)) for _, b in as64)
    return float(np.sqrt(difference) / max(np.sqrt(size), 1e-30))


def assert_close(
    actual: Any, expected: Any, dtype: Any, *, gradient: bool = False
) -> None:
    """Asserts the tolerance that the table allows to a computation in `dtype`."""
    bound = TOLERANCE[jnp.dtype(dtype)][gradient]
    error = relative_error(actual, expected)
    assert error <= bound, f"relative error {error:.2e} above {bound:.0e}"


def assert_same_avals(actual: Any, expected: Any) -> None:
    """Asserts equal structure, shapes and dtypes."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (jnp.shape(a), jnp.result_type(a)) == (jnp.shape(b), jnp.result_type(b))


def assert_identical(actual: Any, expected: Any) -> None:
    """Asserts that two trees are equal bit for bit (keys by their data)."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    flat = jax.tree_util.tree_flatten_with_path(actual)[0]
    for (path, a), b in zip(flat, jax.tree.leaves(expected), strict=True):
        assert bits(a) == bits(b), f"{jax.tree_util.keystr(path)}: {a} is not {b}"


def bits(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    """The bytes of a leaf, which tell -0.0 from 0.0 and one NaN from another."""
    is_array = isinstance(leaf, jax.Array)
    if is_array and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    leaf = np.asarray(leaf)
    return leaf.dtype.name, leaf.shape, leaf.tobytes()
