"""Repeated layers become calls of one function, and nothing else changes."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from _programs import DERIVATIVES, norm
from _transformer import bfloat16, exact_jit, inputs, unrolled, weights
from flax_amp._rewriter.outline import repeats
from helpers import (
    assert_all_in,
    assert_close,
    assert_identical,
    equations,
)

LAYERS = 6
W = jax.random.normal(jax.random.key(1), (LAYERS, 8, 8)) / 3
X = jax.random.normal(jax.random.key(2), (4, 8))


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


def assert_changes_nothing(fn, *args, transform=jax.value_and_grad):
    """Asserts that values and gradients are those without calls, bit for bit."""
    outlined = exact_jit(transform(bfloat16(fn)))(*args)
    plain = exact_jit(transform(bfloat16(fn, merge_layers=False)))(*args)
    assert_identical(outlined, plain)


def dense(w, x):
    return jnp.tanh(x @ w) + x


def stack(w, x, body=dense):  # the first and the last layer have other neighbours
    for i in range(len(w)):
        x = body(w[i], x)
    return jnp.mean(x**2)


# --- a transformer -------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["_MIN_SAVED", "_MIN_COPIES"])
def test_what_saves_little_is_left_alone(monkeypatch, limit):
    monkeypatch.setattr(repeats, limit, 500)
    assert not calls(bfloat16(unrolled), weights(LAYERS), inputs())


def test_small_programs_are_left_alone(monkeypatch):
    monkeypatch.undo()
    assert not calls(bfloat16(stack), W[:4], X)


def test_five_equal_layers_are_merged(monkeypatch):
    monkeypatch.undo()
    # The first of the layers reads a float32 leaf.
    found = [len(calls(bfloat16(unrolled), weights(n), inputs())) for n in (5, 6)]
    assert found == [0, 5]


def test_equal_layers_are_calls_of_one_function():
    """Which is differentiated and lowered once."""
    fn, args = bfloat16(unrolled), (weights(LAYERS), inputs())
    bodies = calls(fn, *args)
    assert len(bodies) >= LAYERS - 2  # the first one reads a float32 leaf
    assert len(set(map(id, bodies))) == 1
    assert_all_in(fn, *args, dtype=jnp.bfloat16, count=6 * LAYERS)

    text = jax.jit(jax.grad(fn)).lower(*args).as_text()
    # Forward and backward; the first layer stands on its own.
    assert text.count("func.func private @repeated") == 2
    assert text.count("call @repeated") == 2 * (LAYERS - 1)


def test_values_and_gradients_stay_the_same():
    assert_changes_nothing(unrolled, weights(LAYERS), inputs())


@pytest.mark.parametrize("derivative", ["jvp", "vmap", "checkpoint", "jvp of grad"])
def test_derivatives_stay_the_same(derivative):
    assert_changes_nothing(stack, W, X, transform=DERIVATIVES[derivative])


# --- programs with and without equal layers ------------------------------------------


def with_a_body(wrap):
    def body(w, x):
        # A new function each time, as Flax makes them.
        return wrap(lambda w, x: x + jax.nn.gelu(norm(x @ w)) @ w)(w, x)

    return lambda w, x: stack(w, x, body)


def random_masks(w, x):
    key = jax.random.key(0)
    for i in range(LAYERS):
        mask = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)
        x = dense(w[i], jnp.where(mask, x, 0))
    return jnp.mean(x**2)


def damped(factors):
    """Layers with rules of their own, which differ in a factor."""

    def with_factor(factor):
        identity = jax.custom_jvp(lambda x: x)
        identity.defjvp(lambda xs, ts: (xs[0], ts[0] * factor))
        return identity

    def loss(w, x):
        for i, factor in enumerate(factors):
            x = with_factor(factor)(dense(w[i], x))
        return jnp.mean(x**2)

    return loss


def scaled(w, x):
    for i in range(LAYERS):
        x = dense(w[i], x * (1 + i))
    return jnp.mean(x**2)


def collected(w, x):
    seen = []
    for i in range(LAYERS):
        x = dense(w[i], x)
        seen.append(jnp.max(x) if i % 2 else jnp.min(x))
    return jnp.mean(x**2) + sum(seen)


def alternating(w, x):
    for i in range(LAYERS):
        x = dense(w[i], x) if i % 2 else jnp.sin(x @ w[i])
    return jnp.mean(x**2)


def printing(w, x):
    for i in range(LAYERS):
        x = dense(w[i], x)
        jax.debug.print("{}", x.sum())
    return jnp.mean(x**2)


def scopes_inside(name, w, x):
    for i in range(LAYERS):
        x = x + 1
        with jax.named_scope(name(i)):
            x = dense(w[i], x)
    return jnp.mean(x**2)


def in_another_program(w, x):
    step = lambda x, _: (x + stack(w, x), None)  # noqa: E731
    return lax.scan(step, x, None, length=2)[0].sum() + stack(w, x)


SOME = 1
ALL = LAYERS - 2  # the first and the last layer have other neighbours
PATTERNS = {  # name: (program, how many calls at least; None: none at all)
    "relu": (lambda w, x: stack(w, x, lambda w, x: jax.nn.relu(x @ w) + x), ALL),
    "checkpointed bodies": (with_a_body(jax.checkpoint), ALL),
    "jitted bodies": (with_a_body(jax.jit), ALL),
    "random numbers of their own": (random_masks, ALL),
    "equal rules of a user": (damped([0.1] * LAYERS), None),
    "different rules of a user": (damped([0.1 * (i + 1) for i in range(LAYERS)]), None),
    "different numbers": (scaled, None),
    "results collected": (collected, SOME),
    "shared weights": (lambda w, x: stack([w[0]] * LAYERS, x), SOME),
    "two kinds that alternate": (alternating, SOME),
    "in a loop and behind it": (in_another_program, SOME),
    "effects": (printing, None),
    "other numbers inside": (functools.partial(scopes_inside, "dense_{}".format), ALL),
    "other names inside": (
        functools.partial(scopes_inside, "abcdef".__getitem__),
        None,
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name):
    fn, least = PATTERNS[name]
    found = len(calls(bfloat16(fn), W, X))
    assert found == 0 if least is None else found >= least
    if found:
        assert_changes_nothing(fn, W, X)


def test_values_that_skip_a_layer():
    """Each layer reads the one before the last, too."""

    def crossed(w, x):
        before = x
        for i in range(LAYERS):
            x, before = dense(w[i], x) + before, x
        return jnp.mean(x**2)

    assert calls(bfloat16(crossed), W, X)
    # Three cotangents meet at each value: their order, and so the rounding, changes.
    actual, expected = (
        exact_jit(jax.value_and_grad(f))(W, X) for f in (bfloat16(crossed), crossed)
    )
    assert_close(actual, expected, jnp.bfloat16, gradient=True)


# --- which equations may repeat ------------------------------------------------------


def _is_in_a_run(kinds, i, copies):
    """Whether an equation is in a stretch of equal pieces, found by trying all."""
    for period in range(1, len(kinds) // copies + 1):
        size = period * copies
        for start in range(max(0, i - size + 1), min(i, len(kinds) - size) + 1):
            piece = kinds[start : start + size]
            if piece[period:] == piece[:-period]:
                return True
    return False


@pytest.mark.parametrize("copies", [2, 3, 5])
def test_kinds_leave_out_no_equation_of_a_run(copies, monkeypatch):
    monkeypatch.setattr(repeats, "_MIN_COPIES", copies)
    draw = random.Random(copies)
    for _ in range(100):
        layer = draw.choices("abcd", k=draw.randint(1, 4))
        noise = [draw.choices("abcde", k=draw.randint(0, 6)) for _ in range(2)]
        kinds = [*noise[0], *layer * draw.randint(1, 8), *noise[1]]
        found = repeats._may_repeat(kinds)
        runs = {i for i in range(len(kinds)) if _is_in_a_run(kinds, i, copies)}
        assert runs <= found
        assert found <= set(range(len(kinds)))


def test_kinds_leave_out_what_stands_between_rare_ones(monkeypatch):
    monkeypatch.undo()
    parts = itertools.chain.from_iterable(["a"] * 4 + [name] for name in "xyz")
    assert repeats._may_repeat(list(parts)) == set()
    assert repeats._may_repeat(["x", *"ab" * 5, "y", *"ab" * 4]) == set(range(1, 11))
