"""Warnings at trace time: a policy has no effect, or products stay in float32.

A policy is judged by the traced program alone, before it is planned, once for each
trace of the function that `amp` was given.
"""

import difflib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Sequence

import flax
import jax
import jax.numpy as jnp

from flax_amp import _compat
from flax_amp._compat import DType, Jaxpr
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._rewriter.primitives import is_matrix_product
from flax_amp._rewriter.roles import ASKS_FOR_PRECISION, Chooser, Context, Role
from flax_amp._rewriter.walk import Visit, walk
from flax_amp._scope_paths import paths, split_method
from flax_amp._tree import is_array, is_inexact_array
from flax_amp.policy import Origin, Policy

_FLAX = os.path.join(os.path.dirname(flax.__file__), "")
_LIBRARIES = (
    _FLAX,
    os.path.join(os.path.dirname(jax.__file__), ""),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),
)
_HALVES = (jnp.float16, jnp.bfloat16)


class PolicyWarning(UserWarning):
    """A policy, or a part of it, has no effect on the program that `amp` was given."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the user: the innermost one outside of JAX and Flax."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def warn_of_policy(
    policy: Policy, closed: Jaxpr, compute_dtype: DType, call: FunctionalCall
) -> None:
    """Warns of keys that match nothing, and of products that stay as they are.

    Args:
      policy: the policy.
      closed: the traced program.
      compute_dtype: its compute dtype.
      call: the call of the user's function that was traced.
    """
    if compute_dtype == jnp.float32:
        return
    # A kernel has its own precision.
    equations = list(walk(closed, enter=lambda e: e.primitive.name != "pallas_call"))
    messages = [_unmatched(policy, equations, closed, call)]
    # What amp has transformed before has no dtypes of the user's.
    if not any(v.eqn.primitive.name.startswith("flax_amp_") for v in equations):
        messages.append(_not_in_half(Chooser(policy, compute_dtype), equations))
    for message in filter(None, messages):
        warn(message, PolicyWarning)


def warn_of_fp8(policy: Policy, reasons: Counter[str], found: int) -> None:
    """Warns if fp8 is asked for, and no product runs in it.

    Args:
      policy: the policy.
      reasons: why products stay in half precision; see `fp8.fp8_product`.
      found: how many products run in fp8.
    """
    if not policy.fp8_recipes or found:
        return
    shown = "; ".join(f"{reason} ({n})" for reason, n in reasons.most_common(3))
    warn(
        "amp: no matrix product of this program runs in fp8: "
        f"{shown or 'it has none that could'}. Expected one by a weight, an argument "
        "of the function, that is large enough (docs/fp8.md). Leave out fp8, or name "
        "the layers that run in it whatever their size, as in "
        'flax_amp.default_amp_policy | {"*/mlp/*": flax_amp.use_fp8}.',
        PolicyWarning,
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
        groups = [
            (argument, floats)
            for argument, leaves in call.leaves_by_argument()
            if (floats := list(filter(is_inexact_array, leaves)))
        ]
        if self._done or not groups or is_array(groups[0][0]):
            return
        (_, parameters), *others = groups
        in_half = [x for x in parameters if x.dtype in _HALVES]
        half = list(filter(_compat.is_differentiated, in_half))
        rest = (x for _, floats in others for x in floats)
        if not half or any(map(_compat.is_differentiated, rest)):
            return
        self._done = True
        dtype = half[0].dtype
        warn(
            f"amp: {len(half)} of {len(parameters)} parameters are in half precision, "
            f"{dtype.name}: an update below 1/{round(2 / float(jnp.finfo(dtype).eps))} "
            "of a weight is lost, so that training stalls. Expected float32 "
            "parameters, which amp casts at each use: keep them in float32, as in "
            "jax.tree.map(lambda x: x.astype(jnp.float32), params), without "
            "param_dtype= or to_bf16()."
        )


def _not_in_half(choose: Chooser, equations: Sequence[Visit]) -> str | None:
    """Says why no product runs in half precision because of `amp`, if none does."""
    products = [visit for visit in equations if is_matrix_product(visit.eqn)]
    kept = Counter(_why_kept(choose, visit) for visit in products)
    asking = sum(kept[why] for why in kept if why.startswith(ASKS_FOR_PRECISION))
    default = getattr(jax.config, "jax_default_matmul_precision", None)
    # An equation does not tell who asked for its precision, the user or the default.
    if asking and default not in (None, "default", "bfloat16"):
        return (
            f"amp: {asking} products stay in float32, because they ask for precision "
            f"while jax.default_matmul_precision is {default!r}. Expected the default, "
            "None, so that they run in the compute dtype: unset it around what amp "
            "transforms, `with jax.default_matmul_precision(None): ...`, and ask for "
            "precision=... at the products that need it."
        )
    if "" in kept or not kept:
        return None
    shown = "; ".join(f"{reason} ({count})" for reason, count in kept.most_common(3))
    return (
        f"amp: no matrix product or convolution of this program runs in {choose.half} "
        f"by amp: {shown}. Expected some between float32 arrays: cast what is float64, "
        "leave out dtype=, precision= and preferred_element_type=, and start from "
        "flax_amp.default_amp_policy | {...} with fewer keys. Or leave out amp; "
        "flax_amp.explain shows each product."
    )


def _why_kept(choose: Chooser, product: Visit) -> str:
    """Says why `amp` leaves a product as it is, or "" if that is not its doing."""
    eqn, scopes, around = product
    outer = scopes[: len(scopes) - len(_compat.scope_names(eqn))]
    # A loop or a call may be left untouched as a whole.
    by_key = (choose.policy.decide(e.primitive, ()) for e in around)
    forced = next((d for d in by_key if d.origin is Origin.PRIMITIVE), None)
    choice = choose(eqn, Context(outer, forced))
    if choice.decision.key == "amp_stop":
        return ""
    dtypes = [v.aval.dtype for v in eqn.invars[:2]]
    if any(jnp.issubdtype(d, jnp.floating) and d.itemsize < 4 for d in dtypes):
        # The program says so itself. In Flax it may do so inadvertently.
        is_layer = _compat.user_file(eqn).startswith(_FLAX)
        is_half = all(dtype in _HALVES for dtype in dtypes)
        return f"a Flax layer with dtype={dtypes[0]}" if is_layer and is_half else ""
    return choice.reason if choice.role is Role.PRECISE else ""


def _unmatched(
    policy: Policy, equations: Sequence[Visit], closed: Jaxpr, call: FunctionalCall
) -> str | None:
    if not policy.scope_keys:
        return None
    scopes = {equation.scopes for equation in equations}
    # Keys may name modules that are passed but not called: inputs that nothing reads.
    jaxpr, _ = _compat.open_jaxpr(closed)
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    inputs = zip(call.array_paths(), jaxpr.invars, strict=True)
    idle = {tuple(path.split("/")) for path, v in inputs if id(v) not in used}
    missing = policy.unmatched(scopes | idle)
    if not missing:
        return None
    lines = "\n".join(f"  {key!r} ({_nearest(key, scopes)})" for key in sorted(missing))
    return (
        f"amp_policy: scope keys that match nothing in this program:\n{lines}\n"
        "expected the name of a jax.named_scope, or the path of a Flax module "
        "('LM/embed'), also as a glob ('*/embed'); an nnx.Module has one if it is an "
        "argument of the function, a shared one that of its first path by the "
        "alphabet. Correct these keys, or leave them out."
    )


def _nearest(key: str, scopes: set[tuple[str, ...]]) -> str:
    """Returns the paths of existing scopes that look most like a key, for a message."""
    wanted = _modules(key.removeprefix("*/"))
    # The shorter one names a module once whose methods call each other.
    found = {min(pair, key=len) for nested in scopes for pair in paths(nested)}
    ends: dict[str, str] = {}  # by their last segments, as many as the key has
    # Of several paths with the same end, the shortest is shown.
    for modules in sorted(map(_modules, found), key=lambda names: (len(names), names)):
        end = "/".join(modules[-len(wanted) :])
        ends.setdefault(end.lower(), "/".join(modules))
    close = difflib.get_close_matches("/".join(wanted).lower(), ends) or [*ends][:3]
    shown = ", ".join(repr(ends[end]) for end in close)
    return f"nearest: {shown}" if shown else "it has no scopes"


def _modules(path: str) -> list[str]:
    """Returns the modules of a path, without their methods."""
    return [split_method(segment)[0] for segment in path.split("/")]
