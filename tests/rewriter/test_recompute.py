"""`recompute`: nothing expensive twice, no effect twice, and no other result."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from _programs import loss_of, norm, normal, softmax_between_products
from _transformer import (
    CONTEXTS,
    MODES,
    bfloat16,
    block,
    exact_jit,
    inputs,
    keeps,
    layer,
    scanned,
    weights,
)
from helpers import (
    MATMULS,
    assert_same_avals,
    equations,
    equations_of,
    relative_error,
)

W, X = weights()["out"][0], inputs()[0]


def dropout(p, x):
    keep_mask = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return block(layer(p, 0), jnp.where(keep_mask, x / 0.5, 0)).sum()


UNIQUE = {
    "dots": (scanned, MATMULS),
    "random numbers": (dropout, ("random_bits", "threefry2x32", "random_wrap")),
}


@pytest.mark.parametrize("name", UNIQUE)
def test_nothing_expensive_twice(name):
    """A gradient has as many expensive equations as one that stores everything."""
    loss, primitives = UNIQUE[name]

    def found(mode):
        grad = jax.grad(bfloat16(loss, recompute=mode))
        eqns = equations_of(grad, weights(), inputs(), primitive=primitives)
        return collections.Counter(eqn.primitive.name for eqn in eqns)

    assert found(False)
    assert found(True) == found(False)


@pytest.mark.parametrize("mode", MODES)
def test_effects_run_once_and_in_order(mode):
    """Callbacks between regions run once each, as they stand in the program."""
    seen = []

    def call(i, x):
        jax.debug.callback(lambda _: seen.append(i), x, ordered=True)

    def loss(w, x):
        for i in range(3):
            x = norm(jnp.tanh(x @ w)) * 2
            call(i, x)
        call(3, lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 2)[0])
        call(4, w)  # which needs nothing of the others
        return jnp.sum(x**2)

    jax.block_until_ready(exact_jit(jax.grad(bfloat16(loss, recompute=mode)))(W, X))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3, 4]


def test_a_jitted_block_is_traced_once(count_traces):
    """A jitted block that is called 24 times has few bodies."""
    body, traces = count_traces(block)
    jitted = jax.jit(body)

    def loss(p, x):
        for _ in range(24):
            x = jitted(layer(p, 0), x)
        return x.sum()

    jaxpr = jax.make_jaxpr(bfloat16(loss))(weights(), inputs())
    calls = [e for _, e in equations(jaxpr) if e.params.get("name") == "counted"]
    # The first takes a float32 argument; how the last are read depends on what follows.
    assert len(calls) == 24
    assert len({id(e.params["jaxpr"]) for e in calls}) <= 4
    assert traces() == 1


# --- memory --------------------------------------------------------------------------

LARGE = {"batch": 16, "length": 32, "size": 64}


def residuals(fn, p, x):
    """The avals of what the backward pass of `fn` reads, arguments left out."""
    _, pullback = jax.eval_shape(functools.partial(jax.vjp, fn), p, x)
    arguments = {(a.shape, a.dtype) for a in jax.tree.leaves((p, x))}
    leaves = jax.tree.leaves(pullback)
    return [a for a in leaves if (a.shape, a.dtype) not in arguments]


def stored(name, recompute):
    """The stored avals of a context; with `recompute=False` nothing is marked."""
    fn = bfloat16(CONTEXTS[name], recompute=recompute)
    args = weights(2, LARGE["size"]), inputs(**LARGE)
    assert bool(keeps(fn, *args)) == recompute
    return residuals(fn, *args)


@pytest.mark.parametrize("name", ["scan", "straight", "jit", "cond", "shard_map"])
def test_memory(name):
    """Much less is stored, everywhere.

    Out of loops travel activations in half precision and small statistics.
    """
    never, found = (stored(name, mode) for mode in MODES)
    bytes_of = lambda avals: sum(a.size * a.dtype.itemsize for a in avals)  # noqa: E731
    assert bytes_of(found) < 0.7 * bytes_of(never)
    if name == "scan":
        size = math.prod(LARGE.values())
        full = [a for a in found if a.dtype == jnp.float32 and a.ndim > 1]
        assert all(math.prod(a.shape[1:]) < size for a in full), full
        assert any(a.dtype == jnp.bfloat16 and a.size >= 2 * size for a in found)


def test_a_relu_is_stored_once():
    """Its derivative reads its result in half precision, and no mask."""

    def fn(stack, x):
        for w in stack:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x @ stack[0])

    stack, x = normal(3, 3, 8, 8), normal(4, 16, 8)
    found = [a for a in residuals(bfloat16(fn), stack, x) if a.shape == (16, 8)]
    assert [a.dtype for a in found] == [jnp.bfloat16] * 3


# --- amp over amp, and values of every dtype between what is computed again ----------

ARGS = normal(0, 4, 4) * 0.4, normal(0, 8, 4)


def test_amp_of_a_derivative_of_amp():
    """The primitives of the inner transformation pass through the outer one."""

    def tuned(loss):
        """The gradient through checkpointed steps of gradient descent in a loop."""

        def outer(w, x):
            step = lambda w, _: (w - 0.1 * jax.grad(loss)(w, x), None)  # noqa: E731
            return loss(lax.scan(jax.checkpoint(step), w, length=2)[0], x)

        return jax.grad(outer)

    loss = softmax_between_products
    actual = exact_jit(bfloat16(tuned(bfloat16(loss))))(*ARGS)
    expected = exact_jit(tuned(bfloat16(loss, recompute=False)))(*ARGS)
    assert relative_error(actual, expected) < 2e-2


def fourier(w, x):
    """A layer of a Fourier neural operator: complex weights for each frequency."""
    spectrum = jnp.fft.rfft(x, axis=0) @ lax.complex(w, 2 * w)
    return jax.nn.gelu(x @ w + jnp.fft.irfft(jnp.tanh(spectrum), len(x), axis=0)) @ w


def keys(w, x):
    h = jax.nn.gelu(x @ w)
    number = lax.stop_gradient(h).sum().astype(jnp.int32)
    pair = jax.random.split(jax.random.fold_in(jax.random.key(0), number))
    key = jnp.where(h[0, 0] > 0, pair[0], pair[1])
    return jnp.sin(h @ w * jax.random.normal(key, h.shape))


def in_dtype(dtype):
    """A program with a part in another dtype than float32."""

    def program(w, x):
        h = jax.nn.gelu(x @ w).astype(dtype)
        return (jnp.sin(h) * jnp.exp(h)).real.astype(jnp.float32) @ w

    return program


DOUBLE = ("float64", "complex128")
PROGRAMS = {"fourier": fourier, "keys": keys}
PROGRAMS |= {name: in_dtype(name) for name in ("float16", *DOUBLE)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_other_dtypes(name):
    """Both modes give the same, of the same types."""
    loss, results = loss_of(PROGRAMS[name]), []
    with jax.enable_x64(name in DOUBLE):
        for mode in MODES:
            gradient = jax.value_and_grad(bfloat16(loss, recompute=mode), (0, 1))
            results.append(exact_jit(gradient)(*ARGS))
        assert_same_avals(
            results[0], jax.eval_shape(jax.value_and_grad(loss, (0, 1)), *ARGS)
        )
    never, found = results
    assert relative_error(found, never) < 1e-5


LINEAR = {
    "checkpoint": lambda w, x: jax.checkpoint(lambda x: (x @ w) @ w * 2)(x),
    "jit": lambda w, x: jax.jit(lambda x: jnp.concatenate([x @ w, x]))(x * 2),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_functions_are_transposed(name):
    """`jax.linear_transpose` of a transformed linear function, as of the plain one."""
    w, x = jnp.eye(4) / 2 + 0.25, jnp.arange(8.0).reshape(2, 4)
    f = functools.partial(LINEAR[name], w)
    (actual,) = jax.linear_transpose(bfloat16(f), x)(f(x))
    (expected,) = jax.linear_transpose(f, x)(f(x))
    assert actual.dtype == jnp.float32
    assert relative_error(actual, expected) < 1e-2


@pytest.mark.parametrize("kind", ["custom_jvp", "cond"])
def test_a_callback_runs_once(kind):
    """Also inside of what the backward pass would compute again."""
    calls = []

    def host(a):
        calls.append(1)
        return a

    def identity(a):
        return jax.pure_callback(host, jax.ShapeDtypeStruct(a.shape, a.dtype), a)

    called = jax.custom_jvp(identity)
    called.defjvp(lambda p, t: (called(*p), jnp.cos(p[0]) * t[0]))
    if kind == "cond":
        fn = lambda a: lax.cond(a.sum() > -1e9, called, jnp.sin, a)  # noqa: E731
    else:
        fn = called
    grad = jax.grad(bfloat16(lambda w: jnp.mean(jnp.tanh(fn(w @ w)) @ w)))
    jax.block_until_ready(jax.jit(grad)(W))
    assert len(calls) == 1
