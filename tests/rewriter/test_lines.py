"""Errors, profiles and HLO name the lines of the user's function, not those of amp."""

import linecache
import traceback

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import jaxpr_as_fun

from _transformer import bfloat16
from flax_amp import _compat
from helpers import dtypes_of, equations, rewritten_in_float32

W, X = jnp.ones((4, 4)), jnp.ones((2, 4))


def bad(y):
    return jnp.log(y - 100.0)  # makes a NaN


def in_layers(w, x):
    for _ in range(8):
        x = jax.nn.relu(jnp.tanh(x @ w) + jnp.sin(x) * jnp.cos(x) - jnp.sin(x @ w))
        x = bad(x * 2)
    return x


# The line that calls a loop is what plain JAX names.
def scanned(w, x):
    return lax.scan(lambda c, _: (bad(c @ w), 0), x, length=2)[0]  # loop


def looped(w, x):
    x = lax.stop_gradient(x @ w)
    return jnp.sum(w) + lax.fori_loop(0, 2, lambda _, x: bad(x), x)  # loop


def branched(w, x):
    return lax.cond(jnp.sum(x) > 0, bad, lambda y: y, x @ w)  # loop


def with_vjp(forward, backward):
    made = jax.custom_vjp(lambda y: forward(y)[0])
    made.defvjp(forward, backward)
    return lambda w, x: made(x @ w)


NAN, LOOP = "makes a NaN", "# loop"
CASES = {
    "straight": (lambda w, x: bad(x @ w), NAN),
    "jit": (lambda w, x: jax.jit(lambda y: bad(y) + 1)(x @ w), NAN),
    "checkpoint": (jax.checkpoint(lambda w, x: jax.jit(bad)(x @ w)), NAN),
    "layers": (in_layers, NAN),
    "backward": (with_vjp(lambda y: (y, None), lambda _, t: (bad(t),)), NAN),
    "scan": (scanned, LOOP),
    "while": (looped, LOOP),
    "cond": (branched, LOOP),
}


def error_of(run):
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        jax.block_until_ready(run(W, X))
    return caught.value


def last_line(error):
    """The last line of this file in the traceback of an error, without its causes."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == __file__]
    return linecache.getline(__file__, own[-1].lineno)  # with its comment


@pytest.mark.parametrize(
    "jit, lower",
    [(jax.jit, bfloat16), (lambda fn: fn, rewritten_in_float32)],
    ids=["jit", "eager"],
)
@pytest.mark.parametrize("fn, line", CASES.values(), ids=CASES)
def test_a_nan_names_the_line_that_makes_it(fn, line, jit, lower):
    lowered = lower(lambda w, x: jnp.sum(fn(w, x)))
    assert line in last_line(error_of(jit(jax.value_and_grad(lowered))))


def without_lines(closed):
    jaxpr = _compat.open_jaxpr(closed)[0]
    eqns = [
        eqn.replace(
            source_info=source_info_util.new_source_info(),
            params=eqn.params
            | {k: without_lines(v) for k, v in eqn.params.items() if k == "jaxpr"},
        )
        for eqn in jaxpr.eqns
    ]
    jaxpr = jaxpr.replace(eqns=eqns)
    return closed.replace(jaxpr=jaxpr) if hasattr(closed, "jaxpr") else jaxpr


def test_equations_without_a_line():
    """Transformations of JAX make some. They are rewritten, and fail, as any other."""
    closed = without_lines(jax.make_jaxpr(jax.jit(lambda w, x: bad(x @ w)))(W, X))
    lowered = bfloat16(lambda w, x: jaxpr_as_fun(closed)(w, x)[0])
    assert dtypes_of(lowered, W, X) == [("bfloat16", "bfloat16")]
    assert "nan" in str(error_of(lowered))
    (eqn,) = _compat.open_jaxpr(closed)[0].eqns
    with pytest.raises(ArithmeticError, match="^mine"), _compat.source_line(eqn):
        raise FloatingPointError("mine")


def everything(w, x):
    x = jax.nn.gelu(jnp.log(x @ w + 9)) + jnp.exp(x)
    x = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=2)[0]
    x = jnp.sum(CASES["backward"][0](w, jnp.cumsum(x)[None, :4])) + x
    return jnp.mean(jax.checkpoint(jnp.sin)(x) - x.mean(-1, keepdims=True))


def test_rewritten_equations_have_the_lines_of_the_user():
    """In the jaxpr and in what XLA gets."""
    traced = jax.jit(jax.grad(bfloat16(everything))).trace(W, X)
    found = equations(traced.jaxpr)
    lines = {source_info_util.summarize(eqn.source_info) for _, eqn in found}
    assert len(lines) > 5
    # None has a line of a function of JAX that nobody calls from here.
    assert {line.partition(":")[0] for line in lines} <= {__file__, ""}
    text = traced.lower().as_text(debug_info=True)
    for plain in ("jnp.tanh(c @ w)", "jnp.log(x @ w + 9)"):
        lines = linecache.getlines(__file__)
        number = 1 + next(i for i, line in enumerate(lines) if plain in line)
        assert f'test_lines.py":{number}:' in text
