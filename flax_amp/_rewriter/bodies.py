"""How equations with matmuls in their bodies are emitted.

Each function gets the operands as they are, in float32 or rounded, and what is known of
the bodies from outside. It changes only what it has to (the bodies, and the dtypes at
their borders) and leaves everything else as it is: names, shardings, donation,
policies, unrolling. What has no matmul inside is bound as it was written.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from flax_amp import _compat
from flax_amp._compat import Array, Arrays, Atom, Eqn, Jaxpr
from flax_amp._rewriter.casts import rounded
from flax_amp._rewriter.custom_derivatives import custom_jvp, custom_vjp
from flax_amp._rewriter.emit import Emitter
from flax_amp._rewriter.flow import Flags, Outside, ResultUses
from flax_amp._rewriter.fp8 import PolicyOfPlainMatmuls
from flax_amp._rewriter.primitives import bodies, is_float32
from flax_amp._rewriter.streams import streams
from flax_amp._tree import split_list


def _jit(emitter: Emitter, eqn: Eqn, operands: Arrays, outside: Outside) -> Arrays:
    """A jit stays a jit: same name, shardings, layouts, donation."""
    body = emitter.rewrite_body(eqn.params["jaxpr"], operands, outside)
    return _compat.bind(eqn, operands, eqn.params | {"jaxpr": body})


def _call(emitter: Emitter, eqn: Eqn, operands: Arrays, outside: Outside) -> Arrays:
    """A plain call is evaluated in place."""
    return emitter.emit(bodies(eqn)[0], operands, outside)


def _checkpoint(
    emitter: Emitter, eqn: Eqn, operands: Arrays, outside: Outside
) -> Arrays:
    """A checkpoint stays as it is: same `prevent_cse`, and same policy but for fp8."""
    # The backward pass reads the operands from memory.
    operands = [
        rounded(x) if is_float32(v) else x
        for x, v in zip(operands, eqn.invars, strict=True)
    ]
    closed = emitter.rewrite_body(eqn.params["jaxpr"], operands, outside)
    body, consts = _compat.hoist_consts(closed)
    params = eqn.params | {"jaxpr": body}
    if emitter.planner.choose.policy.fp8_recipes and params["policy"] is not None:
        params["policy"] = PolicyOfPlainMatmuls(params["policy"])
    return _compat.bind(eqn, [*consts, *operands], params)


def _shard_map(
    emitter: Emitter, eqn: Eqn, operands: Arrays, outside: Outside
) -> Arrays:
    """A shard_map stays as it is: same mesh, specs, manual axes and checks."""
    params = eqn.params
    return jax.shard_map(
        lambda *xs: tuple(emitter.emit(params["jaxpr"], xs, outside)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=set(params["newly_manual_axes"]),
    )(*operands)


def _cond(emitter: Emitter, eqn: Eqn, operands: Arrays, outside: Outside) -> Arrays:
    """Branches agree on the dtype of each result: half where that is asked."""
    index, *xs = operands
    of_branches = outside.without(1)  # the index

    def branch(closed: Any, *xs: Array) -> tuple[Array, ...]:
        outs = emitter.emit(closed, xs, of_branches)
        return tuple(emitter.cast_as(outs, eqn.outvars, outside.uses.rounded))

    branches = [functools.partial(branch, b) for b in eqn.params["branches"]]
    return jax.lax.switch(index, branches, *xs)


# --- loops ---------------------------------------------------------------------------


def _scan(emitter: Emitter, eqn: Eqn, operands: Arrays, outside: Outside) -> Arrays:
    """A scan carries the stream through a stack of layers in half precision.

    `streams.py` says which carry that is. Small terms add up in every other one, such
    as the state of a recurrence, or weights that each step updates. It stays float32.
    """
    emitter = emitter.replace(in_loop=True)
    closed, sizes = eqn.params["jaxpr"], _compat.scan_counts(eqn)
    consts, init, xs = split_list(operands, *sizes)
    start, count = len(consts), len(init)
    _, carries, _ = split_list(_compat.open_jaxpr(closed)[0].invars, *sizes)
    *_, xs_are_arguments = split_list(outside.arguments, *sizes)
    is_stream = streams(
        emitter.planner, closed, outside.context, sizes, xs_are_arguments
    )
    rest = (False,) * len(xs)
    uses = ResultUses(
        is_stream + outside.uses.for_matmuls[count:],
        is_stream + outside.uses.rounded[count:],
        tuple(not one for one in is_stream) + outside.uses.for_results[count:],
    )
    of_body = Outside(
        outside.context,
        uses,
        arguments=(*outside.arguments[:start], *(False,) * count, *xs_are_arguments),
        after_matmul=(*(False,) * start, *is_stream, *rest),
    )

    # The cotangents of what each step reads add up over the steps, in float32.
    is_half = [getattr(x, "dtype", None) == emitter.half for x in consts]
    wide = emitter.cast_as(consts, eqn.invars[:start], (False,) * start)

    def body(carry: tuple[Array, ...], x: tuple[Array, ...]) -> Any:
        known = emitter.cast_as(wide, eqn.invars[:start], is_half)
        found = emitter.emit(closed, (*known, *carry, *x), of_body)
        carry_out, ys = split_list(found, count)
        return tuple(emitter.cast_as(carry_out, carries, is_stream)), tuple(ys)

    first = tuple(emitter.cast_as(init, carries, is_stream))
    carry, ys = jax.lax.scan(body, first, tuple(xs), **_compat.scan_options(eqn))
    return [*carry, *ys]


def _while(emitter: Emitter, eqn: Eqn, operands: Arrays, outside: Outside) -> Arrays:
    """A while loop carries float32; reverse mode does not differentiate it."""
    emitter = emitter.replace(in_loop=True, recompute=False)
    params = eqn.params
    sizes = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body, init = split_list(operands, *sizes)
    in_cond, in_body, _ = split_list(outside.arguments, *sizes)

    def states(arrays: Arrays, atoms: Sequence[Atom]) -> list[Array]:
        # The results of a body must have the types of its inputs, strong ones.
        cast = emitter.cast_as(arrays, atoms, (False,) * len(atoms))
        return [_compat.with_weak_type(x, False) for x in cast]

    start = states(init, eqn.invars[sum(sizes) :])

    def rewritten(closed: Jaxpr, consts: Arrays, are_arguments: Flags) -> Jaxpr:
        results = _compat.open_jaxpr(closed)[0].outvars
        flags = (*are_arguments, *(False,) * len(start))
        of_jaxpr = Outside.in_float32(outside.context, len(results), flags)

        def run(*xs: Array) -> list[Array]:
            return states(emitter.emit(closed, xs, of_jaxpr), results)

        return jax.make_jaxpr(run)(*consts, *start)

    # The primitive is bound: under vmap there is a condition for each example, which
    # jax.lax.while_loop does not take.
    jaxprs = {
        "cond_jaxpr": rewritten(params["cond_jaxpr"], of_cond, in_cond),
        "body_jaxpr": rewritten(params["body_jaxpr"], of_body, in_body),
    }
    return _compat.bind(eqn, [*of_cond, *of_body, *start], params | jaxprs)


EMIT_BODIES: dict[str, Callable[..., Arrays]] = {
    "jit": _jit,
    "closed_call": _call,
    "eval_jaxpr": _call,
    "remat2": _checkpoint,
    "shard_map": _shard_map,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
}
