"""What a logarithm reads stays in float32, on whichever side of a border it stands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from _softmaxes import CLASSES, SIZE, SMOOTH, TARGET, with_rule
from flax_amp import amp
from helpers import assert_close, both_halves, equations, jit

softmax = jax.nn.softmax
GAP = 20.0  # of the logits: most probabilities are 2e-9, which float16 does not have


def rows(fn):
    return lambda z: lax.scan(lambda c, row: (c, fn(row)), 0.0, z)[1]


def beside(z):
    """A product reads the probabilities in the loop, too."""
    step = lambda p: (p, p @ SMOOTH.T)  # noqa: E731
    return rows(lambda row: step(softmax(row)))(z)[0]


def in_carry(z):
    return lax.scan(lambda c, _: (softmax(z), None), 0 * z, None, length=2)[0]


def handed_on(z):
    """The probabilities of an iteration leave the loop two iterations later."""
    step = lambda c, _: ((softmax(z), c[0], c[1]), None)  # noqa: E731
    return lax.scan(step, (0 * z,) * 3, None, length=3)[0][2]


def stream(z):
    """The carry has a layer for each iteration, so it may be in half precision."""
    step = lambda c, w: (softmax(c @ w), None)  # noqa: E731
    return lax.scan(step, z, jnp.eye(CLASSES)[None])[0]


def from_while(z):
    step = lambda c: (c[0] + 1, softmax(z))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < 2, step, (0, 0 * z))[1]


def in_branch(z):
    return lax.cond(z[0, 0] >= 0, softmax, lambda z: z, z)


LEAVING = {  # the probabilities leave something
    "scan": rows(softmax),
    "beside a product": beside,
    "carry": in_carry,
    "handed on": handed_on,
    "stream": stream,
    "map": functools.partial(lax.map, softmax),
    "fori_loop": lambda z: lax.fori_loop(0, 2, lambda i, p: softmax(z), 0 * z),
    "while_loop": from_while,
    "cond": in_branch,
    "cond in scan": rows(lambda row: in_branch(row[None])[0]),
    "jit": jax.jit(softmax),
    "checkpoint": jax.checkpoint(softmax),
}
ENTERING = {  # or pass through something
    "constant of a scan": lambda p: lax.scan(lambda c, _: (c, p), 0.0, None, 1)[1][0],
    "fori_loop": lambda p: lax.fori_loop(0, 2, lambda i, c: c / 1.0, p),
    "jit": jax.jit(lambda p: p * 1.0),
    "cond": lambda p: lax.cond(p[0, 0] >= 0, lambda p: p * 1.0, jnp.zeros_like, p),
}


def rule(forward, probabilities):
    def backward(kept, ct):
        p = probabilities(kept)
        return (p * (ct - (p * ct).sum(-1, keepdims=True)),)

    function = jax.custom_vjp(lambda z: softmax(z))
    function.defvjp(forward, backward)
    return function


def once(z):
    p = softmax(z)
    return p, p


def read_and_kept(z):
    p = softmax(z * 1.0)
    return softmax(z), (p, (p @ SMOOTH.T).sum())


IN_RULES = {
    "custom_jvp": with_rule,
    "custom_vjp": rule(once, lambda p: p),
    "read and kept": rule(read_and_kept, lambda kept: kept[0]),
    "computed twice": rule(lambda z: (softmax(z), softmax(z)), lambda p: p),
    "computed again": rule(lambda z: (softmax(z), z), softmax),
}
BY = (
    LEAVING
    | {f"into {name}": lambda z, f=f: f(softmax(z)) for name, f in ENTERING.items()}
    | IN_RULES
)
LOSSES = {  # of the probabilities of each class
    "log": lambda p: -(TARGET * jnp.log(p + 1e-12)).sum(-1).mean(),
    "log of a sum": lambda p: -jnp.log((TARGET * p).sum(-1) + 1e-12).mean(),
    "where": lambda p: -jnp.log(jnp.where(TARGET > 0, p, 0).sum(-1)).mean(),
    # Of small terms only, and scaled: float32 has no others at this gap.
    "entropy": lambda p: 2**20 * (TARGET * p * jnp.log(p)).sum(-1).mean(),
    "kl": lambda p: (SMOOTH * (jnp.log(SMOOTH) - jnp.log(p))).sum(-1).mean(),
    "focal": lambda p: -(TARGET * (1 - p) ** 2 * jnp.log(p)).sum(-1).mean(),
}


def programs(probabilities):
    """A product reads the probabilities, too. Its part of the loss is the smaller."""

    def program(loss):
        def fn(w):
            p = probabilities(jnp.eye(SIZE, dtype=w.dtype) @ w)
            return loss(p) + (p @ SMOOTH.T).mean() / 8

        return fn

    return [program(loss) for loss in LOSSES.values()]


def weights(dtype=np.float32):
    return np.zeros((SIZE, CLASSES), dtype) + GAP * (np.arange(CLASSES) == 0)


def differentiate(fns, w, derivative=jax.grad):
    """Traces the values and gradients of all functions as one program."""
    return jit(lambda w: [(fn(w), derivative(fn)(w)) for fn in fns]).trace(w)


def run(traced, w):
    return traced.lower().compile()(w)


def exponentials(traced):
    """Returns the dtypes that exponentials are stored in."""
    return {
        str(eqn.outvars[0].aval.dtype)
        for _, eqn in equations(traced.jaxpr)
        if eqn.primitive.name == "exp" or eqn.params.get("name") == "rounded_exp"
    }


@functools.cache
def reference():
    with jax.enable_x64(True):
        w = weights(np.float64)
        return run(differentiate(programs(softmax), w), w)


@both_halves
@pytest.mark.parametrize("name", BY)
def test_logarithms(name, dtype):
    """Values and gradients are those of float64; no numerator is rounded."""
    fns = [amp(fn, compute_dtype=dtype) for fn in programs(BY[name])]
    # A `while` has no reverse mode.
    derivative = jax.jacfwd if name == "while_loop" else jax.grad
    traced = differentiate(fns, weights(), derivative)
    assert exponentials(traced) == {"float32"}
    results = zip(LOSSES, run(traced, weights()), reference(), strict=True)
    for loss, (value, gradient), (expected, expected_gradient) in results:
        assert np.isfinite(gradient).all(), loss
        assert_close(value, expected, dtype)
        assert_close(gradient, expected_gradient, dtype, gradient=True)


WEAK = {  # readers of probabilities that need no small ones
    "product": lambda p: (p @ SMOOTH.T).mean(),
    "mean": lambda p: p.mean(0).max(),
    "squares": lambda p: ((p - TARGET) ** 2).mean(),
}


@both_halves
@pytest.mark.parametrize("reader", WEAK)
def test_other_readers(reader, dtype):
    """The probabilities that a loop stacks stay in half precision for them."""
    fn = amp(lambda w: WEAK[reader](beside(jnp.eye(SIZE) @ w)), compute_dtype=dtype)
    traced = jax.jit(fn).trace(weights())
    assert exponentials(traced) == {"float32", jnp.dtype(dtype).name}


@both_halves
def test_other_values(dtype):
    """What has no limits leaves a loop in half precision, for a logarithm too."""

    def fn(w, x):
        stacked = rows(lambda row: jnp.sin(row @ w))(x @ w)
        return jnp.log(stacked + 2.0) + jnp.log(rows(lambda row: row * 2.0)(stacked))

    traced = jax.jit(amp(fn, compute_dtype=dtype)).trace(*np.ones((2, SIZE, SIZE)))
    scans = [eqn for _, eqn in equations(traced.jaxpr) if eqn.primitive.name == "scan"]
    assert {str(eqn.outvars[-1].aval.dtype) for eqn in scans} == {jnp.dtype(dtype).name}


@both_halves
def test_residuals_of_a_loss(dtype):
    """No cotangent of their size meets the probabilities that a loss keeps."""

    @jax.custom_vjp
    def cross_entropy(z):
        return -(TARGET * jax.nn.log_softmax(z)).sum(-1)

    def forward(z):
        return cross_entropy(z), softmax(z)

    cross_entropy.defvjp(forward, lambda p, ct: ((p - TARGET) * ct[:, None],))
    fn = lambda w: cross_entropy(jnp.eye(SIZE) @ w).mean()  # noqa: E731
    traced = jax.jit(jax.grad(amp(fn, compute_dtype=dtype))).trace(weights())
    assert jnp.dtype(dtype).name in exponentials(traced)


@both_halves
@pytest.mark.parametrize("first", ["zeros", "probabilities"])
def test_the_condition_of_a_loop_is_a_reader(first, dtype):
    """It ends where a logarithm says so, of what an iteration gives or of the first."""

    def steps(x, w):
        logits = x @ w
        start = softmax(logits) if first == "probabilities" else 0 * logits + 1

        def condition(c):
            return (c[0] < 3) & (-jnp.log(c[1][1]) < 1.25 * GAP)

        def step(c):
            return c[0] + 1, c[1] if first == "probabilities" else softmax(logits)

        return lax.while_loop(condition, step, (0, start))[0]

    x, w = jnp.eye(2)[0], GAP * jnp.eye(2)
    assert jit(amp(steps, compute_dtype=dtype))(x, w) == steps(x, w) == 3
