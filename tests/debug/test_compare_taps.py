"""Measuring changes nothing: the same equations, dtypes, losses and gradients.

And what is measured is what NumPy finds.
"""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import flax_amp
from flax_amp import _compat, amp
from flax_amp.debug._compare_programs import Programs
from flax_amp.debug._compare_stats import (
    EXPONENTS,
    difference,
    flushed,
    histogram,
    magnitudes,
    relative,
)
from flax_amp.debug._compare_taps import taps_of
from helpers import equations

WIDTH = 4
KEY = jax.random.key(0)
X, W = (jax.random.normal(key, (WIDTH, WIDTH)) for key in jax.random.split(KEY))
WS = jnp.stack([W, 2 * W, -W])


def scoped(name, w, x):
    with jax.named_scope(name):
        return jnp.tanh(x @ w)


def biased(w, x):
    """Modules begin with what depends on whether its operand is half: biases, moves."""
    with jax.named_scope("product"):
        y = x @ w
    with jax.named_scope("bias"):
        y = jnp.tanh(y + w[:1])
    with jax.named_scope("residual"):
        y = y + scoped("inside", W, y)
    with jax.named_scope("last"):
        z = y @ w
    with jax.named_scope("moves"):
        z = jax.nn.relu(z[1:])
    with jax.named_scope("loss"):
        return jnp.mean(z + w[1:])


def looped(w, x):
    def body(y, v):
        return scoped("out", v, scoped("in", w, y)) + y, jnp.sum(y)

    y, sums = jax.lax.scan(jax.checkpoint(body), x, WS)
    return jnp.mean(y) + jnp.mean(sums)


def nested(w, x):
    def outer(y, v):
        return jax.lax.scan(lambda z, u: (scoped("deep", u, z), None), y, v)

    return jnp.mean(jax.lax.scan(outer, x, jnp.stack([WS, WS * w[None]]))[0])


def branched(w, x):
    y = scoped("a", w, x)
    with jax.named_scope("choice"):
        branches = [lambda y: scoped("left", w, y), lambda y: y * 2]
        y = jax.lax.switch((y[0, 0] > 9).astype(jnp.int32), branches, y)
    return jnp.mean(scoped("b", w, y))


def called(w, x):
    y = jax.jit(lambda x: scoped("inside", w, x))(scoped("a", w, x))
    with jax.named_scope("rule"):
        y = jax.nn.relu(jax.nn.gelu(y @ w))
    return jnp.mean(scoped("b", w, y))


def opaque(w, x):
    def body(state):
        i, y = state
        return i + 1, scoped("unseen", W, y)

    with jax.named_scope("while"):
        _, y = jax.lax.while_loop(lambda s: s[0] < 3, body, (0, x))
    return jnp.mean(scoped("b", w, jax.lax.stop_gradient(y)))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = x + nn.remat(nn.Dense)(WIDTH)(nn.LayerNorm()(x))
        x = nn.MultiHeadDotProductAttention(2)(x[None])[0]
        x = nn.BatchNorm(use_running_average=False)(x)
        return nn.Embed(5, WIDTH).attend(x)


@functools.cache
def variables():
    with jax.ensure_compile_time_eval():
        return Model().init(jax.random.key(0), X)


def linen(w, x):
    scale = {"scale": w[0], "bias": w[1]}
    params = {**variables()["params"], "LayerNorm_0": scale}
    all_ = {**variables(), "params": params}
    return jnp.mean(Model().apply(all_, x, mutable=["batch_stats"])[0] ** 2)


# name: function, how many edges of it are found at least
PROGRAMS = {
    "biased": (biased, 5),
    "looped": (looped, 4),
    "nested": (nested, 2),
    "branched": (branched, 5),
    "called": (called, 5),
    "opaque": (opaque, 1),
    "linen": (linen, 12),
}
POLICIES = {
    "default": None,
    "scope": flax_amp.default_amp_policy | {"b": jnp.float32, "a": jnp.float16},
    "jaxamp": flax_amp.jaxamp_policy,
}


def programs_of(fun):
    closed = jax.make_jaxpr(lambda w, x: (fun(w, x),))(W, X)
    return Programs(closed, [W, X], [True, False])


IGNORED = ("name", "flax_amp_stored", "remat2", "convert_element_type")


def dtypes(closed):
    """Counts equations by primitive and dtypes, but for those that mark.

    They end runs of equations that are recomputed together, which changes no number.
    A float32 value that several modules read in half is cast for each of them.
    """
    return Counter(
        (eqn.primitive.name, *(str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)))
        for _, eqn in equations(closed)
        if eqn.primitive.name not in IGNORED
    )


@pytest.mark.filterwarnings("ignore::flax_amp.PolicyWarning")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_marks_change_no_equation(name, policy, dtype=jnp.bfloat16):
    programs = programs_of(PROGRAMS[name][0])
    options = {"compute_dtype": dtype, "amp_policy": POLICIES[policy]}
    keep = {_compat.primitives()["name"]: flax_amp.keep_precision}
    marked = {**options, "amp_policy": {**keep, **(POLICIES[policy] or {})}}
    if policy == "default":
        marked = options
    before = programs.lowered(programs.closed, options)
    after = programs.lowered(programs.marked.jaxpr, marked)
    assert dtypes(after) == dtypes(before)
    assert len(taps_of(after)) >= PROGRAMS[name][1]
    # Every edge is in both programs.
    assert set(taps_of(after)) == set(taps_of(programs.marked.jaxpr))


@pytest.mark.parametrize("name", ["looped", "branched", "called", "linen"])
def test_measuring_changes_no_number(name):
    programs = programs_of(PROGRAMS[name][0])
    options = {"compute_dtype": jnp.float16, "amp_policy": None}
    measured = programs.run(options, 8.0)
    alone = programs.run_jaxpr(programs.lowered(programs.closed, options), 8.0)
    np.testing.assert_array_equal(measured.loss, alone.loss)
    np.testing.assert_allclose(
        measured.gradients[0], alone.gradients[0], rtol=1e-6, atol=1e-8
    )
    fun = amp(PROGRAMS[name][0], compute_dtype=jnp.float16)
    loss, gradient = jax.jit(jax.value_and_grad(fun))(W, X)
    np.testing.assert_allclose(measured.loss, loss, rtol=2e-3)
    scale = np.abs(gradient).max()
    np.testing.assert_allclose(measured.gradients[0], gradient, atol=5e-3 * scale)
    reference = jax.grad(PROGRAMS[name][0])(W, X)
    np.testing.assert_allclose(
        programs.reference.gradients[0], reference, rtol=1e-5, atol=1e-6
    )


def test_values_and_cotangents_of_edges():
    def fun(w, x):
        return jnp.mean(scoped("b", w, scoped("a", w, x)) ** 2)

    programs = programs_of(fun)
    reference = programs.reference
    edges = {(e.maker, e.reader): name for name, e in programs.marked.edges.items()}
    parameters = [(None, "a"), (None, "b")]  # both read it
    assert sorted(edges, key=str) == sorted(
        [("a", "b"), ("b", ""), ("", None), *parameters], key=str
    )
    both = sum(reference.cotangents[edges[edge]] for edge in parameters)
    np.testing.assert_allclose(both, reference.gradients[0], rtol=1e-5, atol=1e-7)
    name = edges["a", "b"]
    h = scoped("a", W, X)
    np.testing.assert_allclose(reference.values[name], h, rtol=1e-6)
    expected = jax.grad(lambda h: jnp.mean(scoped("b", W, h) ** 2))(h)
    np.testing.assert_allclose(reference.cotangents[name], expected, rtol=1e-5)
    forced = programs.run(
        {"compute_dtype": jnp.bfloat16, "amp_policy": None}, 1.0, forced=True
    )
    # `b` reads the float32 values, rounded, whatever `a` computes.
    low = amp(lambda w, h: scoped("b", w, h), compute_dtype=jnp.bfloat16)
    given = low(W, h.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(
        forced.values[edges["b", ""]].astype(jnp.float32), given, rtol=1e-2
    )


def test_each_edge_is_seen_in_each_iteration():
    shapes = {s.shape for s in taps_of(programs_of(nested).marked.jaxpr).values()}
    assert (2, 3, WIDTH, WIDTH) in shapes


def test_parameters_belong_to_the_module_that_reads_them():
    def fun(params, x):
        stacked = jnp.stack([params["u"], params["v"]])
        x = scoped("first", params["w"].T, x)
        return jnp.mean(
            jax.lax.scan(lambda x, w: (scoped("loop", w, x), 0), x, stacked)[0]
        )

    params = dict(u=W, v=W, w=W)
    leaves = jax.tree.leaves(params)
    tree = jax.tree.structure(params)
    closed = jax.make_jaxpr(lambda *a: (fun(tree.unflatten(a[:-1]), a[-1]),))(
        *leaves, X
    )
    readers = Programs(closed, [*leaves, X], [True] * 3 + [False]).marked.readers
    assert readers == {0: ["loop"], 1: ["loop"], 2: ["first"], 3: ["first"]}


# --- statistics ----------------------------------------------------------------------


def numbers():
    exponents = np.random.uniform(-60, 30, 500)
    signs = np.random.choice([-1.0, 1.0], 500)
    special = [0.0, 2.0**-25, np.nextafter(np.float32(2.0**-25), 1), 65504, np.inf]
    return np.concatenate([signs * 2.0**exponents, special, [np.nan]]).astype(
        np.float32
    )


def test_magnitudes_against_numpy():
    x = numbers()
    found = jax.device_get(magnitudes(x))
    finite = np.abs(x[np.isfinite(x) & (x != 0)])
    assert found.largest == finite.max()
    ceils = np.ceil(np.log2(finite.astype(float)))
    expected = Counter(ceils.clip(EXPONENTS[0], EXPONENTS[-1]).astype(int).tolist())
    counts = histogram([found])
    assert counts == expected and histogram([]) == {}
    with np.errstate(over="ignore"):
        assert flushed(counts) == (finite.astype(np.float16) == 0).mean()


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_errors_against_numpy(size):
    reference = (np.random.randn(3, 40) * size).astype(np.float32)
    x = reference * (1 + 1e-2 * np.random.randn(3, 40).astype(np.float32))
    found = jax.device_get(difference(x, reference, 3))
    wide = x.astype(float) - reference
    expected = np.linalg.norm(wide, axis=1) / np.linalg.norm(
        reference.astype(float), axis=1
    )
    np.testing.assert_allclose(found.distance / found.reference, expected, rtol=1e-5)
    together = np.linalg.norm(wide) / np.linalg.norm(reference.astype(float))
    np.testing.assert_allclose(relative([found]), together, rtol=1e-5)


def test_what_is_not_finite_is_infinitely_far():
    reference = np.array([1.0, 2.0, np.inf, np.nan, 0.0], np.float32)
    x = np.array([1.0, np.inf, 3.0, 4.0, np.nan], np.float32)
    found = jax.device_get(difference(x, reference, 5))
    np.testing.assert_array_equal(found.distance, [0, np.inf, 0, 0, np.inf])
    np.testing.assert_array_equal(found.reference, [1, 2, 0, 0, 0])
    assert relative([found]) == np.inf and relative([]) is None
    zero = difference(jnp.zeros(3), jnp.zeros(3), 1)
    assert relative([zero]) == 0
