"""`half_params`: which parameters can be stored in half precision, bit for bit.

`amp` casts a weight at each use. If no equation reads the weight in float32, the casts
can be done once, before the function is called:

    y = dot (convert[bfloat16] w) x        w: f32[4,4]
    y = dot w x                            w: bf16[4,4], the same y

But the user's function is then traced with arrays in half precision, and JAX's own
rules of promotion may give a different program: for two parameters in half precision,
`tanh(w1 @ w2)` computes the `tanh` in half precision, too. So nothing is assumed: the
program of `amp(fun)` for float32 parameters is compared with the program for the
parameters in half precision (`value_numbers.py`), and parameters are left out until
both programs compute the same values. On the 19 models of the benchmarks the first
comparison is enough.
"""

import copy
import enum
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flax_amp import _tree
from flax_amp._compat import DType, Jaxpr
from flax_amp._jaxprs import struct_of
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._rewriter.transform import refuse_rewritten, trace_call
from flax_amp._rewriter.value_numbers import Digits, Numbering, Reader, Table, Value
from flax_amp.policy import MatmulDType, Policy, PolicyEntries, Precision, read_options


def half_params(
    fun: Callable[..., Any],
    *,
    precision: Precision | None = None,
    compute_dtype: DTypeLike | None = None,
    amp_policy: PolicyEntries | None = None,
    matmul_dtype: MatmulDType = None,
    argnums: int | Sequence[int] = 0,
) -> Callable[..., Any]:
    """Stores in half precision the parameters that `amp(fun)` only ever reads rounded.

    `amp` casts a weight at each use. A weight that no equation reads in float32 can be
    stored in half precision, in half of its bytes, and the results of `amp(fun)` keep
    their bits. This serves inference, export, teachers, and weights that are not
    trained:

        half = flax_amp.half_params(predict)(params, x)
        y = jax.jit(flax_amp.amp(predict))(half, x)   # the bits of ...(params, x)

    Parameters that arithmetic reads stay float32, such as the scales of norms, most
    biases, and an embedding whose rows are added to the rows of another embedding.
    `flax_amp.explain` with `parameters=True` gives the reason for each parameter.

    The function is traced, for most functions twice, and nothing is compiled. Arguments
    may be abstract (`jax.ShapeDtypeStruct`, or the results of `jax.eval_shape` and
    `nnx.eval_shape`). The proof is about arguments of these shapes and dtypes, and
    about the forward pass: the gradient with respect to a parameter in half precision
    is rounded to half precision.

    Args:
      fun: the function before `amp`.
      precision: an option of `flax_amp.amp`, as are the next three arguments. Give the
        same options as to `amp`. In float32, the parameters are returned as they are.
      compute_dtype: a dtype instead of a word.
      amp_policy: which primitive or scope runs in which precision.
      matmul_dtype: the dtype of matmuls, such as `"fp8"`.
      argnums: the place of the positional argument with the parameters, or several
        places.

    Returns:
      A function of the arguments of `fun` that returns the parameters. Float32 arrays
      that are only read rounded are in half precision there, and all remaining leaves
      are as they were. If `argnums` is a sequence, the function returns a tuple.
      Shardings are kept. In place of an `nnx.Module` the function returns a copy, which
      shares the arrays that stay as they are.

    Raises:
      TypeError: if `fun` is rewritten by `amp` already, or an option has a wrong type.
      ValueError: when called, if `argnums` is not the place of an argument.

    Example:
      >>> import jax, jax.numpy as jnp, flax_amp
      >>> def predict(params, x):
      ...     return jnp.tanh(x @ params["w"]) * params["scale"]
      >>> params, x = {"w": jnp.full((4, 2), 0.3), "scale": jnp.ones(2)}, jnp.ones(4)
      >>> half = flax_amp.half_params(predict)(params, x)
      >>> half["w"].dtype, half["scale"].dtype
      (dtype(bfloat16), dtype('float32'))
      >>> run = jax.jit(flax_amp.amp(predict))
      >>> bool((run(half, x) == run(params, x)).all())
      True
    """
    refuse_rewritten(f"half_params: {getattr(fun, '__name__', fun)!s}", fun)
    options = precision, compute_dtype, matmul_dtype, amp_policy
    dtype, entries = read_options("half_params", *options)
    policy = Policy(entries)
    is_one = not isinstance(argnums, Sequence)
    places: Any = [argnums] if is_one else argnums
    places = list(map(operator.index, places))

    def of_call(*args: Any, **kwargs: Any) -> Any:
        for n in places:
            if not 0 <= n < len(args):
                raise ValueError(
                    f"half_params: got {argnums=} for a call with {len(args)} "
                    "positional arguments; expected the places of the arguments that "
                    "hold the parameters, from 0 on. Pass the parameters by position."
                )
        call = FunctionalCall(fun, args, kwargs, open_scopes=policy.names_scopes)
        found = find_parameters(call, policy, dtype, places)
        halves = {x.place for x in found if x.is_half}
        inputs = [
            _in_half(x, dtype) if i in halves else x for i, x in enumerate(call.inputs)
        ]
        of_halves, _ = call.arguments_with(inputs)
        chosen = [of_halves[n] for n in places]
        return chosen[0] if is_one else tuple(chosen)

    return of_call


def _in_half(x: Any, half: DType) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=half)
    return x.astype(half)


# --- the search ----------------------------------------------------------------------


class Reason(enum.Enum):
    """Why a parameter stays float32."""

    IN_FLOAT32 = "the precision is float32"
    NOT_READ = "no equation reads it"
    UNROUNDED = "an equation reads it in float32"
    PROMOTED = "an equation would compute something else from half precision"
    UNPROVEN = "the function could not be traced with it, or may compute something else"


class Parameter(NamedTuple):
    """A float32 array among the inputs of a call."""

    place: int  # the place among the inputs of the call
    reason: Reason | None  # why the parameter stays float32, else `None`
    reader: Reader | None  # the equation that the reason is about

    @property
    def is_half(self) -> bool:
        """Whether the parameter can be stored in half precision."""
        return self.reason is None


def find_parameters(
    call: FunctionalCall, policy: Policy, half: DType, argnums: Sequence[int]
) -> list[Parameter]:
    """Finds which float32 arrays of some arguments can be stored in half precision."""
    places = [p for p in call.places_of(argnums) if _is_float32(call.inputs[p])]
    if half == jnp.float32:
        return [Parameter(p, Reason.IN_FLOAT32, None) for p in places]
    return _Search(call, policy, half, places).run()


class _Search:
    """Compares the program of a call with programs for parameters in half precision."""

    def __init__(
        self, call: FunctionalCall, policy: Policy, half: DType, places: Sequence[int]
    ):
        self.call = call
        self.policy = policy
        self.half = half
        self.places = places
        self.reasons: dict[int, tuple[Reason, Reader | None]] = {}
        self.table = Table(half)
        self.in_float32 = Numbering(self.table)
        self.expected = self._results(self.in_float32, self._program([]))

    def run(self) -> list[Parameter]:
        for p, reader in self.in_float32.unrounded.items():
            self.reasons[p] = Reason.UNROUNDED, reader
        for p in {*self.places} - self.in_float32.rounded - {*self.reasons}:
            self.reasons[p] = Reason.NOT_READ, None
        found = self._proven([p for p in self.places if p not in self.reasons])
        parameters = []
        for p in self.places:
            if p in found:
                parameters.append(Parameter(p, None, None))
            else:
                parameters.append(Parameter(p, *self.reasons[p]))
        return parameters

    def _proven(self, candidates: list[int]) -> list[int]:
        """Returns parameters that can all be stored in half precision.

        Candidates are left out until the program for the remaining candidates in half
        precision computes the same values as the program for float32 parameters.
        """
        while candidates:
            differing = self._differing_parameters(candidates)
            if differing is None:
                return candidates
            if differing:
                for p, reader in differing.items():
                    self.reasons[p] = Reason.PROMOTED, reader
                candidates = [p for p in candidates if p not in differing]
                continue
            # The function refuses operands of two dtypes, or no parameter is known to
            # cause the difference. So the two parts of the candidates are tried apart.
            if len(candidates) == 1:
                self.reasons[candidates[0]] = Reason.UNPROVEN, None
                return []
            middle = len(candidates) // 2
            first = self._proven(candidates[:middle])
            second = self._proven(candidates[middle:])
            # Each part is proven, but both together are not: the second part stays
            # float32.
            if len(first) + len(second) == len(candidates):
                self.reasons |= dict.fromkeys(second, (Reason.UNPROVEN, None))
                return first
            candidates = first + second
        return []

    def _differing_parameters(self, candidates: list[int]) -> dict[int, Reader] | None:
        """Compares the programs; returns `None` if they compute the same values.

        Otherwise returns the parameters that are read where the programs begin to
        differ, each with the equation there. The dict is empty if no such parameter is
        known.
        """
        numbering = Numbering(self.table, frozenset(candidates))
        try:
            program = self._program(candidates)
        except Exception:  # from the user's code, which has run for float32
            return {}
        results = self._results(numbering, program)
        if results == self.expected:
            return None
        differing: dict[int, Reader] = {}
        for number, reader in numbering.first_new.items():
            read = self.table.sources(number) & numbering.stored_in_half
            # JAX computes in half precision from two operands in half precision, and in
            # float32 as soon as an operand is float32. So the largest parameter may
            # still be stored in half precision, unless the equation reads it alone.
            ordered = sorted(read, key=self._size)
            differing |= dict.fromkeys(ordered[:-1] or ordered, reader)
        return differing

    def _size(self, place: int) -> int:
        return math.prod(self.call.inputs[place].shape)

    def _program(self, halves: Sequence[int]) -> "_Program":
        """Traces the program for some parameters in half precision."""
        call = copy.copy(self.call)
        call.inputs = [
            _half_struct(x, self.half) if i in halves else x
            for i, x in enumerate(call.inputs)
        ]
        arrays = {i: x for i, x in enumerate(call.inputs) if _tree.is_array_or_shape(x)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a call of `amp(fun)` gives the warnings
            traced = trace_call(call, self.policy, self.half)
            closed = jax.make_jaxpr(traced.emit)([*arrays.values()])
        return _Program(closed, traced.rebuild, [*arrays])

    def _results(self, numbering: Numbering, program: "_Program") -> list[Any]:
        """Returns the results of a program as a list that can be compared.

        Equal lists mean equal values and dtypes in the same structure.
        """
        values = []
        for place, x in zip(program.places, program.closed.in_avals, strict=True):
            if place in self.places:
                number = self.table.parameter(place, x.shape)
                is_half = place in numbering.stored_in_half
                digits = Digits.AS_IT_IS if is_half else Digits.FLOAT32
                values.append(Value(number, digits))
            else:
                values.append(Value(self.table.number("input", place)))
        *outs, effects = numbering.run(program.closed, values)
        tree = program.rebuild(outs)
        leaves, treedef = jax.tree.flatten(tree, lambda x: isinstance(x, Value))
        types = [(x.dtype, x.weak_type) for x in program.closed.out_avals]
        return [effects, *leaves, treedef, types]


class _Program(NamedTuple):
    """A traced call, rewritten by `amp`."""

    closed: Jaxpr
    rebuild: Callable[[Sequence[Any]], Any]  # from arrays to the result
    places: list[int]  # the arrays among the inputs of the call


def _is_float32(x: Any) -> bool:
    return _tree.is_array_or_shape(x) and x.dtype == jnp.float32


def _half_struct(x: Any, half: DType) -> jax.ShapeDtypeStruct:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=half)
    return struct_of(jax.typeof(x), half)
