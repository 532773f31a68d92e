"""Equations with bodies: their signatures, and how they are emitted.

Each kind of equation with bodies has a class. Its methods return

- `operand_uses`, backward: the uses of the operands, given the uses of the results;
- `origins`, forward: the origins of the results, given the origins of the operands;
- `halves`, forward: which results are half. Branches are joined, a loop is a fixed
  point, a call returns the dtypes that its body gives;
- `emit`: the results. Bodies, and dtypes in their signatures, change. Names, shardings,
  donation, policies and unrolling stay. So `jit`, `checkpoint` and `while` are bound
  again, and not made by public functions, which would lose shardings or a batched
  condition.

`register` makes the row of the primitive. An equation without a matmul inside is
arithmetic of its region: the equation is bound as it was written, and only the method
`origins` is called.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from flax_amp import _compat, _tree
from flax_amp._compat import Array, Arrays, Atom, Eqn, Jaxpr
from flax_amp._rewriter.casts import rounded
from flax_amp._rewriter.custom_derivatives import custom_jvp, custom_lin, custom_vjp
from flax_amp._rewriter.emit import Emitter
from flax_amp._rewriter.flow import Flags, FlowAnalysis, ResultUses
from flax_amp._rewriter.fp8 import PolicyOfPlainMatmuls
from flax_amp._rewriter.origins import (
    Origin,
    OriginAnalysis,
    Origins,
    Roots,
    first_root,
    joined,
)
from flax_amp._rewriter.primitives import bodies, is_float32, register
from flax_amp._rewriter.roles import Context
from flax_amp._rewriter.rule import Planner, Signature
from flax_amp._rewriter.streams import streams
from flax_amp._rewriter.weight_matmuls import PolicyOfWeightMatmuls
from flax_amp._tree import split_list


class Body:
    """An equation that hands its operands to a body, and returns the body's results."""

    def operand_uses(
        self, flows: FlowAnalysis, eqn: Eqn, context: Context, uses: ResultUses
    ) -> tuple[Flags, Flags]:
        """Returns which operands lead to matmuls inside, and which arithmetic reads.

        `uses` are the uses of the results of the equation.
        """
        count = len(eqn.invars)
        to_matmuls = [False] * count
        read_in_own_region = [False] * count
        for body in bodies(eqn):
            flow = flows.flow(body, context, uses)
            # The index of a branch comes before the operands of the body, and so do
            # the variables that the rule of a custom derivative closes over.
            offset = count - len(flow.program.invars)
            for i, v in enumerate(flow.program.invars, start=offset):
                to_matmuls[i] |= v in flow.for_matmuls
                read_in_own_region[i] |= v in flow.read_in_own_region
        return tuple(to_matmuls), tuple(read_in_own_region)

    def origins(
        self,
        analysis: OriginAnalysis,
        eqn: Eqn,
        context: Context,
        operands: tuple[Origin, ...],
    ) -> Origins:
        """Returns the origins of the results."""
        (body,) = bodies(eqn)
        count = len(_compat.open_jaxpr(body)[0].invars)
        return analysis.origins(body, context, operands[len(operands) - count :])

    def halves(self, planner: Planner, eqn: Eqn, signature: Signature) -> Flags:
        """Returns which results are half."""
        (body,) = bodies(eqn)
        count = len(_compat.open_jaxpr(body)[0].invars)
        of_body = signature.without(len(eqn.invars) - count)
        return planner.plan(body, of_body).result_halves

    def emit(
        self, emitter: Emitter, eqn: Eqn, operands: Arrays, signature: Signature
    ) -> Arrays:
        """Returns the results for operands in the dtypes of `signature`."""
        raise NotImplementedError


@register("jit", body="jaxpr")
class Jit(Body):
    """A jit stays a jit: same name, shardings, layouts, donation."""

    def emit(
        self, emitter: Emitter, eqn: Eqn, operands: Arrays, signature: Signature
    ) -> Arrays:
        body = emitter.rewrite_body(eqn.params["jaxpr"], operands, signature)
        return _compat.bind(eqn, operands, eqn.params | {"jaxpr": body})


@register("closed_call eval_jaxpr", body="call_jaxpr")
class Call(Body):
    """A plain call is evaluated in place."""

    def emit(
        self, emitter: Emitter, eqn: Eqn, operands: Arrays, signature: Signature
    ) -> Arrays:
        return emitter.emit(bodies(eqn)[0], operands, signature)


@register("remat2", body="jaxpr")
class Checkpoint(Body):
    """A checkpoint stays: same `prevent_cse`, same policy but for matmuls of `amp`."""

    def emit(
        self, emitter: Emitter, eqn: Eqn, operands: Arrays, signature: Signature
    ) -> Arrays:
        # The backward pass reads the operands from memory.
        operands = [
            rounded(x) if is_float32(v) else x
            for x, v in zip(operands, eqn.invars, strict=True)
        ]
        closed = emitter.rewrite_body(eqn.params["jaxpr"], operands, signature)
        body, consts = _compat.hoist_consts(closed)
        params = eqn.params | {"jaxpr": body}
        if emitter.planner.choose.policy.fp8_recipes and params["policy"] is not None:
            params["policy"] = PolicyOfPlainMatmuls(params["policy"])
        if emitter.reduce_in_float32 and params["policy"] is not None:
            params["policy"] = PolicyOfWeightMatmuls(params["policy"])
        return _compat.bind(eqn, [*consts, *operands], params)


@register("shard_map", body="jaxpr")
class ShardMap(Body):
    """A shard_map stays a shard_map: same mesh, specs, manual axes and checks."""

    def emit(
        self, emitter: Emitter, eqn: Eqn, operands: Arrays, signature: Signature
    ) -> Arrays:
        params = eqn.params
        return jax.shard_map(
            lambda *xs: tuple(emitter.emit(params["jaxpr"], xs, signature)),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            check_vma=params["check_vma"],
            axis_names=set(params["newly_manual_axes"]),
        )(*operands)


@register("custom_jvp_call", body="call_jaxpr")
class CustomJvp(Body):
    """The user's jvp rule is rewritten and attached again."""

    emit = staticmethod(custom_jvp)


@register("custom_vjp_call", body="call_jaxpr")
class CustomVjp(Body):
    """The user's forward and backward functions are rewritten and attached again."""

    emit = staticmethod(custom_vjp)


class _InFloat32(Body):
    """An equation with float32 operands and results; its matmuls follow the rule."""

    def operand_uses(
        self, flows: FlowAnalysis, eqn: Eqn, context: Context, uses: ResultUses
    ) -> tuple[Flags, Flags]:
        every = (True,) * len(eqn.invars)
        return every, every

    def halves(self, planner: Planner, eqn: Eqn, signature: Signature) -> Flags:
        return (False,) * len(eqn.outvars)


@register("custom_lin", body="")
class CustomLin(_InFloat32):
    """The tangents of a `custom_vjp`: a call of its backward rule, traced later."""

    emit = staticmethod(custom_lin)

    def origins(
        self,
        analysis: OriginAnalysis,
        eqn: Eqn,
        context: Context,
        operands: tuple[Origin, ...],
    ) -> Origins:
        whole = joined(operands)
        found = Origin(after_matmul=True, reads=whole.reads, weights=whole.weights)
        return Origins({}, (found,) * len(eqn.outvars), (), 0, {})


def _with_shifted_roots(known: Roots, shift: int, roots: Roots) -> Roots:
    """Returns a set in which the bits of the roots that are not known are shifted."""
    return roots & known | (roots & ~known) << shift


@register("cond", body="branches")
class Cond(Body):
    """A result is half if every branch gives the result in half precision.

    If a matmul reads the result next, each branch rounds the result at its own end.
    Otherwise the result is float32, and is rounded at the border as the results of
    arithmetic are.
    """

    def origins(
        self,
        analysis: OriginAnalysis,
        eqn: Eqn,
        context: Context,
        operands: tuple[Origin, ...],
    ) -> Origins:
        found = [analysis.origins(b, context, operands[1:]) for b in bodies(eqn)]
        known = first_root(operands) - 1
        results: list[list[Origin]] = []
        for each in found:
            # Each branch makes new roots, and numbers them from the same number on. The
            # shift keeps the new roots of two branches apart.
            before = [o for earlier in results for o in earlier]
            shift = first_root(before).bit_length() - known.bit_length() - 1
            change = functools.partial(_with_shifted_roots, known, max(shift, 0))
            results.append([o.mapped(change) for o in each.results])
        biases = functools.reduce(operator.or_, (x.biases for x in found), 0) & known
        pairs = zip(*results, strict=True)
        inputs = zip(*(x.inputs for x in found), strict=True)
        known_inputs = tuple(map(joined, inputs))
        return Origins({}, tuple(map(joined, pairs)), known_inputs, biases, {})

    def halves(self, planner: Planner, eqn: Eqn, signature: Signature) -> Flags:
        of_branches = signature.without(1)  # the first operand is the index
        found = [planner.plan(b, of_branches).result_halves for b in bodies(eqn)]
        return tuple(map(all, zip(*found, strict=True)))

    def emit(
        self, emitter: Emitter, eqn: Eqn, operands: Arrays, signature: Signature
    ) -> Arrays:
        index, *xs = operands
        halves = self.halves(emitter.planner, eqn, signature)
        of_branches = signature.without(1)

        def branch(closed: Jaxpr, *xs: Array) -> tuple[Array, ...]:
            outs = emitter.emit(closed, xs, of_branches)
            return tuple(emitter.cast_as(outs, eqn.outvars, halves))

        branches = [functools.partial(branch, b) for b in bodies(eqn)]
        return jax.lax.switch(index, branches, *xs)


# --- loops ---------------------------------------------------------------------------


def _origins_of_loop(
    analysis: OriginAnalysis,
    body: Jaxpr,
    context: Context,
    parts: tuple[Sequence[Origin], Sequence[Origin], Sequence[Origin]],
) -> Origins:
    """Returns the origins of the results of a body, after any number of steps.

    `parts` are the origins of the constants that each step reads, of the carries at the
    start, and of the arrays that are sliced for the steps. The next step has slices of
    its own, so the roots of slices do not go on with the carries.
    """
    consts, init, xs = parts
    first = first_root((*consts, *init, *xs))
    slices = [_of_slice(o, first << i) for i, o in enumerate(xs)]
    known = first - 1

    def next_of(before: Origin, after: Origin) -> Origin:
        """Returns the joined origin of a carry before a step and after the step."""
        return before._replace(
            reads=before.reads | (after.reads & known),
            weights=before.weights | (after.weights & known),
            state=before.state or after.state,
            after_matmul=before.after_matmul or after.after_matmul,
        )

    carries = [o._replace(is_argument=False) for o in init]
    biases: Roots = 0
    while True:
        kept = [o._replace(begins_at=o.begins_at & ~biases) for o in consts]
        found = analysis.origins(body, context, (*kept, *carries, *slices))
        after = found.results[: len(carries)]
        before = carries, biases
        carries = list(map(next_of, carries, after))
        biases |= found.biases & known
        if (carries, biases) == before:
            break

    own = (first << len(xs)) - first

    def of_arrays(roots: Roots) -> Roots:
        """Returns a set with the roots of the arrays in the place of their slices."""
        parts = (o.reads for i, o in enumerate(xs) if roots & first << i)
        return functools.reduce(operator.or_, parts, roots & ~own)

    results = tuple(
        # A slice is no copy of its array.
        o.mapped(of_arrays)._replace(begins_at=o.begins_at & ~own)
        for o in found.results
    )
    return found._replace(results=results, biases=biases)


def _of_slice(array: Origin, root: Roots) -> Origin:
    """Returns the origin of a slice of an array, for which `root` stands."""
    if array.begins_at:
        return array._replace(begins_at=root, reads=root)
    if array.is_argument:
        return array._replace(reads=root)
    return array


class _Scan(NamedTuple):
    """How a scan runs."""

    of_body: Signature
    are_streams: Flags  # which carries are half
    halves: Flags  # which results are half


@register("scan", body="jaxpr")
class Scan(Body):
    """A scan carries the stream through a stack of layers in half precision.

    Two kinds of carries are states, and stay float32: a carry that begins at data, and
    a carry that passes the same weights again, because the body adds a value to it that
    passes no further weights. Among the remaining carries, `streams.py` finds the
    streams.
    """

    def operand_uses(
        self, flows: FlowAnalysis, eqn: Eqn, context: Context, uses: ResultUses
    ) -> tuple[Flags, Flags]:
        # The matmuls of the next step may read the carries that a step gives.
        _, carried = _compat.scan_counts(eqn)
        for_matmuls = (True,) * carried + uses.for_matmuls[carried:]
        uses = uses._replace(for_matmuls=for_matmuls)
        return super().operand_uses(flows, eqn, context, uses)

    def origins(
        self,
        analysis: OriginAnalysis,
        eqn: Eqn,
        context: Context,
        operands: tuple[Origin, ...],
    ) -> Origins:
        consts, init, xs = split_list(operands, *_compat.scan_counts(eqn))
        parts = consts, init, xs
        return _origins_of_loop(analysis, eqn.params["jaxpr"], context, parts)

    def halves(self, planner: Planner, eqn: Eqn, signature: Signature) -> Flags:
        return self._planned(planner, eqn, signature).halves

    def _planned(self, planner: Planner, eqn: Eqn, signature: Signature) -> _Scan:
        """Returns how a scan runs; both `halves` and `emit` call this method."""
        key = "scan", eqn.params["jaxpr"], _compat.scan_counts(eqn), signature
        if key not in planner.cache:
            planner.cache[key] = self._fixed_point(planner, eqn, signature)
        found: _Scan = planner.cache[key]
        return found

    def _fixed_point(self, planner: Planner, eqn: Eqn, signature: Signature) -> _Scan:
        """Finds the carries that are half, and that the body gives in half again."""
        closed = eqn.params["jaxpr"]
        sizes = _compat.scan_counts(eqn)
        consts, init, xs = split_list(signature.origins, *sizes)
        _, carries, _ = split_list(_compat.open_jaxpr(closed)[0].invars, *sizes)
        are_arguments = [o.is_argument for o in xs]
        are_streams = streams(planner, closed, signature.context, sizes, are_arguments)
        found = _origins_of_loop(planner, closed, signature.context, (consts, init, xs))
        are_streams = tuple(
            is_stream and is_float32(v) and not (before.begins_at or after.state)
            for is_stream, v, before, after in zip(
                are_streams, carries, init, found.results, strict=False
            )
        )
        while True:
            of_body = self._of_body(eqn, signature, found, are_streams)
            halves = planner.plan(closed, of_body).result_halves
            settled = tuple(map(min, are_streams, halves))
            if settled == are_streams:
                return _Scan(of_body, are_streams, settled + halves[len(settled) :])
            are_streams = settled

    def _of_body(
        self, eqn: Eqn, signature: Signature, found: Origins, are_streams: Flags
    ) -> Signature:
        """Returns the signature of the body if some carries are half."""
        start, count = _compat.scan_counts(eqn)
        uses = signature.uses
        rest = len(uses.read_only_rounded) - count
        of_results = ResultUses(
            for_matmuls=are_streams + uses.for_matmuls[count:],
            read_only_rounded=are_streams + uses.read_only_rounded[count:],
            for_results=(*(not x for x in are_streams), *uses.for_results[count:]),
            states=(*(not x for x in are_streams), *(False,) * rest),
        )
        (body,) = bodies(eqn)
        inputs = [found.of[v] for v in _compat.open_jaxpr(body)[0].invars]
        consts, carries, xs = split_list(inputs, start, count)
        pairs = zip(carries, are_streams, strict=True)
        of_carries = [o._replace(after_matmul=is_stream) for o, is_stream in pairs]
        origins = (*consts, *of_carries, *xs)
        of_consts, _, of_xs = split_list(signature.halves, start, count)
        halves = (*of_consts, *are_streams, *of_xs)
        return Signature(signature.context, of_results, origins, halves)

    def emit(
        self, emitter: Emitter, eqn: Eqn, operands: Arrays, signature: Signature
    ) -> Arrays:
        planned = self._planned(emitter.planner, eqn, signature)
        emitter = emitter.replace(in_loop=True)
        closed = eqn.params["jaxpr"]
        sizes = _compat.scan_counts(eqn)
        consts, init, xs = split_list(operands, *sizes)
        start, count = sizes
        of_consts, carries, _ = split_list(eqn.invars, *sizes)

        # The cotangents of the constants add up over the steps. With float32 constants
        # they add up in float32: after 2,048 steps the error is 0.005, and 0.81 with
        # constants in half precision.
        wide = emitter.cast_as(consts, of_consts, (False,) * start)
        of_steps = planned.of_body.halves[:start]

        def body(carry: tuple[Array, ...], x: tuple[Array, ...]) -> Any:
            known = emitter.cast_as(wide, of_consts, of_steps)
            found = emitter.emit(closed, (*known, *carry, *x), planned.of_body)
            carry_out, ys = split_list(found, count)
            cast = emitter.cast_as(carry_out, carries, planned.are_streams)
            return tuple(cast), tuple(ys)

        first = tuple(emitter.cast_as(init, carries, planned.are_streams))
        options = _compat.scan_options(eqn)
        carry, ys = jax.lax.scan(body, first, tuple(xs), **options)
        return [*carry, *ys]


@register("while", body="body_jaxpr")
class While(_InFloat32):
    """A while loop carries float32; reverse mode cannot differentiate a while loop."""

    def origins(
        self,
        analysis: OriginAnalysis,
        eqn: Eqn,
        context: Context,
        operands: tuple[Origin, ...],
    ) -> Origins:
        sizes = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        _, consts, init = split_list(operands, *sizes)
        body = eqn.params["body_jaxpr"]
        found = _origins_of_loop(analysis, body, context, (consts, init, ()))
        # The loop may run no step at all.
        pairs = zip(init, found.results, strict=True)
        return found._replace(results=tuple(map(joined, pairs)))

    def emit(
        self, emitter: Emitter, eqn: Eqn, operands: Arrays, signature: Signature
    ) -> Arrays:
        emitter = emitter.replace(in_loop=True, recompute=False)
        params = eqn.params
        sizes = params["cond_nconsts"], params["body_nconsts"]
        for_cond, for_body, init = split_list(operands, *sizes)
        of_cond, of_body, _ = split_list(signature.origins, *sizes)
        halves_of_cond, halves_of_body, _ = split_list(signature.halves, *sizes)

        def states(arrays: Arrays, atoms: Sequence[Atom]) -> list[Array]:
            # The results of a body must have the types of its inputs: strong types.
            cast = emitter.cast_as(arrays, atoms, (False,) * len(atoms))
            return [_tree.with_weak_type(x, False) for x in cast]

        start = states(init, eqn.invars[sum(sizes) :])
        (body,) = bodies(eqn)
        context = signature.context
        parts = of_body, signature.origins[sum(sizes) :], ()
        found = _origins_of_loop(emitter.planner, body, context, parts)
        inputs = [found.of[v] for v in _compat.open_jaxpr(body)[0].invars]
        of_body, carries = split_list(inputs, len(of_body))
        of_carries = [o._replace(after_matmul=False) for o in carries]

        def rewritten(
            closed: Jaxpr, consts: Arrays, origins: Sequence[Origin], halves: Flags
        ) -> Jaxpr:
            results = _compat.open_jaxpr(closed)[0].outvars
            of_jaxpr = Signature(
                context,
                ResultUses.in_float32(len(results), are_states=True),
                (*origins, *of_carries),
                (*halves, *(False,) * len(start)),
            )

            def run(*xs: Array) -> list[Array]:
                return states(emitter.emit(closed, xs, of_jaxpr), results)

            return jax.make_jaxpr(run)(*consts, *start)

        # The primitive is bound: under vmap there is a condition for each example,
        # which jax.lax.while_loop does not take.
        condition = params["cond_jaxpr"]
        jaxprs = {
            "cond_jaxpr": rewritten(condition, for_cond, of_cond, halves_of_cond),
            "body_jaxpr": rewritten(body, for_body, of_body, halves_of_body),
        }
        operands = [*for_cond, *for_body, *start]
        return _compat.bind(eqn, operands, params | jaxprs)
