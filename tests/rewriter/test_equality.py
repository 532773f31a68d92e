"""Layers that differ in anything at all are never merged; equal ones are."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from _transformer import exact_jit
from flax_amp import (
    AmpTrainState,
    amp,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
)
from flax_amp._rewriter.outline import repeats
from helpers import assert_identical, equations

LAYERS = 11  # of which the middle one differs: the others are too few for a run
W = jax.random.normal(jax.random.key(1), (LAYERS, 4, 4)) / 2
X = jax.random.normal(jax.random.key(2), (4, 4))

float32 = functools.partial(amp, compute_dtype=jnp.float32)


@pytest.fixture(autouse=True)
def small_layers(monkeypatch):
    monkeypatch.setattr(repeats, "_MIN_SAVED", 2)


def count_calls(fn, *args):
    eqns = [eqn for _, eqn in equations(jax.make_jaxpr(fn)(*args))]
    return sum(eqn.params.get("name") == "repeated" for eqn in eqns)


# Each makes a part of a layer from one of two numbers, in which the layers differ.


def literal(number):
    return lambda x: x * number


def zero(number):
    signed = np.copysign(0.0, number - 0.7)
    return lambda x: x + lax.atan2(0.0, lax.stop_gradient(x * 0 + 1) * signed)


def constant(number):
    return lambda x: jax.jit(lambda x: x * np.full((1, 4), number, np.float32))(x)


def zeros(number):
    array = np.full((1, 4), np.copysign(0.0, number - 0.7), np.float32)
    return lambda x: (
        x + jax.jit(lambda one: lax.atan2(0 * one, array * one))(jnp.ones((1, 4)))
    )


def weak_type(number):
    one = 1.0 if number < 0.7 else np.float32(1)
    return lambda x: x * lax.stop_gradient(x.astype(jnp.bfloat16) * one + 0.01)


def dtype(number):
    half = jnp.float16 if number < 0.7 else jnp.bfloat16
    return lambda x: x.astype(half).astype(x.dtype)


def axis(number):
    return lambda x: x - jnp.sum(x, axis=int(2 * number) - 1, keepdims=True)


def parameter(number):
    return lambda x: lax.cumsum(x, reverse=number < 0.7)


def precision(number):
    chosen = "highest" if number < 0.7 else "default"
    return lambda x: jnp.dot(x, x, precision=chosen) / 4


def branch(number):
    return lambda x: lax.cond(x[0, 0] < 9, lambda x: x * number, lambda x: x, x)


def loop(number):
    return lambda x: lax.fori_loop(0, 2, lambda _, x: x * number, x)


def checkpointed(number):
    return jax.checkpoint(lambda x: jnp.sin(x * number))


def policy(number):
    name = f"saved_{number}"
    saved = jax.checkpoint_policies.save_only_these_names(name)
    return jax.checkpoint(jnp.sin, policy=saved)


def called(function):
    """Calls back where nothing is differentiated."""

    def part(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        stopped = lax.stop_gradient(x)
        return x + jax.pure_callback(function, shape, stopped, vmap_method="sequential")

    return part


def times(x, number):
    return np.asarray(x * number, np.float32)


def callback(number):
    return called(lambda x: times(x, number))


def callback_default(number):
    return called(lambda x, factor=number: times(x, factor))


def callback_partial(number):
    return called(functools.partial(times, number=number))


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


def callback_object(number):
    return called(Alike(number))


def with_jvp(rule, **options):
    @jax.custom_jvp
    def identity(x):
        return x

    identity.defjvp(rule, **options)
    return identity


def jvp(number):
    return with_jvp(lambda xs, ts: (xs[0], ts[0] * number))


def jvp_constant(number):
    return with_jvp(lambda xs, ts: (xs[0], ts[0] * jnp.array([[number, 1, 1, 1]])))


def jvp_array(number):  # too large to compare its contents
    large = np.full((4096, 4), number, np.float32)
    return with_jvp(lambda xs, ts: (xs[0], ts[0] * large[:4]))


def jvp_list(number):
    factors = [number]
    return with_jvp(lambda xs, ts: (xs[0], ts[0] * factors[0]))


def jvp_attribute(number):
    def rule(xs, ts):
        return xs[0], ts[0] * rule.number

    rule.number = number
    return with_jvp(rule)


def jvp_method(number):
    return with_jvp(Alike(number).rule)


def jvp_zero(number):
    signed = np.copysign(0.0, number - 0.7)
    return with_jvp(lambda xs, ts: (xs[0], ts[0] * (1 + lax.atan2(0.0, signed))))


def jvp_symbolic(number):
    def rule(xs, ts):
        known = hasattr(ts[0], "at")  # an array, no symbolic zero
        return xs[0], ts[0] * number if known else ts[0]

    return with_jvp(rule, symbolic_zeros=True)


def jvp_callback(number):
    part = called(lambda x: times(x, number))
    return with_jvp(lambda xs, ts: (xs[0], ts[0] * part(xs[0])))


def jvp_nested(number):  # shows in the second derivative
    inner = with_jvp(lambda xs, ts: (xs[0], ts[0] * number))
    return with_jvp(lambda xs, ts: (xs[0], ts[0] * inner(xs[0])))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def scaled_by(x, number):
    return x


@scaled_by.defjvp
def scale(number, xs, ts):
    return xs[0], ts[0] * number


def jvp_static(number):
    return lambda x: scaled_by(x, number)


def with_vjp(forward, backward):
    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(forward, backward)
    return identity


def vjp_backward(number):
    return with_vjp(lambda x: (x, None), lambda _, t: (t * number,))


def vjp_forward(number):
    return with_vjp(lambda x: (x, x * number), lambda r, t: (t * r,))


def vjp_nested(number):
    return with_vjp(lambda x: (jvp(number)(x), None), lambda _, t: (t / 2,))


def linear(number):
    def part(x):
        return jax.custom_derivatives.linear_call(
            lambda _, x: x / 2, lambda _, t: t * number, (), x
        )

    return part


def vmapped(number):
    @jax.custom_batching.custom_vmap
    def identity(x):
        return x

    identity.def_vmap(lambda size, batched, x: (x * number, True))
    return identity


def solve(number):
    def part(x):
        return lax.custom_linear_solve(
            lambda x: x * 2, x, lambda _, x: x * number, symmetric=True
        )

    return part


MERGED = [
    *(literal, zero, constant, zeros, weak_type, dtype, axis, parameter, precision),
    *(branch, loop, checkpointed),
    *(callback, callback_default, callback_partial),
    *(jvp, jvp_constant, jvp_zero, jvp_symbolic, jvp_callback, jvp_static),
    *(vjp_backward, vjp_forward, vmapped, solve),
]
# Objects of kinds that are unknown, if only in some versions of JAX, and new in each
# layer may be equal or not: it is sound to leave the layers alone.
LEFT_ALONE = [
    *(policy, linear),
    *(callback_object, jvp_array, jvp_list, jvp_attribute, jvp_method),
    *(jvp_nested, vjp_nested),
]


def stack(parts):
    def loss(w, x):
        for i, part in enumerate(parts):
            x = jnp.tanh(part(x @ w[i])) + x
        return jnp.mean(x**2)

    return loss


def parts_of(kind, place=None):
    """The parts of all layers, new ones for each; that at one place differs."""
    return [kind(1.0 if i == place else 0.5) for i in range(LAYERS)]


def name_of(kind):
    return kind.__name__


@pytest.mark.parametrize("kind", MERGED, ids=name_of)
def test_equal_layers_are_merged(kind):
    assert count_calls(float32(stack(parts_of(kind))), W, X) >= LAYERS - 2


@pytest.mark.parametrize("kind", [*MERGED, *LEFT_ALONE], ids=name_of)
def test_layers_that_differ_in_one_thing_are_kept_apart(kind):
    assert not count_calls(float32(stack(parts_of(kind, LAYERS // 2))), W, X)


# As users write them, where they do not make new functions for each layer.
clipped = with_vjp(lambda x: (x, None), lambda _, t: (jnp.clip(t, -1, 1),))
ORDINARY = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softmax": jax.nn.softmax,
    "attention": lambda x: jax.nn.dot_product_attention(*[x[None, :, None]] * 3)[
        0, :, 0
    ],
    "mapped rule": jax.vmap(jax.nn.relu),
    "rule": clipped,
    "checkpointed rule": lambda x: jax.checkpoint(lambda x: clipped(x))(x),  # noqa: PLW0108
}


@pytest.mark.parametrize("part", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_layers_are_merged(part):
    assert count_calls(float32(stack([part] * LAYERS)), W, X) >= LAYERS - 2


@pytest.mark.parametrize(
    "make", [amp, make_train_step, make_nnx_train_step, make_eval_step]
)
def test_merging_can_be_switched_off(make):
    message = re.escape("merge_layers: got 'no'; expected True or False.")
    with pytest.raises(TypeError, match=message):
        make(lambda *args: None, merge_layers="no")
    with pytest.raises(TypeError, match=message):
        amp(merge_layers="no")


def test_what_is_switched_off_stays_apart():
    loss = stack([jax.nn.relu] * LAYERS)
    off = functools.partial(float32, merge_layers=False)
    assert count_calls(float32(loss), W, X)
    assert not count_calls(off(loss), W, X)
    assert not count_calls(off()(loss), W, X)
    assert_identical(gradient(off(loss))(W, X), gradient(loss)(W, X))


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


def in_rule(part):
    """Calls a part in the rule of a custom derivative only."""
    return with_jvp(lambda xs, ts: (xs[0], ts[0] * part(xs[0])))


def gradient(fn):
    return jax.value_and_grad(fn, argnums=(0, 1))


def second(fn):
    def slope(w, x):
        return jnp.sum(jax.grad(fn, argnums=1)(w, x) ** 2)

    return jax.value_and_grad(slope, argnums=1)


def batched(fn):
    return lambda w, x: jax.vmap(fn, in_axes=(None, 0))(w, jnp.stack([x, x / 2]))


WRAPS = [lambda part: part, jax.jit, jax.checkpoint, in_rule]
layers = st.lists(
    st.tuples(st.sampled_from([*MERGED, *LEFT_ALONE]), st.sampled_from(WRAPS)),
    min_size=1,
    max_size=3,
)
generated = functools.partial(
    hypothesis.settings,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate],  # to shrink one takes minutes
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


def nearly_equal(drawn, different, place):
    """Layers of the drawn parts; one part of the one at the place differs."""

    def layer(i):
        parts = [
            wrap(kind(1.0 if (i, k) == (place, different % len(drawn)) else 0.5))
            for k, (kind, wrap) in enumerate(drawn)
        ]
        return lambda x: functools.reduce(lambda x, part: part(x), parts, x)

    return stack([layer(i) for i in range(LAYERS)])


@generated(max_examples=40)
@hypothesis.given(layers, st.integers(0, 2))
def test_a_difference_anywhere_keeps_layers_apart(drawn, different):
    assert not count_calls(float32(nearly_equal(drawn, different, LAYERS // 2)), W, X)


@pytest.mark.slow
@generated(max_examples=12)
@hypothesis.given(
    st.tuples(st.sampled_from([*MERGED, *LEFT_ALONE]), st.sampled_from(WRAPS)),
    st.integers(0, LAYERS - 1),
)
def test_nearly_equal_layers_compute_what_plain_jax_does(drawn, place):
    fn = nearly_equal([drawn], 0, place)
    kind, wrap = drawn
    is_second = kind in (jvp_nested, vjp_nested) or wrap is in_rule
    transform = batched if kind is vmapped else second if is_second else gradient
    plain = exact_jit(transform(fn))(W, X)
    assert_identical(exact_jit(transform(float32(fn)))(W, X), plain)


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

    batch = jnp.stack([X, X / 2])
    for transform, x in (
        (jax.grad, X),
        (lambda f: jax.jit(jax.grad(f)), X),
        (lambda f: jax.vmap(jax.grad(f), (None, 0)), batch),
    ):
        found = transform(float32(network))(W, x)
        np.testing.assert_allclose(found, transform(network)(W, x), rtol=1e-5)
