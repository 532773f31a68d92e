"""Numbers the values of programs: equal numbers mean equal values, bit for bit.

Two programs are numbered in the same table. A value that both programs compute in the
same way, from the same inputs, has the same number in both. The programs of
`half_params.py` differ in the storage of some parameters, in float32 or in half
precision:

    stored in float32                       stored in half precision
    r = reshape w         rounded: n        r = reshape w                    n
    h = convert r         n                 f = convert[float32] r           cast up: n
    y = dot h x           m                 h = convert[bfloat16] f          n
                                            y = dot h x                      m

A parameter has the number of its rounded value, and *digits*: of the original float32,
of float32 that was cast up from half precision, or of half precision. A move, such as a
reshape, commutes with the rounding of each element, so the result of a move keeps the
digits. Rounding either kind of float32 gives the number itself. The remaining equations
that read float32 have numbers of their own, because the two kinds differ in their
digits.
"""

import dataclasses
import enum
import functools
import itertools
import math
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from ml_dtypes import finfo

from flax_amp import _compat
from flax_amp._compat import Aval, DType, Eqn, Jaxpr
from flax_amp._rewriter.primitives import Trait, bodies, has, literal
from flax_amp._tree import fill, is_array, is_key, pick, split_list

Number = int
Leaves = frozenset[int]  # parameters, by their places among the inputs
NO_LEAVES: Leaves = frozenset()


class Digits(enum.Enum):
    """The digits that a program has of a value, beside the number of the value."""

    AS_IT_IS = "as the number says"
    FLOAT32 = "in float32, before it is rounded"
    CAST_UP = "in float32, after it was rounded"


class Value(NamedTuple):
    """A value of a program."""

    number: Number
    digits: Digits = Digits.AS_IT_IS


class Reader(NamedTuple):
    """An equation, after the equations whose bodies it is in, outermost first."""

    eqns: tuple[Eqn, ...]  # empty for the results of the program


# The body of such a call stands for the call. The further parameters, such as a rule of
# derivatives or a sharding, change no value of the forward pass.
_CALLS = """jit closed_call eval_jaxpr remat2 custom_jvp_call custom_vjp_call
custom_vmap_call""".split()
# Each element of the result is an element of an operand, or a number of the program, up
# to its sign. So rounding before and rounding after the move give the same result.
_MOVES = """gather dynamic_slice select_n neg abs all_gather all_to_all
ppermute""".split()


class Table:
    """The numbers of all values of several programs."""

    def __init__(self, half: DType):
        self.half = half
        self.numbers: dict[Any, Number] = {}
        # The numbers of parameters, moved at most, with the parameters they come from.
        self.leaves: dict[Number, Leaves] = {}
        self.operands: dict[Number, tuple[Number, ...]] = {}
        self.literals: dict[Number, float] = {}  # the numbers of scalar literals
        # By the `id` of an object: the object and its key. The table keeps the object
        # alive, so that no second object gets the same `id`.
        self._keys: dict[int, tuple[Any, Any]] = {}

    def number(self, *key: Any, operands: Sequence[Value] = ()) -> Number:
        """Returns the number of a value for a key, which says how it is computed."""
        found = self.numbers.setdefault(key, len(self.numbers))
        self.operands.setdefault(found, tuple(x.number for x in operands))
        return found

    def parameter(self, place: int, shape: Sequence[int]) -> Number:
        """Returns the number of a parameter in half precision."""
        found = self.number("parameter", place, tuple(shape))
        self.leaves[found] = frozenset([place])
        return found

    def constant(self, x: Any, dtype: DType = None) -> Number:
        """Returns the number of a literal or of an array that a program closes over."""
        has_value = getattr(x, "is_fully_addressable", True)
        if isinstance(x, jax.core.Tracer) or is_key(x) or not has_value:
            return self.number(self._identity(x))
        array = np.asarray(x, dtype)
        return self.number(array.dtype, array.shape, array.tobytes())

    def sources(self, number: Number) -> Leaves:
        """Returns the parameters in half precision that are nearest before a value."""
        found = NO_LEAVES
        seen = {number}
        left = [number]
        while left:
            n = left.pop()
            if n in self.leaves:
                found |= self.leaves[n]
            else:
                new = {*self.operands[n]} - seen
                seen |= new
                left += new
        return found

    def key_of(self, x: Any) -> Any:
        """Returns a key that is equal for equation parameters with the same meaning."""
        if isinstance(x, dict):
            return tuple((k, self.key_of(v)) for k, v in x.items())
        if isinstance(x, tuple | list):
            return type(x), *map(self.key_of, x)
        if isinstance(x, float):  # 0.0 == -0.0, and a NaN is not equal to itself
            return repr(x)
        if x is None or isinstance(x, bool | int | str):
            return type(x), x
        if is_array(x):
            return self.constant(x)
        if id(x) not in self._keys:
            # The object gets its key before its parts, because a function may close
            # over itself.
            self._identity(x)
            self._keys[id(x)] = x, self._key_of_object(x)
        return self._keys[id(x)][1]

    def _identity(self, x: Any) -> Any:
        return self._keys.setdefault(id(x), (x, ("object", id(x))))[1]

    def _key_of_object(self, x: Any) -> Any:
        if hasattr(x, "eqns") or hasattr(x, "jaxpr"):
            body, consts = _compat.open_jaxpr(x)
            return str(body), tuple(map(self.constant, consts))
        # A function that is made anew in each trace, such as the callback of
        # `jax.debug.print`, is known by its code, closure and default arguments.
        if isinstance(x, functools.partial):
            return self.key_of((x.func, x.args, x.keywords))
        if isinstance(x, types.FunctionType):
            cells = list(map(_contents, x.__closure__ or ()))
            outside = id(x.__code__), id(x.__globals__)
            return outside, self.key_of((cells, x.__defaults__, x.__kwdefaults__))
        # JAX's record of a callback is a frozen dataclass, and is known by its fields.
        of_class = getattr(type(x), "__dataclass_params__", None)
        if of_class is not None and of_class.frozen:
            fields = [getattr(x, field.name) for field in dataclasses.fields(x)]
            return type(x), self.key_of(fields)
        try:
            hash(x)
        except TypeError:
            return self._identity(x)
        return type(x), x


class Numbering:
    """Numbers the values of one program, which stores some parameters in half."""

    def __init__(self, table: Table, stored_in_half: Leaves = NO_LEAVES):
        self.table = table
        self.stored_in_half = stored_in_half
        self.rounded: set[int] = set()  # the parameters that some equation rounds
        # By a parameter: the first equation that reads the parameter unrounded.
        self.unrounded: dict[int, Reader] = {}
        # The equations at which this program begins to differ from earlier programs, by
        # the numbers of their results. Such a number is new in this program, and the
        # numbers of the equation's operands are not new.
        self.first_new: dict[Number, Reader] = {}
        self._known = len(table.numbers)
        self._around: list[Eqn] = []
        self._effects: list[Any] = []  # the equations with effects so far
        self._depth = 0  # the number of loops, branches and `shard_map`s around

    def run(self, closed: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Returns the results of a program, and a value that stands for its effects."""
        results = self._body(closed, inputs)
        for x in results:
            self._read(x)
        return [*results, Value(self.table.number("effects", *self._effects))]

    def _body(self, closed: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        jaxpr, consts = _compat.open_jaxpr(closed)
        env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for v, const in zip(jaxpr.constvars, consts, strict=True):
            env[v] = Value(self.table.constant(const))

        def read(atom: Any) -> Value:
            if not isinstance(atom, Literal):
                return env[atom]
            aval: Aval = atom.aval
            number = self.table.constant(atom.val, aval.dtype)
            if (scalar := literal(atom)) is not None:
                self.table.literals[number] = scalar
            return Value(number)

        for eqn in jaxpr.eqns:
            self._around.append(eqn)
            env.update(zip(eqn.outvars, self._equation(eqn, read), strict=True))
            self._around.pop()
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Eqn, read: Any) -> Sequence[Value]:
        operands = [read(v) for v in eqn.invars]
        name = eqn.primitive.name
        if name in _CALLS:
            (body,) = bodies(eqn)
            # The variables that the rule of a custom derivative closes over come first.
            count = len(_compat.open_jaxpr(body)[0].invars)
            return self._body(body, operands[len(operands) - count :])
        if name in _BINDERS:
            return _BINDERS[name](self, eqn, operands)
        if name == "convert_element_type" and (cast := self._cast(eqn, operands[0])):
            return [cast]
        if moved := self._moved(eqn, operands):
            return moved
        return self._numbered(eqn, operands, self.table.key_of(eqn.params))

    def _cast(self, eqn: Eqn, x: Value) -> Value | None:
        """Returns a parameter that is cast between float32 and half precision."""
        old = eqn.invars[0].aval.dtype
        new = eqn.params["new_dtype"]
        if old == new:  # from a weak type to a strong one
            return x
        leaves = self.table.leaves.get(x.number, NO_LEAVES)
        if not leaves:
            return None
        if (old, new) == (jnp.float32, self.table.half):
            self.rounded |= leaves
            return Value(x.number)
        if (old, new) != (self.table.half, jnp.float32):
            return None
        # XLA may drop a cast to half precision if a cast up follows at once. Then the
        # program with a float32 parameter would go on with more digits.
        if not leaves <= self.stored_in_half:
            self._note_float32_read(leaves - self.stored_in_half)
        return Value(x.number, Digits.CAST_UP)

    def _moved(self, eqn: Eqn, operands: Sequence[Value]) -> list[Value] | None:
        """Returns the results of a move of parameters; `None` for any equation else."""
        name = eqn.primitive.name
        digits = set()
        if not (has(eqn, Trait.LAYOUT) or name in _MOVES):
            return None
        if name == "optimization_barrier":  # gives its operands, one by one
            return [self._part(x, name) for x in operands]
        leaves = NO_LEAVES
        numbers = []
        for v, x in zip(eqn.invars, operands, strict=True):
            number: Number | None = x.number
            if x.number in self.table.leaves:
                leaves |= self.table.leaves[x.number]
                digits.add(x.digits)
            elif jnp.issubdtype(v.aval.dtype, jnp.inexact):
                number = self._in_half(x)
            if number is None:
                return None
            numbers.append(Value(number))
        fill_value = eqn.params.get("fill_value")
        is_exact = fill_value is None or self._is_exact(fill_value)
        if len(digits) != 1 or not is_exact:
            return None
        params = self.table.key_of(eqn.params)
        half = self.table.half
        results = self._numbered(eqn, numbers, params, half)
        self.table.leaves |= {x.number: leaves for x in results}
        (of_results,) = digits
        return [Value(x.number, of_results) for x in results]

    def _part(self, x: Value, *key: Any) -> Value:
        """Returns a part of a value, or the value behind a barrier, in its digits."""
        is_leaf = x.number in self.table.leaves
        of_number = Value(x.number) if is_leaf else x
        number = self.table.number(*key, of_number, operands=[x])
        if is_leaf:
            self.table.leaves[number] = self.table.leaves[x.number]
        return Value(number, x.digits)

    def _in_half(self, x: Value) -> Number | None:
        """Returns the number of a literal in half precision, if the cast is exact.

        The literal is an operand beside a parameter.
        """
        scalar = self.table.literals.get(x.number)
        if scalar is None or not self._is_exact(scalar):
            return None
        return self.table.constant(scalar, self.table.half)

    def _is_exact(self, x: Any) -> bool:
        """Whether half precision can represent a number.

        A NaN counts as exact, because a lookup fills rows with NaNs.
        """
        number = float(x)
        half = self.table.half
        is_large = math.isfinite(number) and abs(number) > float(finfo(half).max)
        return not is_large and np.array_equal(
            np.asarray(number, half), np.asarray(number), equal_nan=True
        )

    def _numbered(
        self, eqn: Eqn, operands: Sequence[Value], params: Any, dtype: DType = None
    ) -> list[Value]:
        """Returns the results of any equation, from its primitive and operands."""
        for x in operands:
            self._read(x)
        key = [eqn.primitive.name, params, *operands]
        if eqn.effects:
            # The results depend on the effects before, as with a reference.
            key += self._depth, len(self._effects)
            self._effects.append(tuple(key))
        are_known = all(x.number < self._known for x in operands)
        found = []
        for i, v in enumerate(eqn.outvars):
            shape = getattr(v.aval, "shape", ())
            of_result = dtype or getattr(v.aval, "dtype", None)
            number = self.table.number(*key, i, shape, of_result, operands=operands)
            if number >= self._known and are_known:
                self.first_new.setdefault(number, Reader(tuple(self._around)))
            found.append(Value(number))
        return found

    def _read(self, x: Value) -> None:
        """Notes the current equation as a reader that needs all digits."""
        if x.digits is Digits.FLOAT32:
            self._note_float32_read(self.table.leaves[x.number])

    def _note_float32_read(self, leaves: Leaves) -> None:
        """Notes the current equation as a reader of these parameters in float32."""
        for leaf in leaves:
            self.unrounded.setdefault(leaf, Reader(tuple(self._around)))

    # --- equations with bodies -------------------------------------------------------

    # A body reads the values outside of the body by their numbers, so that the order in
    # which a loop takes its constants does not matter. Values that differ from
    # iteration to iteration are numbered by the depth of the loop, so that the values
    # of nested loops have different numbers.

    def _inside(
        self, closed: Jaxpr, inputs: Sequence[Value]
    ) -> tuple[list[Value], tuple[Any, ...]]:
        """Returns the results of a body, and its effects."""
        before = self._effects
        self._effects = []
        self._depth += 1
        results = self._body(closed, inputs)
        self._depth -= 1
        effects = self._effects
        self._effects = before
        return results, tuple(effects)

    def _loop(
        self,
        eqn: Eqn,
        parts: Sequence[tuple[Jaxpr, Sequence[Value], Sequence[Value]]],
        init: Sequence[Value],
        *options: Any,
    ) -> list[Value]:
        """Returns the results of a loop.

        Each part is a body, with its inputs before and after the carry. The last body
        gives the next carry and the remaining results of the loop. A parameter that a
        loop carries and does not change counts as a constant of the loop. The loops of
        `nn.RNN` carry their parameters. If such a parameter counted as a carry, half of
        the weights of an LSTM would stay float32.
        """
        avals = [v.aval for v in eqn.outvars[: len(init)]]
        carry = [
            Value(self.table.number("carry", self._depth, i, aval.shape, aval.dtype))
            for i, aval in enumerate(avals)
        ]
        is_kept = [x.number in self.table.leaves for x in init]
        # The set of kept parameters is a guess until the bodies return all of the set.
        while True:
            inputs = fill(pick(init, is_kept), is_kept, carry)
            runs = [
                self._inside(body, [*before, *inputs, *after])
                for body, before, after in parts
            ]
            last, _ = runs[-1]
            triples = list(zip(is_kept, init, last[: len(init)], strict=True))
            still_kept = [kept and x == y for kept, x, y in triples]
            if still_kept == is_kept:
                break
            is_kept = still_kept
        # The loop hands a kept parameter through, and no equation reads the parameter.
        # So `_numbered` must not note the loop as a float32 reader.
        found = _with_digits_of_number(init, is_kept)
        found += [x for results, _ in runs[:-1] for x in results]
        found += _with_digits_of_number(last, is_kept)
        effects = tuple(happened for _, happened in runs)
        outs = self._numbered(eqn, found, (options, effects, tuple(is_kept)))
        carried = fill(pick(init, is_kept), is_kept, outs[: len(init)])
        return [*carried, *outs[len(init) :]]

    def _scan(self, eqn: Eqn, operands: Sequence[Value]) -> list[Value]:
        consts, init, xs = split_list(operands, *_compat.scan_counts(eqn))
        parts = [self._part(x, "element", self._depth) for x in xs]
        (body,) = bodies(eqn)
        length = self.table.key_of(eqn.params["length"])
        return self._loop(
            eqn, [(body, consts, parts)], init, eqn.params["reverse"], length
        )

    def _while(self, eqn: Eqn, operands: Sequence[Value]) -> list[Value]:
        params = eqn.params
        sizes = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body, init = split_list(operands, *sizes)
        jaxprs = [
            (params["cond_jaxpr"], of_cond, ()),
            (params["body_jaxpr"], of_body, ()),
        ]
        return self._loop(eqn, jaxprs, init)

    def _cond(self, eqn: Eqn, operands: Sequence[Value]) -> list[Value]:
        index, *others = operands
        runs = [self._inside(body, others) for body in bodies(eqn)]
        found = [index, *(x for results, _ in runs for x in results)]
        return self._numbered(eqn, found, tuple(happened for _, happened in runs))

    def _shard_map(self, eqn: Eqn, operands: Sequence[Value]) -> list[Value]:
        (body,) = bodies(eqn)
        specs = map(self.table.key_of, eqn.params["in_specs"])
        parts = [
            self._part(x, "part", self._depth, spec)
            for spec, x in zip(specs, operands, strict=True)
        ]
        results, effects = self._inside(body, parts)
        others = {k: v for k, v in eqn.params.items() if k != "jaxpr"}
        return self._numbered(eqn, results, (self.table.key_of(others), effects))


def _contents(cell: types.CellType) -> Any:
    """Returns the value of a variable that a function closes over, or an empty cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _with_digits_of_number(
    values: Sequence[Value], flags: Sequence[bool]
) -> list[Value]:
    """Returns the values, with the digits of their numbers where a flag is on."""
    pairs = itertools.zip_longest(values, flags)
    return [Value(x.number) if flag else x for x, flag in pairs]


_BINDERS: dict[str, Any] = {
    "scan": Numbering._scan,
    "while": Numbering._while,
    "cond": Numbering._cond,
    "shard_map": Numbering._shard_map,
}
