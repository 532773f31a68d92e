"""Which equation runs in which precision: precision functions and policies.

A *policy* is a plain dict. Its keys are JAX primitives and scope strings, its values
*precision functions*

    (compute_dtype, original_dtypes, *invars, **bind_params) -> (invars, bind_params)

which cast the operands of one equation and adapt its parameters. `amp` recognizes the
functions of this module, and paints the whole program with them
(`flax_amp/_rewriter/paint.py`). It calls any other function on the equations that its
key selects. A dtype as a value means `use_precision(dtype)`.

The function of an equation is that of

1. the outermost `jax.named_scope` (or Flax module) around it that a key matches
   (`flax_amp/_scope_paths.py`);
2. or else its primitive;
3. or else `"amp_default"`.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, DType, Params
from flax_amp._jaxpr.traits import Kind, names_of
from flax_amp._scope_paths import names_method, paths, pattern

BindArguments = tuple[Arrays, Params]  # what a primitive is bound to
PrecisionFunction = Callable[..., BindArguments]
PolicyEntries = Mapping[Any, Any]  # an alias, to keep signatures short

# --- precision functions -------------------------------------------------------------

# Parameters by which a primitive fixes the dtype of its own result.
DTYPE_PARAMS = ("preferred_element_type", "out_dtype")


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _as_dtype(dtype: Any) -> Any:
    try:
        return jnp.dtype(dtype)
    except (TypeError, ValueError):  # a ValueError for strings such as "16-mixed"
        return None


def _cast(x: Array, dtype: DTypeLike) -> Array:
    return x.astype(dtype) if _is_float(x) and x.dtype != dtype else x


def with_result_dtype(bind_params: Mapping[str, Any], dtype: DTypeLike) -> Params:
    """Returns `bind_params` with the float result dtypes they fix set to `dtype`."""
    return {
        name: jnp.dtype(dtype)
        if name in DTYPE_PARAMS
        and value is not None
        and jnp.issubdtype(value, jnp.floating)
        else value
        for name, value in bind_params.items()
    }


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
    invars_ = [_cast(x, compute_dtype) for x in invars]
    return invars_, with_result_dtype(bind_params, compute_dtype)


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


def use_widest_precision(
    compute_dtype: DTypeLike,
    original_dtypes: Sequence[DType],
    *invars: Array,
    **bind_params: Any,
) -> BindArguments:
    """Runs the equation in the widest float dtype of its original operands.

    Arguments and result as in `use_compute_precision`.
    """
    del compute_dtype
    return _use_widest_of(original_dtypes, invars, bind_params)


def _use_widest_of(
    dtypes: Sequence[DType], invars: Sequence[Array], bind_params: Params
) -> BindArguments:
    """Runs an equation in the widest float dtype of some; without one, as it is."""
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    if not floats:
        return list(invars), bind_params
    widest = functools.reduce(jnp.promote_types, floats)
    return use_compute_precision(widest, floats, *invars, **bind_params)


@dataclasses.dataclass(frozen=True)
class use_precision:  # noqa: N801 - reads as a function in a policy
    """Runs the equation in one given dtype, whatever the compute dtype.

    A result in a dtype that is neither float32 nor the compute dtype returns to
    float32.

    Args:
      dtype: a float dtype.

    Example:
      >>> import jax, jax.numpy as jnp, flax_amp
      >>> policy = flax_amp.default_amp_policy | {
      ...     "lm_head": flax_amp.use_precision(jnp.bfloat16)}
    """

    dtype: Any

    def __post_init__(self) -> None:
        # numpy reads None as float64
        checked = None if self.dtype is None else _as_dtype(self.dtype)
        is_float = checked is not None and jnp.issubdtype(checked, jnp.floating)
        if checked is None or not is_float or checked.itemsize < 2:
            raise TypeError(
                f"use_precision: got {self.dtype!r}; expected a float dtype such as "
                "jnp.float32 or jnp.bfloat16. For matrix products on 8-bit floats, "
                "which have to be scaled, use flax_amp.use_fp8."
            )
        object.__setattr__(self, "dtype", checked)

    def __call__(
        self,
        compute_dtype: DTypeLike,
        original_dtypes: Sequence[DType],
        *invars: Array,
        **bind_params: Any,
    ) -> BindArguments:
        """Arguments and result as in `use_compute_precision`."""
        del compute_dtype
        return use_compute_precision(
            self.dtype, original_dtypes, *invars, **bind_params
        )


@dataclasses.dataclass(frozen=True)
class use_fp8:  # noqa: N801 - reads as a function in a policy
    """Runs matrix products by weights on 8-bit floats, all else by the rule of `amp`.

    Both factors are scaled by a power of two and rounded to `float8_e4m3fn`, cotangents
    to `float8_e5m2`. Results are in the compute dtype. Scales come from the numbers at
    hand, so there is no state.

    As the value of `jax.lax.dot_general_p`, or as `matmul_dtype`, it takes the products
    that `docs/fp8.md` lists: those by weights, which are arguments of the function. It
    leaves small ones in half precision, what is computed from arguments alone, such as
    a first layer, and the last product. As the value of a scope it takes small products
    and the last one as well. Products of two activations, such as those of attention,
    convolutions, and products of arrays with explicit shardings stay in half precision
    in any case.

    Args:
      scaling: `"tensor"`: each factor has one scale. `"row"`: it has one for each index
        of the axes that are not summed over: for each row of `x` and each column of `w`
        in `x @ w`, which helps if a few of them are much larger than others. Gradients
        sum over other axes, so the factors are then rounded anew for each.
      weight_gradients: `"fp8"`, or `"half"`: gradients of weights are products in half
        precision.
      any_shape: whether small products run in fp8, too.
      emulate: `None`: a default device without such products is refused where the
        function is traced. `True`: the products run in float32 on the same 8-bit
        numbers, on any device, only slower. `False`: nothing is refused, as to compile
        for another device.

    Raises:
      ValueError: if `scaling` or `weight_gradients` is none of these words.
      TypeError: if `any_shape` or `emulate` is none of these values.

    Example:
      >>> import jax.numpy as jnp, flax_amp
      >>> policy = flax_amp.default_amp_policy | {
      ...     "*/mlp/*": flax_amp.use_fp8, "*/lm_head": jnp.bfloat16}

    References:
      Micikevicius et al., [FP8 Formats for Deep
      Learning](https://arxiv.org/abs/2209.05433), 2022.
    """

    scaling: Literal["tensor", "row"] = "tensor"
    weight_gradients: Literal["fp8", "half"] = "fp8"
    any_shape: bool = False
    emulate: bool | None = None

    def __post_init__(self) -> None:
        words = {"scaling": ("tensor", "row"), "weight_gradients": ("fp8", "half")}
        for name, expected in words.items():
            if (word := getattr(self, name)) not in expected:
                listed = " or ".join(map(repr, expected))
                raise ValueError(f"use_fp8: {name} is {word!r}; expected {listed}.")
        if not isinstance(self.any_shape, bool):
            raise TypeError(
                f"use_fp8: any_shape is {self.any_shape!r}; expected True or False."
            )
        if not isinstance(self.emulate, bool | None):
            raise TypeError(
                f"use_fp8: emulate is {self.emulate!r}; expected True, False or None."
            )

    def __call__(
        self,
        compute_dtype: DTypeLike,
        original_dtypes: Sequence[DType],
        *invars: Array,
        **bind_params: Any,
    ) -> BindArguments:
        """Arguments and result as in `use_compute_precision`.

        Called on its own, the function runs the equation in the compute dtype.
        """
        return use_compute_precision(
            compute_dtype, original_dtypes, *invars, **bind_params
        )


def follow_precision(
    compute_dtype: DTypeLike,
    original_dtypes: Sequence[DType],
    *invars: Array,
    **bind_params: Any,
) -> BindArguments:
    """Runs the equation by the rule of `amp`, as if no key named it.

    Called on its own, the function knows dtypes only, and promotes to the widest of
    them. Arguments and result as in `use_compute_precision`.
    """
    del compute_dtype, original_dtypes
    dtypes = [x.dtype for x in invars if hasattr(x, "dtype")]
    return _use_widest_of(dtypes, invars, bind_params)


keep_precision = follow_precision  # the name that moves of data had

# The functions that the analysis understands; any other is called equation by equation.
BUILT_IN = (
    use_compute_precision,
    use_original_precision,
    use_widest_precision,
    follow_precision,
)

# --- policies ------------------------------------------------------------------------


def _family(names: Sequence[str], fn: PrecisionFunction) -> dict[Any, Any]:
    # Names that this JAX version does not have are left out.
    known = _compat.primitives()
    return {known[name]: fn for name in names if name in known}


_SPECIAL_SCOPES = {
    "amp_stop": use_original_precision,
    "amp_default": use_original_precision,
}

# The default of `amp`: products are low, and everything else follows the rule of
# `_rewriter/paint.py`. Extend it with `default_amp_policy | {...}`.
default_amp_policy: dict[Any, PrecisionFunction] = {
    **_family(names_of((Kind.PRODUCT,)), use_compute_precision),
    **_SPECIAL_SCOPES,
}

# The default of jaxamp: four primitives are low, four are full, the rest is untouched.
jaxamp_policy: dict[Any, PrecisionFunction] = {
    **_family(
        ("add", "sub", "dot_general", "conv_general_dilated"), use_compute_precision
    ),
    **_family(("exp", "log", "mul", "div"), use_precision(jnp.float32)),
    **_SPECIAL_SCOPES,
}


MatmulDType = Literal["fp8"] | use_fp8 | type | None  # short, for signatures


def with_matmul_dtype(
    entries: PolicyEntries | None, matmul_dtype: MatmulDType
) -> PolicyEntries | None:
    """Returns a policy whose matrix products in the compute dtype run in fp8, if asked.

    Keys for scopes stay, and one for `dot_general` with another value.

    Raises:
      TypeError: if `matmul_dtype` is something else.
    """
    if matmul_dtype is None:
        return entries
    recipe = use_fp8 if matmul_dtype == "fp8" else matmul_dtype
    if recipe is not use_fp8 and not isinstance(recipe, use_fp8):
        raise TypeError(
            f"matmul_dtype: got {matmul_dtype!r}; expected 'fp8', or "
            "flax_amp.use_fp8(...) with options, or None for the compute dtype."
        )
    entries = default_amp_policy if entries is None else entries
    if not isinstance(entries, Mapping):
        return entries  # `Policy` refuses it
    changed = {
        key: recipe
        for key, value in entries.items()
        if _is_dot_general(key) and value is use_compute_precision
    }
    return {**entries, **changed}


def without_fp8(entries: PolicyEntries | None) -> PolicyEntries | None:
    """Returns a policy without its entries for fp8.

    `dot_general` runs in the compute dtype instead. A scope loses its key: with
    `use_compute_precision`, its norms and softmaxes would be in half precision as well.
    """
    if entries is None:
        return None
    return {
        key: use_compute_precision if isinstance(function, use_fp8) else function
        for key, function in _functions(entries).items()
        if not (isinstance(key, str) and isinstance(function, use_fp8))
    }


# --- looking a policy up -------------------------------------------------------------


class Origin(enum.Enum):
    """What selected a precision function."""

    SCOPE = "scope"
    PRIMITIVE = "primitive"
    DEFAULT = "default"


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """The precision function of one equation and the policy key that selected it.

    Compared by identity: a user's function need not be hashable.
    """

    function: PrecisionFunction
    origin: Origin
    key: str

    @property
    def is_chosen(self) -> bool:
        """Whether a key for a scope or a primitive decided, not `amp_default`."""
        return self.origin is not Origin.DEFAULT

    @property
    def lowers_all_inside(self) -> bool:
        """Whether it asks for all inside of a scope in one dtype, not only products."""
        is_fp8 = isinstance(self.function, use_fp8)
        return self.origin is Origin.SCOPE and not is_fp8


class Policy:
    """A checked policy dict, ready to be looked up equation by equation.

    Args:
      entries: `{primitive or scope string: precision function or dtype}`; `None` for
        `default_amp_policy`.

    Raises:
      TypeError: if an entry has the wrong type; all wrong entries are listed.
    """

    def __init__(self, entries: PolicyEntries | None):
        functions = _functions(default_amp_policy if entries is None else entries)
        # By name: two JAX modules may hold two objects for one primitive.
        self._primitives = {
            key.name: Decision(fn, Origin.PRIMITIVE, key.name)
            for key, fn in functions.items()
            if isinstance(key, Primitive)
        }
        scopes = [key for key in functions if isinstance(key, str)]
        # Keys of one method take precedence over keys of the whole module.
        scopes.sort(key=names_method, reverse=True)
        self._scopes = [
            (pattern(key), Decision(functions[key], Origin.SCOPE, key))
            for key in scopes
        ]
        default = functions.get("amp_default", use_original_precision)
        self._default = Decision(default, Origin.DEFAULT, "amp_default")
        self._match = functools.cache(self._match_scopes)
        # Scope names in a sub-jaxpr start at its border. The scopes around the border
        # are needed only if a key spans several scopes.
        self.spans_scopes = any(set("/*?[") & set(key) for key in scopes)
        self.scope_keys = frozenset(scopes) - {"amp_stop", "amp_default"}
        self.names_scopes = bool(self.scope_keys)
        self.fp8_recipes = {fn for fn in functions.values() if isinstance(fn, use_fp8)}
        # Whether the policy can change a program whose compute dtype is float32: a
        # function of the user's may cast to any dtype.
        known = (*BUILT_IN, use_precision(jnp.float32), *self.fp8_recipes)
        self.may_leave_float32 = any(fn not in known for fn in functions.values())

    def decide(self, primitive: Primitive, scopes: tuple[str, ...]) -> Decision:
        """Returns the decision for one equation; arguments as in `matching`."""
        return self.matching(primitive, scopes)[0]

    def matching(self, primitive: Primitive, scopes: tuple[str, ...]) -> list[Decision]:
        """Returns the decisions of all keys that match one equation.

        The first one decides: that of the outermost scope, or else of the primitive.

        Args:
          primitive: the equation's primitive.
          scopes: the names of the scopes around it, outermost first.
        """
        by_primitive = self._primitives.get(primitive.name)
        found = (*self._match(scopes), by_primitive, self._default)
        return [decision for decision in found if decision]

    def unmatched(
        self, keys: Iterable[str], all_scopes: Collection[tuple[str, ...]]
    ) -> set[str]:
        """Returns those of scope keys that match none of the nested scopes given."""
        return set(keys) - {
            d.key for found in map(self._match, all_scopes) for d in found
        }

    def _match_scopes(self, scopes: tuple[str, ...]) -> tuple[Decision, ...]:
        """Returns the decisions of all keys that match a scope, outer scopes first."""
        found = list(self._match(scopes[:-1])) if scopes else []
        for spellings in paths(scopes, start=len(scopes) - 1):
            for regex, decision in self._scopes:
                if any(map(regex.fullmatch, spellings)):
                    found.append(decision)
        return tuple(dict.fromkeys(found))


def _functions(entries: Any) -> dict[Any, PrecisionFunction]:
    """Returns the checked entries, each dtype as the precision function it means."""
    if not isinstance(entries, Mapping):
        raise TypeError(
            f"amp_policy: got {type(entries).__name__}; expected a dict "
            "{primitive or scope string: precision function}, such as "
            "flax_amp.default_amp_policy."
        )
    functions = {key: _as_function(value) for key, value in entries.items()}
    wrong = [
        f"  key {key!r} of type {type(key).__name__}"
        for key in entries
        if not isinstance(key, str | Primitive)
    ] + [
        f"  value {entries[key]!r} of key {key!r}"
        for key, function in functions.items()
        if function is None
        or (
            isinstance(function, use_fp8)
            and not (isinstance(key, str) or _is_dot_general(key))
        )
    ]
    if wrong:
        raise TypeError(
            "amp_policy: wrong entries:\n" + "\n".join(wrong) + "\nexpected keys that "
            "are JAX primitives (jax.lax.exp_p) or scope strings ('*/LayerNorm_*'), "
            "and as values precision functions (flax_amp.use_original_precision) or "
            "float dtypes (jnp.float32); flax_amp.use_fp8 for scopes and for "
            "jax.lax.dot_general_p alone."
        )
    return functions


def _is_dot_general(key: Any) -> bool:
    return isinstance(key, Primitive) and key.name == "dot_general"


def _as_function(value: Any) -> Any:
    """Returns the precision function that a value of a policy means, if any."""
    if value is use_fp8 or (isinstance(value, str) and value == "fp8"):
        return use_fp8()
    if callable(value) and not isinstance(value, type):
        return value
    # Arrays have a dtype, and numpy takes them for it.
    if not isinstance(value, type | np.dtype | str):
        return None
    try:
        return use_precision(value)
    except TypeError:
        return None


def check_compute_dtype(dtype: Any) -> DType:
    """Returns `dtype` as a numpy dtype.

    Raises:
      TypeError: if it is not float16, bfloat16 or float32.
    """
    checked = _as_dtype(dtype)
    if checked not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise TypeError(
            f"compute_dtype: got {dtype!r}; expected jnp.float16, jnp.bfloat16, or "
            "jnp.float32 for a run without mixed precision."
        )
    return checked
