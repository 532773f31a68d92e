"""Programs for `rewriter/test_six_lines.py`: layers in a line, and bodies of layers.

A layer is a tuple `(name, first, second, weight)`: the values that it reads, counted
back from the last one, and its weight. A body has programs of its own in addition:
`(kind, first, second, weight, bodies, results)`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

N = 8
STEPS = 3
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
    # Sums `x + f(x)`: residual streams or states, by where they begin.
    "residual": lambda a, w, bias: a + (a @ w + bias[None]),
    "step": lambda a, w, bias: a + 0.1 * jnp.tanh(a @ w),
    "descent": lambda a, w, bias: a - 0.1 * (a @ w - bias[None]) @ w.T,
    "from zeros": lambda a, w, bias: jnp.zeros((N, N)) + a @ w,
}
# ... and from two.
OF_TWO = {
    "matmul of two": lambda a, b: a @ b / N,
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "where": lambda a, b: jnp.where(MASK, a, b),
    "maximum": lambda a, b: jnp.maximum(a, b),
    "sum": lambda a, b: b * a.sum(-1, keepdims=True) / N,
    "jit of two": jax.jit(lambda a, b: a * jnp.tanh(b + a)),
}
# What a body gave that is no matrix: scalars, sums along an axis.
OF_OTHERS = {
    "times": lambda a, other: a * other,
    "plus": lambda a, other: a + other,
}
# Matmuls more often: without them there is nothing to say.
OFTEN = "matmul matmul dense block running scaled residual step add".split()
LAYERS = [*OF_ONE, *OF_TWO, *OF_OTHERS]
NAMES = [*LAYERS, *OFTEN]
CALLS = ("jit", "checkpoint", "custom_jvp", "custom_vjp", "shard_map")
LOOPS = ("scan", "scan", "scan", "while")
KINDS = (*CALLS, "cond", "switch", *LOOPS)

# What a body returns: a value of it, counted back, or what is made of its last one.
RESULTS = ("0", "0", "1", "2", "first", "scalar", "sum", "maximum")


class Arguments(NamedTuple):
    """The arguments of a program; those of a body, too."""

    weights: tuple[jax.Array, ...]
    biases: tuple[jax.Array, ...]
    stacks: tuple[jax.Array, ...]  # of weights, one for each step of a scan
    stacked_biases: tuple[jax.Array, ...]
    choice: jax.Array  # of a branch


def arguments(seed):
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = (N, N), (4, N, N), (4, N), (2, STEPS, N, N), (2, STEPS, N)
    x, w, bias, stacks, biases = map(jax.random.normal, keys, shapes)
    scale = np.sqrt(N)
    parts = tuple(w / scale), tuple(bias), tuple(stacks / scale), tuple(biases)
    return x, Arguments(*parts, jnp.int32(1))


# --- programs as functions -----------------------------------------------------------


class State(NamedTuple):
    """What a program has computed: matrices, and all else that bodies gave."""

    values: list[jax.Array]
    others: list[jax.Array]


def run(program, inputs, args):
    """Runs the layers, each in a scope of its number; returns a `State`."""
    state = State([*inputs], [])
    for number, layer in enumerate(program):
        with jax.named_scope(f"layer{number}"):
            add(layer, state, args)
    return state


def add(layer, state, args):
    name, first, second, weight = layer[:4]
    a, b = (state.values[-1 - min(k, len(state.values) - 1)] for k in (first, second))
    if name in OF_ONE:
        found = [OF_ONE[name](a, args.weights[weight], args.biases[weight])]
    elif name in OF_TWO:
        found = [OF_TWO[name](a, b)]
    elif name in OF_OTHERS:
        found = [OF_OTHERS[name](a, state.others[-1]) if state.others else a + 0.5]
    else:
        found = body(layer, a, b, args)
    state.values.extend(x for x in found if x.shape == (N, N))
    state.others.extend(x for x in found if x.shape != (N, N))


def results_of(state, names):
    last = state.values[-1]
    made = {
        "first": lambda: state.values[0],
        "scalar": last.mean,
        "sum": lambda: last.sum(-1, keepdims=True),
        "maximum": lambda: last.max(-1, keepdims=True),
    }

    def result(name):
        if name in made:
            return made[name]()
        return state.values[-1 - min(int(name), len(state.values) - 1)]

    return tuple(map(result, names))


def body(layer, a, b, args):
    kind, _, _, _, programs, names = layer

    def function(number):
        def call(a, b, args):
            with jax.named_scope(f"body{number}"):
                return results_of(run(programs[number], [b, a], args), names)

        return call

    if kind in CALLS:
        return call(kind, function(0), a, b, args)
    if kind == "cond":
        return lax.cond(args.choice > 0, function(0), function(1), a, b, args)
    if kind == "switch":
        branches = [
            function(0),
            function(1),
            lambda a, b, args: function(0)(b, a, args),
        ]
        return lax.switch(args.choice, branches, a, b, args)
    if kind == "while":
        return while_loop(function(0), a, b, args)
    return scan(function(0), a, b, args)


def call(kind, function, a, b, args):
    if kind == "checkpoint":
        return jax.checkpoint(function)(a, b, args)
    if kind == "shard_map" and jax.sharding.get_abstract_mesh().empty:
        mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
        spec = jax.P()
        return jax.shard_map(
            function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )(a, b, args)
    if kind == "custom_jvp":
        called = jax.custom_jvp(function)
        called.defjvp(lambda primals, tangents: jax.jvp(function, primals, tangents))
        return called(a, b, args)
    if kind == "custom_vjp":
        called = jax.custom_vjp(function)
        called.defvjp(lambda *xs: jax.vjp(function, *xs), lambda vjp, c: vjp(c))
        return called(a, b, args)
    return jax.jit(function)(a, b, args)  # no shard_map in another one


def scan(function, a, b, args):
    """Two weights of each step's own, two that are closed over. It carries two values.

    The last values of all results but the first two are stacked.
    """

    def step(carry, own):
        weights, biases = own
        known = args._replace(
            weights=(*weights, *args.weights[2:]), biases=(*biases, *args.biases[2:])
        )
        found = function(*carry, known)
        matrices = [x for x in found if x.shape == (N, N)]
        carry = tuple([*matrices, carry[0], carry[1]][:2])
        return carry, (*matrices[2:], *(x for x in found if x.shape != (N, N)))

    carry, stacked = lax.scan(step, (a, b), (args.stacks, args.stacked_biases))
    return *carry, *(x[-1] for x in stacked)


def while_loop(function, a, b, args):
    def step(carry):
        i, *values = carry
        found = function(*values, args)
        matrices = [x for x in found if x.shape == (N, N)]
        return i + 1, *[*matrices, *values][:2]

    return lax.while_loop(lambda carry: carry[0] < STEPS, step, (0, a, b))[1:]


def function(program, returned=()):
    """The loss of a program, and some of its values, counted back."""

    def loss(x, args):
        state = run(program, [x], args)
        with jax.named_scope(f"layer{len(program)}"):
            used = [state.values[-1], *state.values[-3:-1], *state.others[-2:]]
            total = sum(jnp.square(v - 0.1).mean() for v in used)
            return total, results_of(state, returned)

    return loss


# --- generation ----------------------------------------------------------------------

_place = (*[st.sampled_from((0, 0, 0, 1, 2, 3))] * 2, st.integers(0, 3))
_layer = st.tuples(st.sampled_from(NAMES), *_place)
_results = st.lists(st.sampled_from(RESULTS), min_size=1, max_size=4).map(tuple)


def _body(depth):
    inner = programs(depth - 1, most=4)
    return st.tuples(st.sampled_from(KINDS), *_place, st.tuples(inner, inner), _results)


def programs(depth, most):
    """Programs of at most so many layers, with bodies in bodies up to a depth."""
    if not depth:
        return st.lists(_layer, min_size=1, max_size=most).map(tuple)
    either = st.one_of(_layer, _layer, _body(depth))
    return st.lists(either, min_size=1, max_size=most).map(tuple)


with_bodies = st.tuples(
    programs(2, most=6), st.lists(st.sampled_from(RESULTS), max_size=2).map(tuple)
)
