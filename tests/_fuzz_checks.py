"""The programs that hypothesis makes, and `check`: what has to hold for each."""

import functools
import gc
import os
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st

import flax_amp
from _fuzz_interpreter import Interpreter
from _fuzz_language import (
    AROUND,
    CHANGES,
    JOINS,
    LOG,
    OPS,
    In,
    Join,
    Layers,
    Op,
    arguments,
    run,
)
from flax_amp import amp, default_amp_policy, use_fp8
from helpers import MATMULS, assert_identical, assert_same_avals, rewritten_in_float32

# --- generation ----------------------------------------------------------------------

_ops = st.builds(
    Op,
    st.sampled_from(sorted(OPS)),
    st.integers(0, 2),
    st.sampled_from([1.25, 0.5, 3.0]),
)


_NODES = ("op", "op", "in", "in", "in", "join", "layers")
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
    if kind == "layers":
        return draw(_layers(_bodies(min(depth - 1, 1), 2, kinds)))
    return draw(_ops)


@st.composite
def _layers(draw, bodies):
    count = draw(st.integers(3, 7))
    change = draw(st.sampled_from(sorted(CHANGES)))
    return Layers(draw(bodies), change, count, draw(st.integers(0, count - 1)))


@st.composite
def programs(draw):
    """Programs of at most four levels, which take little time."""
    if draw(st.integers(0, 2)) == 2:  # layers that are alike
        return draw(_ops), draw(_layers(st.tuples(_ops)))
    program = draw(_bodies(3, 3, sorted(AROUND)))
    assume(_cost(program) <= 16)
    return program


def _cost(nodes):
    """About how many operations run."""
    return sum(map(_node_cost, nodes))


def _node_cost(node):
    if isinstance(node, Op):
        return 1
    if isinstance(node, Join):
        return _cost(node.left) + _cost(node.right)
    if isinstance(node, Layers):
        return node.count * (1 + _cost(node.body))
    return node.n * _cost(node.body)


EXTRAS = ("", "", "", "", "explain", "explain", "leaks", "twice", "export")
options = st.fixed_dictionaries({"recompute": st.booleans()})

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
    "linearize": lambda fn: lambda p, x: jax.linearize(_loss(fn), p, x)[1](p, x),
    "vmap": _batched,
    "vmap of grad": lambda fn: _batched(_grad(fn)),
    "jit of grad": lambda fn: jax.jit(_grad(fn)),
    "hessian-vector product": lambda fn: _along(_grad(fn)),
    "grad of grad": lambda fn: jax.grad(lambda p, x: _sines(_grad(fn)(p, x)), (0, 1)),
    "grad of checkpoint": lambda fn: jax.grad(jax.checkpoint(_loss(fn)), (0, 1)),
    "grad of checkpoint of grad": lambda fn: jax.grad(
        lambda p, x: _sines(jax.checkpoint(_grad(fn))(p, x)), (0, 1)
    ),
    "hvp of checkpoint": lambda fn: _along(
        jax.grad(jax.checkpoint(_loss(fn)), (0, 1))
    ),
}  # fmt: skip

# What JAX cannot do, by words of a program: it need not be tried.
_CANNOT = (
    (("'while'",), {"forward", "jvp", "vmap"}),
    (
        ("custom_vjp", "custom_gradient", "rule_const", "nondiff"),
        TRANSFORMS.keys() - {"jvp", "linearize"},
    ),
    (("'io",), {"forward", "grad", "jvp", "linearize", "hessian-vector product"}),
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
    dtype, extra = draw(st.sampled_from(dtypes)), draw(st.sampled_from(EXTRAS))
    return program, transform, dtype, draw(options), extra


WIDE = "FLAX_AMP_FUZZ" in os.environ

# --- checks --------------------------------------------------------------------------


class Case:
    """One program under one transform, without `amp` and with it."""

    def __init__(self, program, transform):
        self.program = program
        self.transform = TRANSFORMS[transform]
        self.is_forward = transform in ("forward", "vmap")
        self.args = arguments()
        self.flat = jax.tree.leaves(self.args)
        self.plain, self.shapes = self.trace(self.function)
        self.expected = self.evaluate(self.plain)

    def function(self, params, x, ints):
        return run(self.program, params, x, ints)

    def trace(self, fn, around=lambda fn: fn):
        def transformed(p, x, ints):
            return self.transform(lambda p, x: fn(p, x, ints))(p, x)

        transformed = around(transformed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", flax_amp.PolicyWarning)
            return jax.make_jaxpr(transformed, return_shape=True)(*self.args)

    def reference(self):
        """The results in float64, or in float32 where time is short."""
        return self.evaluate(self.plain, wide=True)[0] if WIDE else self.expected[0]

    def evaluate(self, closed, **how):
        """Returns results, effects, and random bits."""
        LOG.clear()
        interpreter = Interpreter(**how)
        outs = interpreter(closed, self.flat)
        jax.effects_barrier()
        return list(map(np.asarray, outs)), list(LOG), interpreter.bits


def check(program, transform, dtype, options, extra=""):
    """Asserts all that holds for a program under a transform.

    Args:
      program: the nodes.
      transform: a key of `TRANSFORMS`.
      dtype: the compute dtype.
      options: those of `amp`.
      extra: a further check, of those that take more time.

    Returns:
      The names of the primitives in the program, transformed.
    """
    case = made(program, transform)
    if dtype == jnp.float32:
        check_float32(case)
    else:
        check_half(case, dtype, options, twice=extra == "twice")
    if extra in _EXTRA_CHECKS:
        _EXTRA_CHECKS[extra](case, options | {"compute_dtype": dtype})
    return {eqn.primitive.name for eqn, _ in _equations(case.plain)}


def made(program, transform):
    """Returns a case, and gives an example up if JAX cannot transform it."""
    try:
        return Case(program, transform)
    except Exception as error:
        assume(not _is_unsupported(error))
        raise


_UNSUPPORTED = (
    "Reverse-mode differentiation does not work for lax.while_loop",
    "can't apply forward-mode autodiff",
    "Differentiation rule for 'custom_lin'",  # of the same, under a gradient
    "does not support",
    "not supported",
    "IO effect",
    "ordered",
    "Effects",
    "Encountered an unexpected tracer",
    # Of a `custom_vjp` with `nondiff_argnums` in a scan, in a checkpoint of a gradient:
    # JAX gives its rule the arguments in another order.
    "Indexer must have integer or boolean type, got indexer with type float32",
)


def _is_unsupported(error):
    return any(text in str(error) for text in _UNSUPPORTED)


def check_float32(case):
    """A program that is rewritten in float32 computes the same bits."""
    closed, shapes = case.trace(rewritten_in_float32(case.function))
    assert_same_avals(shapes, case.shapes)
    outs, log, bits = case.evaluate(closed)
    paths = _paths(shapes)
    if case.is_forward:
        assert_identical(outs, case.expected[0])
    else:
        # The order in which cotangents are added up is not the same.
        assert_error(case, paths, outs, jnp.float32)
    assert_same_log(log, case.expected[1], exact=True)
    assert_same_bits(bits, case.expected[2])


def check_half(case, dtype, options, twice=False):
    """In half precision, everything but the digits of floats is the same."""
    lower = functools.partial(amp, compute_dtype=dtype, **options)
    fn = lower(case.function)
    closed, shapes = case.trace(lower(fn) if twice else fn)
    assert_same_avals(shapes, case.shapes)
    outs, log, bits = case.evaluate(closed)
    assert_same_log(log, case.expected[1], exact=False)
    assert_same_bits(bits, case.expected[2])
    paths = _paths(shapes)
    for path, actual, plain in zip(paths, outs, case.expected[0], strict=True):
        if path in ("['mask']", "['w']"):
            assert actual.tobytes() == plain.tobytes(), path
    assert_error(case, paths, outs, dtype)


def _paths(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


def assert_same_log(actual, expected, exact):
    """Asserts that callbacks saw the same; those with effects in the same order."""
    actual, expected = map(_in_order, (actual, expected))
    assert [tag for tag, *_ in actual] == [tag for tag, *_ in expected]
    for (tag, *seen), (_, *wanted) in zip(actual, expected, strict=True):
        for a, b in zip(seen, wanted, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), tag
            if exact or a.dtype.kind in "iub":
                assert a.tobytes() == b.tobytes(), f"{tag} saw {a}, not {b}"


def _in_order(log):
    """Returns the calls of functions with effects, and then all others by their name.

    Pure functions may be called in any order.
    """
    pure = sorted((call for call in log if call[0].startswith("pure")), key=_values)
    return [call for call in log if not call[0].startswith("pure")] + pure


def _values(call):
    return call[0], tuple(np.ravel(call[1]))


def assert_same_bits(actual, expected):
    """Asserts that the same random numbers were drawn, none of them again."""
    # They have no order: `amp` emits equations that need each other next to each other.
    first, second = (sorted(x.tobytes() for x in bits) for bits in (actual, expected))
    assert first == second, "random numbers"


def assert_error(case, paths, outs, dtype, reference=None):
    """Asserts that the error is one that rounding explains.

    It is compared with the errors of the program without `amp` if each of its equations
    rounds its results to `dtype`, with some more noise.
    """
    wide = case.reference()
    found = _errors(outs, wide if reference is None else reference)
    eps = float(jnp.finfo(dtype).eps)
    sizes = _errors(wide, [0 * v for v in wide])
    # A gradient that cancels out is what float32 rounds.
    rounding = _errors(case.expected[0], wide)
    bounds = [4 * max(eps * a, b) for a, b in zip(sizes, rounding, strict=True)]
    # More samples only where few of them do not explain the error.
    for seed in range(16):
        late = [
            f"{path}: error {a:.2e} above {b:.2e}"
            for path, a, b in zip(paths, found, bounds, strict=True)
            if not a <= b
        ]
        if not late:
            return
        rounded, *_ = case.evaluate(case.plain, half=dtype, seed=seed)
        errors = _errors(rounded, wide)
        bounds = [max(b, 4 * e) for b, e in zip(bounds, errors, strict=True)]
    raise AssertionError("; ".join(late))


def _errors(actual, expected):
    """Returns the largest error of each float result; infinity for NaN."""
    found = []
    for a, b in zip(actual, expected, strict=True):
        if a.dtype.kind in "iub" or a.size == 0:
            found.append(0.0)
            continue
        with np.errstate(all="ignore"):
            error = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
        found.append(float(np.nan_to_num(error, nan=np.inf)))
    return found


def check_fp8(program, transform, dtype, options):
    """With products in fp8, types, effects and random bits are those of half precision.

    What is finite in half precision is finite in fp8.

    Returns:
      How many products run in fp8.
    """
    case = made(program, transform)
    results = []
    # In a scope, because the products of these programs are small.
    in_fp8 = default_amp_policy | {"fp8": use_fp8(emulate=True)}
    for policy in (default_amp_policy, in_fp8):
        lower = functools.partial(amp, compute_dtype=dtype, **options)
        fn = lower(jax.named_scope("fp8")(case.function), amp_policy=policy)
        closed, shapes = case.trace(fn)
        assert_same_avals(shapes, case.shapes)
        results.append(case.evaluate(closed))
    (half, _, _), (outs, log, bits) = results
    assert_same_log(log, case.expected[1], exact=False)
    assert_same_bits(bits, case.expected[2])
    names = [eqn.primitive.name for eqn, _ in _equations(closed)]
    found = names.count("flax_amp_fp8_dot")
    for path, actual, plain in zip(_paths(shapes), outs, half, strict=True):
        # An index, such as that of the largest number, may be another one.
        if path in ("['mask']", "['w']"):
            assert actual.tobytes() == plain.tobytes(), path
        elif actual.dtype.kind not in "iub" and np.isfinite(plain).all():
            assert np.isfinite(actual).all(), path
    return found


# --- further checks ------------------------------------------------------------------


def check_leaks(case, options):
    """`amp` leaks no tracer of a program that leaks none by itself.

    The jaxpr of a custom derivative holds the tracers that the rule closes over: under
    a checkpoint, and also without one, as `amp` traces the function.
    """
    # To say what holds a tracer, JAX searches all objects that are not frozen. It took
    # minutes in a process that had run many tests. Where all that holds it is frozen,
    # JAX raises an IndexError instead.
    gc.freeze()
    try:
        with jax.checking_leaks():
            case.trace(case.function)
            jax.make_jaxpr(case.function)(*case.args)
    except Exception as error:
        assert "Leaked trace" in str(error) or isinstance(error, IndexError)
        return
    else:
        with jax.checking_leaks():
            case.trace(amp(case.function, **options))
    finally:
        gc.unfreeze()


def check_exported(case, options):
    """A program can be exported, and keeps its types."""
    if "callback" in str(case.plain):
        return

    def export(function):
        fn = case.transform(lambda p, x: function(p, x, case.args[2]))
        return jax.export.export(jax.jit(fn))(*case.args[:2])

    try:
        done = export(amp(case.function, **options))
    except TypeError as error:
        # Of a rule that closes over what a branch computes: JAX cannot lower it.
        if "No constant handler" not in str(error):
            raise
        with pytest.raises(TypeError, match="No constant handler"):
            export(case.function)
        return
    actual = [(v.shape, v.dtype) for v in done.out_avals]
    assert actual == [(v.shape, v.dtype) for v in jax.tree.leaves(case.shapes)]


def check_explained(case, options):
    """`explain` counts what is emitted: casts, and other equations by their dtypes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flax_amp.PolicyWarning)
        found = flax_amp.explain(case.function, backward=False, **options)(*case.args)
        closed = jax.make_jaxpr(amp(case.function, **options))(*case.args)
    totals, counts = found.totals, Counter()
    casts = Counter(down=totals.casts_down, up=totals.casts_up)
    for row in found.equations:
        if row.primitive == "convert_element_type":  # the user's own
            casts[_direction(*row.before.operands[:1], *row.before.results)] += (
                row.times
            )
        elif row.primitive in _COUNTED:
            counts[row.primitive, row.after.operands] += row.times
    emitted_casts, emitted = Counter(), Counter()
    for eqn, times in _equations(closed):
        name = eqn.primitive.name
        dtypes = [str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)]
        if name in ("convert_element_type", "flax_amp_saturate"):
            emitted_casts[_direction(*dtypes)] += times
        elif name in _COUNTED:
            emitted[name, tuple(dtypes[: len(eqn.invars)])] += times
    for both in (casts, emitted_casts):
        both.pop(None, None)
    assert +casts == +emitted_casts, f"explain: {casts}, emitted: {emitted_casts}"
    missing, more = counts - emitted, emitted - counts
    assert not missing and not more, f"explain: {missing}, emitted: {more}"


_COUNTED = frozenset((*MATMULS, "tanh", "sin", "exp", "log1p", "reduce_sum", "sort"))


def _direction(before, after):
    if before == after or "float" not in before or "float" not in after:
        return None
    wider = jnp.dtype(after).itemsize > jnp.dtype(before).itemsize
    return "up" if wider else "down"


def _equations(closed, times=1):
    """Yields each equation and how often it runs."""
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        yield eqn, times
        loops = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for body in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _equations(body, times * loops)


_EXTRA_CHECKS = {
    "leaks": check_leaks,
    "export": check_exported,
    "explain": check_explained,
}
