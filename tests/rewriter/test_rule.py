"""What is emitted: its size, its sums, what is rounded; a metric changes nothing."""

import functools
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from _programs import WITHIN, layer, norm, normal, over_devices, with_jvp, with_vjp
from benchmarks.matmuls import exact_matmuls
from flax_amp import amp, default_amp_policy, explain, use_compute_precision
from helpers import (
    HALVES,
    MATMULS,
    equations,
    equations_of,
    jit,
    relative_error,
    run_all,
)

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
    layer, depths = LAYERS[name], (3, 6, 12)
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


# bfloat16 loses more terms than float16: each name has it, and one name has float16.
@pytest.mark.parametrize(
    "name, dtype", [*((name, jnp.bfloat16) for name in SEEN), ("matmul", jnp.float16)]
)
def test_a_scan_adds_up_the_cotangents_of_what_it_closes_over(name, dtype):
    """In float32: a half would lose the small terms of many steps."""
    steps, (w0, w, x) = 512, normal(0, 3, 16, 16) / 4

    def loss(w0):
        h = x @ w0

        def step(c, _):
            return c + (jnp.tanh(c @ w) * 0.1 + SEEN[name](c, h, w0)) / steps, None

        return (lax.scan(step, jnp.zeros_like(h), length=steps)[0] ** 2).mean()

    lowered = amp(loss, compute_dtype=dtype)
    actual, expected = run_all(jax.grad(lowered), jax.grad(loss))(w0)
    assert relative_error(actual, expected) < 0.012


@pytest.mark.parametrize("last", [lambda x: x + 64.0 / (1 + x * x), None])
def test_a_residual_stream_is_rounded_whatever_its_last_term(last):
    """The last term is a large numerator, or a small part of the stream's sine."""

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
def test_a_mean_with_its_axes_kept_is_no_state(size):
    """The sum is broadcast before it is divided, by 32 or by 33."""

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
    found = run_all(gradient(loss), plain, with_metrics)(W, X)
    expected, alone, beside = (gradients for gradients, _ in found)
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
CASES |= {
    name: network(READS["index"], operand)
    for name, operand in OPERANDS.items()
    if name != "half"  # which each read has
}
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
        return exact_matmuls(jax.grad(lambda *a: SCALE * f(*a), (0, 1)))

    assert relative_error(*run_all(scaled(lowered), scaled(fn))(*ROWS)) < 0.03


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


# --- what decides no dtype -----------------------------------------------------------


@pytest.mark.parametrize("count", [62, 66, 200])
def test_the_size_of_a_jitted_function_decides_no_dtype(count):
    """It is written out in its place, whatever its size."""

    def moves(y, bias):
        y = y + bias
        for i in range(count):
            y = lax.rev(y, (i % 2,))
        return y

    def fn(run, w, x, bias):
        return run(x @ w, bias) @ w

    def found(run):
        lowered = amp(functools.partial(fn, run), recompute=False)
        eqns = equations_of(lowered, W, X, W[:1], primitive=("rev", "add"))
        return [[v.aval.dtype.name for v in eqn.invars] for eqn in eqns]

    assert found(jax.jit(moves)) == found(moves)
    assert {dtype for pair in found(moves) for dtype in pair} == {"bfloat16"}


def test_the_plan_is_asserted():
    """A wrong plan is an error at trace time, and no wrong dtype."""

    def lies(compute_dtype, original_dtypes, *invars, **params):
        calls.append(0)
        dtype = compute_dtype if len(calls) < 2 else jnp.float32
        return [x.astype(dtype) for x in invars], params

    calls = []
    policy = default_amp_policy | {lax.tanh_p: lies}
    with pytest.raises(
        AssertionError, match=r"tanh .* gave float32; expected bfloat16"
    ):
        jax.make_jaxpr(amp(lambda w, x: jnp.tanh(x @ w) @ w, amp_policy=policy))(W, X)


# --- keys for sums at indices --------------------------------------------------------

SCATTERS = {
    "scatter_add": lambda h, i: jnp.zeros_like(h).at[i].add(h),
    "scatter_mul": lambda h, i: jnp.ones_like(h).at[2 * i].mul(h, unique_indices=True),
    "scatter_max": lambda h, i: jnp.zeros_like(h).at[i].max(h),
    "scatter_min": lambda h, i: jnp.zeros_like(h).at[i].min(h),
}


@pytest.mark.parametrize("key", ["primitive", "scope"])
@pytest.mark.parametrize("name", SCATTERS)
def test_a_key_for_a_scatter_has_an_effect(name, key):
    index = jnp.arange(SIZE) // 2

    def loss(w, x):
        h = jnp.tanh(x @ w)
        with jax.named_scope("add_up"):
            h = SCATTERS[name](h, index)
        return jnp.sum((h @ w) ** 2)

    primitive = getattr(lax, f"{name}_p")
    entry = {primitive: use_compute_precision, "add_up": jnp.bfloat16}
    policy = {k: v for k, v in entry.items() if (k == "add_up") == (key == "scope")}
    lowered = amp(loss, amp_policy=default_amp_policy | policy)
    (eqn,) = equations_of(lowered, W, X, primitive=primitive.name)
    dtypes = {v.aval.dtype.name for v in (eqn.invars[0], *eqn.outvars)}
    assert dtypes == {"bfloat16"}
    got, exact = run_all(jax.grad(lowered), jax.grad(loss))(W, X)
    assert relative_error(got, exact) < 0.05


# --- found by readers ----------------------------------------------------------------


@pytest.mark.parametrize("key", ["s", lax.iota_p])
def test_a_key_for_an_equation_without_operands(key):
    def fn(x):
        with jax.named_scope("s"):
            return jnp.sum(jnp.arange(8.0) * jnp.abs(x))

    policy = default_amp_policy | {key: jnp.bfloat16}
    lowered = amp(lambda w, x: fn((x @ w)[0]), amp_policy=policy)
    assert relative_error(lowered(W, X), fn((X @ W)[0])) < 0.05


def test_calls_of_calls_in_a_scan_take_no_exponential_time():
    function = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
    for _ in range(30):
        function = jax.jit(lambda x, w, f=function: f(f(x, w), w))

    def loss(w, x):
        return lax.scan(lambda c, w: (function(c, w), None), x @ w[0], w)[0].sum()

    jax.make_jaxpr(amp(loss, recompute=False))(jnp.stack([W, W]), X)


def masked(y):
    return jnp.where(y > 0, y, -1e9)


IN_A_SCOPE = {
    "a mask": masked,
    "a comparison": lambda y: y * (y > 0),
    "a variance": jnp.var,
    "pad": lambda y: jnp.pad(y, 1),
    "dropout": lambda y: jax.random.bernoulli(jax.random.key(0), 0.5, y.shape) * y,
    "a quantile": lambda y: jnp.quantile(y, 0.3),
    "an index": lambda y: y[jnp.arange(4)],
    "linspace": lambda y: jnp.linspace(0.0, 1.0, SIZE)[None] * y,
    "segments": lambda y: jax.ops.segment_sum(y, jnp.arange(SIZE) // 2, 4),
    "clamp": lambda y: lax.clamp(0.0, y, 1.0),
    "a loop": lambda y: lax.fori_loop(0, 2, lambda i, y: 0.5 * y + i, y),
}


@pytest.mark.parametrize("name", IN_A_SCOPE)
def test_a_scope_in_a_dtype(name):
    """What has its dtype among its parameters, or a number as an operand."""

    def fn(w, x):
        with jax.named_scope("a"):
            return jnp.tanh(IN_A_SCOPE[name](x @ w))

    # In the dtype of the matmuls, and in a third one.
    fns = [
        amp(fn, amp_policy=default_amp_policy | {"a": dtype}, recompute=recompute)
        for dtype, recompute in itertools.product(HALVES, (True, False))
    ]
    for got in run_all(*fns)(W, X):
        assert got.dtype == jnp.float32
        assert bool(jnp.isfinite(got).all())


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_sum_over_devices_in_a_third_dtype(check_vma):
    """Where it is planned, the axis of the mesh has no name."""

    def fn(w, x):
        with jax.named_scope("a"):
            return lax.psum(jnp.tanh(x @ w), "data")

    specs = (P(), P("data"))
    run = over_devices(fn, specs, out_specs=P(), check_vma=check_vma)
    policy = default_amp_policy | {"a": jnp.float16}
    got = jit(amp(run, amp_policy=policy))(W, X)
    assert relative_error(got, run(W, X)) < 0.05
