"""`reduce_dtype=jnp.float32`: gradients of weights that are never rounded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from flax_amp import AmpTrainState, amp, make_train_step
from helpers import MATMULS, assert_close, both_halves, equations, jit, relative_error

wide = functools.partial(amp, compute_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
narrow = functools.partial(amp, compute_dtype=jnp.bfloat16)

MODES = ("never", "auto", "always")
ROWS, SIZE = 16, 8


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


# --- products, each with a weight and data -------------------------------------------


def dense(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def weight_first(w, x):
    return jnp.sum(jnp.tanh(w @ jnp.sin(x).T) ** 2)


def einsum(w, x):
    x = x.reshape(4, ROWS // 4, SIZE)
    return jnp.sum(jnp.tanh(jnp.einsum("ebi,eij->ebj", x, w)) ** 2)


def heads(w, x):
    return jnp.sum(jnp.tanh(jnp.einsum("bi,hij->bhj", x, w)) ** 2)


def conv(w, x):
    y = lax.conv_general_dilated(
        x.reshape(2, 8, SIZE), w, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jnp.sum(jnp.tanh(y) ** 2)


def grouped_conv(w, x):
    y = lax.conv_general_dilated(
        x.reshape(2, 8, SIZE),
        w,
        (1,),
        [(1, 1)],
        rhs_dilation=(2,),
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=2,
    )
    return jnp.sum(jnp.tanh(y) ** 2)


PRODUCTS = {
    "dense": (dense, (SIZE, 4)),
    "weight first": (weight_first, (4, SIZE)),
    "einsum with batch": (einsum, (4, SIZE, 3)),
    "heads": (heads, (2, SIZE, 3)),
    "conv": (conv, (3, SIZE, 4)),
    "grouped conv": (grouped_conv, (3, SIZE // 2, 4)),
}
products = pytest.mark.parametrize("loss, shape", PRODUCTS.values(), ids=PRODUCTS)


def stacked(w, x):
    return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2)


def repeated(w, x, wrap):
    layer = wrap(lambda w, x: jnp.tanh(x @ w))
    return jnp.sum(layer(w[1], layer(w[0], x)) ** 2)


STACKS = {
    "scan": stacked,
    "jit": functools.partial(repeated, wrap=jax.jit),
    "remat": functools.partial(repeated, wrap=jax.checkpoint),
    "vmap": functools.partial(repeated, wrap=lambda f: jax.vmap(f, (None, 0))),
    "cond": lambda w, x: lax.cond(x[0, 0] < 9, dense, lambda w, x: 0.0, w[0], x),
    "scan of remat": lambda w, x: jnp.sum(
        lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, w)[0]
    ),
}


# --- structure -----------------------------------------------------------------------


def on_tpu(fn, *args):
    """The products of a function, without those that only the CPU runs."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    return [
        eqn
        for path, eqn in equations(jaxpr)
        if eqn.primitive.name in MATMULS and eqn.invars[0].aval.dtype != jnp.float32
    ]


def preferred(fn, *args):
    """How many products have a result of each dtype."""
    dtypes = [str(eqn.outvars[0].aval.dtype) for eqn in on_tpu(fn, *args)]
    return dtypes.count("bfloat16"), dtypes.count("float32")


@pytest.mark.parametrize("mode", MODES)
@products
def test_only_gradients_of_weights_are_wide(loss, shape, mode):
    """Forward products and gradients of what was computed stay in the compute dtype."""
    args = normal(*shape), normal(ROWS, SIZE, seed=1), jnp.eye(SIZE)

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
    args = normal(*shape), normal(ROWS, SIZE, seed=1)
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STACKS)
def test_in_structured_code(name, mode):
    """Loops, calls, checkpoints and branches: wide where narrow has a product."""
    args = normal(2, SIZE, SIZE), normal(ROWS, SIZE, seed=1)
    wide_loss = wide(STACKS[name], recompute=mode)
    narrow_loss = narrow(STACKS[name], recompute=mode)
    low, full = preferred(jax.grad(wide_loss, (0, 1)), *args)
    assert full >= 1
    assert (low + full, 0) == preferred(jax.grad(narrow_loss, (0, 1)), *args)


@pytest.mark.parametrize("name", ["dense", "conv"])
def test_without_it_nothing_is_wide(name):
    """By default, and with the compute dtype, gradients are rounded once."""
    loss, shape = PRODUCTS[name]
    args = normal(*shape), normal(ROWS, SIZE, seed=1)
    for reduce_dtype in (None, jnp.bfloat16, "bfloat16"):
        grad = jax.grad(narrow(loss, reduce_dtype=reduce_dtype))
        assert preferred(grad, *args) == (2, 0)
    full = amp(loss, compute_dtype=jnp.float32, reduce_dtype=jnp.float32)
    assert relative_error(jax.grad(full)(*args), jax.grad(loss)(*args)) < 1e-6


# --- numbers -------------------------------------------------------------------------


@pytest.mark.slow
@both_halves
@products
def test_gradients_of_products(loss, shape, dtype):
    """Gradients of weights and data are those of float32, within the tolerance."""
    args = normal(*shape), normal(ROWS, SIZE, seed=1)
    fn = amp(loss, compute_dtype=dtype, reduce_dtype=jnp.float32)
    actual = jit(jax.value_and_grad(fn, (0, 1)))(*args)
    expected = jit(jax.value_and_grad(loss, (0, 1)))(*args)
    assert_close(actual[0], expected[0], dtype)
    assert_close(actual[1], expected[1], dtype, gradient=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
def test_gradients_in_structured_code(name):
    """The same inside loops, calls, checkpoints and branches."""
    args = normal(2, SIZE, SIZE) / 3, normal(ROWS, SIZE, seed=1)
    actual = jit(jax.grad(wide(STACKS[name]), (0, 1)))(*args)
    expected = jit(jax.grad(STACKS[name], (0, 1)))(*args)
    assert_close(actual, expected, jnp.bfloat16, gradient=True)


def test_one_rounding_less():
    """The gradient of a large batch is nearer to that of float32 than a rounded one."""
    # Numbers that bfloat16 has: only the result is rounded.
    w = jnp.zeros((SIZE, SIZE))
    x = normal(4096, SIZE).astype(jnp.bfloat16).astype(jnp.float32)
    target = normal(4096, SIZE, seed=1).astype(jnp.bfloat16).astype(jnp.float32)

    def loss(w, x):
        return jnp.sum((x @ w) * target)

    exact = np.asarray(x, np.float64).T @ np.asarray(target, np.float64)
    error = relative_error(jit(jax.grad(wide(loss)))(w, x), exact)
    rounded = relative_error(jit(jax.grad(narrow(loss)))(w, x), exact)
    assert error < 1e-5 < 1e-3 < rounded


def test_shared_weight():
    """The two gradients of a weight that is used twice add up in float32."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    args = normal(SIZE, SIZE), normal(ROWS, SIZE, seed=1)
    jaxpr = jax.make_jaxpr(jax.grad(wide(loss)))(*args)
    sums = [e for _, e in equations(jaxpr) if e.primitive.name == "add_any"]
    of_weight = [e for e in sums if e.outvars[0].aval.shape == (SIZE, SIZE)]
    assert [e.outvars[0].aval.dtype for e in of_weight] == [jnp.float32]


@pytest.mark.parametrize("mode", MODES)
def test_memory(mode):
    """What is stored is no more than without it."""
    args = normal(3, SIZE, SIZE), normal(ROWS, SIZE, seed=1)

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

    for loss in (stacked, STACKS["jit"]):
        assert memory(wide(loss, recompute=mode)) <= memory(
            narrow(loss, recompute=mode)
        )


def test_sharded_sum_is_in_float32(mesh):
    """Over eight devices the partial sums travel in float32."""
    data = jax.NamedSharding(mesh, jax.P("data"))
    everywhere = jax.NamedSharding(mesh, jax.P())
    args = normal(SIZE, SIZE), normal(64, SIZE, seed=1)

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
    reduced = [
        line for line in lines if " all-reduce(" in line or "all-reduce-start(" in line
    ]
    assert reduced and all("f32[8,8]" in line for line in reduced)


# --- arguments -----------------------------------------------------------------------


@pytest.mark.parametrize("make", [amp, make_train_step])
@pytest.mark.parametrize(
    "reduce_dtype, compute_dtype",
    [
        (jnp.float16, jnp.bfloat16),
        (jnp.bfloat16, jnp.float16),
        ("int32", jnp.bfloat16),
        (jnp.bfloat16, jnp.float32),
    ],
)
def test_other_dtypes(make, reduce_dtype, compute_dtype):
    """The message says what was given and what is expected."""
    got, low = jnp.dtype(reduce_dtype).name, jnp.dtype(compute_dtype).name
    expected = f"reduce_dtype: got {got}; expected float32, or None or {low}"
    with pytest.raises(ValueError, match=expected):
        make(dense, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)


@pytest.mark.parametrize("value", ["float33", 3, object()])
def test_no_dtype_at_all(value):
    """What is no dtype is a TypeError."""
    with pytest.raises(TypeError, match="reduce_dtype: got .*; expected a dtype"):
        amp(dense, compute_dtype=jnp.bfloat16, reduce_dtype=value)


@pytest.mark.parametrize("reduce_dtype", [None, jnp.float32, "float32"])
def test_train_step_takes_it(reduce_dtype):
    """A step with it moves the parameters, which stay float32."""
    state = AmpTrainState.create(
        apply_fn=None, params={"w": normal(SIZE, 4)}, tx=optax.sgd(0.1)
    )

    def loss(params, batch):
        return dense(params["w"], batch) / ROWS

    options = {"compute_dtype": jnp.bfloat16, "reduce_dtype": reduce_dtype}
    step = make_train_step(loss, **options)
    before = np.asarray(state.params["w"])
    after, _ = step(state, normal(ROWS, SIZE, seed=1))
    assert after.params["w"].dtype == jnp.float32
    assert not np.array_equal(before, after.params["w"])
