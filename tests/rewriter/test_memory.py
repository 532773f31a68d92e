"""`recompute`: which values are stored; nothing expensive twice, no other result."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from _programs import (
    loss_of,
    norm,
    normal,
    over_devices,
)
from flax_amp import (
    AmpTrainState,
    amp,
    default_amp_policy,
    graph_policy,
    make_eval_step,
    use_compute_precision,
)
from helpers import (
    MATMULS,
    assert_same_avals,
    barriers,
    equations,
    equations_of,
    exact_jit,
    relative_error,
)

# --- a small transformer, in every context -------------------------------------------

MODES = (False, True)  # of `recompute`
SIZE, LENGTH, BATCH = 8, 4, 8


def block(p, x):
    q, k, v = jnp.split(norm(x) @ p["qkv"], 3, axis=-1)
    x = x + jax.nn.softmax(q @ k.mT) @ v @ p["out"]
    return x + jax.nn.gelu(norm(x) @ p["up"] + p["bias"][None, None]) @ p["down"]


def weights(layers=2, size=SIZE):
    square = normal(0, layers, 4 * size, size) * 0.3
    return {
        "qkv": square[:, : 3 * size].mT,
        "out": square[:, 3 * size :],
        "up": square.mT,
        "bias": square[..., 0],
        "down": square[:, ::-1],
    }


def inputs(batch=BATCH, length=LENGTH, size=SIZE):
    return normal(7, batch, length, size)


def layer(p, i):
    return jax.tree.map(lambda w: w[i], p)


def unrolled(p, x, body=block):
    for i in range(len(p["bias"])):
        x = body(layer(p, i), x)
    return jnp.mean(x**2)


def scanned(p, x):
    x = x @ p["out"][0]  # a stream begins behind a matmul
    return jnp.mean(lax.scan(lambda x, p: (block(p, x), None), x, p)[0] ** 2)


def sharded(p, x):
    run = over_devices(lambda p, x: block(layer(p, 0), x), (P(), P("data")))
    return jnp.mean(run(p, x) ** 2)


CONTEXTS = {
    "straight": unrolled,
    "scan": scanned,
    "jit": lambda p, x: unrolled(p, x, jax.jit(block)),
    "shard_map": sharded,
}


def keeps(fn, *args):
    """The marks of what is stored."""
    return equations_of(fn, *args, primitive="flax_amp_stored")


W, X = weights()["out"][0], inputs()[0]


def test_nothing_expensive_twice():
    """A gradient has as many expensive equations as one that stores everything."""

    def dropout(p, x):
        keep_mask = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
        return scanned(p, jnp.where(keep_mask, x / 0.5, 0))

    def found(mode):
        grad = jax.grad(amp(dropout, recompute=mode))
        names = (*MATMULS, "random_bits", "threefry2x32", "random_wrap")
        eqns = equations_of(grad, weights(), inputs(), primitive=names)
        return collections.Counter(eqn.primitive.name for eqn in eqns)

    assert len(found(False)) == 2
    assert found(True) == found(False)


def test_effects_run_once_and_in_order():
    """Callbacks between regions run once each, as they stand in the program."""
    seen = []

    def call(i, x):
        jax.debug.callback(lambda _: seen.append(i), x, ordered=True)

    def loss(w, x):
        for i in range(3):
            x = norm(jnp.tanh(x @ w)) * 2
            call(i, x)
        call(3, lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 2)[0])
        call(4, w)  # which needs nothing of the others
        return jnp.sum(x**2)

    jax.block_until_ready(exact_jit(jax.grad(amp(loss)))(W, X))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3, 4]


def test_a_jitted_block_is_traced_once(count_traces):
    """A jitted block that is called 24 times has few bodies."""
    body, traces = count_traces(block)
    jitted = jax.jit(body)

    def loss(p, x):
        for _ in range(24):
            x = jitted(layer(p, 0), x)
        return x.sum()

    jaxpr = jax.make_jaxpr(amp(loss))(weights(), inputs())
    calls = [e for _, e in equations(jaxpr) if e.params.get("name") == "counted"]
    # The first takes a float32 argument; how the last are read depends on what follows.
    assert len(calls) == 24
    assert len({id(e.params["jaxpr"]) for e in calls}) <= 4
    assert traces() == 1


# --- memory --------------------------------------------------------------------------

LARGE = {"batch": 16, "length": 32, "size": 64}


def residuals(fn, p, x):
    """The avals of what the backward pass of `fn` reads, arguments left out."""
    _, pullback = jax.eval_shape(functools.partial(jax.vjp, fn), p, x)
    arguments = {(a.shape, a.dtype) for a in jax.tree.leaves((p, x))}
    leaves = jax.tree.leaves(pullback)
    return [a for a in leaves if (a.shape, a.dtype) not in arguments]


def stored_in(name, recompute):
    """The stored avals of a context; with `recompute=False` nothing is marked."""
    fn = amp(CONTEXTS[name], recompute=recompute)
    args = weights(2, LARGE["size"]), inputs(**LARGE)
    assert bool(keeps(fn, *args)) == recompute
    return residuals(fn, *args)


@pytest.mark.parametrize("name", CONTEXTS)
def test_memory(name):
    """Much less is stored, everywhere.

    Out of loops travel activations in half precision and small statistics.
    """
    never, found = (stored_in(name, mode) for mode in MODES)
    bytes_of = lambda avals: sum(a.size * a.dtype.itemsize for a in avals)  # noqa: E731
    assert bytes_of(found) < 0.7 * bytes_of(never)
    if name == "scan":
        size = math.prod(LARGE.values())
        full = [a for a in found if a.dtype == jnp.float32 and a.ndim > 1]
        assert all(math.prod(a.shape[1:]) < size for a in full), full
        assert any(a.dtype == jnp.bfloat16 and a.size >= 2 * size for a in found)


def test_a_relu_is_stored_once():
    """Its derivative reads its result in half precision, and no mask."""

    def fn(stack, x):
        for w in stack:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x @ stack[0])

    stack, x = normal(3, 3, 8, 8), normal(4, 16, 8)
    found = [a for a in residuals(amp(fn), stack, x) if a.shape == (16, 8)]
    assert [a.dtype for a in found] == [jnp.bfloat16] * 3


def test_an_evaluation_step_stores_nothing():
    def predict(params, x):
        return block(layer(params, 0), x)

    step = make_eval_step(predict)
    state = AmpTrainState.create(params=weights(), tx=optax.sgd(0.1))
    assert keeps(amp(predict), weights(), inputs())
    assert not keeps(step, state, inputs())


# --- values of every dtype between what is computed again -----------------------------

ARGS = normal(0, 4, 4) * 0.4, normal(0, 8, 4)


def fourier(w, x):
    """A layer of a Fourier neural operator: complex weights for each frequency."""
    spectrum = jnp.fft.rfft(x, axis=0) @ lax.complex(w, 2 * w)
    return jax.nn.gelu(x @ w + jnp.fft.irfft(jnp.tanh(spectrum), len(x), axis=0)) @ w


def keys(w, x):
    h = jax.nn.gelu(x @ w)
    number = lax.stop_gradient(h).sum().astype(jnp.int32)
    pair = jax.random.split(jax.random.fold_in(jax.random.key(0), number))
    key = jnp.where(h[0, 0] > 0, pair[0], pair[1])
    return jnp.sin(h @ w * jax.random.normal(key, h.shape))


def doubles(w, x):
    h = jax.nn.gelu(x @ w).astype("float64")
    return (jnp.sin(h) * jnp.exp(h)).astype(jnp.float32) @ w


@pytest.mark.parametrize("program", [fourier, keys, doubles])
def test_other_dtypes(program):
    """Both modes give the same, of the same types."""
    loss, results = loss_of(program), []
    with jax.enable_x64(program is doubles):
        for mode in MODES:
            gradient = jax.value_and_grad(amp(loss, recompute=mode), (0, 1))
            results.append(exact_jit(gradient)(*ARGS))
        assert_same_avals(
            results[0], jax.eval_shape(jax.value_and_grad(loss, (0, 1)), *ARGS)
        )
    never, found = results
    assert relative_error(found, never) < 1e-5


def test_a_callback_runs_once():
    """Also inside of what the backward pass would compute again."""
    calls = []

    def host(a):
        calls.append(1)
        return a

    def identity(a):
        return jax.pure_callback(host, jax.ShapeDtypeStruct(a.shape, a.dtype), a)

    called = jax.custom_jvp(identity)
    called.defjvp(lambda p, t: (called(*p), jnp.cos(p[0]) * t[0]))
    fn = lambda a: lax.cond(a.sum() > -1e9, called, jnp.sin, a)  # noqa: E731
    grad = jax.grad(amp(lambda w: jnp.mean(jnp.tanh(fn(w @ w)) @ w)))
    jax.block_until_ready(jax.jit(grad)(W))
    assert len(calls) == 1


# --- barriers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss, recompute", [(unrolled, True), (scanned, True), (unrolled, False)]
)
def test_barriers_of_a_model(loss, recompute):
    """On accelerators in straight code; none in loops and in forward passes.

    On TPUs there is one behind each maximum of a forward pass, too.
    """
    args = weights(), inputs()
    fn = amp(loss, recompute=recompute)
    of_forward, of_gradient = barriers(fn, *args), barriers(jax.grad(fn), *args)
    maxima = {"unrolled": 2, "scanned": 1}[loss.__name__] if recompute else 0
    assert of_forward == {"cpu": 0, "cuda": 0, "rocm": 0, "tpu": maxima}
    found = {p for p, count in of_gradient.items() if count > of_forward[p]}
    is_straight = recompute and loss is unrolled
    assert found == ({"cuda", "rocm", "tpu"} if is_straight else set())


# --- lookups -------------------------------------------------------------------------

SENDERS, RECEIVERS = jnp.arange(12) % 4, jnp.arange(12) % 3


def messages(w, x):
    h = jnp.tanh(x @ w)[SENDERS]
    h = jax.ops.segment_sum(jnp.tanh(h @ w), RECEIVERS, 4)
    return jnp.mean((h @ w) ** 2)


@pytest.mark.parametrize("policy", [default_amp_policy, graph_policy])
def test_lookups_are_computed_again(policy):
    """The rows that edges take of the nodes are no part of what is stored."""
    grad = jax.grad(amp(messages, amp_policy=policy))
    stored = {eqn.invars[0].aval.shape for eqn in keeps(grad, W, X)}
    assert (4, SIZE) in stored
    gathers = [
        eqn
        for eqn in equations_of(grad, W, X, primitive="gather")
        if eqn.invars[0].aval.shape == (4, SIZE)
    ]
    assert len(gathers) == 3  # forward, again, and the derivative of the sum


def test_few_rows_of_a_large_array_are_stored():
    """Such as the masked tokens of a text, for a head."""

    def fn(w, x):
        h = jnp.tanh(x @ w) @ w
        return jnp.mean((jnp.tanh(h[jnp.arange(3)] @ w) @ w) ** 2)

    x = normal(4, 64, SIZE)
    stored = {eqn.invars[0].aval.shape for eqn in keeps(jax.grad(amp(fn)), W, x)}
    assert (3, SIZE) in stored
    assert len(equations_of(jax.grad(amp(fn)), W, x, primitive="gather")) == 1


def test_rows_of_a_table_are_stored():
    """A lookup in an argument is not repeated: the table would be cast again."""

    def fn(table, w):
        return jnp.mean((jnp.tanh(table[jnp.arange(64) % 4] @ w) @ w) ** 2)

    policy = default_amp_policy | {lax.gather_p: use_compute_precision}
    grad = jax.grad(amp(fn, amp_policy=policy), (0, 1))
    assert len(equations_of(grad, normal(4, 4, SIZE), W, primitive="gather")) == 1


def test_a_maximum_is_found_in_a_scan():
    """Its derivative compares it with the array from which it was computed again."""

    def loss(w, x):
        s = jnp.tanh(x @ w) * 3
        least = jnp.min(jnp.sin(s), 0, keepdims=True)
        return jnp.mean((jnp.tanh(s - least) @ w) ** 2)

    def scan(fn):
        return lambda w, x: lax.scan(
            lambda c, x: (c + fn(w, x), None), 0.0, jnp.stack([x, 2 * x])
        )[0]

    grad = exact_jit(jax.grad(scan(amp(loss))))
    assert relative_error(grad(W, X), jax.grad(scan(loss))(W, X)) < 0.02
    # JAX 0.12 alone computed the array again with other bits.
    reductions = equations_of(jax.grad(amp(loss)), W, X, primitive="reduce_min")
    assert len(reductions) == 2
