"""`recompute`: nothing expensive twice, no effect twice, and no other result."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from _programs import (
    loss_of,
    norm,
    normal,
    softmax_between_products,
)
from _transformer import (
    CONTEXTS,
    MODES,
    bfloat16,
    block,
    exact_jit,
    inputs,
    keeps,
    layer,
    scanned,
    unrolled,
    weights,
)
from flax_amp._rewriter.recompute.mincut import min_cut
from helpers import (
    MATMULS,
    assert_same_avals,
    equations,
    equations_of,
    relative_error,
)

W, X = weights()["out"][0], inputs()[0]


def dropout(p, x):
    keep_mask = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return block(layer(p, 0), jnp.where(keep_mask, x / 0.5, 0)).sum()


def convolved(p, x):
    image = norm(x)[..., None]
    kernel = p["qkv"][0, :3, :6].reshape(3, 3, 1, 2)
    y = lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.sum(jax.nn.gelu(norm(y)) ** 2)


def routed(p, x):
    """Sorts, sums up, gathers and scatters between norms and activations."""
    h = jax.nn.gelu(norm(x @ p["out"][0]))
    h = jnp.exp(jnp.cumsum(jnp.sort(h, axis=-1), axis=1) / 100)
    rows = jnp.arange(len(h))[::-1]
    h = norm(h[rows]) * h
    h = jnp.zeros_like(h).at[rows].add(jnp.sin(h))
    return jnp.sum(norm(h) ** 2)


@jax.custom_vjp
def swish(x):
    return lax.erf_inv(x / 9)


swish.defvjp(lambda x: (swish(x), x), lambda x, g: (g * jnp.cos(x),))


def customized(p, x):
    return jnp.sum(norm(swish(norm(x @ p["out"][0]))) ** 2)


UNIQUE = {
    "dots": (scanned, MATMULS),
    "dots of a jitted block": (CONTEXTS["jit"], MATMULS),
    "convolutions": (convolved, MATMULS),
    "random numbers": (dropout, ("random_bits", "threefry2x32", "random_wrap")),
    "routing": (routed, ("cumsum", "sort", "gather", "scatter-add", "scatter")),
    "custom derivatives": (customized, ("erf_inv",)),
}


@pytest.mark.parametrize("name", UNIQUE)
def test_nothing_expensive_twice(name):
    """A gradient has as many expensive equations as one that stores everything."""
    loss, primitives = UNIQUE[name]

    def found(mode):
        grad = jax.grad(bfloat16(loss, recompute=mode))
        eqns = equations_of(grad, weights(), inputs(), primitive=primitives)
        return collections.Counter(eqn.primitive.name for eqn in eqns)

    assert found("never")
    assert found("auto") == found("always") == found("never")


@pytest.mark.parametrize("mode", MODES)
def test_effects_run_once_and_in_order(mode):
    """Callbacks between regions run once each, as they stand in the program."""
    seen = []

    def loss(w, x):
        for i in range(3):
            x = norm(jnp.tanh(x @ w)) * 2
            jax.debug.callback(lambda x, i=i: seen.append(i), x, ordered=True)
        return jnp.sum(x**2)

    jax.block_until_ready(exact_jit(jax.grad(bfloat16(loss, recompute=mode)))(W, X))
    jax.effects_barrier()
    assert seen == [0, 1, 2]


def with_rule(run):
    f = jax.custom_vjp(run)
    f.defvjp(lambda x: (run(x), x), lambda x, g: (run(x) * g,))
    return f


BODIES = {
    "checkpoint": jax.checkpoint,
    "while": lambda run: (
        lambda x: lax.fori_loop(0, jnp.int32(x.size), lambda _, x: run(x), x)
    ),
    "custom_vjp": with_rule,
}


@pytest.mark.parametrize("body", BODIES)
def test_bodies_with_rules_of_their_own(body):
    """What says itself what is stored, or has no backward pass, is left alone."""

    def loss(w, x):
        run = lambda x: jnp.sin(norm(jnp.tanh(norm(x @ w)) @ w))  # noqa: E731
        return BODIES[body](run)(x).sum()

    assert not keeps(bfloat16(loss, recompute="always"), W, X)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", [scanned, unrolled])
def test_never_leaves_no_trace(mode, loss):
    """The others mark what is stored."""
    found = keeps(bfloat16(loss, recompute=mode), weights(), inputs())
    assert bool(found) == (mode != "never")


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_regions_of_straight_code_have_functions(name):
    """XLA computes the arithmetic of a BatchNorm and a relu again without a region."""

    def loss(w, x):
        for _ in range(3):
            y = x @ w
            centered = y - y.mean(0, keepdims=True)
            scale = lax.rsqrt((centered**2).mean(0, keepdims=True) + 1e-5)
            x = getattr(jax.nn, name)(centered * scale)
        return (x @ w).sum()

    x = jnp.ones((64, len(W)))
    assert bool(keeps(bfloat16(loss, recompute="auto"), W, x)) == (name != "relu")
    assert keeps(bfloat16(loss, recompute="always"), W, x)


def test_jitted_block_is_rewritten_once(count_traces):
    """A jitted block that is called 24 times is traced once and keeps one body."""
    body, traces = count_traces(block)
    jitted = jax.jit(body)

    def loss(p, x):
        for _ in range(24):
            x = jitted(layer(p, 0), x)
        return x.sum()

    jaxpr = jax.make_jaxpr(bfloat16(loss))(weights(), inputs())
    calls = [e for _, e in equations(jaxpr) if e.params.get("name") == "counted"]
    bodies = [id(e.params["jaxpr"]) for e in calls]
    assert len(bodies) == 24
    # The first takes a float32 argument; how the last are read depends on what follows.
    assert len(set(bodies)) <= 4
    assert len(set(bodies[1:-2])) == 1
    assert traces() == 1


# --- the minimum cut, against trying every set ---------------------------------------


@st.composite
def graphs(draw, least=0):
    """A random DAG: costs, edges from low to high numbers, sources, sinks."""
    size = draw(st.integers(1, 7))
    nodes = st.integers(0, size - 1)
    costs = draw(st.lists(st.integers(least, 4), min_size=size, max_size=size))
    pairs = list(itertools.combinations(range(size), 2))
    edges = draw(st.lists(st.sampled_from(pairs), max_size=12)) if pairs else []
    sources, sinks = draw(st.frozensets(nodes)), draw(st.frozensets(nodes))
    return dict(enumerate(costs)), edges, sources, sinks


def reaches_sinks(edges, sinks, cut):
    """The nodes from which a path leads to a sink around the cut."""
    found = set(sinks) - cut
    while True:
        more = {a for a, b in edges if b in found and a not in cut} - found
        if not more:
            return found
        found |= more


def separates(edges, sources, sinks, cut):
    return not reaches_sinks(edges, sinks, cut) & set(sources)


def cuts(costs, edges, sources, sinks):
    """Every set that separates the sources from the sinks."""
    sizes = range(len(costs) + 1)
    sets = (set(s) for r in sizes for s in itertools.combinations(costs, r))
    return [s for s in sets if separates(edges, sources, sinks, s)]


def total(costs, cut):
    return sum(costs[node] for node in cut)


@settings(deadline=None, max_examples=150)
@given(graphs(), st.sampled_from([1, 10**9, 10**12]))
def test_separates_at_the_least_cost(graph, unit):
    """No set of nodes, free ones included, separates for less, even at terabytes."""
    costs, edges, sources, sinks = graph
    scaled = {node: cost * unit for node, cost in costs.items()}
    cut = min_cut(scaled, edges, sources, sinks)
    assert cut <= costs.keys()
    assert separates(edges, sources, sinks, cut)
    assert total(costs, cut) == min(total(costs, other) for other in cuts(*graph))


@settings(deadline=None, max_examples=100)
@given(graphs(least=1))
def test_of_equals_the_nearest_to_the_sinks(graph):
    """Behind the chosen cut lies no more than behind any other that costs the same."""
    costs, edges, sources, sinks = graph
    cut = min_cut(costs, edges, sources, sinks)
    behind = reaches_sinks(edges, sinks, cut)
    for other in cuts(*graph):
        if total(costs, other) == total(costs, cut):
            assert behind <= reaches_sinks(edges, sinks, other)


# --- amp over amp --------------------------------------------------------------------

ARGS = normal(0, 4, 4) * 0.4, normal(0, 8, 4)


def tuned(loss):
    """The gradient through two checkpointed steps of gradient descent in a loop."""

    def outer(w, x):
        step = lambda w, _: (w - 0.1 * jax.grad(loss)(w, x), None)  # noqa: E731
        return loss(lax.scan(jax.checkpoint(step), w, length=2)[0], x)

    return jax.grad(outer)


def test_amp_of_a_derivative_of_amp():
    """The primitives of the inner transformation pass through the outer one."""
    loss = softmax_between_products
    inner = tuned(bfloat16(loss, recompute="always"))
    actual = exact_jit(bfloat16(inner, recompute="always"))(*ARGS)
    expected = exact_jit(tuned(bfloat16(loss, recompute="never")))(*ARGS)
    assert relative_error(actual, expected) < 2e-2


# --- values of every dtype between what is computed again ----------------------------


def fourier(w, x):
    """A layer of a Fourier neural operator: complex weights for each frequency."""
    spectrum = jnp.fft.rfft(x, axis=0) @ lax.complex(w, 2 * w)
    return jax.nn.gelu(x @ w + jnp.fft.irfft(jnp.tanh(spectrum), len(x), axis=0)) @ w


def phase(w, x):
    z = jnp.exp(1j * (x @ w)) * jnp.exp(1j * x)
    return jax.nn.gelu(z.real * z.imag) @ w + jnp.abs(z)


def associative(w, x):
    def join(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    decay = jnp.exp(lax.complex(-jnp.abs(x), x))
    states = lax.associative_scan(join, (decay, (x @ w).astype(jnp.complex64)))[1]
    return jax.nn.gelu(states.real) @ w


def float8(w, x):
    """Quantized values up to the largest float8, and subnormal ones.

    Cotangents are float8 too: a larger factor than 1e3 makes those of a second order
    NaN, without amp as well.
    """
    h = jnp.tanh(x @ w)
    large = jnp.clip(h * 1e3, -448, 448).astype(jnp.float8_e4m3fn)
    product = large @ jnp.eye(4, dtype=jnp.float8_e4m3fn)
    small = (h / 512).astype(jnp.float8_e4m3fn).astype(jnp.float32) * 512
    h = jnp.sin(product.astype(jnp.float32) / 448) * jnp.tanh(small) * h
    return jnp.sin(large.astype(jnp.float32) / 448) * h @ w


def integers(w, x):
    h = jax.nn.gelu(x @ w)
    whole = jnp.round(h * 3).astype(jnp.int8)
    chosen = jnp.where(h > 0, h, jnp.sin(h)) * jax.nn.one_hot(jnp.argmax(h, -1), 4)
    return (chosen * whole * jnp.round(h * 2).astype(jnp.int4).astype(jnp.float32)) @ w


def keys(w, x):
    h = jax.nn.gelu(x @ w)
    number = lax.stop_gradient(h).sum().astype(jnp.int32)
    pair = jax.random.split(jax.random.fold_in(jax.random.key(0), number))
    key = jnp.where(h[0, 0] > 0, pair[0], pair[1])
    return jnp.sin(h @ w * jax.random.normal(key, h.shape))


def in_dtype(dtype):
    """A program with a part in another dtype than float32."""

    def program(w, x):
        h = jax.nn.gelu(x @ w).astype(dtype)
        return (jnp.sin(h) * jnp.exp(h)).real.astype(jnp.float32) @ w

    return program


UNSTORED = (fourier, phase, associative, float8)
PROGRAMS = {function.__name__: function for function in (*UNSTORED, integers, keys)}
DOUBLE = ("float64", "complex128")
STORABLE = ("float16", "bfloat16", "float32", "float64")
PROGRAMS |= {name: in_dtype(name) for name in ("float16", *DOUBLE)}


def assert_regions_hold_what_can_be_stored(jaxpr):
    """No value in a region is complex or float8; what is around it still has one."""
    for path, eqn in equations(jaxpr):
        if "remat2" in path or "checkpoint" in path:
            for atom in (*eqn.invars, *eqn.outvars):
                dtype = atom.aval.dtype
                is_storable = dtype.name in STORABLE
                assert not jnp.issubdtype(dtype, jnp.inexact) or is_storable


@pytest.mark.parametrize("name", PROGRAMS)
def test_other_dtypes(name):
    """Each mode gives what "never" gives, of the same types.

    Low cotangents of regions on both sides of float8 values add up in another order.
    """
    loss, results = loss_of(PROGRAMS[name]), []
    with jax.enable_x64(name in DOUBLE):
        for mode in MODES:
            lowered = bfloat16(loss, recompute=mode)
            gradient = jax.value_and_grad(lowered, (0, 1))
            assert_regions_hold_what_can_be_stored(jax.make_jaxpr(gradient)(*ARGS))
            results.append(exact_jit(gradient)(*ARGS))
        assert keeps(lowered, *ARGS)
        assert_same_avals(
            results[0], jax.eval_shape(jax.value_and_grad(loss, (0, 1)), *ARGS)
        )
    never, *others = results
    for found in others:
        assert relative_error(found, never) < (1e-2 if name == "float8" else 1e-6)


# --- linear functions ----------------------------------------------------------------

LINEAR = {
    "product": lambda w, x: x @ w,
    "scan": lambda w, x: lax.scan(lambda c, x: (c * 2 + x @ w, x / 2), x[0], x),
    "checkpoint": lambda w, x: jax.checkpoint(lambda x: (x @ w) @ w * 2)(x),
    "jit": lambda w, x: jax.jit(lambda x: jnp.concatenate([x @ w, x]))(x * 2),
    "layers": lambda w, x: functools.reduce(lambda x, _: (x @ w) / 2, range(8), x),
}


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_functions_are_transposed(name, mode):
    """`jax.linear_transpose` of a transformed linear function, as of the plain one."""
    w, x = jnp.eye(4) / 2 + 0.25, jnp.arange(8.0).reshape(2, 4)
    f = functools.partial(LINEAR[name], w)
    (actual,) = jax.linear_transpose(bfloat16(f, recompute=mode), x)(f(x))
    (expected,) = jax.linear_transpose(f, x)(f(x))
    assert actual.dtype == jnp.float32
    assert relative_error(actual, expected) < 1e-2
