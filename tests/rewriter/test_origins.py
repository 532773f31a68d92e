"""States: sums that begin at data, or that pass the same weights again.

A state is float32 in every transform. What looks like one and is none (a residual
stream, a bias) is half on its way to a matmul.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import flax_amp
from _programs import normal, with_jvp, with_vjp
from benchmarks.matmuls import cast_matmuls, exact_matmuls
from flax_amp import amp
from flax_amp._rewriter.origins import Origin, RootMap
from helpers import exact_jit, relative_error

# The plan is made of jaxprs, which hardly differ between the versions of JAX.
pytestmark = pytest.mark.once

ROWS, SIZE, LAYERS = 4, 8, 3
STACKS = [normal(20 + seed, LAYERS, SIZE, SIZE) * 0.3 for seed in range(3)]
FIRST, LAST = normal(1, SIZE, SIZE) * 0.3, normal(2, SIZE, SIZE) * 0.3
X, TIMES = normal(3, ROWS, SIZE), normal(4, LAYERS, ROWS, SIZE)
BIASES = normal(5, LAYERS, SIZE)
POSITIONS = jnp.broadcast_to(400 + 2 * jnp.arange(float(SIZE)), (ROWS, SIZE))
ORDER = jnp.array([2, 0, 3, 1])
tanh = jnp.tanh


def attention(x, q, k, v):
    return jax.nn.softmax((x @ q) @ (x @ k).T) @ (x @ v)


# A step `x, u, v, w, b, t -> x`, with weights, a bias and data of each step, and where
# the first `x` comes from.
BEGIN_AT_DATA = {
    "an argument": (lambda x, u, *_: x + tanh(x @ u), lambda x: x),
    "scaled": (lambda x, u, *_: x + 0.05 * tanh(x @ u), lambda x: 3 * x - 1),
    "positions": (lambda x, u, *_: x + jnp.sin(x) @ u, lambda x: POSITIONS),
    "an iota": (
        lambda x, u, *_: x + jnp.sin(x) @ u,
        lambda x: 4 * lax.broadcasted_iota(jnp.float32, x.shape, 1),
    ),
    "zeros": (lambda x, u, *_: x + tanh(x @ u + 1), jnp.zeros_like),
    "subtracted": (lambda x, u, *_: x - 0.1 * (x @ u) @ u.T, lambda x: x),
    "clipped": (lambda x, u, *_: jnp.clip(x + x @ u, -9, 9), lambda x: x),
    "moved": (lambda x, u, *_: (x.T + (x @ u).T).T, lambda x: x),
    "at indices": (lambda x, u, *_: x.at[:, :4].add((x @ u)[:, :4]), lambda x: x),
    "permuted": (lambda x, u, *_: (x + x @ u)[ORDER], lambda x: x),
    "sorted": (lambda x, u, *_: jnp.sort(x + x @ u, axis=0), lambda x: x),
    "periodic": (lambda x, u, *_: jnp.mod(x + x @ u, 7.0), lambda x: x),
    "a part": (
        lambda x, u, *_: jnp.concatenate([x[:, :2] + (x @ u)[:, :2], x[:, 2:]], 1),
        lambda x: x,
    ),
}
SAME_WEIGHTS = {  # the same `u`, `v` and `w` in each step
    "shared": lambda x, u, v, w, b, t: x + tanh(x @ u),
    "own scale": lambda x, u, v, w, b, t: x + b[None] * tanh(x @ u),
    "data of each step": lambda x, u, v, w, b, t: x + tanh(x @ u + t @ v),
    "attention": lambda x, u, v, w, b, t: x + attention(x, u, v, w),
    "normed weights": lambda x, u, v, w, b, t: x + x @ (u / jnp.linalg.norm(u)),
    "a jit": lambda x, u, v, w, b, t: x + jax.jit(lambda x, u: tanh(x @ u))(x, u),
    "a checkpoint": lambda x, u, v, w, b, t: (
        x + jax.checkpoint(lambda x, u: tanh(x @ u))(x, u)
    ),
    "a scan": lambda x, u, v, w, b, t: (
        x + lax.scan(lambda c, _: (tanh(c @ u), None), x, None, length=2)[0]
    ),
}
STREAMS = {  # weights of each step
    "own": lambda x, u, v, w, b, t: x + tanh(x @ u),
    "two": lambda x, u, v, w, b, t: x + jax.nn.relu(x @ u + b[None]) @ v,
    "attention": lambda x, u, v, w, b, t: x + attention(x, u, v, w),
    "normed weights": lambda x, u, v, w, b, t: x + x @ (u / jnp.linalg.norm(u)),
    "low rank": lambda x, u, v, w, b, t: x + (x @ FIRST) @ (w + u[:, :2] @ v[:2]),
    "taken": lambda x, u, v, w, b, t: x + tanh(x @ jnp.take(u[None], 0, axis=0)),
    "a jit": lambda x, u, v, w, b, t: x + jax.jit(lambda x, u: tanh(x @ u))(x, u),
    "a checkpoint": lambda x, u, v, w, b, t: (
        x + jax.checkpoint(lambda x, u: tanh(x @ u))(x, u)
    ),
    "a part inside": lambda x, u, v, w, b, t: (
        x + jax.checkpoint(lambda x, u: tanh(x @ u[0]))(x, u[None])
    ),
    "a scan": lambda x, u, v, w, b, t: (
        x + lax.scan(lambda c, u: (tanh(c @ u), None), x, jnp.stack([u, v]))[0]
    ),
    "a bias": lambda x, u, v, w, b, t: x @ u + b[None],
}
# The bias does not begin what it is added to, though that depends on it in later steps.
BIAS = normal(8, SIZE)
SAME_BIAS = {
    "own weights": lambda x, u, v, w, b, t: x @ u + BIAS[None],
    "activations": lambda x, u, v, w, b, t: tanh(x @ u + BIAS[None]),
}


def network(step, first, around=lambda f: f, is_shared=False):
    def fn(weights, x):
        x = first(x)
        for i in range(LAYERS):
            k = 0 if is_shared else i
            own = (stack[k] for stack in weights)
            x = around(step)(x, *own, BIASES[i], TIMES[i])
        return jnp.sum((x @ LAST) ** 2)

    return fn


def sums_of(fn):
    """What became of each sum of two arrays, by `explain`."""
    rows = flax_amp.explain(fn, backward=False)(STACKS, X).equations
    names = ("add", "sub", "scatter-add")
    return [row.result for row in rows if row.primitive in names and row.result]


AROUND = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: (
        lambda x, *rest: lax.cond(x[0, 0] < 99, f, lambda x, *_: -x, x, *rest)
    ),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "checkpoint of a jit": lambda f: jax.checkpoint(jax.jit(f)),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", BEGIN_AT_DATA)
def test_sums_that_begin_at_data_are_states(name, around):
    step, first = BEGIN_AT_DATA[name]
    found = sums_of(network(step, first, AROUND[around]))
    assert found.count("float32: a state that begins at data") >= LAYERS


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", SAME_WEIGHTS)
def test_sums_that_pass_the_same_weights_again_are_states(name, around):
    step, around = SAME_WEIGHTS[name], AROUND[around]
    found = sums_of(network(step, lambda x: x @ FIRST, around, is_shared=True))
    asked = "float32: a state that passes the same weights again"
    # In a body, the first sum is float32 because it is handed out so.
    assert found.count(asked) >= LAYERS - 1
    assert not [result for result in found if result.startswith("rounded")]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", {**STREAMS, **SAME_BIAS})
def test_streams_and_biases_are_no_states(name, around):
    step = {**STREAMS, **SAME_BIAS}[name]
    found = sums_of(network(step, lambda x: x @ FIRST, AROUND[around]))
    assert not [result for result in found if "state that" in result]


@pytest.mark.parametrize("part", [lambda w, i: w[i], lambda w, i: jnp.take(w, i, 0)])
def test_parts_of_a_computed_array_are_weights_of_their_own(part):
    """Weights may be scaled or averaged before they are taken apart."""

    def fn(weights, x):
        stack, x = 0.5 * weights[0] + 0.1, x @ FIRST
        for i in range(LAYERS):
            x = x + tanh((x @ part(stack, i)) @ part(stack + 1, i))
        return jnp.sum((x @ LAST) ** 2)

    assert not [result for result in sums_of(fn) if "state that" in result]


def test_a_body_is_planned_once_for_all_layers():
    """Roots that a body cannot tell apart are one root for it."""
    stream = Origin(after_matmul=True, reads=0b0111, weights=0b0110)
    later = Origin(after_matmul=True, reads=0b1111111, weights=0b1111110)
    own = [Origin(is_argument=True, begins_at=x, reads=x) for x in (1 << 3, 1 << 9)]
    first, second = (
        RootMap(pair, lambda: 1 << 20) for pair in ([stream, own[0]], [later, own[1]])
    )
    assert first.body_origins == second.body_origins
    known = [origin.mapped(second.to_program) for origin in second.body_origins]
    assert known == [later, own[1]]
    weight = Origin(is_argument=True, begins_at=0b10, reads=0b10)
    shared = RootMap([later, weight], lambda: 1 << 20)
    assert shared.body_origins != first.body_origins


# --- numbers: beside a program that casts matmuls only -------------------------------

PIXELS, DRAWS = 64, 4
GRID = jnp.broadcast_to(8 * jnp.arange(float(PIXELS)), (8, PIXELS))


def refined(first):
    """Coordinates that a head refines, as in RAFT and DETR."""

    def loss(p, features, target):
        c = start = first(features)
        for _ in range(4):
            rows = [features, jnp.sin(c)[..., None], ((c - start) / 4)[..., None]]
            hidden = jax.nn.relu(jnp.concatenate(rows, -1) @ p["a"])
            c = c + (hidden @ p["b"])[..., 0] * 4
        return jnp.mean((c - start - target) ** 2)

    def draw(seed):
        p = {"a": normal(seed, 8, 32) * 0.4, "b": normal(seed + 1, 32, 1) * 0.3}
        return p, normal(seed + 2, 8, PIXELS, 6), normal(seed + 3, 8, PIXELS)

    return loss, draw


def couplings(weights, x):
    """A normalizing flow."""
    a, b = jnp.split(x, 2, -1)
    log = 0.0
    for w in weights:
        s, t = jnp.split(tanh(a) @ w, 2, -1)
        a, b = b * jnp.exp(tanh(s)) + t, a
        log += tanh(s).sum(-1)
    return (0.5 * (a**2 + b**2).sum(-1) - log).mean()


def integrated(dt, is_latent=False):
    def loss(w, y):
        y = start = y @ w if is_latent else y
        for _ in range(20):
            y = y + dt * tanh(y @ w)
        return ((y - start) ** 2).mean() * 1e4

    return loss, lambda seed: (normal(seed, 16, 16) * 0.3, normal(seed + 1, 4, 16))


def proximal(p, codes):
    x = jnp.zeros((8, 16))
    for _ in range(10):
        x = x - 0.3 * (x @ p.T - codes) @ p
        x = jnp.sign(x) * jax.nn.relu(jnp.abs(x) - 0.01)
    return ((x @ p.T - codes) ** 2).mean()


def inner_steps(w, x):
    """Weights that an inner loop trains, as in MAML."""
    y = jnp.sin(x[:, :4])
    for _ in range(5):
        w = w - 0.05 * x.T @ (x @ w - y)
    return ((x @ w - y) ** 2).mean()


def in_a_scan(w, y, grid):
    """Coordinates that a loop over layers moves, and that are projected each time."""

    def layer(c, u):
        return 9 * c / jnp.linalg.norm(c) + 0.01 * tanh(c @ u), None

    c, _ = lax.scan(layer, grid, w)
    return jnp.mean((c - y) ** 2)


def of_shapes(*shapes):
    return lambda seed: tuple(0.3 * normal(seed + i, *s) for i, s in enumerate(shapes))


# And the most that the gradient's error may be of that of the other program.
RECURRENCES = {
    "from a grid": (*refined(lambda _: GRID), 1.1),
    "from an iota": (
        *refined(lambda _: 8 * lax.broadcasted_iota(jnp.float32, GRID.shape, 1)),
        1.1,
    ),
    "from zeros": (*refined(lambda _: jnp.zeros_like(GRID)), 1.1),
    "a flow": (
        couplings,
        lambda seed: (list(normal(seed, 6, 6, 12) * 0.3), normal(seed + 1, 16, 12)),
        1.1,
    ),
    "an integrator": (*integrated(0.05), 1.1),
    "small steps": (*integrated(1e-3), 1.1),
    "proximal steps": (proximal, of_shapes((12, 16), (8, 12)), 1.1),
    "inner gradient steps": (inner_steps, of_shapes((8, 4), (16, 8)), 1.1),
    "a scan": (in_a_scan, of_shapes((32, 8, 8), (4, 8), (4, 8)), 1.1),
    # The start is the result of a matmul, which is rounded. Each region that reads it
    # gives it a cotangent in half precision.
    "a latent integrator": (*integrated(0.05, is_latent=True), 1.7),
}


@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrences_are_as_exact_as_casting_matmuls_only(name):
    fn, draw, most = RECURRENCES[name]
    grad = jax.grad(fn)
    ours = exact_matmuls(jax.grad(amp(fn)))
    others = cast_matmuls(grad, jnp.bfloat16)
    run = exact_jit(lambda *args: [f(*args) for f in (grad, ours, others)])
    found = [run(*draw(10 * seed)) for seed in range(DRAWS)]
    gaps = [[relative_error(g, exact) for g in rest] for exact, *rest in found]
    error, of_others = np.sqrt(np.square(gaps).mean(0))
    assert error <= most * of_others, (error, of_others)


@pytest.mark.parametrize("is_loop", [False, True])
def test_the_output_of_an_lstm_is_no_state(is_loop):
    """Its cell begins at zeros and is one; a gate multiplies a function of the cell."""

    def cell(carry, x, u):
        c, h = carry
        gate = jax.nn.sigmoid(x @ u + h @ u.T)
        c = gate * c + (1 - gate) * tanh(h @ u)
        return c, gate * tanh(c)

    def fn(weights, x):
        u, zeros = weights[0][0], jnp.zeros((ROWS, SIZE))
        carry, ys = (zeros, zeros), []
        if is_loop:

            def step(carry, x):
                carry = cell(carry, x, u)
                return carry, carry[1]

            ys = lax.scan(step, carry, TIMES)[1]
        else:
            for t in TIMES:
                carry = cell(carry, t, u)
                ys.append(carry[1])
        return jnp.sum((jnp.concatenate([*ys]) @ LAST) ** 2)

    rows = flax_amp.explain(fn, backward=False)(STACKS, X).equations
    *_, output = [row for row in rows if row.primitive == "mul"]
    asked = "rounded: a matmul" if is_loop else "float32: only its own region"
    assert output.result.startswith(asked)
