"""`amp` emits each equation in the dtypes that the six lines of the rule ask for.

The lines are those of docs/policies.md. Programs are generated. `_six_lines.py` reads
the lines independently of the rewriter, and tells the dtypes of each operand and the
number that the loss is. `make fuzz` tries a tenth of what `FLAX_AMP_FUZZ` says.
"""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax import lax

from _six_lines import MOVES, Reading
from benchmarks.matmuls import exact_matmuls
from flax_amp import amp
from helpers import HALVES, equations, exact_jit

COUNT = int(os.environ.get("FLAX_AMP_FUZZ", 0))  # 0: the same programs in every run
N = 8
MASK = np.arange(N * N).reshape(N, N) % 3 > 0


def softmax(a):
    e = jnp.exp(a - a.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def block(a, w, bias):
    """A residual, which arithmetic of its own region reads and a later one, too."""
    s = jnp.tanh(a) + jnp.sin(a)
    return s + jnp.tanh((s - s.mean(-1, keepdims=True)) @ w + bias[None])


# A value of a layer: from another one, and from arguments (a weight, a bias) ...
OF_ONE = {
    "matmul": lambda a, w, bias: a @ w,
    "dense": lambda a, w, bias: a @ w + bias[None],
    "bias": lambda a, w, bias: a + bias[None],
    "weight": lambda a, w, bias: a * w,
    "scale": lambda a, w, bias: a * bias[0],
    "shift": lambda a, w, bias: a + 0.5,
    "offset": lambda a, w, bias: a + bias[0],
    "tanh": lambda a, w, bias: jnp.tanh(a),
    "exp": lambda a, w, bias: jnp.exp(jnp.sin(a)),
    "minus": lambda a, w, bias: -a,
    "mask": lambda a, w, bias: jnp.where(MASK, a, 0.0),
    "reshape": lambda a, w, bias: a.reshape(2, 32).reshape(N, N),
    "transpose": lambda a, w, bias: a.T,
    "roll": lambda a, w, bias: jnp.roll(a, 3, 0),
    "flip": lambda a, w, bias: jnp.flip(a, 1),
    "centre": lambda a, w, bias: a - a.mean(0, keepdims=True),
    "cumsum": lambda a, w, bias: jnp.cumsum(a, 1) / N,
    "softmax": lambda a, w, bias: softmax(a),
    "block": block,
    # A later region reads a sum, and a scalar.
    "running": lambda a, w, bias: jnp.cumsum(jnp.sin(a), 1) + jnp.tanh(a @ w),
    "scaled": lambda a, w, bias: (a @ w) * lax.rsqrt(jnp.square(a).mean() + 1),
}
# ... and from two.
OF_TWO = {
    "matmul": lambda a, b: a @ b / N,
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "where": lambda a, b: jnp.where(MASK, a, b),
    "maximum": lambda a, b: jnp.maximum(a, b),
    "sum": lambda a, b: b * a.sum(-1, keepdims=True) / N,
    "jit": jax.jit(lambda a, b: a * jnp.tanh(b + a)),
}
# Matmuls more often: without them there is nothing to say.
NAMES = [*OF_ONE, *OF_TWO, *"matmul dense block running scaled".split()]
layer = st.tuples(st.sampled_from(NAMES), *[st.integers(0, 3)] * 3)
programs = st.lists(layer, min_size=4, max_size=12)


def function(program):
    """The loss of a program: each layer in a scope of its number."""

    def loss(x, w, bias):
        values, unread = [x], {0}
        for i, (name, first, second, weight) in enumerate(program):
            a, b = (max(0, i - k) for k in (first, second))
            with jax.named_scope(f"layer{i}"):
                if name in OF_ONE:
                    y, b = OF_ONE[name](values[a], w[weight], bias[weight]), a
                else:
                    y = OF_TWO[name](values[a], values[b])
            values.append(y)
            unread = unread - {a, b} | {i + 1}
        with jax.named_scope(f"layer{len(program)}"):
            return sum(jnp.square(values[i] - 0.1).mean() for i in sorted(unread))

    return loss


def arguments(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (N, N), (4, N, N), (4, N)
    x, w, bias = map(jax.random.normal, keys, shapes)
    return x, tuple(w / np.sqrt(N)), tuple(bias)


def grouped(closed, noted=None):
    """`{(layer, primitive): operand dtypes of each equation}`, in order."""
    found, noted = {}, iter(noted or [])
    for scopes, eqn in equations(closed):
        name = eqn.primitive.name
        if name not in ("jit", "convert_element_type"):
            key = (*re.findall(r"layer\d+", "/".join(scopes))[-1:], name)
            dtypes = next(noted, [v.aval.dtype.name for v in eqn.invars])
            found.setdefault(key, []).append(dtypes)
    return found


def agree(key, asked, found):
    """Whether equations have the dtypes that the lines ask for.

    A move of float32 values that are rounded behind it may move rounded ones; a bias
    that is added in half may be repeated before.
    """
    if key[-1] not in MOVES.split():
        return asked == found
    halves = [
        sum("float32" not in dtypes for dtypes in each) for each in (asked, found)
    ]
    return halves[0] <= halves[1]


def check(program, half):
    loss, args = function(program), arguments(0)
    closed = jax.make_jaxpr(loss)(*args)
    reading = Reading(closed.jaxpr)

    def by_lines(*args):
        return reading.run([*closed.consts, *jax.tree.leaves(args)], half)[0]

    jax.eval_shape(by_lines, *args)
    for recompute in (False, True):
        fn = amp(loss, compute_dtype=half, recompute=recompute)
        found = grouped(jax.make_jaxpr(fn)(*args))
        for key, asked in grouped(closed, reading.noted).items():
            others = found.get(key, [])
            text = f"{key}: {asked} by the lines, {others} under amp"
            assert agree(key, asked, others), text
    run = exact_jit(lambda *args: (by_lines(*args), exact_matmuls(fn)(*args)))
    # A sum in another order may change one rounding, but not for each draw.
    pairs = (run(*arguments(seed)) for seed in range(3))
    gaps = [abs(ours - lines) / abs(lines) for lines, ours in pairs]
    assert min(gaps) < 1e-6, f"relative difference of the loss {gaps}"


@settings(
    max_examples=-(-COUNT // 10) or 40,
    derandomize=not COUNT,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(programs, st.sampled_from(HALVES))
def test_generated_programs(program, half):
    check(program, half)


@pytest.mark.parametrize("name", [*OF_ONE, *OF_TWO])
def test_each_layer_between_matmuls(name):
    layers = [("matmul", 0, 0, 0), (name, 0, 1, 1), ("matmul", 0, 0, 2)]
    check(layers, HALVES[len(name) % 2])
