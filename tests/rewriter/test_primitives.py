"""One row per primitive: which dtype it runs in, its value, gradient and batching."""

import contextlib
import functools
import importlib
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _primitive_rows import MATMUL, MAY_BE_HALF, OPAQUE, ROWS, STRUCTURED
from _structured_rows import (
    AS_WRITTEN,
    NOT_RUN,
    OTHER_VERSIONS,
    WITHOUT_FUNCTION,
    is_in,
)
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive

from flax_amp import amp
from flax_amp._rewriter.primitives import TRAITS, walk
from helpers import (
    HALVES,
    assert_close,
    assert_identical,
    equations,
    jit,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:amp. no matmul",  # of rows that run as written
)

# Calls that are evaluated in place.
INLINED = ("closed_call", "eval_jaxpr")
# Their primitives stand in kernels only, or need other packages.
_KERNELS = ("pallas", "mosaic", "tpu_custom_call", "jax2tf", "test_util")


for _name in (
    "checkify fused key_reuse._core multihost_utils overlap pallas rnn "
    "scheduling_groups sparse.linalg xla_metadata"
).split():
    with contextlib.suppress(ModuleNotFoundError):  # not in this version
        importlib.import_module(f"jax.experimental.{_name}")


def roll_call():
    """The names of JAX's primitives; what else is registered is other packages'."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("jax.") and not any(part in name for part in _KERNELS)
    ]
    values = [v for module in modules for v in list(vars(module).values())]
    return {v.name for v in values if isinstance(v, Primitive)} | {"pallas_call"}


IN_THIS_JAX = roll_call()
HERE = [name for name in ROWS if name in IN_THIS_JAX]


def is_float32(x):
    return getattr(x, "dtype", None) == jnp.float32


TAKES_FLOAT32 = [name for name in HERE if any(map(is_float32, ROWS[name].args))]
each_row = pytest.mark.parametrize("name", HERE)
each_run = pytest.mark.parametrize(
    "name", [name for name in TAKES_FLOAT32 if name not in NOT_RUN]
)


def test_each_primitive_has_a_row():
    here = roll_call()
    listed = {name for name in here if is_in(name, AS_WRITTEN + WITHOUT_FUNCTION)}
    assert here - ROWS.keys() == listed
    assert ROWS.keys() - here <= OTHER_VERSIONS, "misspelled, or of no version"


def test_each_primitive_of_the_rewriter_has_a_row():
    known = {name for name in TRAITS if not name.startswith("flax_amp_")}
    assert not [x for x in known - ROWS.keys() if not is_in(x, WITHOUT_FUNCTION)]


# --- dtypes --------------------------------------------------------------------------


def low(x):
    """The same array as the result of a matmul, which adds its two halves."""
    halves = lax.broadcast_in_dim(x, (*x.shape, 2), range(x.ndim))
    return halves @ np.full(2, 0.5, x.dtype)


def program(row, is_behind=False, is_before=False):
    """Calls a row behind matmuls, on their results, and before those that read it."""

    def maybe_low(tree, is_low):
        return jax.tree.map(lambda x: low(x) if is_low and is_float32(x) else x, tree)

    def run(*args):
        args = maybe_low(args, is_behind)
        with jax.named_scope("row"):
            results = row.call(*args)
        return maybe_low(results, is_before)

    return run


between = functools.partial(program, is_behind=True, is_before=True)


def equations_of_row(fn, name, args):
    found = equations(jax.make_jaxpr(fn)(*args))
    inside = [eqn for scopes, eqn in found if "row" in scopes]
    own = [eqn for eqn in inside if eqn.primitive.name == name]
    # A broadcast of halves is `flax_amp_spread`.
    is_replaced = name in (*INLINED, "broadcast_in_dim")
    assert own or is_replaced, "the call does not give it"
    # `amp` casts operands with the same primitive.
    return own[-1:] if name == "convert_element_type" else own


def float_dtypes(variables):
    """Which of the dtypes that `amp` decides on there are among the variables."""
    names = {str(v.aval.dtype) for v in variables if hasattr(v.aval, "dtype")}
    return names & {"float32", "float16", "bfloat16"}


@pytest.mark.parametrize("is_between", [False, True], ids=["alone", "between"])
@pytest.mark.parametrize(
    "name", [name for name in TAKES_FLOAT32 if ROWS[name].family != STRUCTURED]
)
def test_dtypes(name, is_between):
    """Matmuls are half. Alone all else is float32, between matmuls all arithmetic.

    What structured primitives hold is the matter of `test_bodies.py`.
    """
    row, dtype = ROWS[name], HALVES[len(name) % 2]
    fn = between(row) if is_between else program(row)
    lowered = amp(fn, compute_dtype=dtype, recompute=False)
    eqns = equations_of_row(lowered, name, row.args)
    allowed = {dtype.__name__ if row.family == MATMUL else "float32"}
    # Two halves are added in half precision on their way to a matmul.
    if is_between and (row.family in MAY_BE_HALF or name == "add"):
        allowed.add(dtype.__name__)
    for eqn in eqns:
        found = float_dtypes((*eqn.invars, *eqn.outvars))
        assert found <= allowed
        assert len(found) <= 1


# --- the walk over the equations of a program ----------------------------------------


def test_the_walk_enters_bodies_but_no_kernels():
    def kernel(x, y):
        y[...] = jnp.sin(x[...])

    def step(x, _):
        return jax.jit(pl.pallas_call(kernel, jax.typeof(x)))(x), None

    closed = jax.make_jaxpr(lambda x: jax.lax.scan(step, x, length=2)[0])(jnp.ones(8))
    names = [visit.eqn.primitive.name for visit in walk(closed)]
    assert names == ["scan", "jit", "pallas_call"]


# --- what is left alone --------------------------------------------------------------

OTHERS = ("float64", "complex64", "int32", "bool", "bfloat16", "float8_e4m3fn")


def text_of(fn, args):
    return re.sub(r" at 0x\w+|0x\w+", "", str(jax.make_jaxpr(fn)(*args)))


def signatures(fn, args):
    """The equations, as primitives with the types of operands and results.

    Left out are small calls, which are opened, the casts of numbers, which are done,
    and the index of a `cond`, which is clamped once more.
    """
    found = [eqn for _, eqn in equations(jax.make_jaxpr(fn)(*args))]
    return {
        (eqn.primitive.name, *(str(v.aval) for v in (*eqn.invars, *eqn.outvars)))
        for eqn in found
        if eqn.primitive.name not in (*INLINED, "jit", "clamp")
        and (eqn.primitive.name != "convert_element_type" or eqn.invars[0].aval.shape)
    }


def is_defined(fn, args):
    """Whether plain JAX can evaluate, differentiate or batch."""
    try:
        jax.eval_shape(fn, *args)
    except Exception:
        return False
    return True


@pytest.mark.once  # which primitives there are is seen by the tests above
@each_row
def test_what_is_left_alone(name):
    """Other dtypes than float32, and in float32 what holds no matmul."""
    row, dtypes = ROWS[name], OTHERS if name in TAKES_FLOAT32 else ()
    if not dtypes or row.family not in (MATMUL, STRUCTURED):
        dtypes = (*dtypes, "float32")
        equations_of_row(program(row), name, row.args)
    same = amp(row.call, recompute=False)
    for dtype in dtypes:
        with jax.enable_x64(dtype == "float64"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a cast from complex to real
            args = [
                np.asarray(x).astype(jnp.dtype(dtype)) if is_float32(x) else x
                for x in row.args
            ]
            is_equal = not is_defined(row.call, args) or (
                text_of(same, args) == text_of(row.call, args)
            )
            # Names of functions may differ.
            assert is_equal or signatures(same, args) == signatures(row.call, args)


# --- values, gradients, batching -----------------------------------------------------


def numbers(tree):
    """The real and imaginary parts of all results that are numbers."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.number)]
    return [part for x in leaves for part in (jnp.real(x), jnp.imag(x))]


def gradient_of(fn, row):
    """The gradient of a sum of all results, each element with its own weight."""

    def total(*args):
        parts = [x for x in numbers(fn(*args)) if jnp.issubdtype(x.dtype, jnp.floating)]
        weights = [1 + np.arange(x.size).reshape(x.shape) / 8 for x in parts]
        return sum((w * x).sum() for w, x in zip(weights, parts, strict=True))

    return jax.grad(total, [i for i, x in enumerate(row.args) if is_float32(x)])


def results(fn, args):
    return jit(lambda *args: numbers(fn(*args)))(*args)


def with_gradient(fn, row, args):
    """The results and their gradient, or `None` if there is none, in one program."""
    grads = gradient_of(fn, row)
    if not is_defined(gradient_of(row.call, row), args):
        return results(fn, args), None
    return jit(lambda *args: (numbers(fn(*args)), grads(*args)))(*args)


def exact(name):
    """The results in float64, and their gradient if there is one."""
    row = ROWS[name]
    with jax.enable_x64(True):
        args = [x.astype(np.float64) if is_float32(x) else x for x in row.args]
        return jax.tree.map(np.asarray, with_gradient(row.call, row, args))


@pytest.mark.slow
@each_run
def test_values_and_gradients(name):
    """Nothing is rounded but for matmuls."""
    row, dtype = ROWS[name], HALVES[len(name) % 2]
    behind, on_both_sides = (
        amp(program(row, True, is_before), compute_dtype=dtype)
        for is_before in (False, True)
    )
    if row.family == OPAQUE:
        assert_identical(results(behind, row.args), results(row.call, row.args))
        return
    is_rounded = row.family in (MATMUL, STRUCTURED)
    expected, grads = exact(name)
    for fn, bound in (
        (behind, dtype if is_rounded else jnp.float32),
        (on_both_sides, dtype),
    ):
        actual, actual_grads = with_gradient(fn, row, row.args)
        assert_close(actual, expected, bound)
        assert_close(actual_grads, grads, dtype, gradient=True)
