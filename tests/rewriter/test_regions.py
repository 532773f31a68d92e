"""What is emitted: its size, its sums, what is rounded; a metric changes nothing."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from _programs import WITHIN, layer, norm, normal, over_devices, with_jvp, with_vjp
from benchmarks.matmuls import exact_matmuls
from flax_amp import amp, explain
from helpers import HALVES, MATMULS, equations, equations_of, jit, relative_error

SIZE = 8
W, X = normal(0, SIZE, SIZE), normal(1, SIZE, SIZE)

# --- the size of what is emitted ------------------------------------------------------


@jax.custom_vjp
def rounded(x):
    """Straight through."""
    return jnp.round(x * 16) / 16


rounded.defvjp(lambda x: (rounded(x), None), lambda _, ct: (ct,))


by_vjp, by_jvp = with_vjp(layer), with_jvp(layer)
LAYERS = {  # from the results of all former layers, and a weight
    "residual": lambda xs, w: xs[-1] + layer(w, xs[-1]),
    "straight through": lambda xs, w: layer(rounded(w), rounded(xs[-1])),
    "custom_vjp": lambda xs, w: by_vjp(w, xs[-1]),
    "custom_jvp": lambda xs, w: by_jvp(w, xs[-1]),
    "sum over all former layers": lambda xs, w: layer(w, sum(xs)),
}


def size(fn, layer, depth):
    """The number of equations of value and gradient."""

    def loss(w, x):
        xs = [x]
        for _ in range(depth):
            xs.append(layer(xs, w))
        return (xs[-1] ** 2).mean()

    traced = jax.make_jaxpr(jax.value_and_grad(fn(loss)))(W, X)
    return sum(1 for _ in equations(traced))


@pytest.mark.parametrize("name", LAYERS)
def test_the_program_grows_as_the_users_does(name):
    """What layers add is in proportion to what they add to the user's program."""
    layer, depths = LAYERS[name], (6, 12, 24)
    ours, plain = (
        np.diff([size(fn, layer, depth) for depth in depths])
        for fn in (amp, lambda fn: fn)
    )
    ratios = ours / plain
    assert ratios[1] <= 1.1 * ratios[0], ratios
    assert ratios.max() <= 4, ratios


def test_calls_within_calls_are_not_inlined():
    """Where each calls the next one twice, 2**40 matmuls would not end."""
    once = twice = jax.jit(layer)
    for _ in range(40):
        once = jax.jit(lambda w, x, f=once: f(w, x))
        twice = jax.jit(lambda w, x, f=twice: f(w, f(w, x)))
    jax.make_jaxpr(amp(twice))(W, X)
    jax.make_jaxpr(jax.grad(amp(lambda w, x: once(w, x).sum())))(W, X)


# --- what is rounded -----------------------------------------------------------------


SEEN = {  # of a carry, what was computed before the loop, and an argument
    "arithmetic": lambda c, h, w0: jnp.sin(h),
    "matmul": lambda c, h, w0: jax.nn.softmax(c @ h) @ h,
    "a weight": lambda c, h, w0: jnp.ones_like(h) @ w0,
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", SEEN)
def test_a_scan_adds_up_the_cotangents_of_what_it_closes_over(name, dtype):
    """In float32: a half would lose the small terms of many steps."""
    steps, (w0, w, x) = 512, normal(0, 3, 16, 16) / 4

    def loss(w0):
        h = x @ w0

        def step(c, _):
            return c + (jnp.tanh(c @ w) * 0.1 + SEEN[name](c, h, w0)) / steps, None

        return (lax.scan(step, jnp.zeros_like(h), length=steps)[0] ** 2).mean()

    lowered = amp(loss, compute_dtype=dtype)
    actual, expected = (jit(jax.grad(f))(w0) for f in (lowered, loss))
    assert relative_error(actual, expected) < 0.012


@pytest.mark.parametrize("last", [lambda x: x + 64.0 / (1 + x * x), None])
def test_what_is_no_small_step_is_rounded(last):
    """A numerator is no factor, and one small step says nothing of those before."""

    def loss(ws, x):
        for w in ws:
            x = x + jnp.tanh(x @ w)
        x = last(x) if last else x + 0.01 * jnp.sin(x)
        return (x @ ws[0]).sum()

    args = [jnp.eye(4)] * 3, jnp.ones((2, 4))
    halves = equations_of(amp(loss), *args, primitive="flax_amp_stored")
    adds = [v.aval for eqn in halves for v in eqn.outvars if v.aval.shape == (2, 4)]
    assert {aval.dtype.name for aval in adds} == {"bfloat16"}


@pytest.mark.parametrize("size", [32, 33])
def test_a_mean_with_its_axes_kept_is_no_small_step(size):
    """The sum is broadcast before it is divided, by more than 32 at one size."""

    def loss(w, x):
        m = jnp.mean(x @ w, 0, keepdims=True) + 1.0
        return (((m @ w) * m) ** 2).mean()

    found = explain(loss)(jnp.ones((4, 4)), jnp.ones((size, 4)))
    (row,) = (row for row in found.equations if row.primitive == "add")
    assert row.result.startswith("rounded"), row


# --- what is logged changes nothing else ---------------------------------------------


def metrics(x):
    """What people log, of a flat array: no equation is then like one of a program."""
    x = lax.stop_gradient(x).ravel()
    entropy = -jnp.sum(jnp.abs(x) * jnp.log(jnp.abs(x) + 1e-9))
    return entropy, jnp.std(x) / (x.max() - x.min() + 1e-6), jnp.mean(x < 0.05)


def straight(w, x, log=lambda x: ()):
    y = x @ w
    p = jax.nn.softmax(norm(y))
    z = jnp.tanh(p @ w)
    return jnp.mean((z @ w) ** 2), [log(v) for v in (y, p, z)]


def recurrence(w, x, log=lambda x: ()):
    """A gated unit that may log in its loop."""

    def step(h, x):
        gate = jax.nn.sigmoid(x @ w + h @ w)
        h = (1 - gate) * h + gate * jnp.tanh(x @ w)
        return h, (h, log(gate), log(h))

    _, (hs, *logs) = lax.scan(step, jnp.zeros(w.shape[:1]), x)
    return jnp.mean((hs @ w) ** 2), logs


def matmuls(fn, args):
    """Counts the matmuls of a program by the types of operands and results."""
    found = equations_of(fn, *args, primitive=MATMULS)
    return Counter(
        tuple(str(v.aval) for v in (*eqn.invars, *eqn.outvars)) for eqn in found
    )


@pytest.mark.parametrize("loss", [straight, recurrence])
def test_a_metric_changes_neither_matmuls_nor_gradients(loss):
    gradient = functools.partial(jax.grad, has_aux=True)
    plain = gradient(amp(loss))
    with_metrics = gradient(amp(functools.partial(loss, log=metrics)))
    assert not matmuls(plain, (W, X)) - matmuls(with_metrics, (W, X))
    expected, alone, beside = (
        jit(fn)(W, X)[0] for fn in (gradient(loss), plain, with_metrics)
    )
    alone, beside = (relative_error(found, expected) for found in (alone, beside))
    assert beside < 1.2 * alone + jnp.finfo(jnp.bfloat16).eps


# --- gathers: what they read is exact, and their gradients are summed in float32 ------

NODES, EDGES = 4, 2048
SCALE = 2.0**10  # for float16
ROWS = normal(0, NODES, NODES) / 2, normal(2, NODES, NODES)
SENDERS = jnp.zeros(EDGES, jnp.int32)  # all edges at one node


def by_slices(h, senders):
    def body(c, i):
        return c, jax.jit(lambda h: lax.dynamic_slice_in_dim(h, i, 1)[0])(h)

    return lax.scan(body, 0.0, senders)[1]


READS = {  # of rows
    "index": lambda h, i: h[i],
    "get": lambda h, i: h.at[i].get(mode="fill", fill_value=0.0),
    "scan": lambda h, i: lax.scan(lambda c, i: (c, h[i]), 0.0, i)[1],
    "scan_slice": by_slices,
    "map": lambda h, i: lax.map(lambda i: h[i], i),
}
OPERANDS = {
    "half": lambda w, x: x @ w,
    "elementwise": lambda w, x: jnp.tanh(x @ w) * x,
    "argument": lambda w, x: x * w,
}


def network(read, operand=OPERANDS["half"]):
    def fn(w, x):
        return jnp.mean(jnp.tanh(read(operand(w, x), SENDERS) @ w) ** 2)

    return fn


AROUND = ("scan", "cond", "vmap", "custom_jvp")
CASES = {name: network(read) for name, read in READS.items()}
CASES |= {name: network(READS["index"], OPERANDS[name]) for name in OPERANDS}
CASES |= {f"in {name}": WITHIN[name](network(READS["index"])) for name in AROUND}


@pytest.mark.parametrize("name", CASES)
def test_cotangents_are_summed_in_float32(name):
    """Whatever reads in parts, whatever is read, and inside of each primitive."""
    fn, dtype = CASES[name], HALVES[len(name) % 2]
    lowered = amp(fn, compute_dtype=dtype)
    sums = equations_of(jax.grad(lowered, (0, 1)), *ROWS, primitive="scatter-add")
    assert {str(e.outvars[0].aval.dtype) for e in sums} <= {"float32"}

    def scaled(f):
        # XLA for the CPU adds up some matmuls of halves in half.
        grad = jax.grad(lambda *a: SCALE * f(*a), (0, 1))
        return jit(exact_matmuls(grad))(*ROWS)

    assert relative_error(scaled(lowered), scaled(fn)) < 0.03


TABLE, INDICES = normal(3, 6, 3), jnp.array([[1, 1, 4], [5, 9, -1]])


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_table_per_device(check_vma):
    """Zeros are the same on all devices; what is added to them is not."""
    tables = jnp.concatenate([TABLE * (1 + k) for k in range(8)])

    def loss(table):
        return jnp.sum((table.at[INDICES % 6].get() @ (jnp.eye(3) / 2)) ** 2)

    def gradient(fn):
        options = dict(in_specs=P("data"), check_vma=check_vma)
        return jit(over_devices(jax.grad(fn), **options))(tables)

    assert relative_error(gradient(amp(loss)), gradient(loss)) < 4e-3
