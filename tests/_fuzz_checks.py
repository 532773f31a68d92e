"""The programs that hypothesis makes, and `check`: what has to hold for each."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

import flax_amp
from _fuzz_interpreter import Interpreter
from _fuzz_language import AROUND, JOINS, OPS, In, Join, Op, arguments, run
from flax_amp import amp
from helpers import assert_identical, assert_same_avals, rewritten_in_float32

# --- generation ----------------------------------------------------------------------

_ops = st.builds(
    Op,
    st.sampled_from(sorted(OPS)),
    st.integers(0, 2),
    st.sampled_from([1.25, 0.5, 3.0]),
)


_NODES = ("op", "op", "in", "in", "in", "join")
# JAX traces the forward function of a rule in a jaxpr. What a rule inside of it closes
# over is out of reach: without `amp`, a `jit` around the outer function fails alike.
_IN_RULES = sorted(AROUND.keys() - {"custom_vjp_closed"})


@st.composite
def _bodies(draw, depth, most, kinds):
    """A sequence of nodes, with up to `depth` levels below them."""
    return tuple(draw(_node(depth, kinds)) for _ in range(draw(st.integers(1, most))))


@st.composite
def _node(draw, depth, kinds):
    kind = draw(st.sampled_from(_NODES)) if depth else "op"
    if kind == "in":
        around = draw(st.sampled_from(kinds))
        inside = _IN_RULES if around.startswith("custom") else kinds
        body = draw(_bodies(depth - 1, 2, inside))
        return In(around, body, draw(st.integers(1, 3)))
    if kind == "join":
        left, right = (draw(_bodies(depth - 1, 2, kinds)) for _ in range(2))
        return Join(draw(st.sampled_from(sorted(JOINS))), left, right)
    return draw(_ops)


@st.composite
def programs(draw):
    """Programs of at most four levels, which take little time."""
    program = draw(_bodies(3, 3, sorted(AROUND)))
    assume(_cost(program) <= 16)
    return program


def _cost(nodes):
    """About how many operations run."""
    parts = {
        Op: lambda op: 1,
        Join: lambda join: _cost(join.left) + _cost(join.right),
        In: lambda node: node.n * _cost(node.body),
    }
    return sum(parts[type(node)](node) for node in nodes)


# --- transforms ----------------------------------------------------------------------

_TARGET = np.cos(np.arange(16.0, dtype=np.float32)).reshape(4, 4)


def _loss(fn):
    return lambda p, x: jnp.sum(fn(p, x)["y"] * _TARGET)


def _grad(fn):
    return jax.grad(_loss(fn), (0, 1))


def _sines(tree):
    return sum(jnp.sum(jnp.sin(v)) for v in jax.tree.leaves(tree))


def _along(fn):
    """The derivative of a function along one direction."""
    return lambda p, x: jax.jvp(fn, (p, x), jax.tree.map(jnp.cos, (p, x)))


def _batched(fn):
    return lambda p, x: jax.vmap(fn, (None, 0))(p, jnp.stack([x, x / 2]))


TRANSFORMS = {
    "forward": lambda fn: fn,
    "grad": _grad,
    "jvp": lambda fn: _along(lambda p, x: fn(p, x)["y"]),
    "vmap": _batched,
    "vmap of grad": lambda fn: _batched(_grad(fn)),
    "hessian-vector product": lambda fn: _along(_grad(fn)),
    "grad of grad": lambda fn: jax.grad(lambda p, x: _sines(_grad(fn)(p, x)), (0, 1)),
    "grad of checkpoint": lambda fn: jax.grad(jax.checkpoint(_loss(fn)), (0, 1)),
}

# What JAX cannot do, by words of a program: it need not be tried.
_CANNOT = (
    (("'while'",), {"forward", "jvp", "vmap"}),
    (("custom_vjp",), TRANSFORMS.keys() - {"jvp"}),
)


@st.composite
def examples(draw, dtypes):
    """The arguments of `check`."""
    program = draw(programs())
    names, text = set(TRANSFORMS), repr(program)
    for words, able in _CANNOT:
        if any(word in text for word in words):
            names &= able
    transform = draw(st.sampled_from(sorted(names)))
    dtype = draw(st.sampled_from(dtypes))
    return program, transform, dtype, draw(st.booleans()), draw(st.booleans())


# --- checks --------------------------------------------------------------------------


class Case:
    """One program under one transform, without `amp` and with it."""

    def __init__(self, program, transform):
        self.program = program
        self.transform = TRANSFORMS[transform]
        self.args = arguments()
        self.plain, self.shapes = self.trace(self.function)
        leaves = jax.tree.leaves_with_path(self.shapes)
        self.paths = [jax.tree_util.keystr(path) for path, _ in leaves]
        self.expected, self.bits = self.evaluate(self.plain)

    def function(self, params, x, ints):
        return run(self.program, params, x, ints)

    def transformed(self, fn):
        return lambda p, x, ints: self.transform(lambda p, x: fn(p, x, ints))(p, x)

    def trace(self, fn):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", flax_amp.PolicyWarning)
            traced = jax.make_jaxpr(self.transformed(fn), return_shape=True)
            return traced(*self.args)

    def evaluate(self, closed, **how):
        """Returns results and random bits."""
        interpreter = Interpreter(**how)
        outs = interpreter(closed, jax.tree.leaves(self.args))
        # Random bits have no order: `amp` emits what needs another next to it.
        bits = sorted(x.tobytes() for x in interpreter.bits)
        return list(map(np.asarray, outs)), bits


def made(program, transform):
    """Returns a case, and gives an example up if JAX itself cannot transform it."""
    try:
        return Case(program, transform)
    except Exception:
        assume(False)


def check(program, transform, dtype, recompute=True, twice=False):
    """Asserts that everything but the digits of floats is as without `amp`.

    The digits are those of float32 if a program is rewritten in float32. `twice` is
    amp over amp.
    """
    case = made(program, transform)
    lower = functools.partial(amp, compute_dtype=dtype, recompute=recompute)
    is_exact = False
    if dtype == jnp.float32:
        # The order in which cotangents are added up is not the same.
        lower, is_exact = rewritten_in_float32, transform in ("forward", "vmap")
    fn = lower(case.function)
    closed, shapes = case.trace(lower(fn) if twice else fn)
    assert_same_avals(shapes, case.shapes)
    outs, bits = case.evaluate(closed)
    assert bits == case.bits, "random numbers"
    for path, actual, plain in zip(case.paths, outs, case.expected, strict=True):
        if is_exact or path in ("['mask']", "['w']"):
            assert_identical(actual, plain)
    assert_error(case, outs, dtype)


def assert_error(case, outs, dtype):
    """Asserts that the error is one that rounding explains.

    It is compared with the errors of the program without `amp` if each of its equations
    rounds its results to `dtype`, with some more noise.
    """
    found, eps = _errors(outs, case.expected), float(jnp.finfo(dtype).eps)
    sizes = _errors(case.expected, map(np.zeros_like, case.expected))
    bounds = [4 * eps * size for size in sizes]
    # More samples only where few of them do not explain the error.
    for seed in range(16):
        late = [
            f"{path}: error {a:.2e} above {b:.2e}"
            for path, a, b in zip(case.paths, found, bounds, strict=True)
            if not a <= b
        ]
        if not late:
            return
        rounded, *_ = case.evaluate(case.plain, half=dtype, seed=seed)
        errors = _errors(rounded, case.expected)
        bounds = [max(b, 4 * e) for b, e in zip(bounds, errors, strict=True)]
    raise AssertionError("; ".join(late))


def _errors(actual, expected):
    """Returns the largest error of each float result; infinity for NaN."""

    def error(a, b):
        if a.dtype.kind in "iub" or a.size == 0:
            return 0.0
        with np.errstate(all="ignore"):
            largest = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
        return float(np.nan_to_num(largest, nan=np.inf))

    return [error(a, b) for a, b in zip(actual, expected, strict=True)]
