"""Repeated layers become calls of one function, and nothing else changes."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from _transformer import bfloat16, block, exact_jit, inputs, layer, unrolled, weights
from flax_amp import amp
from flax_amp._rewriter import emit
from flax_amp._rewriter.outline import repeats
from helpers import assert_all_in, assert_close, assert_identical, equations

LAYERS = 6


@pytest.fixture(autouse=True)
def from_two_equations_on(monkeypatch):
    """Calls also where they save next to nothing: the layers of a test are small."""
    monkeypatch.setattr(repeats, "_MIN_SAVED", 2)
    monkeypatch.setattr(repeats, "_MIN_COPIES", 2)


def calls(fn, *args):
    """The bodies of all calls of repeated layers."""
    return [
        getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
        for _, eqn in equations(jax.make_jaxpr(fn)(*args))
        if eqn.params.get("name") == "repeated"
    ]


def gradients(fn, *args):
    return exact_jit(jax.value_and_grad(fn))(*args)


def assert_changes_nothing(fn, *args, differentiate=gradients):
    """Asserts that values and gradients are those without calls, bit for bit."""
    outlined = differentiate(bfloat16(fn), *args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emit, "outline", lambda plan: plan)
        assert not calls(bfloat16(fn), *args)
        plain = differentiate(bfloat16(fn), *args)
    assert_identical(outlined, plain)


def dense(w, x):
    return jnp.tanh(x @ w) + x


def stack(w, x, body=dense):  # the first and the last layer have other neighbours
    for i in range(len(w)):
        x = body(w[i], x)
    return jnp.mean(x**2)


W = jax.random.normal(jax.random.key(1), (LAYERS, 8, 8)) / 3
X = jax.random.normal(jax.random.key(2), (4, 8))


@pytest.mark.parametrize("limit", ["_MIN_SAVED", "_MIN_COPIES"])
def test_what_saves_little_is_left_alone(monkeypatch, limit):
    monkeypatch.setattr(repeats, limit, 500)
    assert not calls(bfloat16(unrolled), weights(LAYERS), inputs())


def test_equal_layers_are_calls_of_one_function():
    bodies = calls(bfloat16(unrolled), weights(LAYERS), inputs())

    assert len(bodies) >= LAYERS - 2  # the first one reads a float32 leaf
    assert len(set(map(id, bodies))) == 1
    assert_all_in(
        bfloat16(unrolled),
        weights(LAYERS),
        inputs(),
        dtype=jnp.bfloat16,
        count=6 * LAYERS,
    )


def test_a_layer_is_differentiated_and_lowered_once():
    grad = jax.jit(jax.grad(bfloat16(unrolled)))
    text = grad.lower(weights(LAYERS), inputs()).as_text()

    # Forward and backward; the first layer stands on its own.
    in_functions = text.count("func.func private @repeated")
    assert in_functions == 2, in_functions
    assert text.count("call @repeated") == 2 * (LAYERS - 1)


@pytest.mark.parametrize("recompute", ["never", "auto", "always"])
def test_values_and_gradients_stay_the_same(recompute):
    loss = functools.partial(amp, compute_dtype=jnp.bfloat16, recompute=recompute)
    fn = loss(unrolled)
    outlined = gradients(fn, weights(LAYERS), inputs())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emit, "outline", lambda plan: plan)
        plain = gradients(loss(unrolled), weights(LAYERS), inputs())

    assert_identical(outlined, plain)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
        lambda f: jax.vmap(f, in_axes=(None, 0)),
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
        lambda f: lambda w, x: jax.hessian(lambda s: f(s * w, x))(1.0),
    ],
    ids=["jvp", "vmap", "checkpoint", "linearize", "hessian"],
)
def test_under_transformations(transform):
    def differentiate(fn, w, x):
        return exact_jit(transform(fn))(w, x)

    x = X[:, None]
    assert calls(bfloat16(stack), W, x)
    assert_changes_nothing(stack, W, x, differentiate=differentiate)


def test_without_jit():
    assert_close(bfloat16(stack)(W, X), stack(W, X), jnp.bfloat16)


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit], ids=["checkpoint", "jit"])
def test_layers_with_a_body(wrap):
    def fn(p, x):
        # A new function each time, as Flax makes them.
        for i in range(LAYERS):
            x = wrap(lambda p, x: block(p, x))(layer(p, i), x)  # noqa: PLW0108
        return jnp.mean(x**2)

    assert len(calls(bfloat16(fn), weights(LAYERS), inputs())) >= LAYERS - 2
    assert_changes_nothing(fn, weights(LAYERS), inputs())


def test_random_numbers_of_each_layer_stay_its_own():
    def fn(w, x):
        key = jax.random.key(0)
        for i in range(LAYERS):
            mask = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)
            x = dense(w[i], jnp.where(mask, x, 0))
        return jnp.mean(x**2)

    assert len(calls(bfloat16(fn), W, X)) >= LAYERS - 2
    assert_changes_nothing(fn, W, X)


def test_custom_derivatives_are_compared_by_what_they_do():
    def damped(factor):
        @jax.custom_jvp
        def identity(x):
            return x

        identity.defjvp(lambda xs, ts: (xs[0], ts[0] * factor))
        return identity

    def fn(factors):
        def loss(w, x):
            for i, factor in enumerate(factors):
                x = damped(factor)(dense(w[i], x))
            return jnp.mean(x**2)

        return loss

    assert len(calls(bfloat16(fn([0.1] * LAYERS)), W, X)) >= LAYERS - 2
    different = fn([0.1 * (i + 1) for i in range(LAYERS)])
    assert not calls(jax.grad(bfloat16(different)), W, X)
    assert_changes_nothing(different, W, X)


def test_relu_layers_are_calls():
    def fn(w, x):
        return stack(w, x, lambda w, x: jax.nn.relu(x @ w) + x)

    assert len(calls(bfloat16(fn), W, X)) >= LAYERS - 2
    assert_changes_nothing(fn, W, X)


def scaled(w, x):
    for i in range(LAYERS):
        x = dense(w[i], x * (1 + i))
    return jnp.mean(x**2)


def crossed(w, x):
    # Every layer reads the one before the last, too.
    before = x
    for i in range(LAYERS):
        x, before = dense(w[i], x) + before, x
    return jnp.mean(x**2)


def collected(w, x):
    seen = []
    for i in range(LAYERS):
        x = dense(w[i], x)
        seen.append(jnp.max(x) if i % 2 else jnp.min(x))
    return jnp.mean(x**2) + sum(seen)


def shared(w, x):
    for _ in range(LAYERS):
        x = dense(w[0], x)
    return jnp.mean(x**2)


def alternating(w, x):
    for i in range(LAYERS):
        x = dense(w[i], x) if i % 2 else jnp.sin(x @ w[i])
    return jnp.mean(x**2)


def printing(w, x):
    for i in range(LAYERS):
        x = dense(w[i], x)
        jax.debug.print("{}", x.sum())
    return jnp.mean(x**2)


@pytest.mark.parametrize(
    "fn, expected",
    [
        (scaled, False),
        (collected, True),
        (shared, True),
        (alternating, True),
        (printing, False),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_other_patterns(fn, expected):
    assert bool(calls(bfloat16(fn), W, X)) == expected
    assert_changes_nothing(fn, W, X)


def test_values_that_skip_a_layer():
    # Three cotangents meet at each value: their order, and so the rounding, changes.
    assert calls(bfloat16(crossed), W, X)
    outlined = gradients(bfloat16(crossed), W, X)
    assert_close(outlined, gradients(crossed, W, X), jnp.bfloat16, gradient=True)


def test_scopes_stay_what_they_were():
    def fn(w, x):
        with jax.named_scope("net"):
            for i in range(LAYERS):
                with jax.named_scope(f"layer_{i}"):
                    x = x + 1
                    with jax.named_scope("dense"):
                        x = dense(w[i], x)
        return jnp.mean(x**2)

    def scopes(fn):
        found = []
        for path, eqn in scoped(jax.make_jaxpr(fn)(W, X)):
            if eqn.primitive.name in ("dot_general", "tanh"):
                found.append(path)
        return found

    assert calls(bfloat16(fn), W, X)
    assert scopes(bfloat16(fn)) == scopes(fn)
    assert f"net/layer_{LAYERS - 1}/dense" in scopes(fn)


def test_layers_with_other_scopes_inside_are_left_alone():
    def fn(w, x):
        for i in range(LAYERS):
            x = x + 1
            with jax.named_scope(f"dense_{i}"):
                x = dense(w[i], x)
        return jnp.mean(x**2)

    assert not calls(bfloat16(fn), W, X)
    assert_changes_nothing(fn, W, X)


def scoped(jaxpr, above=()):
    """Yields each equation with its scopes, those of the calls around it included."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        own = (*above, *filter(None, [str(eqn.source_info.name_stack)]))
        body = eqn.params.get("jaxpr")
        if body is not None:
            yield from scoped(body, own)
        yield "/".join(own), eqn


def test_a_loop_of_layers_inside_of_another_program():
    def fn(w, x):
        def step(x, _):
            return x + stack(w, x), None

        return lax.scan(step, x, None, length=2)[0].sum() + stack(w, x)

    assert_changes_nothing(fn, W, X)


def test_small_programs_are_left_alone(monkeypatch):
    monkeypatch.undo()

    assert not calls(bfloat16(stack), W[:4], X)


# What a random program is made of: functions of a weight, the last value and another.
STEPS = [
    lambda w, x, y: x @ w,
    lambda w, x, y: x + y,
    lambda w, x, y: jnp.tanh(x),
    lambda w, x, y: x - jnp.mean(x, -1, keepdims=True),
    lambda w, x, y: x * 2.0,
    lambda w, x, y: x * 3.0,
    lambda w, x, y: jax.nn.relu(x) + w[:1],
]
step = st.tuples(st.integers(0, len(STEPS) - 1), st.integers(1, 5))


@pytest.mark.slow
@hypothesis.given(
    period=st.lists(step, min_size=1, max_size=5),
    copies=st.integers(2, 4),
    changed=st.lists(st.tuples(st.integers(0, 20), step), max_size=2),
)
@hypothesis.settings(
    deadline=None,
    max_examples=25,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate],  # to shrink one takes minutes
)
def test_random_programs(period, copies, changed):
    program = period * copies
    for place, other in changed:
        program[place % len(program)] = other

    def fn(w, x):
        values = [x]
        for i, (function, back) in enumerate(program):
            other = values[max(0, len(values) - back)]
            values.append(STEPS[function](w[i % LAYERS], values[-1], other))
        return jnp.sum(jnp.tanh(values[-1]) + values[len(values) // 2])

    assert_changes_nothing(fn, W, X)
