"""The figures of `explain` are those of the program that `amp` emits."""

import math
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import flax_amp
from flax_amp import explain
from flax_amp._compat import open_jaxpr
from flax_amp._jaxpr.traits import is_matrix_product
from helpers import MATMULS

X, W = jnp.ones((4, 8)), jnp.full((8, 8), 0.1)
STACK = jnp.full((7, 8, 8), 0.1)
HALVES = ("float16", "bfloat16")
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


def scan_layers(stack, x):
    return jax.lax.scan(lambda x, w: (layer(x, w), x.sum()), x, stack)


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


def rematted(w, x):
    return jax.checkpoint(layer)(jax.checkpoint(attention)(x, w), w)


def unrolled(stack, x):
    for w in stack:
        x = layer(x, w)
    return jnp.square(x).mean()


@jax.custom_vjp
def clipped(x):
    return norm(x) @ jnp.ones((8, 8))


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.clip(g @ W, -1, 1),))


@jax.custom_jvp
def swish(x):
    return x * jax.nn.sigmoid(x) @ W


swish.defjvp(lambda p, t: (swish(*p), t[0] @ W))


def custom_rules(w, x):
    return jax.nn.relu(clipped(x @ w) + swish(x @ w)).sum()


def stopped(w, x):
    with flax_amp.amp_stop():
        y = jax.jit(layer)(x @ w, w) @ w
    return flax_amp.amp_stop(scan_layers)(jnp.stack([w, w]), y @ w)


def solved(w, x):
    matrix = w @ w.T + jnp.eye(8)
    return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, x[0])[0]


def embedded(w, x):
    rows = (w @ W)[jnp.array([1, 1, 2])]
    return rows @ w, w[jnp.array([0, 3])] @ w, jnp.sort(x @ w), jnp.argmax(x @ w)


def others(w, x):
    y = jax.lax.dot(x, w, precision="highest")
    z = (x @ w).astype(jnp.float16) @ w.astype(jnp.float16)
    return (
        y + 1e-9,
        z,
        (x @ w) * 1e-30,
        jax.random.normal(jax.random.key(0), (4, 8)) @ w,
    )


def convolved(w, x):
    y = jax.lax.conv_general_dilated(
        x[None, ..., None],
        w.reshape(2, 2, 1, 16),
        (2, 2),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    y = jax.lax.conv_general_dilated(
        y,
        w.reshape(2, 2, 4, 4)[:, :, :, :4],
        (1, 1),
        "SAME",
        feature_group_count=4,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return jax.lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([1, 3])), nn.relu(y)


def two_regions(w, x):
    y = x @ w
    z, _ = scan_layers(jnp.stack([w, w]), norm(y))
    return y - z.mean(-1, keepdims=True)


PROGRAMS = {
    "two regions": (two_regions, W, X),
    "attention": (attention, X, W),
    "nested scans": (nested_scans, STACK, X),
    "loops": (loops, W, X),
    "cond": (branches, W, X),
    "remat": (rematted, W, X),
    "unrolled": (unrolled, STACK, X),
    "custom rules": (custom_rules, W, X),
    "amp_stop": (stopped, W, X),
    "solve": (solved, W, X),
    "gather": (embedded, W, X),
    "user's dtypes": (others, W, X),
    "convolutions": (convolved, W, X),
    "grad": (jax.grad(unrolled), STACK, X),
    "vmap": (jax.vmap(layer, (None, 0)), X, STACK),
    "no arrays": (lambda w, x: 3.0, W, X),
}


def walk(jaxpr, times=1):
    """Yields the equations of a jaxpr and of all inside, and how often they run."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        yield eqn, times
        name = eqn.primitive.name
        inner = times * eqn.params["length"] if name == "scan" else times
        for body in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from walk(body, inner)


def emitted(closed):
    """The casts, the products by dtypes, and the operations of a program."""
    casts, products, flops, low = Counter(), Counter(), 0, 0
    for eqn, times in walk(closed):
        name = eqn.primitive.name
        dtypes = [
            str(getattr(v.aval, "dtype", "")) for v in (*eqn.invars, *eqn.outvars)
        ]
        if name in CASTS:
            casts[direction(*dtypes)] += times
        if name in MATMULS:
            products[dtypes[0], dtypes[-1]] += times
            size = times * operations(eqn) * is_matrix_product(eqn)
            flops, low = flops + size, low + size * (dtypes[0] in HALVES)
    casts.pop(None, None)
    return casts, products, flops, low


def operations(eqn):
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name == "dot_general":
        ((contracting, _), _) = eqn.params["dimension_numbers"]
        return 2 * math.prod(shapes[-1]) * math.prod(shapes[0][i] for i in contracting)
    if eqn.primitive.name == "ragged_dot_general":
        return 2 * math.prod(shapes[-1]) * shapes[0][-1]
    kernel = shapes[1]  # HWIO
    return 2 * math.prod(shapes[-1]) * math.prod(kernel[:3])


def direction(before, after):
    """The kind of a cast."""
    if before == after or "float" not in before or "float" not in after:
        return None
    return "up" if after == "float32" else "down"


def explained(found):
    casts, products = Counter(), Counter()
    for row in found.equations:
        casts["down"] += row.casts_down
        casts["up"] += row.casts_up
        if row.primitive == "convert_element_type":  # the user's own
            casts[direction(row.before.operands[0], row.before.results[0])] += row.times
        if row.primitive in MATMULS:
            products[row.after.operands[0], row.after.results[-1]] += row.times
    casts.pop(None, None)
    return casts, products, found.totals.flops, found.totals.low_flops


def check(fun, args, **options):
    jaxpr = jax.make_jaxpr(flax_amp.amp(fun, **options))(*args)
    found = explain(fun, backward=False, **options)(*args)
    for actual, expected in zip(explained(found), emitted(jaxpr), strict=True):
        assert actual == expected


@pytest.mark.parametrize("name", PROGRAMS)
def test_figures_are_those_of_the_program(name):
    fun, *args = PROGRAMS[name]
    for dtype, recompute in (("bfloat16", "auto"), ("float16", "never")):
        check(fun, args, compute_dtype=dtype, recompute=recompute)
    check(fun, args, compute_dtype=jnp.float32)


def odd_precision(compute_dtype, original_dtypes, *invars, **params):
    """A user's function: float16 for the first operand's sake, whatever is asked."""
    return [x.astype(jnp.float16) for x in invars], params


POLICIES = {
    "primitive": {jax.lax.tanh_p: flax_amp.use_compute_precision},
    "glob": {"*/inner": jnp.float32, "head": flax_amp.use_compute_precision},
    "third dtype": {jax.lax.dot_general_p: flax_amp.use_precision(jnp.float16)},
    "own function": {jax.lax.dot_general_p: odd_precision},
    "own function for a scope": {"inner": odd_precision},
    "nothing runs low": {jax.lax.dot_general_p: flax_amp.use_original_precision},
}


def scoped(w, x):
    with jax.named_scope("head"):
        y = x @ w
        with jax.named_scope("inner"):
            y = jnp.tanh(y + 1.0)
        return jax.jit(attention)(y, w)


@pytest.mark.filterwarnings("ignore::flax_amp.PolicyWarning")
@pytest.mark.parametrize("name", POLICIES)
def test_figures_follow_a_policy(name):
    policy = flax_amp.default_amp_policy | POLICIES[name]
    for dtype in (jnp.bfloat16, jnp.float32):
        check(scoped, (W, X), compute_dtype=dtype, amp_policy=policy)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(7):
            x = x + nn.Dense(8)(nn.LayerNorm()(x))
        x = nn.BatchNorm(use_running_average=False)(x)
        return self.head(x)

    @nn.nowrap
    def head(self, x):
        return nn.Dense(2)(nn.MultiHeadDotProductAttention(2)(x[None])[0]).mean()


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.up = nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.gelu(self.up(self.norm(x))))


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(7)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x).sum()


def test_figures_of_flax_models(key):
    model = LinenModel()
    variables = jax.eval_shape(model.init, key, X)
    check(lambda v, x: model.apply(v, x, mutable=True), (variables, X))

    graphdef, state = nnx.split(NNXModel(nnx.Rngs(0)))
    check(lambda state, x: nnx.merge(graphdef, state, copy=True)(x), (state, X))


# --- generated programs --------------------------------------------------------------

PARTS = {
    "product": lambda w, x: x @ w,
    "bias": lambda w, x: x + w[:1],
    "tiny": lambda w, x: x + 1e-9,
    "scale": lambda w, x: x * 1e-30,
    "norm": lambda w, x: norm(x),
    "softmax": lambda w, x: nn.softmax(x),
    "exp": lambda w, x: jnp.exp(x),
    "relu": lambda w, x: nn.relu(x),
    "gather": lambda w, x: x[jnp.array([0, 0, 1, 2])],
    "mask": lambda w, x: jnp.where(x > 0.1, x, -1e9),
    "half": lambda w, x: (x.astype(jnp.float16) * 2).astype(jnp.float32),
    "clip": lambda w, x: clipped(x),
    "stop": lambda w, x: flax_amp.amp_stop(layer)(x, w),
    "sort": lambda w, x: jnp.sort(x) + jnp.cumsum(x, 0),
}
AROUND = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: (
        lambda w, x: jax.lax.scan(
            lambda x, w: (f(w, x), None), x, jnp.stack([w, w, w])
        )[0]
    ),
    "fori": lambda f: lambda w, x: jax.lax.fori_loop(0, 3, lambda _, x: f(w, x), x),
    "cond": lambda f: lambda w, x: jax.lax.cond(x[0, 0] > 0, f, lambda w, x: x, w, x),
}


@pytest.mark.once
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
)
@given(
    st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=6),
    st.lists(st.sampled_from(sorted(AROUND)), min_size=1, max_size=3),
    st.sampled_from(["auto", "always", "never"]),
)
def test_figures_of_generated_programs(names, around, recompute):
    def fun(w, x):
        for name in names:
            x = PARTS[name](w, x)
        return x

    for name in around:
        inner = AROUND[name](fun)
        fun = lambda w, x, f=inner: f(w, x) @ w  # noqa: E731
    check(fun, (W, X), compute_dtype=jnp.bfloat16, recompute=recompute)
