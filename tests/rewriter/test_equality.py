"""Layers that differ in anything at all are never merged; equal ones are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from flax_amp import (
    AmpTrainState,
    amp,
    make_eval_step,
    make_train_step,
)
from flax_amp._rewriter.outline import repeats
from helpers import assert_identical, equations, rewritten_in_float32

LAYERS = 9  # of which the middle one differs: the others are too few for a run
W = jax.random.normal(jax.random.key(1), (LAYERS, 4, 4)) / 2
X = jax.random.normal(jax.random.key(2), (4, 4))


@pytest.fixture(autouse=True)
def small_layers(monkeypatch):
    monkeypatch.setattr(repeats, "_MIN_SAVED", 2)


def count_calls(fn, *args):
    eqns = [eqn for _, eqn in equations(jax.make_jaxpr(fn)(*args))]
    return sum(eqn.params.get("name") == "repeated" for eqn in eqns)


# --- what layers can differ in -------------------------------------------------------


def signed_zero(number):
    """A zero whose sign depends on the number."""
    return float(np.copysign(0.0, number - 0.7))


def full(number):
    return np.full((1, 4), number, np.float32)


def signed_zeros(number):
    def angles(one):
        return lax.atan2(0 * one, full(signed_zero(number)) * one)

    return lambda x: x + jax.jit(angles)(jnp.ones((1, 4)))


def called(function):
    """Calls back where nothing is differentiated."""

    def part(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        stopped = lax.stop_gradient(x)
        return x + jax.pure_callback(function, shape, stopped, vmap_method="sequential")

    return part


def times(x, number):
    return np.asarray(x * number, np.float32)


class Alike:
    """Its objects all call themselves equal."""

    def __init__(self, number):
        self.number = number

    def __call__(self, *x):
        return times(x[0], self.number)

    def rule(self, primals, tangents):
        return primals[0], tangents[0] * self.number

    def __eq__(self, other):
        return isinstance(other, Alike)

    def __hash__(self):
        return 0


def with_jvp(rule, **options):
    identity = jax.custom_jvp(lambda x: x)
    identity.defjvp(rule, **options)
    return identity


def with_factor(factor, **options):
    """The identity with a tangent times `factor(x)`."""
    return with_jvp(lambda xs, ts: (xs[0], ts[0] * factor(xs[0])), **options)


def with_vjp(forward, backward):
    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(forward, backward)
    return identity


def jvp_array(number):  # too large to compare its contents
    large = np.full((4096, 4), number, np.float32)
    return with_factor(lambda x: large[:4])


def jvp_list(number):
    factors = [number]
    return with_factor(lambda x: factors[0])


def jvp_attribute(number):
    def rule(xs, ts):
        return xs[0], ts[0] * rule.number

    rule.number = number
    return with_jvp(rule)


def jvp_symbolic(number):
    def rule(xs, ts):
        known = hasattr(ts[0], "at")  # an array, no symbolic zero
        return xs[0], ts[0] * number if known else ts[0]

    return with_jvp(rule, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def scaled_by(x, number):
    return x


scaled_by.defjvp(lambda number, xs, ts: (xs[0], ts[0] * number))


def vmapped(number):
    identity = jax.custom_batching.custom_vmap(lambda x: x)
    identity.def_vmap(lambda size, batched, x: (x * number, True))
    return identity


def linear(number):
    forward, transpose = lambda _, x: x / 2, lambda _, t: t * number
    call = jax.custom_derivatives.linear_call
    return lambda x: call(forward, transpose, (), x)


def solve(number):
    return lambda x: lax.custom_linear_solve(
        lambda x: x * 2, x, lambda _, x: x * number, symmetric=True
    )


def no_value(number):
    """A callback that closes over a variable which has no value."""
    factor = number

    def callback(x):
        return times(x, number if number else factor)  # noqa: F821

    del factor
    return called(callback)


def beside(make):
    """A callback that holds an object, which cannot be compared by its value."""

    def part(number):
        held = make(number)
        return called(lambda x: (times(x, number), held)[0])

    return part


def deleted(number):
    array = jnp.full(3, number)
    array.delete()
    return array


def weak_type(number):
    one = 1.0 if number < 0.7 else np.float32(1)
    return lambda x: x * lax.stop_gradient(x.astype(jnp.bfloat16) * one + 0.01)


save_names = jax.checkpoint_policies.save_only_these_names

# Each makes a part of a layer from one of two numbers, in which the layers differ.
MERGED = {
    "literal": lambda n: lambda x: x * n,
    "zero": lambda n: (
        lambda x: x + lax.atan2(0.0, lax.stop_gradient(x * 0 + 1) * signed_zero(n))
    ),
    "constant": lambda n: lambda x: jax.jit(lambda x: x * full(n))(x),
    "signed zeros": signed_zeros,
    "weak type": weak_type,
    "dtype": lambda n: (
        lambda x: x.astype(jnp.float16 if n < 0.7 else jnp.bfloat16).astype(x.dtype)
    ),
    "axis": lambda n: lambda x: x - jnp.sum(x, axis=int(2 * n) - 1, keepdims=True),
    "parameter": lambda n: lambda x: lax.cumsum(x, reverse=n < 0.7),
    "precision": lambda n: (
        lambda x: jnp.dot(x, x, precision="highest" if n < 0.7 else "default") / 4
    ),
    "branch": lambda n: (
        lambda x: lax.cond(x[0, 0] < 9, lambda x: x * n, jnp.positive, x)
    ),
    "loop": lambda n: lambda x: lax.fori_loop(0, 2, lambda _, x: x * n, x),
    "checkpointed": lambda n: jax.checkpoint(lambda x: jnp.sin(x * n)),
    "callback": lambda n: called(lambda x: times(x, n)),
    "default of callback": lambda n: called(lambda x, factor=n: times(x, factor)),
    "partial callback": lambda n: called(functools.partial(times, number=n)),
    "zero in a callback": lambda n: called(
        functools.partial(times, number=signed_zero(n))
    ),
    "solve": solve,
}
# Rules of a user may read and change anything while they are traced.
RULES = {
    "jvp": lambda n: with_factor(lambda x: n),
    "array in jvp": lambda n: with_factor(lambda x: jnp.array([[n, 1, 1, 1]])),
    "zero in jvp": lambda n: (
        lambda zero: with_factor(lambda x: 1 + lax.atan2(0.0, zero))
    )(signed_zero(n)),
    "symbolic zeros of jvp": jvp_symbolic,
    "callback in jvp": lambda n: with_factor(called(lambda x: times(x, n))),
    "static argument of jvp": lambda n: lambda x: scaled_by(x, n),
    "backward of vjp": lambda n: with_vjp(lambda x: (x, None), lambda _, t: (t * n,)),
    "forward of vjp": lambda n: with_vjp(lambda x: (x, x * n), lambda r, t: (t * r,)),
    "vmapped": vmapped,
}
# Objects of kinds that are unknown, if only in some versions of JAX, and new in each
# layer may be equal or not: it is sound to leave the layers alone.
SECOND_ORDER = {  # which show in the second derivative
    "jvp in jvp": lambda n: with_factor(with_factor(lambda x: n)),
    "jvp in vjp": lambda n: with_vjp(
        lambda x: (RULES["jvp"](n)(x), None), lambda _, t: (t / 2,)
    ),
}
LEFT_ALONE = SECOND_ORDER | {
    "policy": lambda n: jax.checkpoint(jnp.sin, policy=save_names(f"saved_{n}")),
    "linear": linear,
    "callback of object": lambda n: called(Alike(n)),
    "large array in jvp": jvp_array,
    "list in jvp": jvp_list,
    "attribute of jvp": jvp_attribute,
    "method as jvp": lambda n: with_jvp(Alike(n).rule),
    "variable without a value": no_value,
    "random key": beside(lambda n: jax.random.key(int(9 * n))),
    "deleted array": beside(deleted),
    "array of objects": beside(lambda n: np.array([n, None])),
    "unhashable key": beside(lambda n: jax.tree_util.DictKey([n])),
}
KINDS = MERGED | RULES | LEFT_ALONE


def stack(parts):
    def loss(w, x):
        for i, part in enumerate(parts):
            x = jnp.tanh(part(x @ w[i])) + x
        return jnp.mean(x**2)

    return loss


def parts_of(kind, place=None):
    """The parts of all layers, new ones for each; that at one place differs."""
    return [kind(1.0 if i == place else 0.5) for i in range(LAYERS)]


def in_rule(part):
    """Calls a part in the rule of a custom derivative only."""
    return with_factor(part)


@pytest.mark.parametrize("wrap", [lambda part: part, jax.jit, jax.checkpoint, in_rule])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_differ_in_one_thing_are_kept_apart(kind, wrap):
    different = stack(list(map(wrap, parts_of(KINDS[kind], LAYERS // 2))))
    assert not count_calls(rewritten_in_float32(different), W, X)


# As users write them, where they do not make new functions for each layer.
clipped = with_vjp(lambda x: (x, None), lambda _, t: (jnp.clip(t, -1, 1),))
ORDINARY = {name: getattr(jax.nn, name) for name in "relu gelu silu softmax".split()}
ORDINARY |= {
    "attention": lambda x: jax.nn.dot_product_attention(*[x[None, :, None]] * 3)[
        0, :, 0
    ],
    "mapped rule": jax.vmap(jax.nn.relu),
}
OWN_RULES = {name: parts_of(kind) for name, kind in RULES.items()} | {
    "rule": [clipped] * LAYERS,
    "checkpointed rule": [lambda x: jax.checkpoint(lambda x: clipped(x))(x)] * LAYERS,
}


EQUAL = {name: [part] * LAYERS for name, part in ORDINARY.items()}
EQUAL |= {name: parts_of(kind) for name, kind in MERGED.items()}


@pytest.mark.parametrize("parts", EQUAL.values(), ids=EQUAL)
def test_equal_layers_are_merged(parts):
    assert count_calls(rewritten_in_float32(stack(parts)), W, X) >= LAYERS - 2


@pytest.mark.parametrize("parts", OWN_RULES.values(), ids=OWN_RULES)
def test_equal_layers_with_rules_of_a_user_are_kept_apart(parts):
    assert not count_calls(rewritten_in_float32(stack(parts)), W, X)


def test_what_is_switched_off_stays_apart():
    loss = stack([jax.nn.relu] * LAYERS)
    off = functools.partial(rewritten_in_float32, merge_layers=False)
    assert count_calls(rewritten_in_float32(loss), W, X)
    assert not count_calls(off(loss), W, X)
    assert not count_calls(off()(loss), W, X)
    assert_identical(jax.grad(off(loss))(W, X), jax.grad(loss)(W, X))


@pytest.mark.parametrize("merges", [True, False])
def test_steps_hand_the_switch_on(merges):
    def loss(params, x):
        return stack([jax.nn.relu] * LAYERS)(params["w"], x)

    state = AmpTrainState.create(params={"w": W}, tx=optax.sgd(0.1))
    options = dict(merge_layers=merges, compute_dtype=jnp.bfloat16)
    train_step = make_train_step(loss, **options)
    eval_step = make_eval_step(loss, **options)
    assert bool(count_calls(train_step, state, X)) == merges
    assert bool(count_calls(eval_step, state, X)) == merges


def test_scopes_inside_of_loops_are_taken_off():
    """A layer that is a loop has its scope inside only, beside the loop's values."""

    def network(ws, h):
        for i in range(LAYERS):

            def body(h, w, i=i):
                with jax.named_scope(f"layer_{i}"):
                    return jnp.tanh(jnp.sin(h) @ w), None

            h, _ = lax.scan(body, h, ws[i][None])
        return h.sum()

    lowered = amp(network, compute_dtype=jnp.bfloat16)
    apart = amp(network, compute_dtype=jnp.bfloat16, merge_layers=False)
    assert count_calls(lowered, W, X)
    assert_identical(jax.grad(lowered)(W, X), jax.grad(apart)(W, X))


@pytest.mark.parametrize("once", [True, False])
def test_rules_over_a_traced_value(once):
    """A layer that is a call would hide the value from the rule; so none is merged."""

    def network(ws, h):
        scale = jnp.tanh(h.sum()) + 2.0  # for all layers the same

        def make():
            @jax.custom_vjp
            def layer(h, w):
                return jnp.tanh(h @ w)

            def backward(operands, ct):
                h, w = operands
                return scale * (ct @ w.T), scale * (h.T @ ct)

            layer.defvjp(lambda h, w: (layer(h, w), (h, w)), backward)
            return layer

        shared = make()
        for w in ws:
            h = (shared if once else make())(h, w)
        return h.sum()

    found, expected = (
        jax.vmap(jax.grad(fn), (None, 0))(W, jnp.stack([X, X / 2]))
        for fn in (rewritten_in_float32(network), network)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
