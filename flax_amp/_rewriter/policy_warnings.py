"""Warnings at trace time: a policy has no effect, or products stay in float32.

A policy is judged by the traced program alone, before it is planned, once for each
trace of the function that `amp` was given. If it is not certain that something is
wrong, there is no warning.
"""

import difflib
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, DType, Eqn, Jaxpr
from flax_amp._jaxpr.traits import is_matrix_product
from flax_amp._jaxpr.walk import Visit, walk
from flax_amp._rewriter.casts import finfo
from flax_amp._rewriter.fp8_rule import NOT_IN_FP8, Fp8Product
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._rewriter.outline.equality import plans_in
from flax_amp._rewriter.plan import Plan, ReasonKind, Step
from flax_amp._scope_paths import paths, split_method
from flax_amp._tree import fill, is_array, is_inexact_array, pick
from flax_amp.policy import (
    Origin,
    Policy,
    follow_precision,
    use_original_precision,
    use_precision,
    use_widest_precision,
)

_FLAX = str(Path(flax.__file__).parent)
_HALVES = (jnp.float16, jnp.bfloat16)
_CUSTOM = ("custom_jvp_call", "custom_vjp_call")

# Precision functions that never cast to the compute dtype.
_HIGH = (
    use_original_precision,
    use_widest_precision,
    follow_precision,
    use_precision(jnp.float32),
)


class PolicyWarning(UserWarning):
    """A policy, or a part of it, has no effect on the program that `amp` was given."""


def warn_of_policy(
    policy: Policy,
    closed: Jaxpr,
    compute_dtype: DType,
    paths_of_inputs: Callable[[], Sequence[str]],
) -> None:
    """Warns of keys that match nothing, and of an `amp` that changes nothing.

    Args:
      policy: the policy.
      closed: the traced program.
      compute_dtype: its compute dtype.
      paths_of_inputs: returns the path of each input of the program among the arguments
        of the user's function.
    """
    if compute_dtype == jnp.float32:
        return
    jaxpr, _ = _compat.open_jaxpr(closed)
    equations = _equations(jaxpr)
    found = (
        _nothing_in_compute_dtype(policy, equations, compute_dtype),
        _half_already(policy, equations),
        _unmatched(policy, equations, jaxpr, paths_of_inputs),
    )
    for message in filter(None, found):
        # For the caller of the function that `amp` returned.
        warnings.warn(message, PolicyWarning, stacklevel=4)


def warn_of_precision(plan: Plan) -> None:
    """Warns if JAX's default precision keeps products in float32.

    An equation does not tell who asked for its precision, the user or the default.
    """
    default: Any = getattr(jax.config, "jax_default_matmul_precision", None)
    # All of these mean `Precision.DEFAULT`, which asks for nothing.
    if default in (None, "default", "fastest", "bfloat16"):
        return
    count = sum(step.reason.kind is ReasonKind.PRECISION for step in _steps(plan))
    if count:
        warnings.warn(
            f"amp: {count} products stay in float32, because they ask for precision "
            f"while jax.default_matmul_precision is {default!r}. Expected the default, "
            "None, so that they run in the compute dtype: unset it around what amp "
            "transforms, `with jax.default_matmul_precision(None): ...`, and ask for "
            "precision=... at the products that need it.",
            stacklevel=4,
        )


def warn_of_fp8(policy: Policy, plan: Plan) -> None:
    """Warns if fp8 is asked for, and no product runs in it."""
    if not policy.fp8_recipes:
        return
    steps = _steps(plan)
    if any(isinstance(step.detail, Fp8Product) for step in steps):
        return
    reasons = Counter(str(step.reason) for step in steps)
    found = (
        f"{reason.removeprefix(NOT_IN_FP8)} ({count})"
        for reason, count in reasons.most_common()
        if reason.startswith(NOT_IN_FP8)
    )
    why = "; ".join(itertools.islice(found, 3)) or "it has none that could"
    warnings.warn(
        f"amp: no matrix product of this program runs in fp8: {why}. Expected one by a "
        "weight, an argument of the function, that is large enough (docs/fp8.md). "
        "Leave out fp8, or take small products as well with "
        "flax_amp.use_fp8(any_shape=True).",
        PolicyWarning,
        stacklevel=4,
    )


class HalfParameterCheck:
    """Warns once of parameters in half precision, whose updates are lost.

    Parameters are what a gradient is taken of: the arrays themselves, not what was
    computed from them, such as a copy in half precision of float32 parameters. A batch,
    a cache or a state may be in half precision, and differentiated as well. It warns
    only of arrays in the first argument that holds floats, if that is not an array
    itself, and only if nothing in other arguments is differentiated: those could be the
    parameters, and the first argument an input or a state.
    """

    def __init__(self) -> None:
        self._done = False

    def __call__(self, call: FunctionalCall) -> None:
        if self._done:
            return
        parameters, half = _half_parameters(call)
        if not half:
            return
        self._done = True
        arrays = filter(is_array, call.inputs)
        names = dict(zip(map(id, arrays), call.array_names(), strict=True))
        shown = ", ".join(names[id(x)] for x in half[:3] if id(x) in names)
        dtype = half[0].dtype
        warnings.warn(
            f"amp: {len(half)} of {len(parameters)} parameters are in half precision"
            f"{shown and f', such as {shown} in {dtype.name}'}: gradients and updates "
            "are rounded, and "
            f"an update below 1/{round(2 / float(finfo(dtype).eps))} of a weight "
            "is lost, so that training stalls. Expected float32 parameters, which amp "
            "casts at each use: keep them in float32, as in jax.tree.map(lambda x: "
            "x.astype(jnp.float32), params), without param_dtype= or to_bf16().",
            UserWarning,
            stacklevel=3,
        )


def _half_parameters(call: FunctionalCall) -> tuple[list[Array], list[Array]]:
    """Returns what may be the parameters of a call, and those in half precision.

    There are none of these if it is not certain that they are parameters.
    """
    groups = [
        (argument, floats)
        for argument, leaves in call.leaves_by_argument()
        if (floats := list(filter(is_inexact_array, leaves)))
    ]
    if not groups or is_array(groups[0][0]):
        return [], []
    (_, parameters), *others = groups
    in_half = [x for x in parameters if x.dtype in _HALVES]
    half = list(filter(_compat.is_differentiated, in_half))
    if any(_compat.is_differentiated(x) for _, floats in others for x in floats):
        return parameters, []
    return parameters, half


def _steps(plan: Plan) -> list[Step]:
    """Returns the steps of a plan and of all plans in it, each plan once."""
    plans, found = {plan: None}, []
    queue = [plan]
    while queue:
        for step in queue.pop().steps:
            found.append(step)
            inner = [p for p in plans_in(step.detail) if p not in plans]
            plans |= dict.fromkeys(inner)
            queue += inner
    return found


def _equations(jaxpr: Jaxpr, scopes: tuple[str, ...] = ()) -> list[Visit]:
    """Returns the equations of a jaxpr and of all jaxprs inside of it."""
    return [
        visit
        for visit in walk(jaxpr, scopes)
        # A kernel has its own precision.
        if all(eqn.primitive.name != "pallas_call" for eqn in visit.around)
    ]


def _nothing_in_compute_dtype(
    policy: Policy, equations: Sequence[Visit], compute_dtype: DType
) -> str | None:
    deciding: list[str] = []
    for equation in equations:
        decision = policy.decide(equation.eqn.primitive, equation.scopes)
        if decision.function not in _HIGH:  # this one may run in the compute dtype
            return None
        is_asked = decision.origin is not Origin.SCOPE  # a scope is meant to be high
        if is_asked and _is_product_in(equation.eqn, (jnp.float32,)):
            deciding.append(decision.key)
    if not deciding:
        return None
    keys = ", ".join(map(repr, sorted(set(deciding))))
    return (
        f"amp_policy: nothing in this program runs in {compute_dtype}: the policy "
        f"leaves all of its {len(deciding)} matrix products and convolutions in "
        f"float32 (by {keys}). Expected a policy that casts some of them. Start from "
        "the default one: flax_amp.default_amp_policy | {...}."
    )


def _is_product_in(eqn: Eqn, dtypes: Sequence[Any]) -> bool:
    """Whether an equation is a matrix product of factors in some dtypes."""
    factors = eqn.invars[:2]
    return is_matrix_product(eqn) and all(v.aval.dtype in dtypes for v in factors)


def _half_already(policy: Policy, equations: Sequence[Visit]) -> str | None:
    if any(e.eqn.primitive.name.startswith("flax_amp_") for e in equations):
        return None  # amp has transformed it before
    products = [
        equation
        for equation in equations
        if is_matrix_product(equation.eqn)
        if policy.decide(equation.eqn.primitive, equation.scopes).origin
        is not Origin.SCOPE
    ]
    halves = [e for e in products if _is_product_in(e.eqn, _HALVES)]
    layers = [equation for equation in halves if _is_of_flax(equation.eqn)]
    # Half of the products or more: a single layer in half precision may be on purpose.
    if not layers or 2 * len(halves) < len(products):
        return None
    scope = "/".join(layers[0].scopes)
    where = f", such as {scope}" if scope else ""
    dtype = layers[0].eqn.invars[0].aval.dtype
    return (
        f"amp: {len(halves)} of the {len(products)} matrix products and convolutions "
        f"run in {dtype} without amp, in Flax layers that have a dtype of their own"
        f"{where}; amp changes nothing there. Expected layers in float32: leave out "
        "their dtype=, or put flax_amp.amp_stop around those that need it."
    )


def _is_of_flax(eqn: Eqn) -> bool:
    """Whether an equation stands in the code of a layer that comes with Flax."""
    return _compat.user_file(eqn).startswith(_FLAX)


# --- keys that match nothing ---------------------------------------------------------


def _unmatched(
    policy: Policy,
    equations: Sequence[Visit],
    jaxpr: Jaxpr,
    paths_of_inputs: Callable[[], Sequence[str]],
) -> str | None:
    if not policy.scope_keys:
        return None
    scopes = {equation.scopes for equation in equations}
    missing = policy.unmatched(policy.scope_keys, scopes)
    if missing:  # Keys may name modules that are passed but not called.
        missing = policy.unmatched(missing, _idle_modules(jaxpr, paths_of_inputs()))
    custom = [e for e in equations if e.eqn.primitive.name in _CUSTOM]
    for equation in custom:  # ... or scopes in a derivative, which is not traced yet.
        inside = _scopes_of_rule(equation) if missing else set()
        if inside is None:  # may be anything
            return None
        missing = policy.unmatched(missing, inside)
    if not missing:
        return None
    lines = "\n".join(f"  {key!r}{_nearest(key, scopes)}" for key in sorted(missing))
    return (
        f"amp_policy: scope keys that match nothing in this program:\n{lines}\n"
        "expected the name of a jax.named_scope, or the path of a Flax module "
        "('LM/embed'), also as a glob ('*/embed'); an nnx.Module has one if it is an "
        "argument of the function, a shared one that of its first path by the "
        "alphabet. Correct these keys, or leave them out."
    )


def _idle_modules(jaxpr: Jaxpr, paths: Sequence[str]) -> set[tuple[str, ...]]:
    """Returns the paths of the inputs that no equation reads."""
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    inputs = zip(paths, jaxpr.invars, strict=True)
    return {tuple(path.split("/")) for path, v in inputs if id(v) not in used}


def _scopes_of_rule(equation: Visit) -> set[tuple[str, ...]] | None:
    """Returns the scopes in the derivative of a call with a custom one.

    `None` if its rule cannot be traced here: it may have any scopes.
    """
    eqn = equation.eqn
    # JAX does not differentiate with respect to what a `custom_vjp` closes over.
    first = eqn.params.get("num_consts", 0)
    moves = [
        i >= first and jnp.issubdtype(v.aval.dtype, jnp.inexact)
        for i, v in enumerate(eqn.invars)
    ]

    def derivative(*operands: Array) -> Any:
        def call(*moving: Array) -> Arrays:
            outs = _compat.bind(eqn, fill(moving, moves, operands), eqn.params)
            return list(filter(is_inexact_array, outs))

        moving = pick(operands, moves)
        if eqn.primitive.name == "custom_jvp_call":
            return jax.jvp(call, moving, moving)
        outs, pullback = jax.vjp(call, *moving)
        return pullback(outs)

    structs = [_compat.struct_of(v.aval, v.aval.dtype) for v in eqn.invars]
    try:
        closed = jax.make_jaxpr(derivative)(*structs)
    except Exception:  # whatever a rule raises that the program never uses
        return None
    jaxpr, _ = _compat.open_jaxpr(closed)
    return {inside.scopes for inside in _equations(jaxpr, equation.scopes)}


def _nearest(key: str, scopes: set[tuple[str, ...]]) -> str:
    """Returns the keys of existing scopes that look most like a key, for a message."""
    segments = _names(key.removeprefix("*/"))
    # The shorter one names a module once whose methods call each other.
    modules = {min(pair, key=len) for nested in scopes for pair in paths(nested)}
    if not modules:
        return " (it has no scopes)"
    known: dict[str, str] = {}  # by their last segments, as many as the key has
    # Of several paths with the same end, the shortest is shown.
    for names in sorted(map(_names, modules), key=lambda names: (len(names), names)):
        end = "/".join(names[-len(segments) :])
        known.setdefault(end.lower(), "/".join(names))
    close = difflib.get_close_matches("/".join(segments).lower(), known)
    shown = [known[end] for end in close] or list(known.values())[:3]
    return f" (nearest: {', '.join(map(repr, shown))})"


def _names(path: str) -> list[str]:
    """Returns the modules of a path, without their methods."""
    return [split_method(segment)[0] for segment in path.split("/")]
