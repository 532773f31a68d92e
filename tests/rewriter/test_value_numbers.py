"""Numbers of values: programs that compute something else have other numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_amp._rewriter.value_numbers import Digits, Numbering, Table, Value

W, X = jnp.ones((4, 4)), jnp.ones((4, 4))
HALF = jnp.dtype(jnp.bfloat16)


def numbers(*programs):
    """Returns the numbers of the results of each program, in one table."""
    table = Table(HALF)
    found = []
    for program in programs:
        closed = jax.make_jaxpr(program)(W, X)
        inputs = [Value(table.number("input", i)) for i in range(2)]
        found.append(Numbering(table).run(closed, inputs))
    return found


def scan(step, init, xs=None, **options):
    return jax.lax.scan(step, init, xs, **{"length": 4} | options)


def noted(w, x):
    jax.debug.callback(print, x)
    return w + x


def written(first, second, w, x):
    ref = jax.new_ref(w)
    values = {"w": w, "x": x}
    ref[...] = values[first]
    y = ref[...]
    ref[...] = values[second]
    return y, ref[...]


def closes_over(number):
    return lambda w, x: jax.pure_callback(lambda: np.float32(number), X[0, 0])


def nested(inner_carry):
    """The inner loop reads its own carry, or that of the outer loop, twice."""

    def outer(a, _):
        def inner(b, _):
            return (b + b if inner_carry else a + b), None

        return scan(inner, a)[0], None

    return lambda w, x: scan(outer, w)[0]


ones = jnp.ones((4, 4))

# Programs that compute the same values, however they are written.
EQUAL = {
    "a call": (lambda w, x: w @ x + x, jax.jit(lambda w, x: w @ x + x)),
    "a checkpoint": (jnp.matmul, jax.checkpoint(jnp.matmul)),
    "what is not read": (lambda w, x: w + x, lambda w, x: (jnp.sin(w), w + x)[1]),
    "a constant of a loop": (
        lambda w, x: scan(lambda c, _: (c @ w + x, c), x),
        lambda w, x: scan(lambda c, _: (c @ w + x, c), x),
    ),
    "nested loops": (nested(True), nested(True)),
    "a callback that is made anew": (closes_over(1), closes_over(1)),
    "a constant": (lambda w, x: w + np.arange(4.0), lambda w, x: w + np.arange(4.0)),
}

# Pairs of programs that differ in one thing.
DIFFERENT = {
    "operands": (lambda w, x: w - x, lambda w, x: x - w),
    "a number": (lambda w, x: w * 2.0, lambda w, x: w * 3.0),
    "the sign of zero": (lambda w, x: w * 0.0, lambda w, x: w * -0.0),
    "a constant": (lambda w, x: w + np.arange(4.0), lambda w, x: w + np.ones(4)),
    "a parameter": (
        lambda w, x: w.reshape(2, 8),
        lambda w, x: w.reshape(8, 2),
    ),
    "an axis": (lambda w, x: w.sum(0), lambda w, x: w.sum(1)),
    "a dtype": (
        lambda w, x: w.astype(jnp.float16),
        lambda w, x: w.astype(jnp.bfloat16),
    ),
    "a rounding": (lambda w, x: w, lambda w, x: w.astype(HALF).astype(jnp.float32)),
    "a result of several": (
        lambda w, x: jnp.split(w, 2)[0],
        lambda w, x: jnp.split(w, 2)[1],
    ),
    "the order of results": (lambda w, x: (w, x), lambda w, x: (x, w)),
    "a branch": (
        lambda w, x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, w),
        lambda w, x: jax.lax.cond(x[0, 0] > 0, jnp.cos, jnp.sin, w),
    ),
    "the length of a loop": (
        lambda w, x: scan(lambda c, _: (c @ w, c.sum()), x)[0],
        lambda w, x: scan(lambda c, _: (c @ w, c.sum()), x, length=3)[0],
    ),
    "the direction of a loop": (
        lambda w, x: scan(lambda c, row: (c + row, None), x[0], w),
        lambda w, x: scan(lambda c, row: (c + row, None), x[0], w, reverse=True),
    ),
    "the start of a loop": (
        lambda w, x: scan(lambda c, _: (c @ w, None), x)[0],
        lambda w, x: scan(lambda c, _: (c @ w, None), w)[0],
    ),
    "the carries of a loop": (
        lambda w, x: scan(lambda c, _: ((c[0], c[1] + c[0]), None), (w, x))[0],
        lambda w, x: scan(lambda c, _: ((c[1], c[1] + c[0]), None), (w, x))[0],
    ),
    "an array and its elements": (
        lambda w, x: scan(lambda c, row: (c + w[0], None), x[0], w),
        lambda w, x: scan(lambda c, row: (c + row, None), x[0], w),
    ),
    "loops in loops": (nested(True), nested(False)),
    "the condition of a loop": (
        lambda w, x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + x, w),
        lambda w, x: jax.lax.while_loop(lambda c: c.sum() < 8, lambda c: c + x, w),
    ),
    "an effect": (lambda w, x: w + x, noted),
    "the order of writes": (
        functools.partial(written, "w", "x"),
        functools.partial(written, "x", "w"),
    ),
    "a read before and after a write": (
        lambda w, x: (written("w", "x", w, x)[0],) * 2,
        functools.partial(written, "w", "x"),
    ),
    "what a callback closes over": (closes_over(1), closes_over(2)),
    "a comparison in a sort": (
        lambda w, x: jax.lax.sort((w, x), num_keys=1),
        lambda w, x: jax.lax.sort((w, x), num_keys=2),
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", EQUAL)
def test_equal_programs(name):
    with jax.numpy_rank_promotion("allow"):
        first, second = numbers(*EQUAL[name])
    assert first == second


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_programs(name):
    with jax.numpy_rank_promotion("allow"):
        first, second = numbers(*DIFFERENT[name])
    assert first != second


# --- parameters in float32 and in half precision --------------------------------------


def as_float32(program):
    """Numbers a program with the parameter in float32."""
    table = Table(HALF)
    numbering = Numbering(table)
    number = table.parameter(0, W.shape)
    inputs = [Value(number, Digits.FLOAT32), Value(table.number("input", 1))]
    return table, numbering, numbering.run(jax.make_jaxpr(program)(W, X), inputs)


def as_half(table, program):
    """Numbers a program with the parameter in half precision."""
    numbering = Numbering(table, frozenset([0]))
    inputs = [Value(table.parameter(0, W.shape)), Value(table.number("input", 1))]
    closed = jax.make_jaxpr(program)(W.astype(HALF), X)
    return numbering.run(closed, inputs)


def cast(w):
    return jax.lax.convert_element_type(w, HALF)


def cast_up(w):
    return jax.lax.convert_element_type(w, jnp.float32)


def padded(x):
    return jax.lax.pad(x, np.asarray(0.5, x.dtype), [(1, 1, 0), (0, 0, 0)])


# What a program does to a float32 parameter, to one in half, and whether it is equal.
FORMS = {
    "cast": (cast, lambda h: h, True),
    "cast up and down": (cast, lambda h: cast(cast_up(h)), True),
    "moved before": (lambda w: cast(w.T), lambda h: h.T, True),
    "moved after": (lambda w: cast(w).T, lambda h: cast(cast_up(h).T), True),
    "moved in another way": (lambda w: cast(w.T), lambda h: h[::-1], False),
    "not moved": (lambda w: cast(w), lambda h: h.T, False),
    "padded": (
        lambda w: cast(padded(w)),
        lambda h: cast(padded(cast_up(h))),
        True,
    ),
    "in arithmetic": (lambda w: w + 1, lambda h: cast_up(h) + 1, False),
    "in arithmetic of halves": (lambda w: cast(w) + 1, lambda h: h + 1, True),
    "rounded behind arithmetic": (
        lambda w: cast(w + 1),
        lambda h: cast(cast_up(h) + 1),
        False,
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    float32, half, is_equal = FORMS[name]
    table, _, expected = as_float32(lambda w, x: float32(w))
    assert (as_half(table, lambda h, x: half(h)) == expected) == is_equal


def test_a_carry_is_read_unless_the_loop_keeps_it():
    def program(w, x):
        def step(carry, _):
            kept, changed = carry
            return (kept, changed + x), kept @ x

        return scan(step, (w, w))[1]

    _, numbering, _ = as_float32(program)
    assert 0 in numbering.unrounded
    _, numbering, _ = as_float32(lambda w, x: scan(lambda c, _: (c, cast(c)), w)[1])
    assert 0 in numbering.rounded and 0 not in numbering.unrounded
