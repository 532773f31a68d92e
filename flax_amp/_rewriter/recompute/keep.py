"""`keep`: marks a value that the backward pass reads instead of computing it again.

Under `jax.checkpoint` with a policy that stores what is marked, everything else is
computed again in the backward pass. But XLA sees both passes in one program and merges
equal computations: in straight code it would undo the recomputation and store the
float32 intermediates after all. `jax.checkpoint(prevent_cse=True)` prevents that with
a barrier on every backend. On a GPU the barrier is what saves the memory; on a TPU it
costs more fusions than it saves. So here the kept value carries the barrier, and
whether there is one is decided when the program is lowered, for the backend it is
lowered to.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import Saveable
from jax.experimental import jet
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir, partial_eval

keep_p = Primitive("flax_amp_keep")
keep_p.multiple_results = True

# Who gets a barrier, by name; on all other platforms the value passes as it is.
NOWHERE: tuple[str, ...] = ()
ON_GPU = ("cuda", "rocm")
EVERYWHERE = ("cpu", "cuda", "rocm", "tpu")


def keep(x: Any, platforms: Sequence[str]) -> Any:
    """Returns `x`, marked to be stored for the backward pass.

    Args:
      x: an array.
      platforms: the platforms on which a barrier stands between the stored value and
        what the backward pass computes from it.
    """
    params = {"platforms": tuple(platforms), "copies": 1, "is_stored": False}
    return keep_p.bind(x, **params)[0]


def _identity(x: Any, *, copies: int, **_: Any) -> list[Any]:
    return [x] * copies


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return keep_p.bind(*primals, **params), _identity(*tangents, **params)


def _series(primals: Any, series: Any, **params: Any) -> Any:
    outs = keep_p.bind(*primals, **params)
    return outs, [series[0]] * len(outs)


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    return keep_p.bind(*args, **params), _identity(*dims, **params)


def _transpose(cotangents: Any, x: Any, **_: Any) -> Any:
    return [functools.reduce(ad.add_tangents, cotangents)]


def _split(saveable: Any, unknown: Any, available: Any, eqn: Any) -> Any:
    """Splits the equation between the two passes (JAX: a partial-evaluation rule).

    The forward pass returns one more copy of the value, which the backward pass stores;
    there it goes through the barrier. An equation that was split before has several
    results: it stands in a gradient that is differentiated again.
    """
    (x,) = eqn.invars
    results = len(eqn.outvars)
    unknowns, instantiated = [unknown[0]] * results, [True] * results
    is_saved = saveable(keep_p, x.aval, **eqn.params) in (True, Saveable)
    if unknown[0] or not is_saved:
        residuals = [] if available[0] or not isinstance(x, Var) else [x]
        return None if unknown[0] else eqn, eqn, unknowns, instantiated, residuals
    residual = Var(x.aval)
    forward = eqn.replace(
        outvars=[*eqn.outvars, residual], params={**eqn.params, "copies": results + 1}
    )
    backward = eqn.replace(invars=[residual], params={**eqn.params, "is_stored": True})
    return forward, backward, unknowns, instantiated, [residual]


def _lowering_for(platform: str) -> Any:
    def lower(
        x: Any, *, copies: int, platforms: Sequence[str], is_stored: bool
    ) -> list[Any]:
        if is_stored and platform in platforms:
            x = jax.lax.optimization_barrier(x)
        return [x] * copies

    return mlir.lower_fun(lower, multiple_results=True)


keep_p.def_impl(_identity)
keep_p.def_abstract_eval(_identity)
ad.primitive_jvps[keep_p] = _jvp
jet.jet_rules[keep_p] = _series  # type: ignore[assignment]
ad.primitive_transposes[keep_p] = _transpose
batching.primitive_batchers[keep_p] = _batch
partial_eval.partial_eval_jaxpr_custom_rules[keep_p] = _split
mlir.register_lowering(keep_p, mlir.lower_fun(_identity, multiple_results=True))
for _platform in EVERYWHERE:
    mlir.register_lowering(keep_p, _lowering_for(_platform), platform=_platform)
