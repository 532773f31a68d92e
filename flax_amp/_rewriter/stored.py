"""`mark_stored` marks a value that the backward pass reads and does not compute again.

    y = mark_stored(x @ w)         forward:   y = dot x w; stored y
    z = sin(cos(y))                backward:  c = cos y; dc = g * cos c; ...

XLA sees both passes in the same program and merges equal computations. In straight
code, XLA would store `c` after all. An optimization barrier between the stored value
and the computations that read the value saves this memory on GPUs and TPUs. On CPUs,
barriers cost more fusions than they save. `jax.checkpoint(prevent_cse=True)` has
barriers on every backend. Here the marked value carries the barrier, and the lowering
for a platform decides, so the mark is a primitive. Partial evaluation splits the
primitive into a forward and a backward equation, and the lowering turns the backward
equation into a barrier. On GPUs, a barrier stands behind each stored value that
arithmetic reads. On TPUs, barriers stand behind matmuls and residual sums only, because
barriers cost fusions: two layers of a ViT-S/16 on a v5e take 4.93 ms and 302 MB with
these barriers, and 5.75 ms and 373 MB without barriers. Loops have no barriers, except
behind maxima.

XLA may go on with more digits than bfloat16 has where a cast to float32 follows a
matmul. Then the backward pass would compute from different numbers than the forward
pass: the weights of a softmax would not add up to 1. So where the difference would
grow, the forward pass rounds the value to the stored digits, as JAX's own
`jax.checkpoint` does. The gradient of attention has an error of 0.012 with the
rounding, and 0.037 without. The gradient of `x / max(abs(x))` has an error of 0.007
with the rounding, and 0.60 without. Elsewhere the rounding would only keep XLA from
fusing: with all stored values rounded, a ConvNeXt on a v5e takes 1.35 of the memory by
hand.

A maximum (or minimum) along an axis, such as the maximum of each row of a softmax, is
small, and the backward pass reads the operand of the maximum anyway. So the mark of a
maximum has two operands, the maximum and its array, and the lowering for a platform
chooses between the two operands:

    m = reduce_max x              forward:   m = reduce_max x; stored m
    m = stored m x                backward:  m = stored m x

On GPUs the backward pass computes the maximum again from `x`. So XLA recognizes the
softmax of the forward pass, and makes a single kernel of the softmax. Two layers of a
ViT-S/16 on an H200 read and write 4.36 GB with a stored maximum, and 4.17 GB with a
maximum that is computed again. A U-Net moves 23.3 GB with a stored maximum, and 22.5 GB
with a maximum that is computed again. (A T5 is the exception: 0.84 of the bytes by hand
became 0.90.) On TPUs a second maximum would cost 14 % of a ViT's time, so the backward
pass reads the stored maximum. The forward pass has a barrier behind the maximum on
TPUs. Without the barrier, XLA would turn the broadcast maximum into a window over whole
rows, and write float32 scores. For two layers of a Llama on a v5e, XLA estimates 41.96
ms and 13.25 GB without the barrier, and 41.07 ms and 12.43 GB with the barrier.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.ad_checkpoint import Saveable
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir, partial_eval

from flax_amp._compat import Array, Arrays, Eqn
from flax_amp._rewriter.casts import rounded
from flax_amp._rewriter.primitives import Trait, has

stored_p = Primitive("flax_amp_stored")
stored_p.multiple_results = True

# The platforms on which a barrier stands behind a value. `EVERYWHERE` has the platforms
# with a lowering of their own.
NOWHERE: tuple[str, ...] = ()
ON_GPU = ("cuda", "rocm")
ON_GPU_AND_TPU = (*ON_GPU, "tpu")
EVERYWHERE = ("cpu", *ON_GPU_AND_TPU)


class Reduction(NamedTuple):
    """A maximum or a minimum along axes."""

    name: str  # of the primitive
    axes: tuple[int, ...]

    def of(self, x: Array) -> Array:
        """Computes the reduction."""
        reduce = {"reduce_max": lax.reduce_max, "reduce_min": lax.reduce_min}
        return reduce[self.name](x, self.axes)

    def batched(self) -> "Reduction":
        """Returns the reduction of an array with an additional first axis."""
        return self._replace(axes=tuple(axis + 1 for axis in self.axes))


def mark_stored(x: Array, platforms: Sequence[str], is_rounded: bool) -> Array:
    """Returns `x`, marked to be stored for the backward pass.

    On `platforms`, a barrier stands between `x` and the computations of the backward
    pass that read `x`. If `is_rounded`, the forward pass rounds `x` to the stored
    digits.
    """
    params = dict(platforms=tuple(platforms), is_rounded=is_rounded, again=None)
    return stored_p.bind(x, copies=1, in_backward=False, **params)[0]


def mark_maximum(m: Array, x: Array, eqn: Eqn) -> Array:
    """Returns `m`, the `reduce_max` or `reduce_min` of `x`, marked as a maximum.

    The platform decides whether the backward pass reads `m` from memory or computes `m`
    again from `x`.
    """
    again = Reduction(eqn.primitive.name, tuple(eqn.params["axes"]))
    params = dict(platforms=NOWHERE, is_rounded=False, again=again)
    return stored_p.bind(m, x, copies=1, in_backward=False, **params)[0]


def is_saved(primitive: Primitive, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint`: stores marked values and results that take long."""
    return primitive is stored_p or has(primitive, Trait.STORED)


def _identity(x: Array, *_: Array, copies: int, **__: Any) -> list[Array]:
    return [x] * copies


def _jvp(primals: Arrays, tangents: Arrays, **params: Any) -> tuple[Arrays, Arrays]:
    return stored_p.bind(*primals, **params), _identity(*tangents, **params)


def _batch(args: Arrays, dims: Sequence[int], **params: Any) -> Any:
    if params["again"] is not None:
        # The axes of the reduction count from an array whose new axis is the first.
        pairs = [*zip(args, dims, strict=True)]
        (size,) = {x.shape[dim] for x, dim in pairs if dim is not None}
        args = [batching.bdim_at_front(x, dim, size) for x, dim in pairs]
        dims = [0] * len(args)
        params["again"] = params["again"].batched()
    return stored_p.bind(*args, **params), _identity(*dims, **params)


def _transpose(cotangents: Arrays, x: Any, **_: Any) -> Arrays:
    # Each copy has a cotangent. Copies that nothing reads have symbolic zeros.
    return [functools.reduce(ad.add_tangents, cotangents)]


def _partial_eval(saveable: Any, unknown: Any, available: Any, eqn: Any) -> Any:
    """Splits the equation between the forward and the backward pass.

    The forward equation returns an additional copy of the value. The copy is stored for
    the backward pass, and the backward equation sends the copy through the barrier. An
    equation with several results was split before, and stands in a gradient that is
    differentiated again.
    """
    x, *sources = eqn.invars
    results = len(eqn.outvars)
    unknowns = [unknown[0]] * results
    instantiated = [True] * results
    is_saved = saveable(stored_p, x.aval, **eqn.params) in (True, Saveable)
    # Nothing is stored here: the equation stands in the backward pass alone, or is
    # computed again. Its operands are residuals unless the backward pass has them.
    if unknown[0] or not is_saved:
        pairs = zip(eqn.invars, available, strict=True)
        residuals = [v for v, is_there in pairs if isinstance(v, Var) and not is_there]
        known = None if unknown[0] else eqn
        return known, eqn, unknowns, instantiated, residuals
    residual = Var(x.aval)
    forward = eqn.replace(
        outvars=[*eqn.outvars, residual], params={**eqn.params, "copies": results + 1}
    )
    again = eqn.params["again"]
    # An array is not stored only to compute its maximum again.
    if not all(available[1:]):
        sources = []
        again = None
    backward = eqn.replace(
        invars=[residual, *sources],
        params={**eqn.params, "again": again, "in_backward": True},
    )
    return forward, backward, unknowns, instantiated, [residual]


def _lowering_for(platform: str) -> Any:
    def lower(
        x: Array,
        *sources: Array,
        copies: int,
        platforms: Sequence[str],
        is_rounded: bool,
        again: Reduction | None,
        in_backward: bool,
    ) -> list[Array]:
        if again is not None:
            if in_backward and platform in ON_GPU:
                x = again.of(*sources)
            elif platform == "tpu" and not in_backward:
                x = lax.optimization_barrier(x)
        elif in_backward and platform in platforms:
            x = lax.optimization_barrier(x)
        # The forward equation of a pair has two copies or more, and a copy is stored.
        elif is_rounded and not in_backward and copies > 1:
            x = rounded(x)
        return [x] * copies

    return mlir.lower_fun(lower, multiple_results=True)


stored_p.def_impl(_identity)
stored_p.def_abstract_eval(_identity)
ad.primitive_jvps[stored_p] = _jvp
ad.primitive_transposes[stored_p] = _transpose
batching.primitive_batchers[stored_p] = _batch
partial_eval.partial_eval_jaxpr_custom_rules[stored_p] = _partial_eval
mlir.register_lowering(stored_p, mlir.lower_fun(_identity, multiple_results=True))
for _platform in EVERYWHERE:
    mlir.register_lowering(stored_p, _lowering_for(_platform), platform=_platform)
