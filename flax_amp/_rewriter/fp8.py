"""Matmuls of 8-bit floats: which matmuls pay, on which devices, and their primitive.

`docs/fp8.md` says which matmuls run in fp8, and which numbers they compute. To JAX an
fp8 matmul is a bilinear primitive, as `dot_general` is. Its derivatives of any order
and mode are fp8 matmuls again, with the axes that JAX gives the derivatives of
`dot_general`. One factor is a weight in float32, the other is in half precision. These
factors are stored for the backward pass, and not their 8-bit copies. A `custom_vjp`
could store the copies, but has no second derivatives and no forward mode.

Scales come from the numbers at hand: a history of magnitudes would be a state, with
wrong first steps. The largest number is found by operations on integers, because masks
of floats would be written to memory by XLA. The result is in half precision, since
float32 partial sums would travel between devices.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from flax_amp import _compat, _jaxprs
from flax_amp._compat import Array, Arrays, DType, Eqn
from flax_amp.policy import Decision, KeyKind, use_fp8

FORWARD = jnp.dtype(jnp.float8_e4m3fn)
BACKWARD = jnp.dtype(jnp.float8_e5m2)
_BIAS = 127  # the bias of the exponents of float32 and bfloat16
# How many bfloat16 operations take as long as moving a byte, by the data sheets: 989e12
# operations and 3.35e12 bytes a second make 295 on an H100, and 2307e12 and some 7.4e12
# make some 310 on a TPU7x. With 16,384 rows, a square weight pays from a width of 1,321
# on; with half of the number from 629 on, and with twice the number from 2,938 on. With
# three such layers, the roofline for an H200 is 0.96 of the roofline in bfloat16 at a
# width of 512, 0.84 at 1,024, and 0.77 at 2,048: some matmuls that gain are left out.
_OPERATIONS_PER_BYTE = 300
# Bytes by which the traffic grows for each number. Each pass over memory counts in
# full. For an activation, these passes are two reads of 2 bytes, a write of the 8-bit
# copy, and a read of the copy. The 15 bytes of a weight are such a count, too. XLA
# fuses passes: in two programs compiled for an H200 (three layers, with 4,096 x 2,048
# and 8,192 x 1,024 activations), the traffic grew by 0 bytes for a number of the
# activations, and by 4 bytes for a number of the weights.
_BYTES_OF_ACTIVATION = 6
_BYTES_OF_WEIGHT = 15

fp8_dot_p = Primitive("flax_amp_fp8_dot")


def fp8_dot(
    eqn: Eqn, recipe: use_fp8, weight: int, dtype: DType, factors: Arrays
) -> Array:
    """Returns a `dot_general` on 8-bit floats, in a dtype of half precision."""
    return fp8_dot_p.bind(
        *[x if i == weight else x.astype(dtype) for i, x in enumerate(factors)],
        dimension_numbers=eqn.params["dimension_numbers"],
        formats=(FORWARD, FORWARD),
        dtype=jnp.dtype(dtype),
        emulate=bool(recipe.emulate),
    )


@dataclasses.dataclass(frozen=True)
class PolicyOfPlainMatmuls:
    """A policy of `jax.checkpoint` that sees each fp8 matmul as a `dot_general`."""

    policy: Callable[..., Any]

    def __call__(self, primitive: Primitive, *avals: Any, **params: Any) -> Any:
        if primitive is fp8_dot_p:
            primitive = lax.dot_general_p
            avals, params = _plain(*avals, **params)
        return self.policy(primitive, *avals, **params)


# --- which matmuls, and where -------------------------------------------------------


def fp8_matmul(
    eqn: Eqn,
    is_weight: Sequence[bool],
    is_computed: Sequence[bool],
    leads: bool,
    decision: Decision,
) -> tuple[use_fp8, int] | str:
    """Returns how a matmul runs in fp8 and its weight, or why it stays in half.

    Args:
      eqn: the equation of the matmul.
      is_weight: for each factor, whether the factor is an argument, moved at most.
      is_computed: for each factor, whether the factor may come from a matmul or from
        the previous step of a loop.
      leads: whether the result leads to a matmul.
      decision: the decision of the policy, with the recipe.
    """
    if eqn.primitive.name != "dot_general":
        return f"{eqn.primitive.name} has no form in fp8"
    avals = [v.aval for v in eqn.invars]
    explicit = jax.sharding.AxisType.Explicit
    if any(explicit in aval.sharding.mesh.axis_types for aval in avals):
        return "its sharding is explicit"
    if any(aval.dtype != jnp.float32 for aval in avals):
        return "a factor is not float32"
    # This holds for the first layer, or for a one-hot matrix times a table.
    if not any(is_computed):
        return "computed from arguments and constants alone"
    if not any(is_weight):
        return "neither factor is an argument"
    weight = 0 if is_weight[0] else 1
    # A user who names a layer wants fp8 there, also in the last layer or a small layer.
    if decision.key_kind is not KeyKind.SCOPE:
        if not leads:
            return "no matmul in half precision behind it"
        if not _pays(eqn, weight):
            return f"too small, {avals[0].shape} by {avals[1].shape}"
    recipe: Any = decision.function
    return recipe, weight


def _pays(eqn: Eqn, weight: int) -> bool:
    """Whether a matmul and the matmuls of its backward pass are faster in fp8.

    For `M x K` by `K x N` numbers, the three matmuls save the time of `3 M K N`
    operations. Their traffic grows by 6 bytes for each number of the activations and of
    the cotangents, which are read twice, and whose copies are written and read. The
    traffic grows by 15 bytes for each number of the weight.
    """
    atoms = eqn.invars[1 - weight], eqn.invars[weight], eqn.outvars[0]
    shapes = [v.aval.shape for v in atoms]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        return False  # a symbol, under `jax.export`
    x, w, y = map(math.prod, shapes)
    (contracting, _), _ = eqn.params["dimension_numbers"]
    k = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracting)
    traffic = _BYTES_OF_ACTIVATION * (x + y) + _BYTES_OF_WEIGHT * w
    return 3 * k * y > _OPERATIONS_PER_BYTE * traffic


def check_device(recipes: Collection[use_fp8]) -> None:
    """Raises a ValueError if a recipe needs fp8, and the default device has no fp8."""
    if all(recipe.emulate is not None for recipe in recipes):
        return
    device = _compat.default_device()
    if not has_fp8(device):
        raise ValueError(
            f"fp8: the device {device.device_kind!r} has no matmuls in fp8, as "
            "GPUs of NVIDIA from compute capability 8.9 on and TPUs from generation 7 "
            "on have. Expected precision='bf16-mixed', or to run the same numbers "
            "without the speed, amp_policy=flax_amp.default_amp_policy | "
            "{jax.lax.dot_general_p: flax_amp.use_fp8(emulate=True)}, or to compile "
            "for another device, flax_amp.use_fp8(emulate=False)."
        )


def has_fp8(device: Any) -> bool:
    """Whether a device has matmuls of `float8_e4m3fn` numbers."""
    if device.platform == "tpu":  # TPUs have fp8 from generation 7 on
        return not re.match(r"TPU v[2-6]", device.device_kind)
    # NVIDIA's GPUs from capability 8.9 on (Ada) have fp8. GPUs of AMD say "gfx942", and
    # their 8-bit formats differ from NVIDIA's formats of the same names.
    capability = str(getattr(device, "compute_capability", ""))
    return bool(re.fullmatch(r"8\.9|9\.\d|\d\d\.\d", capability))


# --- numbers -------------------------------------------------------------------------


def scale_exponent(x: Array, format_: DType, axes: Sequence[int]) -> Array:
    """Returns the least `e` for which `x / 2**e` is in the range of a format.

    The result is at least -126, and has length 1 along `axes`. Numbers that are not
    finite do not count. All steps work on the bits of `x`, float32 or bfloat16. Read as
    integers, the bits have the order of the numbers, and need no masks, which XLA would
    write to memory.
    """
    info = ml_dtypes.finfo(x.dtype)
    word = np.dtype(f"uint{info.bits}").type
    one = word(1 << info.nmant)  # the lowest bit of the exponent
    magnitude = word(2 ** (info.bits - 1) - 1)
    # Infinities and NaNs have the largest exponent. The addition of 1 to the exponent
    # wraps the largest exponent to 0: in bfloat16, an infinity is 0x7f80, and 0x7f80 +
    # 0x80 is 0 without the sign bit. `initial` makes the maximum the maximum of zeros
    # if no number is finite.
    bits = ((lax.bitcast_convert_type(x, word) & magnitude) + one) & magnitude
    bits = jnp.max(bits, axes, keepdims=True, initial=one) - one
    # The largest number of a format is 1.75 * 2**n. A number larger than 1.75 times a
    # power of two gets the next exponent: the addition carries into the exponent.
    up_from_1_75 = (1 << (info.nmant - 2)) - 1
    of_largest = ((bits.astype(jnp.int32) + up_from_1_75) >> info.nmant) - _BIAS
    of_format = math.frexp(float(ml_dtypes.finfo(format_).max))[1] - 1
    return jnp.maximum(of_largest - of_format, 1 - _BIAS)


def power_of_two(e: Array, dtype: DType) -> Array:
    """Returns `2**e` in float32 or bfloat16: zero below its range, infinity above."""
    info = ml_dtypes.finfo(dtype)
    bits = jnp.clip(e + _BIAS, 0, 2 * _BIAS + 1) << info.nmant
    return lax.bitcast_convert_type(bits.astype(f"uint{info.bits}"), dtype)


def quantize(x: Array, e: Array, format_: DType) -> Array:
    """Returns `x / 2**e`, rounded to an 8-bit format; `e` is a `scale_exponent`."""
    # `float8_e4m3fn` has no infinity, and a compiler may round an infinity to 448, the
    # largest number. The added NaN keeps an infinity from becoming a finite number.
    not_finite = x - x  # 0, or NaN
    return (x * power_of_two(-e, x.dtype) + not_finite).astype(format_)


def _matmul(
    *factors: Array,
    dimension_numbers: Any,
    formats: Sequence[DType],
    dtype: DType,
    emulate: bool,
    constrain_layout: bool = False,
) -> Array:
    _, batch = dimension_numbers
    copies = []
    exponents = []
    for x, format_, of_batch in zip(factors, formats, batch, strict=True):
        # Each matmul of a batch, such as the matmul of each expert, has its own
        # exponent. The axes are in order, so that both passes make the same copy: XLA
        # does not merge a maximum over the axes (1, 0) with a maximum over (0, 1).
        axes = [axis for axis in range(x.ndim) if axis not in of_batch]
        # The exponent of float16 has another bias and another range than `_BIAS` says.
        wide = x.astype(jnp.float32) if x.dtype == jnp.float16 else x
        e = scale_exponent(wide, format_, axes)
        copy = quantize(wide, e, format_)
        if constrain_layout and x.dtype == jnp.float32:
            # Only the weight is float32. A GPU may want the weight transposed. With the
            # constraint, XLA transposes the 8-bit copy. Without the constraint, XLA
            # transposes all float32 weights of a loop at once, which makes a second
            # copy of the weights.
            copy = with_layout_constraint(copy, Layout(tuple(range(copy.ndim))))
        copies.append(copy.astype(jnp.float32) if emulate else copy)
        in_order = jnp.transpose(e, [*of_batch, *axes])
        exponents.append(lax.squeeze(in_order, range(len(of_batch), x.ndim)))
    # The powers of two can follow the rounding to bfloat16, because they change no
    # digit. Devices that add up a sharded matmul then exchange bfloat16.
    rounds_first = dtype == jnp.bfloat16 and not emulate
    lhs, rhs = copies
    y = lax.dot_general(
        lhs,
        rhs,
        dimension_numbers,
        # Hopper's fast matmuls make sums with fewer digits. Only the forward pass
        # allows sums with fewer digits: "highest" turns sums with fewer digits off in
        # the backward pass.
        precision="highest" if BACKWARD in formats and not emulate else None,
        preferred_element_type=dtype if rounds_first else jnp.float32,
    )
    e = lax.expand_dims(sum(exponents), range(len(batch[0]), y.ndim))
    # In two steps, since `2**e` itself may be out of range where the result is not.
    for part in (e >> 1, e - (e >> 1)):
        y = y * power_of_two(part, y.dtype)
    return y.astype(dtype)


# --- the rules of the primitive ------------------------------------------------------


def _with_fp8_matmul(
    fn: Callable[..., Array], *operands: Array, **params: Any
) -> Array:
    """Runs a function with a single `dot_general`, and computes this matmul in fp8."""

    def run(eqn: Eqn, values: Arrays) -> Arrays:
        if eqn.primitive is not lax.dot_general_p:
            return _compat.bind(eqn, values, eqn.params)
        numbers = eqn.params["dimension_numbers"]
        return [fp8_dot_p.bind(*values, dimension_numbers=numbers, **params)]

    # Only the axes of the matmul are read from the jaxpr. All operands are float32
    # there, because `jax.linear_transpose` wants a cotangent in the dtype of the
    # result.
    structs = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in operands]
    (out,) = _jaxprs.evaluate(jax.make_jaxpr(fn)(*structs), operands, run)
    return out


def _transpose(
    i: int, g: Array, *factors: Any, dimension_numbers: Any, formats: Any, **params: Any
) -> Array:
    """Returns the cotangent of factor `i`."""
    aval = factors[i].aval
    other = factors[1 - i]

    def of_plain(g: Array, other: Array) -> Array:
        def matmul(x: Array) -> Array:
            pair = (x, other) if i == 0 else (other, x)
            return lax.dot_general(*pair, dimension_numbers)

        x = jax.ShapeDtypeStruct(aval.shape, jnp.float32)
        return jax.linear_transpose(matmul, x)(g)[0]

    params |= dict(dtype=g.dtype, formats=(BACKWARD, formats[1 - i]))
    return _with_fp8_matmul(of_plain, g, other, **params).astype(aval.dtype)


def _batch(
    factors: Arrays, dims: Sequence[Any], *, dimension_numbers: Any, **params: Any
) -> Any:
    matmul = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers)
    return _with_fp8_matmul(jax.vmap(matmul, tuple(dims)), *factors, **params), 0


def _plain(*factors: Any, dimension_numbers: Any, dtype: DType, **_: Any) -> Any:
    """Returns the operands and parameters of the same matmul as a `dot_general`."""
    return tuple(x.update(dtype=dtype, weak_type=False) for x in factors), dict(
        dimension_numbers=dimension_numbers,
        precision=None,
        preferred_element_type=dtype,
        out_sharding=None,
    )


def _abstract_eval(*factors: Any, **params: Any) -> Any:
    avals, params = _plain(*factors, **params)
    return lax.dot_general_p.abstract_eval(*avals, **params)


def _lower_for_gpu(context: Any, *factors: Any, **params: Any) -> Any:
    # A layout constraint is a custom call, which `jax.export` would refuse.
    is_exported = context.module_context.lowering_parameters.for_export
    matmul = functools.partial(_matmul, constrain_layout=not is_exported)
    return mlir.lower_fun(matmul, multiple_results=False)(context, *factors, **params)


fp8_dot_p.def_impl(_matmul)
fp8_dot_p.def_effectful_abstract_eval(_abstract_eval)
ad.defbilinear(fp8_dot_p, *(functools.partial(_transpose, i) for i in (0, 1)))
batching.primitive_batchers[fp8_dot_p] = _batch
mlir.register_lowering(fp8_dot_p, mlir.lower_fun(_matmul, multiple_results=False))
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(fp8_dot_p, _lower_for_gpu, platform=_platform)
