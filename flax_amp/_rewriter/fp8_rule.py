"""Which matrix products run in fp8: those by weights, where it pays.

A product `y = dot x w` of `M x K` by `K x N` numbers has a forward and two backward
products, which take half of their time in fp8. To find the largest magnitudes and to
round takes passes over the factors and the cotangent, of about 4 bytes for each number
of `x` and of `y`'s cotangent, and 9 for each of `w`, which is stored in float32. With
300 operations in the time of one byte, as on an H100 or a TPU7x, it pays if

    3 M K N > 300 (4 M K + 4 M N + 9 K N),  or  400/N + 400/K + 900/M < 1

Examples, with many rows: 4096 x 4096 pays (0.2), 768 x 3072 as well (0.65), 768 x 768
does not (1.04).
"""

import math
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import jax

from flax_amp._compat import Eqn
from flax_amp._jaxpr.traits import is_matrix_product
from flax_amp._rewriter.plan import Need, Reason, Values
from flax_amp.policy import Decision, Origin, use_fp8


class Fp8Product(NamedTuple):
    """How a product runs in fp8: its recipe, and which of its factors is the weight."""

    recipe: use_fp8
    weight: int


NOT_IN_FP8 = "not in fp8: "  # a product for which fp8 was asked


def product_in_fp8(
    eqn: Eqn, ins: Values, need: Need, decision: Decision
) -> Fp8Product | Reason:
    """Returns how a product runs in fp8, or why it stays in half precision.

    A weight is an argument of the whole function, moved at most, such as a slice of the
    parameters of all layers. The other factor must not be one.

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
            obstacle = "no product behind it"
        elif not recipe.any_shape:
            obstacle = _size_that_loses(eqn, _weight(ins))
    if obstacle:
        return Reason(NOT_IN_FP8 + "{}", obstacle)
    return Fp8Product(recipe, _weight(ins))


def _obstacle(eqn: Eqn, ins: Values) -> str:
    """Says why a product cannot run in fp8, or is never meant to."""
    if eqn.primitive.name != "dot_general" or not is_matrix_product(eqn):
        return "no matrix product"
    if any(_has_explicit_sharding(v.aval) for v in eqn.invars):
        return "its sharding is explicit"
    if None in ins:
        return "a factor is not float32"
    # Masks and one-hot matrices are no arguments either.
    count = sum(value is not None and value.is_argument for value in ins)
    if count == 2:
        return "both factors are arguments"
    return "" if count else "neither factor is an argument"


def _weight(ins: Values) -> int:
    """Returns which factor is the weight."""
    left, _ = ins
    return 0 if left is not None and left.is_argument else 1


def _size_that_loses(eqn: Eqn, weight: int) -> str:
    """Returns the rows, the terms of a sum and the columns of the weight, if small."""
    contracted, batch = eqn.params["dimension_numbers"]
    shapes = [v.aval.shape for v in eqn.invars]
    terms = math.prod(shapes[0][axis] for axis in contracted[0])
    taken = [{*c, *b} for c, b in zip(contracted, batch, strict=True)]
    rows, columns = (
        math.prod(n for axis, n in enumerate(shape) if axis not in axes)
        for shape, axes in zip(shapes, taken, strict=True)
    )
    if weight == 0:
        rows, columns = columns, rows
    # Under `jax.export`, a size may be a symbol, which may be small.
    known = [max(n, 1) if isinstance(n, int) else 1 for n in (rows, terms, columns)]
    costs = 900 / known[0] + 400 / known[1] + 400 / known[2]
    return f"too small, {rows} x {terms} x {columns}" if costs >= 1 else ""


def _has_explicit_sharding(aval: Any) -> bool:
    mesh = aval.sharding.mesh
    return jax.sharding.AxisType.Explicit in mesh.axis_types


# --- hardware ------------------------------------------------------------------------


def check_device(recipes: Collection[use_fp8]) -> None:
    """Raises a ValueError if the default device has no products in fp8.

    A recipe that says whether to emulate them is not asked about.
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
            "GPUs from NVIDIA of compute capability 8.9 and TPUs of generation 7 have. "
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
