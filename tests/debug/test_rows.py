"""The rows of `explain` are those of the program that `amp` emits, cast for cast."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import flax_amp
from flax_amp import explain
from flax_amp._compat import open_jaxpr
from flax_amp._rewriter.primitives import is_matrix_product
from helpers import MATMULS

X, W = jnp.ones((4, 8)), jnp.full((8, 8), 0.1)
STACK = jnp.full((7, 8, 8), 0.1)
CASTS = ("convert_element_type", "flax_amp_saturate")


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(
        x.var(-1, keepdims=True) + 1e-6
    )


def layer(x, w):
    return x + jnp.tanh(norm(x) @ w)


def attention(x, w):
    scores = jnp.where(jnp.tri(4, dtype=bool), (x @ w) @ x.T, -1e9)
    return jax.nn.softmax(scores) @ x


def nested_scans(stack, x):
    def outer(x, w):
        return jax.lax.scan(lambda x, _: (layer(x, w), None), x, None, length=3)

    return jax.lax.scan(outer, x, stack)[0]


def loops(w, x):
    def step(h, row):
        h = jnp.tanh(row @ w + h)
        return h, h

    y, z = jax.lax.while_loop(
        lambda c: c[1].sum() < 3, lambda c: (c[0] @ w, c[1] + 1.0), (x @ w, X)
    )
    y = jax.lax.fori_loop(0, 3, lambda _, x: x @ w, y)
    return jax.lax.scan(step, jnp.zeros(8), y), z


def branches(w, x):
    y = jax.lax.cond(x.sum() > 0, lambda y: y @ w, lambda y: jnp.exp(y), x @ w)
    return jax.lax.switch(0, [lambda y: y @ w, lambda y: y, nn.softmax], y).sum()


def unrolled(stack, x):
    for w in stack:
        x = layer(x, w)
    return jnp.square(x).mean()


@jax.custom_vjp
def clipped(x):
    return norm(x) @ jnp.ones((8, 8))


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.clip(g @ W, -1, 1),))


def stopped(w, x):
    with flax_amp.amp_stop():
        y = jax.jit(layer)(x @ w, w) @ w
    return flax_amp.amp_stop(nested_scans)(jnp.stack([w, w]), y @ w)


def scoped(w, x):
    with jax.named_scope("head"):
        y = x @ w
        with jax.named_scope("inner"):
            y = jnp.tanh(y + 1.0)
        return jax.jit(attention)(y, w)


def rematted(w, x):
    return jax.checkpoint(layer)(jax.checkpoint(attention)(x, w), w)


def embedded(w, x):
    return (w @ W)[jnp.array([1, 1, 2])] @ w, w[jnp.array([0, 3])] @ w


PROGRAMS = {
    "attention": (attention, X, W),
    "scans": (nested_scans, STACK, X),
    "loops": (loops, W, X),
    "cond": (branches, W, X),
    "remat": (rematted, W, X),
    "custom rule": (lambda w, x: jax.nn.relu(clipped(x @ w)).sum(), W, X),
    "amp_stop": (stopped, W, X),
    "gather": (embedded, W, X),
    "own dtypes": (lambda w, x: (x @ w).astype("float16") @ w.astype("float16"), W, X),
    "grad": (jax.grad(unrolled), STACK, X),
    "vmap": (jax.vmap(layer, (None, 0)), X, STACK),
}


def walk(jaxpr, times=1):
    """Yields the equations of a jaxpr and of all inside, and how often they run."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        yield eqn, times
        inner = times * eqn.params.get("length", 1)
        for body in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from walk(body, inner)


def emitted(closed):
    """The casts, and the products by dtypes, with their operations in half."""
    casts, products, low = Counter(), Counter(), 0
    for eqn, times in walk(closed):
        dtypes = [str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)]
        if eqn.primitive.name in CASTS:
            casts[direction(*dtypes)] += times
        if eqn.primitive.name in MATMULS:
            products[dtypes[0], dtypes[-1]] += times
            (contracting, _), _ = eqn.params["dimension_numbers"]
            terms = [eqn.invars[0].aval.shape[i] for i in contracting]
            size = 2 * math.prod((*eqn.outvars[0].aval.shape, *terms))
            is_half = dtypes[0] in ("float16", "bfloat16")
            low += times * size * is_matrix_product(eqn) * is_half
    casts.pop(None, None)
    return casts, products, low


def direction(before, after):
    """The kind of a cast."""
    if before == after or "float" not in before or "float" not in after:
        return None
    return "up" if after == "float32" else "down"


def explained(found):
    totals, products = found.totals, Counter()
    casts = Counter(down=totals.casts_down, up=totals.casts_up)
    for row in found.equations:
        if row.primitive == "convert_element_type":  # the user's own
            casts[direction(row.before.operands[0], row.before.results[0])] += row.times
        if row.primitive in MATMULS:
            products[row.after.operands[0], row.after.results[-1]] += row.times
    casts.pop(None, None)
    return +casts, products, found.totals.low_flops


def check(fun, args, **options):
    jaxpr = jax.make_jaxpr(flax_amp.amp(fun, **options))(*args)
    found = explain(fun, backward=False, **options)(*args)
    assert explained(found) == emitted(jaxpr)


@pytest.mark.parametrize("name", PROGRAMS)
def test_figures_are_those_of_the_program(name):
    fun, *args = PROGRAMS[name]
    for dtype, recompute in (("bfloat16", True), ("float16", False)):
        check(fun, args, compute_dtype=dtype, recompute=recompute)
    check(fun, args, compute_dtype=jnp.float32)


def odd_precision(compute_dtype, original_dtypes, *invars, **params):
    """A user's function: float16 for the first operand's sake, whatever is asked."""
    return [x.astype(jnp.float16) for x in invars], params


POLICIES = {
    "primitive": {jax.lax.tanh_p: flax_amp.use_compute_precision},
    "glob": {"*/inner": jnp.float32, "head": flax_amp.use_compute_precision},
    "third dtype": {jax.lax.dot_general_p: jnp.float16},
    "own function": {jax.lax.dot_general_p: odd_precision},
    "nothing runs low": {jax.lax.dot_general_p: flax_amp.use_original_precision},
}


@pytest.mark.filterwarnings("ignore::flax_amp.PolicyWarning")
@pytest.mark.parametrize("name", POLICIES)
def test_figures_follow_a_policy(name):
    policy = flax_amp.default_amp_policy | POLICIES[name]
    for dtype in (jnp.bfloat16, jnp.float32):
        check(scoped, (W, X), compute_dtype=dtype, amp_policy=policy)


# A program, a primitive, what it computes in, and what became of its result.
RESULTS = {
    "product": (attention, "dot_general", "bfloat16", "half precision"),
    "sum": (attention, "reduce_sum", "float32", "float32: a sum"),
    "for a product": (attention, "div", "float32", "rounded: a matmul reads it later"),
    "in passing": (attention, "exp", "float32", "float32: only its own region"),
    "loss": (
        lambda x, w: jnp.log(x @ w).sum(),
        "log",
        "float32",
        "float32: no matmul reads it later",
    ),
    "weights": (
        lambda x, w: x @ (w * w),
        "mul",
        "float32",
        "float32: computed from arguments",
    ),
    "amp_stop": (
        lambda x, w: flax_amp.amp_stop(jnp.sin)(x @ w) @ w,
        "sin",
        "float32",
        "float32: scope amp_stop",
    ),
}


@pytest.mark.parametrize("fun, name, inside, result", RESULTS.values(), ids=RESULTS)
def test_what_becomes_of_results(fun, name, inside, result):
    found = explain(fun)(X, W)
    rows = [row for row in found.equations if row.primitive == name]
    assert rows and all(row.computes_in == inside for row in rows)
    assert any(row.result.startswith(result) for row in rows), rows
    lines = [" ".join(x.split()) for x in found.report(only="equations").splitlines()]
    assert any(line.startswith(f"{name} ") and result in line for line in lines)
