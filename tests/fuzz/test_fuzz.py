"""Generated programs: under `amp` they do what they do without it.

`FOUND` has the shortest programs that have failed once. `make fuzz` runs more programs
in slices of at most 250, so that a failure ends its slice only, and the memory of a
slice is given back. Each slice prints its seed and how many it has drawn: with
`FLAX_AMP_FUZZ=250` and that `FLAX_AMP_FUZZ_SEED`, the same programs run again.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import time
import warnings
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax.extend.core import Literal

from _fuzz_language import AROUND, JOINS, OPS, In, Join, Op, arguments, run
from _programs import batched
from flax_amp import PolicyWarning, _compat, _jaxprs, amp
from helpers import (
    HALVES,
    assert_identical,
    assert_same_avals,
    rewritten_in_float32,
)

COUNT = int(os.environ.get("FLAX_AMP_FUZZ", 0))  # 0: those of every run
SEED = int(os.environ.get("FLAX_AMP_FUZZ_SEED", 1000 * time.time() if COUNT else 0))
SLICES = -(-COUNT // 250) or 3
DTYPES = (jnp.float32, *HALVES)

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


TRANSFORMS = {
    "forward": lambda fn: fn,
    "grad": _grad,
    "jvp": lambda fn: _along(lambda p, x: fn(p, x)["y"]),
    "vmap": batched,
    "vmap of grad": lambda fn: batched(_grad(fn)),
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


# --- evaluation ----------------------------------------------------------------------

_CALLS = ("jaxpr", "call_jaxpr", "call")  # parameters that hold the body of a call


def _of_dtype(atoms, values):
    """The values of variables; literals, which are numbers, as arrays."""
    return [
        np.asarray(x, atom.aval.dtype) if isinstance(atom, Literal) else x
        for atom, x in zip(atoms, values, strict=True)
    ]


def _is_float32(x):
    return getattr(x, "dtype", None) == jnp.float32


@dataclasses.dataclass
class Interpreter:
    """Evaluates jaxprs equation by equation, so that equal ones give equal bits.

    XLA fuses, and fused code rounds otherwise. Here each equation runs by itself. The
    same interpreter gives the error of a program in which each single equation rounds
    its results to half precision.

    Attributes:
      half: the dtype to which each float32 result is rounded, if there is one.
      seed: of the further noise of each rounding.
      bits: the random bits that were drawn, in order.
    """

    half: Any = None
    seed: int = 0
    bits: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self._rng = np.random.default_rng(self.seed)

    def __call__(self, closed, args):
        outs = _jaxprs.evaluate(closed, args, self._equation)
        return _of_dtype(_compat.open_jaxpr(closed)[0].outvars, outs)

    def _equation(self, eqn, args):
        args = _of_dtype(eqn.invars, args)
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._scan(eqn, args)
        if name == "while":
            return self._while(params, args)
        if name == "cond":
            branches = params["branches"]
            index = np.clip(int(args[0]), 0, len(branches) - 1)
            return self(branches[index], args[1:])
        for body in (params[key] for key in _CALLS if key in params):
            return self(body, args)
        return self._bind(eqn, args)

    def _bind(self, eqn, args):
        outs = _compat.bind(eqn, args, eqn.params)
        if eqn.primitive.name == "random_bits":
            self.bits.append(np.asarray(outs[0]))
        return outs if self.half is None else list(map(self._rounded, outs))

    def _rounded(self, x):
        if not _is_float32(x):
            return x
        x = np.asarray(x)
        noise = 1 + jnp.finfo(self.half).eps / 2 * self._rng.uniform(-1, 1, x.shape)
        with np.errstate(over="ignore"):  # an error that is infinite explains all
            return (x * noise).astype(self.half).astype(np.float32)

    def _scan(self, eqn, args):
        params = eqn.params
        num_consts, num_carry = _compat.scan_counts(eqn)
        split = num_consts + num_carry
        consts, carry, xs = args[:num_consts], args[num_consts:split], args[split:]
        xs = [x if _is_key(x) else np.asarray(x) for x in xs]
        order, rows = range(params["length"]), {}
        for i in reversed(order) if params["reverse"] else order:
            outs = self(params["jaxpr"], [*consts, *carry, *(x[i] for x in xs)])
            carry = outs[:num_carry]
            rows[i] = outs[num_carry:]
        columns = zip(*(rows[i] for i in order), strict=True)
        return [*carry, *map(_stack, columns)]

    def _while(self, params, args):
        first, second = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body = args[:first], args[first : first + second]
        carry = args[first + second :]
        while np.any(on := self(params["cond_jaxpr"], [*of_cond, *carry])[0]):
            outs = self(params["body_jaxpr"], [*of_body, *carry])
            carry = [_choose(on, *pair) for pair in zip(outs, carry, strict=True)]
        return carry


def _is_key(x):
    return jnp.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)


def _choose(on, new, old):
    """Returns the new carry of those elements of a batch that go on, else the old."""
    if not np.ndim(on):
        return new
    dims = (*np.shape(on), *(1,) * (np.ndim(new) - np.ndim(on)))
    return np.where(np.reshape(on, dims), new, old)


def _stack(rows):
    return (
        jnp.stack(rows) if _is_key(rows[0]) else np.stack(list(map(np.asarray, rows)))
    )


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
            warnings.simplefilter("ignore", PolicyWarning)
            traced = jax.make_jaxpr(self.transformed(fn), return_shape=True)
            return traced(*self.args)

    def evaluate(self, closed, **how):
        """Returns results and random bits."""
        interpreter = Interpreter(**how)
        outs = interpreter(closed, jax.tree.leaves(self.args))
        # Random bits have no order: `amp` emits what needs another next to it.
        bits = sorted(x.tobytes() for x in interpreter.bits)
        return list(map(np.asarray, outs)), bits


def check(program, transform, dtype, recompute=True, twice=False):
    """Asserts that everything but the digits of floats is as without `amp`.

    The digits are those of float32 if a program is rewritten in float32. `twice` is
    amp over amp.
    """
    try:
        case = Case(program, transform)
    except Exception:  # JAX itself cannot transform it
        assume(False)
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


# --- the tests -----------------------------------------------------------------------

_settings = settings(
    max_examples=-(-(COUNT or 45) // SLICES),
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


def marks_of(part):
    """A slice is enough on the other versions of JAX, and for the fast part."""
    slow = [pytest.mark.slow] if part and not COUNT else []
    return [pytest.mark.once, *slow] if part else []


@pytest.mark.filterwarnings("ignore::flax_amp.PolicyWarning")  # nothing in half
@pytest.mark.parametrize(
    "part", [pytest.param(i, marks=marks_of(i)) for i in range(SLICES)]
)
def test_generated_programs(part):
    count = itertools.count()

    @hypothesis.seed(SEED + part)
    @_settings
    @given(examples(DTYPES))
    def check_all(example):
        with contextlib.suppress(jax.errors.UnexpectedTracerError):  # of a closure
            check(*example)
            next(count)

    try:
        check_all()
    finally:
        print(f"{next(count)} programs of FLAX_AMP_FUZZ_SEED={SEED + part}")
        if COUNT:
            jax.clear_caches()


FOUND = {
    "a loop that ends at another step for each element of a batch": (
        (In("while", (Op("abs"),), 1),),
        "vmap",
    ),
    "a custom_vjp in the rule of a custom_jvp, an equation with a list in it": (
        (In("custom_jvp", (In("custom_vjp", (Op("abs"),), 1),), 1),),
        "grad",
    ),
    "a rule that closes over what a branch computes": (
        (In("switch", (In("custom_vjp_closed", (Op("abs"),), 1),), 1),),
        "grad",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_failed_once(name):
    for dtype in DTYPES:
        check(*FOUND[name], dtype)
