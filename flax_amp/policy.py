"""Which equation runs in which precision: words, precision functions and policies.

A *policy* is a plain dict. Its keys are JAX primitives and scope strings. Its values
are dtypes or *precision functions*

    (compute_dtype, original_dtypes, *invars, **bind_params) -> (invars, bind_params)

which cast the operands of an equation and adapt its parameters. `amp` recognizes the
functions of this module. `amp` calls a user's own function on the equations that the
key of the function selects.

A key may match a `jax.named_scope` (or Flax module) around an equation. The outermost
such scope decides. Without such a scope, the key of the primitive decides. An equation
that no key selects follows the rule of `amp`, with `"amp_default"` as its value.
"""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, DType, Params
from flax_amp._scope_paths import paths, pattern

BindArguments = tuple[Arrays, Params]  # the operands and parameters of a bind
PrecisionFunction = Callable[..., BindArguments]
PolicyEntries = Mapping[Any, Any]

# --- precision functions -------------------------------------------------------------


def _cast(x: Array, dtype: DTypeLike) -> Array:
    is_float = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    if not is_float or x.dtype == dtype:
        return x
    return x.astype(dtype)


def with_result_dtype(bind_params: Mapping[str, Any], dtype: DTypeLike) -> Params:
    """Returns `bind_params` with `dtype` in place of the float result dtypes."""
    changed = dict(bind_params)
    for name in {"preferred_element_type", "out_dtype"} & changed.keys():
        if changed[name] is not None and jnp.issubdtype(changed[name], jnp.floating):
            changed[name] = jnp.dtype(dtype)
    return changed


def use_compute_precision(
    compute_dtype: DTypeLike,
    original_dtypes: Sequence[DType],
    *invars: Array,
    **bind_params: Any,
) -> BindArguments:
    """Runs the equation in the compute dtype.

    Args:
      compute_dtype: the `compute_dtype` given to `amp`.
      original_dtypes: the operand dtypes of the untransformed program.
      *invars: the operands as they arrive, already cast by earlier equations.
      **bind_params: the parameters of the primitive.

    Returns:
      The operands and parameters to bind the primitive with.
    """
    del original_dtypes
    operands = [_cast(x, compute_dtype) for x in invars]
    return operands, with_result_dtype(bind_params, compute_dtype)


def use_compute_precision_behind_matmuls(
    compute_dtype: DTypeLike,
    original_dtypes: Sequence[DType],
    *invars: Array,
    **bind_params: Any,
) -> BindArguments:
    """Runs the equation in the compute dtype if a matmul comes before it.

    This function is for the key of a primitive. An equation whose operands come from
    data, weights and constants alone follows the rule of `amp`: coordinates are
    subtracted, and edges are counted, in float32. In the body of a loop, the inputs of
    the body count as data.

    Arguments and result as in `use_compute_precision`.

    Example:
      >>> import flax_amp, jax
      >>> policy = flax_amp.default_amp_policy | {
      ...     jax.lax.cumsum_p: flax_amp.use_compute_precision_behind_matmuls}
    """
    return use_compute_precision(compute_dtype, original_dtypes, *invars, **bind_params)


def use_original_precision(
    compute_dtype: DTypeLike,
    original_dtypes: Sequence[DType],
    *invars: Array,
    **bind_params: Any,
) -> BindArguments:
    """Runs the equation in the dtypes of the untransformed program.

    Arguments and result as in `use_compute_precision`.
    """
    del compute_dtype
    pairs = zip(invars, original_dtypes, strict=True)
    return [_cast(x, dtype) for x, dtype in pairs], bind_params


def use_float32_result(
    compute_dtype: DTypeLike,
    original_dtypes: Sequence[DType],
    *invars: Array,
    **bind_params: Any,
) -> BindArguments:
    """Runs a matmul in the compute dtype, and keeps its float32 sum as the result.

    This function is for the key of a matmul primitive or of a scope. It serves logits,
    distances and scores that are ranked, compared, or read by a loss: rounding makes
    neighboring scores equal. The matmuls of the derivative give half precision. All
    further equations in the scope follow the rule of `amp`.

    Arguments and result as in `use_compute_precision`.

    Example:
      >>> import flax_amp
      >>> policy = flax_amp.default_amp_policy | {
      ...     "*/nearest": flax_amp.use_float32_result}
    """
    arguments = compute_dtype, original_dtypes
    invars_in_half, params = use_compute_precision(*arguments, *invars, **bind_params)
    return invars_in_half, params | {"preferred_element_type": jnp.dtype(jnp.float32)}


@dataclasses.dataclass(frozen=True)
class InDtype:
    """The precision function of a dtype in a policy: equations run in this dtype."""

    dtype: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    def __call__(self, _: DTypeLike, *args: Any, **bind_params: Any) -> BindArguments:
        """Arguments and result as in `use_compute_precision`."""
        return use_compute_precision(self.dtype, *args, **bind_params)


@dataclasses.dataclass(frozen=True)
class use_fp8:  # noqa: N801 - reads as a function in a policy
    """Runs matmuls by weights on 8-bit floats, and all else by the rule of `amp`.

    As the value of `jax.lax.dot_general_p`, or as `matmul_dtype`, `use_fp8` leaves
    small matmuls, the first layer and the last layer in half precision. As the value of
    a scope, `use_fp8` includes small matmuls and the last layer (`docs/fp8.md`).

    Args:
      emulate: `None`: tracing the function is an error if the default device has no
        matmuls in fp8. `True`: the matmuls run in float32 on the same 8-bit numbers,
        on any device. `False`: the default device is not checked, as is needed to
        compile for another device.

    Example:
      >>> import jax.numpy as jnp, flax_amp
      >>> policy = flax_amp.default_amp_policy | {
      ...     "*/mlp/*": flax_amp.use_fp8, "*/lm_head": jnp.bfloat16}

    References:
      Micikevicius et al., [FP8 Formats for Deep
      Learning](https://arxiv.org/abs/2209.05433), 2022.
    """

    emulate: bool | None = None

    def __call__(self, *args: Any, **bind_params: Any) -> BindArguments:
        """Runs the equation in the compute dtype; see `use_compute_precision`."""
        return use_compute_precision(*args, **bind_params)


# --- words ---------------------------------------------------------------------------

MatmulDType = Literal["fp8"] | use_fp8 | type | None  # short, for signatures
# The words for a precision, and the short forms of the words.
Precision = Literal[
    "bf16-mixed", "16-mixed", "32-true", "fp8-mixed", "bf16", "fp16", "fp32", "fp8"
]
_MEANING: dict[Any, tuple[Any, MatmulDType]] = {
    "bf16-mixed": (jnp.bfloat16, None),
    "16-mixed": (jnp.float16, None),
    "32-true": (jnp.float32, None),
    "fp8-mixed": (jnp.bfloat16, "fp8"),
}
_LONG: dict[Any, Any] = dict(
    zip(("bf16", "fp16", "fp32", "fp8"), _MEANING, strict=True)
)


def long_word(word: Any, name: str = "precision", hint: str = "") -> Precision:
    """Returns the long form of a word, or raises a ValueError that calls it `name`."""
    long: Any = _LONG.get(word, word) if isinstance(word, str) else None
    if long not in _MEANING:
        words = ", ".join(f"{long!r} ({short!r})" for short, long in _LONG.items())
        raise ValueError(f"{name} is {word!r}; expected one of {words}.{hint}")
    return long


def read_precision(word: Any) -> tuple[Any, MatmulDType]:
    """Returns the compute dtype and the `matmul_dtype` of a word; see `long_word`."""
    return _MEANING[long_word(word, hint=" Pass a dtype as compute_dtype.")]


# --- policies ------------------------------------------------------------------------

# The default of `amp`: matmuls run in half precision, and everything else follows the
# rule. Extend it with `default_amp_policy | {...}`.
default_amp_policy: dict[Any, PrecisionFunction] = {
    lax.dot_general_p: use_compute_precision,
    lax.conv_general_dilated_p: use_compute_precision,
    _compat.ragged_dot_general_p: use_compute_precision,
    "amp_stop": use_original_precision,
    "amp_default": use_original_precision,
}

# For graphs: lookups of computed rows and sums over edges are half, too. The default
# policy adds up in float32 there, forward and backward, in arrays as large as the
# messages of all edges. Under this policy the sums add up in half precision, as in a
# model whose layers have `dtype=bfloat16`.
graph_policy: dict[Any, PrecisionFunction] = default_amp_policy | {
    lax.gather_p: use_compute_precision_behind_matmuls,
    lax.scatter_add_p: use_compute_precision_behind_matmuls,
}

_LOW = (lax.add_p, lax.sub_p, lax.dot_general_p, lax.conv_general_dilated_p)
_FULL = (lax.exp_p, lax.log_p, lax.mul_p, lax.div_p)
# The default of jaxamp: four primitives run in the compute dtype, and four in float32.
# All further primitives run in their original dtypes.
jaxamp_policy: dict[Any, PrecisionFunction] = {
    **dict.fromkeys(_LOW, use_compute_precision),
    **dict.fromkeys(_FULL, InDtype(jnp.float32)),
    **dict.fromkeys(("amp_stop", "amp_default"), use_original_precision),
}


def with_matmul_dtype(
    entries: PolicyEntries | None, matmul_dtype: MatmulDType
) -> PolicyEntries | None:
    """Returns a policy with fp8 for `dot_general`.

    A policy whose `dot_general` key has a value of its own keeps the value.
    """
    if matmul_dtype is None:
        return entries
    recipe = _as_function(matmul_dtype)
    if not isinstance(recipe, use_fp8):
        raise TypeError(
            f"matmul_dtype: got {matmul_dtype!r}; expected 'fp8', "
            "flax_amp.use_fp8(emulate=...), or None for the compute dtype."
        )
    functions = _functions(entries)
    default = use_compute_precision
    if functions.get(lax.dot_general_p, default) is default:
        functions[lax.dot_general_p] = recipe
    return functions


def read_options(
    caller: str,
    precision: Any,
    compute_dtype: Any,
    matmul_dtype: MatmulDType,
    entries: PolicyEntries | None,
    default: Precision = "bf16-mixed",
) -> tuple[DType, PolicyEntries | None]:
    """Returns the compute dtype and the policy of the options of `amp`.

    `compute_dtype` and `matmul_dtype` replace the dtypes of the word for the precision.
    """
    if precision is not None and compute_dtype is not None:
        raise TypeError(
            f"{caller}: got both {precision=} and {compute_dtype=}; expected one."
        )
    low, of_word = read_precision(default if precision is None else precision)
    given = low if compute_dtype is None else compute_dtype
    checked = _as_function(given)
    if checked not in map(InDtype, (jnp.float16, jnp.bfloat16, jnp.float32)):
        raise TypeError(
            f"compute_dtype: got {given!r}; expected jnp.float16, jnp.bfloat16, or "
            "jnp.float32 for a run without mixed precision."
        )
    if matmul_dtype is None:
        matmul_dtype = of_word
    return checked.dtype, with_matmul_dtype(entries, matmul_dtype)


def without_fp8(entries: PolicyEntries) -> PolicyEntries:
    """Returns a policy without its entries for fp8.

    `dot_general` runs in the compute dtype instead. A scope loses its key, because
    `use_compute_precision` would lower the norms and softmaxes of the scope as well.
    """
    kept = {k: f for k, f in _functions(entries).items() if not isinstance(f, use_fp8)}
    return dict.fromkeys({lax.dot_general_p} & {*entries}, use_compute_precision) | kept


# --- looking a policy up -------------------------------------------------------------


class KeyKind(enum.Enum):
    """The kind of key that selected a precision function."""

    SCOPE = "scope"
    PRIMITIVE = "primitive"
    DEFAULT = "default"


@dataclasses.dataclass(frozen=True, eq=False)  # functions need not be hashable
class Decision:
    """The precision function of one equation and the policy key that selected it."""

    function: PrecisionFunction
    key_kind: KeyKind
    key: str

    @property
    def is_chosen(self) -> bool:
        """Whether a key for a scope or a primitive decided, not `amp_default`."""
        return self.key_kind is not KeyKind.DEFAULT


class Policy:
    """A checked policy dict, which decides equation by equation."""

    def __init__(self, entries: PolicyEntries | None):
        functions = _functions(entries)
        # By name, because two JAX modules may hold two objects for the same primitive.
        self._primitives = {
            key.name: Decision(fn, KeyKind.PRIMITIVE, key.name)
            for key, fn in functions.items()
            if isinstance(key, Primitive)
        }
        scopes = [key for key in functions if isinstance(key, str)]
        self._scopes = [
            (pattern(key), Decision(functions[key], KeyKind.SCOPE, key))
            for key in scopes
        ]
        default = functions.get("amp_default", use_original_precision)
        self._default = Decision(default, KeyKind.DEFAULT, "amp_default")
        self._match = functools.cache(self._match_scopes)
        # Scope names in a sub-jaxpr begin at the sub-jaxpr. The scopes around the
        # sub-jaxpr are needed only if a key spans several scopes.
        self.spans_scopes = any(set("/*?[") & set(key) for key in scopes)
        self.scope_keys = frozenset(scopes) - {"amp_stop", "amp_default"}
        self.names_scopes = bool(self.scope_keys)
        self.fp8_recipes = {fn for fn in functions.values() if isinstance(fn, use_fp8)}
        # Whether the policy can change a program whose compute dtype is float32. A
        # user's own function may cast to any dtype.
        mine: list[Any] = [use_compute_precision, use_original_precision]
        mine += [use_float32_result, InDtype(jnp.float32), *self.fp8_recipes]
        self.may_leave_float32 = any(fn not in mine for fn in functions.values())

    def decide(self, primitive: Primitive, scopes: tuple[str, ...]) -> Decision:
        """Returns the decision for an equation of `primitive` inside `scopes`.

        The key of the outermost scope decides, or else the key of the primitive.
        """
        by_primitive = self._primitives.get(primitive.name, self._default)
        return next(iter(self._match(scopes)), by_primitive)

    def unmatched(self, all_scopes: Iterable[tuple[str, ...]]) -> set[str]:
        """Returns the scope keys that match none of the given nested scopes."""
        found = itertools.chain.from_iterable(map(self._match, all_scopes))
        return {*self.scope_keys} - {decision.key for decision in found}

    def _match_scopes(self, scopes: tuple[str, ...]) -> tuple[Decision, ...]:
        """Returns the decisions of all keys that match a scope, outer scopes first."""
        found = (
            decision
            for spellings in paths(scopes)
            for regex, decision in self._scopes
            if any(map(regex.fullmatch, spellings))
        )
        return tuple(dict.fromkeys(found))


def _functions(entries: Any) -> dict[Any, PrecisionFunction]:
    """Returns the checked entries, with a precision function for each dtype."""
    if entries is None:
        entries = default_amp_policy
    if not isinstance(entries, Mapping):
        raise TypeError(
            f"amp_policy: got {type(entries).__name__}; expected a dict, such as "
            "flax_amp.default_amp_policy | {...}."
        )
    functions = {key: _as_function(value) for key, value in entries.items()}
    wrong = [
        f"  {key!r}: {entries[key]!r}"
        for key, function in functions.items()
        if not isinstance(key, str | Primitive) or function is None
    ]
    if wrong:
        raise TypeError(
            "amp_policy: wrong entries:\n" + "\n".join(wrong) + "\nexpected keys that "
            "are JAX primitives (jax.lax.exp_p) or scope strings ('*/LayerNorm_*'), "
            "and as values precision functions (flax_amp.use_original_precision) or "
            "float dtypes of at least 16 bits (jnp.float32)."
        )
    return functions


def _as_function(value: Any) -> Any:
    """Returns the precision function that a value of a policy means, or `None`."""
    if value is use_fp8 or (isinstance(value, str) and value == "fp8"):
        return use_fp8()
    # NumPy would read an array as the dtype of the array, and `None` as float64.
    if not isinstance(value, type | np.dtype | str):
        return value if callable(value) else None
    try:
        in_dtype = InDtype(value)
    except (TypeError, ValueError):  # a ValueError for strings such as "16-mixed"
        return None
    dtype = in_dtype.dtype
    # float64 does not exist without `jax_enable_x64`. 8-bit floats need `use_fp8`.
    is_here = jax.dtypes.canonicalize_dtype(dtype) == dtype
    is_float = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
    if not is_float or not is_here:
        return None
    return in_dtype
