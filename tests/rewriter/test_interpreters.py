"""The interpreters that JAX ships, over `amp` and under it; docs/composition.md."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import checkify, jet, roofline, sparse
from jax.extend import linear_util
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval

from _programs import W, X, norm
from flax_amp import amp
from helpers import relative_error

lower = functools.partial(amp, compute_dtype=jnp.bfloat16)


def straight(w, x):
    return jnp.mean((jnp.tanh(norm(x @ w + x[0, 0])) @ (w * 2)) ** 3)


def rows(w, x):
    return jnp.mean(jnp.tanh(w[jnp.arange(3)] @ x.T) ** 2)


def layers(w, x):
    for _ in range(8):
        x = jnp.tanh(norm(x @ w))
    return jnp.mean(x**3)


def checkpointed(w, x):
    return jnp.mean(jax.checkpoint(lambda x: jnp.sin(x @ w) @ w)(x))


def softmax(w, x):
    """Written by hand: that of JAX has a custom derivative."""
    exp = jnp.exp((z := x @ w) - z.max(-1, keepdims=True))
    return jnp.mean((exp / exp.sum(-1, keepdims=True) @ w) ** 2)


def looped(w, x):
    step = lambda h, _: (jnp.tanh(norm(h @ w)), None)  # noqa: E731
    return jnp.mean(lax.scan(step, x, None, length=3)[0] ** 3)


def shared_rows(w, x):
    """A table that a product reads as well."""
    return jnp.mean((w[jnp.arange(3)] @ w) ** 2 * x.sum())


STRAIGHT = {
    "straight": straight,
    "layers": layers,
    "checkpointed": checkpointed,
    "softmax": softmax,
}
LOOKUPS = {"rows": rows}
ALL = STRAIGHT | LOOKUPS | {"scan": looped, "shared": shared_rows}


def series(fn):
    """The value and three derivatives along a line."""
    zeros = jnp.zeros_like
    terms = (W.T / 4, zeros(W), zeros(W)), (X[::-1] / 8, zeros(X), zeros(X))
    return lambda w, x: jet.jet(fn, (w, x), terms)


def in_sparse(fn):
    def run(w, x):
        return sparse.sparsify(fn)(sparse.BCOO.fromdense(w, nse=w.size), x)

    return run


def gradient_in_sparse(fn):
    def run(w, x):
        grads = sparse.grad(sparse.sparsify(fn))(sparse.BCOO.fromdense(w), x)
        return grads.todense()

    return run


def checked(fn, errors=checkify.float_checks):
    def run(w, x):
        error, out = checkify.checkify(fn, errors=errors)(w, x)
        error.throw()
        return out

    return run


index_checked = functools.partial(checked, errors=checkify.index_checks)


def keys_checked(fn):
    def run(w, x):
        with jax.debug_key_reuse(True):
            return jax.jit(fn)(w, x)

    return run


def without_dead_code(fn):
    """By `jax.interpreters.partial_eval`."""

    def run(w, x):
        closed = jax.make_jaxpr(fn)(w, x)
        jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True])
        kept = [a for a, is_used in zip((w, x), used, strict=True) if is_used]
        return jax.core.eval_jaxpr(jaxpr, closed.consts, *kept)

    return run


def as_function(fn):
    return lambda *args: jaxpr_as_fun(jax.make_jaxpr(fn)(*args))(*args)[0]


def as_wrapped(fn):
    info = jax.api_util.debug_info("test", fn, (W, X), {})
    return linear_util.wrap_init(fn, debug_info=info).call_wrapped


def estimated(fn):
    def run(w, x):
        _, result = roofline.roofline(fn)(w, x)
        return jnp.float32(result.unfused_flops)

    return run


# interpreter -> programs of which the default `amp` gives what plain JAX gives
OVER = {
    series: STRAIGHT | LOOKUPS,
    in_sparse: STRAIGHT | LOOKUPS | {"scan": looped},
    gradient_in_sparse: STRAIGHT,
    checked: ALL,
    keys_checked: STRAIGHT | LOOKUPS,
    without_dead_code: STRAIGHT | LOOKUPS,
    as_function: {"layers": layers},
    as_wrapped: {"layers": layers},
}
EXPECTED = {"checkpointed": lambda w, x: jnp.mean(jnp.sin(x @ w) @ w)}


@pytest.mark.parametrize(
    "interpreter, name",
    [(interpreter, name) for interpreter, fns in OVER.items() for name in fns],
)
def test_over_amp(interpreter, name):
    fn = ALL[name]
    recompute = "always" if name in ("layers", "checkpointed") else "auto"
    actual = interpreter(lower(fn, recompute=recompute))(W, X)
    expected = interpreter(EXPECTED.get(name, fn))(W, X)
    assert relative_error(actual, expected) < 0.1


@pytest.mark.parametrize("name", ["layers", "checkpointed"])
def test_series_of_a_gradient_and_gradient_of_a_series(name):
    fn, plain = ALL[name], EXPECTED.get(name, ALL[name])

    def third(fn):
        return lambda w, x: series(fn)(w, x)[1][2]

    for outer in (lambda f: series(jax.grad(f)), lambda f: jax.grad(third(f))):
        actual, expected = (outer(f)(W, X) for f in (lower(fn), plain))
        assert relative_error(actual, expected) < 0.1


UNDER = (series, in_sparse, checked, keys_checked, as_function, as_wrapped)


@pytest.mark.parametrize("interpreter", UNDER)
def test_under_amp(interpreter):
    inside = interpreter(layers)
    actual, expected = lower(inside)(W, X), inside(W, X)
    assert relative_error(actual, expected) < 0.1
    # What multiplies sparse arrays is not known to `amp`.
    text = str(jax.make_jaxpr(lower(inside))(W, X))
    assert ("bf16[" in text) == (interpreter is not in_sparse)


def test_roofline():
    """Its FLOPs are those of the products, whatever they run in."""
    actual, expected = (estimated(f)(W, X) for f in (lower(layers), layers))
    assert expected / 2 < actual < 3 * expected


# --- what does not compose -----------------------------------------------------------


@pytest.mark.parametrize(
    "interpreter, name, error",
    [
        (series, "scan", KeyError),  # of JAX itself
        (lambda f: series(jax.grad(f)), "rows", KeyError),
        (index_checked, "shared", ValueError),
    ],
)
def test_what_does_not_compose_is_an_error(interpreter, name, error):
    with pytest.raises(error):
        interpreter(lower(ALL[name], recompute="always"))(W, X)
