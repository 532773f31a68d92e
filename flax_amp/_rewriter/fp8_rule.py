"""Which matrix products run in fp8: those by weights, where it pays.

A product `y = dot x w` of `M x K` by `K x N` numbers and its two backward products take
half of their time in fp8. What they cost is traffic. Each number of `x` and of the
cotangent of `y` is read twice in half precision, to find the largest and to be rounded,
and its copy is written and read: 6 bytes. Each number of `w` is read twice in float32
and written once: 9 bytes, and some of them again in the backward pass. On an H100 or a
TPU7x some 300 operations take the time of a byte, so it pays if

    3 M K N > 300 (6 M K + 6 M N + 15 K N)

By XLA's estimates for a TPU7x, four layers of two products with 16384 rows take 0.95 of
the time of bfloat16 with 1024 x 4096 weights, and 0.62 with 2048 x 8192; a GPT with
768 x 3072 weights takes 1.08.
"""

import math
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import jax

from flax_amp._compat import Eqn
from flax_amp._rewriter.plan import Need, Paint, Reason, Values, has_paint
from flax_amp.policy import Decision, Origin, use_fp8

_OPERATIONS_PER_BYTE = 300
_BYTES_OF_ACTIVATION, _BYTES_OF_WEIGHT = 6, 15

# The start of the reason of a product that is in half precision though fp8 was asked.
NOT_IN_FP8 = "not in fp8: "


class Fp8Product(NamedTuple):
    """How a product runs in fp8: its recipe, and which of its factors is the weight."""

    recipe: use_fp8
    weight: int


def product_in_fp8(
    eqn: Eqn, ins: Values, need: Need, decision: Decision
) -> Fp8Product | Reason:
    """Returns how a product runs in fp8, or why it stays in half precision.

    Args:
      eqn: the equation of a product.
      ins: the values of its factors.
      need: what is needed of its result.
      decision: the decision of the policy, whose function is a `use_fp8`.
    """
    recipe: Any = decision.function
    obstacle = _obstacle(eqn, ins)
    # Who names a layer means it, also if it is the last one, or small.
    if not obstacle and decision.origin is not Origin.SCOPE:
        if Need.LATER not in need:
            obstacle = "no product in half precision behind it"
        elif not recipe.any_shape:
            obstacle = _too_small(eqn, _weight(ins))
    if obstacle:
        return Reason(NOT_IN_FP8 + "{}", obstacle)
    return Fp8Product(recipe, _weight(ins))


def _obstacle(eqn: Eqn, ins: Values) -> str:
    """Returns why a product cannot or should not run in fp8, or an empty string."""
    if eqn.primitive.name != "dot_general":
        return f"{eqn.primitive.name} has no form in fp8"
    if any(_has_explicit_sharding(v.aval) for v in eqn.invars):
        return "its sharding is explicit"
    if None in ins:
        return "a factor is not float32"
    # Such as a first layer, or a one-hot matrix times a table.
    if all(has_paint(value, Paint.LEAF) for value in ins):
        return "computed from arguments and constants alone"
    # A weight is an argument of the whole function, moved at most, such as a slice of
    # the parameters of all layers.
    if not any(value is not None and value.is_argument for value in ins):
        return "neither factor is an argument"
    return ""


def _weight(ins: Values) -> int:
    """Returns which factor is the weight."""
    lhs, _ = ins
    return 0 if lhs is not None and lhs.is_argument else 1


def _too_small(eqn: Eqn, weight: int) -> str:
    """Returns the size of a product that fp8 would not speed up, or an empty string."""
    contracting, batch = eqn.params["dimension_numbers"]
    shapes = [v.aval.shape for v in eqn.invars]
    k = math.prod(shapes[0][axis] for axis in contracting[0])
    used = [{*c, *b} for c, b in zip(contracting, batch, strict=True)]
    m, n = (
        math.prod(length for axis, length in enumerate(shape) if axis not in axes)
        for shape, axes in zip(shapes, used, strict=True)
    )
    if weight == 0:
        m, n = n, m
    # Under `jax.export`, a size may be a symbol, which may be small.
    if not all(isinstance(size, int) for size in (m, k, n)):
        return f"too small, {m} x {k} x {n}"
    traffic = _BYTES_OF_ACTIVATION * (m * k + m * n) + _BYTES_OF_WEIGHT * k * n
    pays = 3 * m * k * n > _OPERATIONS_PER_BYTE * traffic
    return "" if pays else f"too small, {m} x {k} x {n}"


def _has_explicit_sharding(aval: Any) -> bool:
    mesh = aval.sharding.mesh
    return jax.sharding.AxisType.Explicit in mesh.axis_types


# --- hardware ------------------------------------------------------------------------


def check_device(recipes: Collection[use_fp8]) -> None:
    """Raises a ValueError if the default device has no products in fp8.

    Where the arrays or a mesh lie is not known here. A recipe that says whether to
    emulate the products is not asked about.
    """
    if all(recipe.emulate is not None for recipe in recipes):
        return
    config: Any = jax.config
    device = config.jax_default_device or jax.default_backend()
    if isinstance(device, str):
        device = jax.devices(device)[0]
    if not has_fp8(device):
        raise ValueError(
            f"fp8: the device {device.device_kind!r} has no matrix products in fp8, as "
            "GPUs of NVIDIA from compute capability 8.9 on and TPUs from generation 7 "
            "on have. "
            "Expected precision='bf16-mixed' (or no matmul_dtype). To run the same "
            "numbers without the speed, pass "
            "matmul_dtype=flax_amp.use_fp8(emulate=True); to compile for another "
            "device, flax_amp.use_fp8(emulate=False)."
        )


def has_fp8(device: Any) -> bool:
    """Whether a device has products of `float8_e4m3fn` numbers."""
    if device.platform == "tpu":
        return re.match(r"TPU v[2-6]", device.device_kind) is None
    # GPUs of AMD say "gfx942", and have other formats with the same names.
    capability = str(getattr(device, "compute_capability", ""))
    numbers = capability.split(".")
    is_nvidia = device.platform in ("gpu", "cuda") and all(map(str.isdigit, numbers))
    return is_nvidia and tuple(map(int, numbers)) >= (8, 9)
