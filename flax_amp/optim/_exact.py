"""Traced numbers that keep the precision of a Python float.

optax computes `1 - b2` in Python, in double precision, before anything becomes an
array. With `b2` an array in float32 the same line is off by 3e-8, which is 3e-5 of
`1 - 0.999`: after some steps a trajectory is another one. An `Exact` holds what float32
leaves out as a second float32, computes with both as long as it meets only numbers, and
is an ordinary array as soon as it meets one.

The arithmetic is that of T. J. Dekker, "A floating-point technique for extending the
available precision", Numerische Mathematik 18 (1971), and D. E. Knuth, "The Art of
Computer Programming", volume 2, section 4.2.2.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from flax_amp import _compat
from flax_amp.optim._decisions import Decisions, Question

# A number as an unevaluated sum; the second is at most half a unit in the last place
# of the first.
Pair = tuple[Any, Any]

# What arithmetic with an `Exact` keeps exact; a bool is an int.
_Number = int | float | np.integer | np.floating

_MOST_PRODUCTS = 64


# XLA must not simplify `(a + b) - a`: it did, in jaxlib 0.10.
_rounded = jax.lax.optimization_barrier


def split(value: Any, dtype: Any) -> Pair:
    """Returns a number as a pair of `dtype`."""
    with np.errstate(over="ignore", invalid="ignore"):
        high = np.asarray(value, dtype)
        low = np.asarray(np.float64(value) - np.float64(high), dtype)
    return high, np.where(np.isfinite(low), low, 0).astype(dtype)


def _pair_of_whole(whole: Any) -> Pair:
    """Returns an integer as a pair, every bit of it."""
    dtype = jax.dtypes.canonicalize_dtype(float)
    bits = 4 * whole.dtype.itemsize
    upper = (whole >> bits) << bits
    return _sum(upper.astype(dtype), (whole - upper).astype(dtype))


def _sum(a: Any, b: Any) -> Pair:
    """Returns `a + b` and its rounding error."""
    total = _rounded(a + b)
    rest = _rounded(total - a)
    return total, (a - (total - rest)) + (b - rest)


def _ordered_sum(a: Any, b: Any) -> Pair:
    """Returns `a + b` and its rounding error, for `b` small against `a`, or 0."""
    total = _rounded(a + b)
    finite = jnp.isfinite(total)
    return jnp.where(finite, total, a), jnp.where(finite, b - (total - a), 0)


def _halves(a: Any) -> Pair:
    """Returns two numbers of half the bits, whose products are exact."""
    info = jnp.finfo(a.dtype)
    upper = jax.lax.reduce_precision(a, info.nexp, info.nmant // 2)
    return upper, a - upper


def _product(a: Any, b: Any) -> Pair:
    """Returns `a * b` and its rounding error, by sums of exact products only.

    A rounded product that is used twice may not be the same twice: compilers turn
    `a * b + c` into one operation with one rounding.
    """
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    product, rest = _sum(a1 * b1, a1 * b2)
    product, more = _sum(product, a2 * b1)
    return product, rest + more + a2 * b2


def _add(a: Pair, b: Pair) -> Pair:
    total, rest = _sum(a[0], b[0])
    return _ordered_sum(total, rest + (a[1] + b[1]))


def _subtract(a: Pair, b: Pair) -> Pair:
    return _add(a, (-b[0], -b[1]))


def _multiply(a: Pair, b: Pair) -> Pair:
    plain = a[0] * b[0]
    product, rest = _product(a[0], b[0])
    rest = rest + (a[0] * b[1] + a[1] * b[0])
    # The halves of inf are NaN, and those of very small products are 0.
    smallest = jnp.finfo(plain.dtype).tiny / jnp.finfo(plain.dtype).eps ** 2
    works = jnp.isfinite(product) & (abs(plain) >= smallest)
    return _ordered_sum(jnp.where(works, product, plain), jnp.where(works, rest, 0))


def _divide(a: Pair, b: Pair) -> Pair:
    # Hidden, or XLA multiplies by the reciprocal of a constant: see `_product`.
    quotient = a[0] / _rounded(jnp.asarray(b[0]))
    zero = jnp.zeros_like(quotient)
    rest = _subtract(a, _multiply((quotient, zero), b))
    return _ordered_sum(quotient, rest[0] / b[0])


# The operators


def _is_power_of_two(value: Any) -> bool:
    return isinstance(value, _Number) and abs(np.frexp(np.float64(value))[0]) == 0.5


def _whole(value: Any) -> Any:
    """Returns what an integer is to JAX, `None` for what is none."""
    if isinstance(value, Exact):
        return value._whole
    most = np.iinfo(jax.dtypes.canonicalize_dtype(int)).max
    whole = isinstance(value, int | np.integer) and abs(int(value)) <= most
    return int(value) if whole else None


def _may_have_wrapped(*values: Any) -> bool:
    """Whether there is an integer that was computed of others."""
    exact = [value for value in values if isinstance(value, Exact)]
    return any(x._whole is not None and x._high is not None for x in exact)


def _pair_of(value: Any, dtype: Any) -> Pair:
    return value._pair() if isinstance(value, Exact) else split(value, dtype)


def _branch_of(plain: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Returns what gives the known value of a result, and who asks for it."""
    both = [x for x in (first, second) if isinstance(x, Exact) and x._decisions]
    if not both:
        return None, None
    return lambda: plain(_known(first), _known(second)), both[0]._decisions


def _known(value: Any) -> Any:
    if not isinstance(value, Exact):
        return value
    if value._known is None:  # only an argument of another mode
        raise TypeError("a number that is not known decides about a branch")
    return value._known()


def _operators(exact: Callable[[Pair, Pair], Pair] | None, plain: Any) -> Any:
    """Makes an operator and its reflection.

    Args:
      exact: computes with pairs; `None` leaves it to the arrays.
      plain: computes with arrays.
    """

    def computed(first: Any, second: Any, dtype: Any) -> Any:
        wholes = _whole(first), _whole(second)
        whole = None
        if exact is not _divide and None not in wholes:
            whole = plain(*wholes)
        pairs = _pair_of(first, dtype), _pair_of(second, dtype)
        if exact is _multiply and _is_power_of_two(second):  # `learning_rate * -1`
            high, low = (part * pairs[1][0] for part in pairs[0])
        else:
            high, low = exact(*pairs)  # type: ignore[misc]
        branch = _branch_of(plain, first, second)
        return Exact(high, low, whole, *branch)

    def compute(self: Any, other: Any, *, reflected: bool) -> Any:
        if exact is None or not isinstance(other, Exact | _Number):
            if exact is None and _may_have_wrapped(self, other):
                raise TypeError("an integer that may be larger than its array")
            array = self.__jax_array__()
            other = other.__jax_array__() if isinstance(other, Exact) else other
            return plain(other, array) if reflected else plain(array, other)
        swap = reflected and exact is not _multiply  # a power of two comes second
        first, second = (other, self) if swap else (self, other)
        dtype = self._pair()[0].dtype
        result = functools.partial(computed, first, second, dtype)
        if isinstance(other, Exact):
            return result()
        sign = math.copysign(1.0, other)  # of a zero
        return self._once((exact, reflected, sign, other), result)

    def forward(self: Any, other: Any) -> Any:
        return compute(self, other, reflected=False)

    def backward(self: Any, other: Any) -> Any:
        return compute(self, other, reflected=True)

    return forward, backward


def _comparison(plain: Callable[[Any, Any], Any]) -> Any:
    """Makes a comparison of both halves."""

    def compare(self: Any, other: Any) -> Any:
        if not isinstance(other, Exact | _Number):
            return plain(self.__jax_array__(), other)
        high, low = self._pair()
        other_high, other_low = _pair_of(other, high.dtype)
        equal = high == other_high
        result = jnp.where(equal, plain(low, other_low), plain(high, other_high))
        known, decisions = _branch_of(plain, self, other)
        asked = decisions is not None and decisions.open
        return Question(result, known, decisions) if asked else result

    return compare


# As a leaf the second half is a key: what is mapped over both halves, as if they were
# two numbers, is an error with a key, and would be a wrong number without.


def _is_hidden(low: Any) -> bool:
    dtype = getattr(low, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _hidden(low: Any, high: Any) -> jax.Array:
    low = jnp.asarray(low, high.dtype)
    words = jnp.atleast_1d(jax.lax.bitcast_convert_type(low, jnp.uint32))
    words = jnp.concatenate([words, jnp.zeros(2 - words.size, jnp.uint32)])
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _shown(key: Any, high: Any) -> jax.Array:
    words = jax.random.key_data(key)
    words = words[0] if high.dtype.itemsize == words.dtype.itemsize else words
    return jax.lax.bitcast_convert_type(words, high.dtype)


class Exact:
    """A traced scalar with about twice the bits of its dtype.

    Arithmetic with Python numbers and with others of its kind gives another; with
    arrays, and in every function of JAX, it is an array, weakly typed, as a Python
    number is.

    Args:
      high: the scalar in its dtype; `None` for an integer.
      low: what `high` leaves out.
      whole: the array that an integer is to JAX. What is computed of integers alone is
        one; as a number it does not wrap.
      known: gives its value as a Python number, if a branch depends on it.
      decisions: what such a branch asks; `None` if it may not depend on it.
    """

    __slots__ = (
        "_computed",
        "_decisions",
        "_high",
        "_known",
        "_low",
        "_trace",
        "_whole",
    )
    __array_ufunc__ = None  # NumPy leaves the arithmetic to this class
    __hash__ = None  # type: ignore[assignment]  # as a traced number has none

    def __init__(
        self,
        high: Any,
        low: Any,
        whole: Any = None,
        known: Callable[[], Any] | None = None,
        decisions: Decisions | None = None,
    ):
        self._high, self._low, self._whole = high, low, whole
        self._known, self._decisions = known, decisions
        self._trace = get_opaque_trace_state()
        self._computed: dict[Any, Any] = {}

    def deciding(
        self, known: Callable[[], Any] | None, decisions: Decisions | None
    ) -> "Exact":
        """Returns the same number, on whose value branches may depend."""
        return Exact(self._high, self._low, self._whole, known, decisions)

    def _once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Returns what was computed before: optax writes `1 - b1` for every leaf.

        What the trace of a loop's body computes, say, must neither come out of it nor
        outlive it.
        """
        if self._trace != get_opaque_trace_state():
            return compute()
        if key not in self._computed:
            self._computed[key] = compute()
        return self._computed[key]

    def _pair(self) -> Pair:
        if self._high is None:
            return self._once("pair", lambda: _pair_of_whole(self._whole))
        if _is_hidden(self._low):
            return self._high, self._once("low", lambda: _shown(self._low, self._high))
        return self._high, self._low

    def __jax_array__(self) -> jax.Array:
        array = self._high if self._whole is None else self._whole
        return self._once("array", lambda: _compat.weakly_typed(jnp.asarray(array)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__jax_array__(), name)

    def __repr__(self) -> str:
        high, low = self._pair()
        return f"Exact({high}, {low})" if self._whole is None else f"Exact({high})"

    __add__, __radd__ = _operators(_add, operator.add)
    __sub__, __rsub__ = _operators(_subtract, operator.sub)
    __mul__, __rmul__ = _operators(_multiply, operator.mul)
    __truediv__, __rtruediv__ = _operators(_divide, operator.truediv)
    __floordiv__, __rfloordiv__ = _operators(None, operator.floordiv)
    __mod__, __rmod__ = _operators(None, operator.mod)
    __lt__ = _comparison(operator.lt)
    __le__ = _comparison(operator.le)
    __gt__ = _comparison(operator.gt)
    __ge__ = _comparison(operator.ge)
    __eq__ = _comparison(operator.eq)
    __ne__ = _comparison(operator.ne)

    def __neg__(self) -> "Exact":
        return self * -1

    def __pos__(self) -> "Exact":
        return self

    def __abs__(self) -> "Exact":
        array = self.__jax_array__()
        sign = jnp.where(array < 0, -1, 1)
        if self._whole is not None:
            return self * Exact(None, None, sign)
        return Exact(*(sign.astype(part.dtype) * part for part in self._pair()))

    def __pow__(self, exponent: Any) -> Any:
        if type(exponent) is not int or not 0 < exponent <= _MOST_PRODUCTS:
            base = self._pair()[0] if isinstance(exponent, _Number) else self
            return jnp.asarray(base) ** exponent
        power: Any = self
        for bit in f"{exponent:b}"[1:]:
            power = power * power
            power = power * self if bit == "1" else power
        return power

    def __rpow__(self, base: Any) -> Any:
        # An integer would wrap.
        base = float(base) if isinstance(base, _Number) else base
        return base ** self.__jax_array__()

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __int__(self) -> int:
        return int(self.__jax_array__())

    def __float__(self) -> float:
        return float(self.__jax_array__())


def _flatten(exact: Exact) -> tuple[Any, None]:
    if exact._high is None:
        return (None, None, exact._whole), None
    low = exact._low
    hidden = low if _is_hidden(low) else _hidden(low, exact._high)
    return (exact._high, hidden, exact._whole), None


# A pytree, so that it may be an argument of functions that optax has compiled.
jax.tree_util.register_pytree_node(
    Exact, _flatten, lambda _, children: Exact(*children)
)
