"""`reduce_dtype=jnp.float32`: gradients of weights that are never rounded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from _programs import normal
from flax_amp import AmpTrainState, amp, make_train_step
from helpers import (
    MATMULS,
    assert_close,
    equations,
    equations_of,
    relative_error,
)

wide = functools.partial(amp, compute_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
narrow = functools.partial(amp, compute_dtype=jnp.bfloat16)

MODES = ("never", "auto", "always")
ROWS, SIZE = 16, 8


# --- products, each with a weight and data -------------------------------------------


def loss_of(product):
    return lambda w, x: jnp.sum(jnp.tanh(product(w, x)) ** 2)


def convolution(strides, padding, **options):
    def product(w, x):
        x, dims = x.reshape(2, 8, SIZE), ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(
            x, w, strides, padding, dimension_numbers=dims, **options
        )

    return product


dense = loss_of(lambda w, x: x @ w)
PRODUCTS = {
    "dense": (dense, (SIZE, 4)),
    "weight first": (loss_of(lambda w, x: w @ jnp.sin(x).T), (4, SIZE)),
    "einsum with batch": (
        loss_of(lambda w, x: jnp.einsum("ebi,eij->ebj", x.reshape(4, -1, SIZE), w)),
        (4, SIZE, 3),
    ),
    "conv": (loss_of(convolution((2,), "SAME")), (3, SIZE, 4)),
    "grouped conv": (
        loss_of(convolution((1,), [(1, 1)], rhs_dilation=(2,), feature_group_count=2)),
        (3, SIZE // 2, 4),
    ),
}
products = pytest.mark.parametrize("loss, shape", PRODUCTS.values(), ids=PRODUCTS)


def scanned(wrap):
    layer = wrap(lambda x, w: (jnp.tanh(x @ w), None))
    return lambda w, x: jnp.sum(lax.scan(layer, x, w)[0] ** 2)


def repeated(wrap):
    layer = wrap(lambda w, x: jnp.tanh(x @ w))
    return lambda w, x: jnp.sum(layer(w[1], layer(w[0], x)) ** 2)


STACKS = {
    "scan": scanned(lambda f: f),
    "jit": repeated(jax.jit),
    "remat": repeated(jax.checkpoint),
    "cond": lambda w, x: lax.cond(x[0, 0] < 9, dense, lambda w, x: 0.0, w[0], x),
    "scan of remat": scanned(jax.checkpoint),
}


def arguments(shape):
    """A weight, and data."""
    return normal(0, *shape), normal(1, ROWS, SIZE)


# --- structure -----------------------------------------------------------------------


def preferred(fn, *args):
    """How many products have a result of each dtype, but those that only CPUs run."""
    dtypes = [
        eqn.outvars[0].aval.dtype.name
        for eqn in equations_of(fn, *args, primitive=MATMULS)
        if eqn.invars[0].aval.dtype != jnp.float32
    ]
    return dtypes.count("bfloat16"), dtypes.count("float32")


@products
def test_only_gradients_of_weights_are_wide(loss, shape):
    """Forward products and gradients of what was computed stay in the compute dtype."""
    args, mode = (*arguments(shape), jnp.eye(SIZE)), MODES[sum(shape) % 3]

    def behind_a_product(w, x, eye):
        return loss(w, x @ eye)

    fn = wide(behind_a_product, recompute=mode)
    assert preferred(fn, *args) == (2, 0)
    # Both factors of the first product are arguments: both gradients are wide.
    assert preferred(jax.grad(fn, (0, 1, 2)), *args) == (3, 3)
    narrow_fn = narrow(behind_a_product, recompute=mode)
    assert preferred(jax.grad(narrow_fn, (0, 1, 2)), *args) == (6, 0)


@products
def test_nothing_rounds_the_gradient(loss, shape):
    """Between the product and the result there is data movement in float32 only."""
    args = arguments(shape)
    jaxpr = jax.make_jaxpr(jax.grad(wide(loss)))(*args)
    made = {v: eqn for _, eqn in equations(jaxpr) for v in eqn.outvars}
    v = jaxpr.jaxpr.outvars[0]
    assert v.aval.dtype == jnp.float32
    names = []
    while made[v].primitive.name not in ("cond", *MATMULS):
        eqn = made[v]
        names.append(eqn.primitive.name)
        if eqn.primitive.name == "remat2":
            inner = eqn.params["jaxpr"]
            v = inner.outvars[eqn.outvars.index(v)]
            continue
        assert eqn.invars[0].aval.dtype == jnp.float32
        v = eqn.invars[0]
    assert "convert_element_type" not in names
    assert set(names) <= {"transpose", "reshape", "remat2", "rev", "jit"}


@pytest.mark.parametrize("name", STACKS)
def test_in_structured_code(name):
    """Loops, calls, checkpoints and branches: wide where narrow has a product."""
    args, mode = arguments((2, SIZE, SIZE)), MODES[len(name) % 3]
    wide_loss = wide(STACKS[name], recompute=mode)
    narrow_loss = narrow(STACKS[name], recompute=mode)
    low, full = preferred(jax.grad(wide_loss, (0, 1)), *args)
    assert full >= 1
    assert (low + full, 0) == preferred(jax.grad(narrow_loss, (0, 1)), *args)


@pytest.mark.parametrize("name", ["dense", "conv"])
def test_without_it_nothing_is_wide(name):
    """By default, and with the compute dtype, gradients are rounded once."""
    loss, shape = PRODUCTS[name]
    args = arguments(shape)
    for reduce_dtype in (None, jnp.bfloat16, "bfloat16"):
        grad = jax.grad(narrow(loss, reduce_dtype=reduce_dtype))
        assert preferred(grad, *args) == (2, 0)
    full = amp(loss, compute_dtype=jnp.float32, reduce_dtype=jnp.float32)
    assert relative_error(jax.grad(full)(*args), jax.grad(loss)(*args)) < 1e-6


# --- numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_memory(mode):
    """What is stored is no more than without it."""
    args = arguments((3, SIZE, SIZE))

    def memory(loss):
        _, pullback = jax.eval_shape(functools.partial(jax.vjp, loss), *args)
        leaves = jax.tree.leaves(pullback)
        shape = args[0].shape
        there = [(3, *shape[1:]), shape[1:], (1, *shape[1:]), args[1].shape]
        return sum(
            a.size * a.dtype.itemsize
            for a in leaves
            if a.dtype != jnp.float32 or a.shape not in there  # the arguments
        )

    for loss in (STACKS["scan"], STACKS["jit"]):
        full, low = (memory(lower(loss, recompute=mode)) for lower in (wide, narrow))
        assert full <= low


def test_sharded_sum_is_in_float32(mesh):
    """Over eight devices the partial sums travel in float32."""
    data = jax.NamedSharding(mesh, jax.P("data"))
    everywhere = jax.NamedSharding(mesh, jax.P())
    args = normal(0, SIZE, SIZE), normal(1, 64, SIZE)

    def grad(transform):
        return jax.jit(
            jax.grad(transform(dense)),
            in_shardings=(everywhere, data),
            out_shardings=everywhere,
        )

    actual = grad(wide)(*args)
    assert actual.sharding.is_equivalent_to(everywhere, 2)
    assert_close(actual, jax.grad(dense)(*args), jnp.bfloat16, gradient=True)
    lines = grad(wide).lower(*args).compile().as_text().splitlines()
    reduced = [x for x in lines if " all-reduce(" in x or "all-reduce-start(" in x]
    assert reduced and all("f32[8,8]" in line for line in reduced)


def test_train_step_takes_it():
    """A step with it moves the parameters, which stay float32."""
    params = {"w": normal(0, SIZE, 4)}
    state = AmpTrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    def loss(params, batch):
        return dense(params["w"], batch) / ROWS

    step = make_train_step(loss, compute_dtype="bfloat16", reduce_dtype="float32")
    before = np.asarray(state.params["w"])
    after, _ = step(state, normal(1, ROWS, SIZE))
    assert after.params["w"].dtype == jnp.float32
    assert not np.array_equal(before, after.params["w"])
