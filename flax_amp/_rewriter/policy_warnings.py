"""Warnings at trace time: a key matches nothing, or matmuls stay as they are.

The warnings come at each trace of the function that is passed to `amp`.
`warn_of_policy` reads the traced program alone, before the plan is made. `warn_of_fp8`
reads the reasons that were counted while the program was emitted.
"""

import difflib
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence

import flax
import jax
import jax.numpy as jnp

from flax_amp import _compat, _jaxprs, _source
from flax_amp._compat import DType, Jaxpr
from flax_amp._rewriter.primitives import Kind, Visit, is_matmul, walk
from flax_amp._rewriter.roles import Chooser, Context, why_as_written
from flax_amp._scope_paths import paths
from flax_amp.policy import KeyKind, Policy, use_compute_precision

# The folders of JAX, of Flax and of this package.
_LIBRARIES = tuple(
    os.path.join(os.path.dirname(file), "")
    for file in (jax.__file__, flax.__file__, os.path.dirname(__file__))
)


class PolicyWarning(UserWarning):
    """A policy, or a key of a policy, has no effect on the program of a function."""


def _warn(message: str) -> None:
    """Warns at the user's line: the innermost line outside of `_LIBRARIES`."""
    # A `stacklevel` of 2 is the caller of `_warn`, and each frame further out adds 1.
    frame = sys._getframe(1)
    level = 2
    while frame.f_back and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
        level += 1
    warnings.warn(message, PolicyWarning, stacklevel=level)


def warn_of_policy(choose: Chooser, closed: Jaxpr, names: Sequence[str]) -> None:
    """Warns of keys that match nothing, and if `amp` changes no matmul.

    `names` has the names of the inputs of the traced program, such as `params['w']`.
    """
    equations = list(walk(closed))
    if choose.policy.scope_keys:
        inputs = zip(_compat.open_jaxpr(closed)[0].invars, names, strict=True)
        used = {id(v) for visit in equations for v in visit.eqn.invars}
        # Unused inputs may be the parameters of a module that is not called here.
        idle = {name for v, name in inputs if id(v) not in used}
        _warn_of_keys(choose.policy, {visit.scopes for visit in equations}, idle)
    if choose.half != jnp.float32:
        _warn_of_matmuls(choose, [x for x in equations if is_matmul(x.eqn)])


def _warn_of_matmuls(choose: Chooser, matmuls: Sequence[Visit]) -> None:
    """Warns of matmuls that `amp` cannot reach, and if `amp` changes no matmul."""
    kept = Counter(_why_kept(choose, visit) for visit in matmuls)
    hidden = Counter(filter(None, (_hidden_in(choose, visit) for visit in matmuls)))
    if hidden:
        _warn(
            "amp: matmuls in hi-primitives of JAX stay in float32: "
            f"{_most_common(hidden)}. JAX makes hi-primitives of checkpoints, custom "
            "derivatives and loops under its flags jax_remat3, jax_custom_vjp3, "
            "jax_custom_jvp3 and jax_scan3, and of a derivative with "
            "generic_batching=True. Expected the flags off where functions are "
            "decorated or traced outside of the function given to amp, and no "
            "generic_batching. Or keep these matmuls in float32 by flax_amp.amp_stop; "
            "flax_amp.explain shows each matmul."
        )
    elif kept and "" not in kept:
        _warn(
            "amp: no matmul or convolution of this program runs in "
            f"{choose.half} by amp: {_most_common(kept)}. Expected matmuls between "
            "float32 arrays: cast float64 arrays, leave out dtype=, precision=, "
            "preferred_element_type= and jax.default_matmul_precision, and start from "
            "flax_amp.default_amp_policy | {...} with fewer keys. Or leave out amp; "
            "flax_amp.explain shows each matmul."
        )
    elif matmuls and all(_is_half_as_written(choose.policy, x) for x in matmuls):
        _warn(
            "amp: each matmul and convolution of this program is in half precision "
            f"without this amp ({len(matmuls)}), so amp changes none of them, and the "
            "equations between them run in the dtypes of the program. Expected a model "
            "in float32: leave out dtype= and param_dtype= of its layers, the casts, "
            "or an amp inside of the function, and amp keeps sums, norms and softmaxes "
            "in float32. Or leave out this amp; flax_amp.explain shows each matmul."
        )


def warn_of_fp8(policy: Policy, reasons: Counter[str]) -> None:
    """Warns with the reasons if fp8 is asked for, and no matmul runs in fp8.

    `reasons` counts why matmuls do not run in fp8, with "" for matmuls that do.
    """
    if policy.fp8_recipes and "" not in reasons:
        emulates = any(recipe.emulate for recipe in policy.fp8_recipes)
        options = "(emulate=True)" if emulates else ""
        why = _most_common(reasons) or "the program has no matmul that could"
        _warn(
            f"amp: no matmul of this program runs in fp8: {why}. Expected a matmul by "
            "a weight, an argument of the function, that is large enough "
            "(docs/fp8.md). Leave out fp8, or name the layers that run in fp8 whatever "
            'their size, as in flax_amp.default_amp_policy | {"*/mlp/*": '
            f"flax_amp.use_fp8{options}}}."
        )


def _most_common(reasons: Counter[str]) -> str:
    return "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))


def _float_factors(matmul: Visit) -> list[DType]:
    dtypes = [v.aval.dtype for v in matmul.eqn.invars[:2]]
    return [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]


def _is_half_as_written(policy: Policy, matmul: Visit) -> bool:
    """Whether a matmul is in half precision in the program, and `amp` leaves it so.

    `amp` rounds a float32 factor, and a float32 result of halves. Another value of a
    key, such as `use_float32_result`, changes the matmul, or its user chose to leave
    the matmul alone. The rule of a `custom_vjp` or `custom_jvp` may have matmuls that
    are not in the program yet.
    """
    eqn = matmul.eqn
    decision = policy.decide(eqn.primitive, matmul.scopes)
    around = [x.primitive.name for x in matmul.around]
    has_own_rule = any(x.startswith(("custom_vjp", "custom_jvp")) for x in around)
    if decision.function is not use_compute_precision or has_own_rule:
        return False
    dtypes = [*_float_factors(matmul), *(v.aval.dtype for v in eqn.outvars)]
    return all(jnp.issubdtype(x, jnp.floating) and x.itemsize == 2 for x in dtypes)


def _why_kept(choose: Chooser, matmul: Visit) -> str:
    """Says why `amp` leaves a matmul in its own dtypes.

    The reason is "" if the policy changes the matmul, if the operands are in half
    precision or fp8 as written, or if `amp_stop` is around the matmul.
    """
    eqn, scopes, around = matmul
    # The program itself has half precision or fp8 here.
    if any(dtype.itemsize < 4 for dtype in _float_factors(matmul)):
        return ""
    if reasons := list(filter(None, map(why_as_written, around))):
        return reasons[0]
    # A key of the policy may leave a loop or a call untouched as a whole.
    by_key = (choose.policy.decide(e.primitive, ()) for e in around)
    forced = next((d for d in by_key if d.key_kind is KeyKind.PRIMITIVE), None)
    # `choose` adds the scopes of the equation itself.
    outer = scopes[: len(scopes) - len(_source.scope_names(eqn))]
    choice = choose(eqn, Context(outer, forced))
    is_kept = choice.role is Kind.ORIGINAL and choice.decision.key != "amp_stop"
    return choice.reason if is_kept else ""


def _hidden_in(choose: Chooser, matmul: Visit) -> str:
    """Names the hi-primitive around a matmul, unless a key of the policy decides."""
    hi = next(filter(_jaxprs.hi_name, matmul.around), None)
    if hi is None or choose.policy.decide(hi.primitive, matmul.scopes).is_chosen:
        return ""
    name = _jaxprs.hi_name(hi)
    # A solver in half precision converges to half precision: so float32 is wanted
    # there, without a warning.
    if name == "CustomRoot":
        return ""
    return name


def _warn_of_keys(policy: Policy, scopes: set[tuple[str, ...]], idle: set[str]) -> None:
    """Warns of keys that match no scope and name no unused input."""
    # A module that is not called here may have parameters: `params['LM']['head']`.
    parts = {tuple(re.findall(r"(?<=\[')[^']+|\w+", name)) for name in idle}
    if missing := sorted(policy.unmatched(scopes | parts)):
        lines = "\n".join(f"  {key!r} ({_nearest(key, scopes)})" for key in missing)
        _warn(
            f"amp_policy: scope keys that match nothing in this program:\n{lines}\n"
            "expected the name of a jax.named_scope, or the path of a Flax module "
            "('LM/embed'), also as a glob ('*/embed'); an nnx.Module has a path if the "
            "module is an argument of the function; of several paths, the first by the "
            "alphabet counts. Correct these keys, or leave them out."
        )


def _nearest(key: str, scopes: set[tuple[str, ...]]) -> str:
    """Names the scope whose last modules look most like a key, for a message.

    The modules of the key are compared with as many last modules of each scope.
    """
    wanted = key.removeprefix("*/")
    depth = wanted.count("/") + 1
    # If a method calls a method of its own module, the shorter path names the module
    # only once.
    found = {min(pair, key=len) for nested in scopes for pair in paths(nested)}
    # Of several paths with the same end, the shortest is shown.
    by_length = sorted(found, key=lambda path: (-len(path), path))
    ends = {"/".join(path.split("/")[-depth:]): path for path in by_length}
    # With `cutoff=0` there is a nearest scope for any key.
    close = difflib.get_close_matches(wanted, ends, n=1, cutoff=0)
    if not close:
        return "the program has no scopes"
    return f"nearest: {ends[close[0]]!r}"
