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
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from flax_amp import _compat

# A number as an unevaluated sum; the second is at most half a unit in the last place
# of the first.
Pair = tuple[Any, Any]


class Exact:
    """A traced scalar with about twice the bits of its dtype.

    Arithmetic with Python numbers and with others of its kind gives another; with
    arrays, and in every function of JAX, it is its first half, weakly typed, as a
    Python number is.

    Args:
      high: the scalar in its dtype.
      low: what `high` leaves out.
    """

    __slots__ = ("_computed", "_high", "_low")
    __array_ufunc__ = None  # NumPy leaves the arithmetic to this class

    def __init__(self, high: jax.Array, low: Any):
        self._high, self._low = high, low
        self._computed: dict[Any, tuple[Any, Any]] = {}

    def _once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Returns what was computed before: optax writes `1 - b1` for every leaf.

        What the trace of a loop's body computed, say, must not come out of it.
        """
        now = get_opaque_trace_state()
        before, result = self._computed.get(key, (None, None))
        if before != now:
            result = compute()
            self._computed[key] = now, result
        return result

    def __jax_array__(self) -> jax.Array:
        return self._once(
            "array", lambda: _compat.weakly_typed(jnp.asarray(self._high))
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__jax_array__(), name)

    def __repr__(self) -> str:
        return f"Exact({self._high}, {self._low})"

    def __neg__(self) -> "Exact":
        return Exact(-self._high, -self._low)

    def __pos__(self) -> "Exact":
        return self

    def __abs__(self) -> "Exact":
        sign = jnp.where(self._high < 0, -1, 1).astype(self._high.dtype)
        return Exact(sign * self._high, sign * self._low)

    def __pow__(self, exponent: Any) -> Any:
        if type(exponent) is int and 0 < exponent <= 4:
            power: Any = self
            for _ in range(exponent - 1):
                power = power * self
            return power
        return self.__jax_array__() ** exponent

    def __rpow__(self, base: Any) -> Any:
        return base ** self.__jax_array__()

    def __bool__(self) -> bool:
        return bool(self._high)

    def __int__(self) -> int:
        return int(self._high)

    def __float__(self) -> float:
        return float(self._high)

    def _pair(self) -> Pair:
        return self._high, self._low


# A pytree, so that it may be an argument of functions that optax has compiled.
jax.tree_util.register_pytree_node(
    Exact, lambda exact: (exact._pair(), None), lambda _, pair: Exact(*pair)
)


# The exact operators


# XLA must not simplify `(a + b) - a`: it did, in jaxlib 0.10.
_rounded = jax.lax.optimization_barrier


def split(value: Any, dtype: Any) -> Pair:
    """Returns a number as a pair of `dtype`."""
    with np.errstate(over="ignore", invalid="ignore"):
        high = np.asarray(value, dtype)
        low = np.asarray(np.float64(value) - np.float64(high), dtype)
    return high, np.where(np.isfinite(low), low, 0).astype(dtype)


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
    product = jnp.where(jnp.isfinite(product), product, plain)  # the halves of inf
    return _ordered_sum(product, rest + (a[0] * b[1] + a[1] * b[0]))


def _divide(a: Pair, b: Pair) -> Pair:
    # Hidden, or XLA multiplies by the reciprocal of a constant: see `_product`.
    quotient = a[0] / _rounded(jnp.asarray(b[0]))
    zero = jnp.zeros_like(quotient)
    rest = _subtract(a, _multiply((quotient, zero), b))
    return _ordered_sum(quotient, rest[0] / b[0])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _is_power_of_two(value: Any) -> bool:
    return _is_number(value) and abs(np.frexp(np.float64(value))[0]) == 0.5


def _exactly(exact: Callable[[Pair, Pair], Pair], plain: Callable[..., Any]) -> Any:
    """Makes an operator and its reflection."""

    def computed(self: Exact, other: Any, *, reflected: bool) -> Exact:
        if exact is _multiply and _is_power_of_two(other):  # `-1 * learning_rate`
            return Exact(
                *(part * np.asarray(other, part.dtype) for part in self._pair())
            )
        known = isinstance(other, Exact)
        pair = other._pair() if known else split(other, self._high.dtype)
        pairs = (pair, self._pair()) if reflected else (self._pair(), pair)
        return Exact(*exact(*pairs))

    def compute(self: Exact, other: Any, *, reflected: bool) -> Any:
        result = functools.partial(computed, self, other, reflected=reflected)
        if isinstance(other, Exact):
            return result()
        if _is_number(other):
            return self._once((exact, reflected, other), result)
        array = self.__jax_array__()
        return plain(other, array) if reflected else plain(array, other)

    def forward(self: Exact, other: Any) -> Any:
        return compute(self, other, reflected=False)

    def backward(self: Exact, other: Any) -> Any:
        return compute(self, other, reflected=True)

    return forward, backward


def _as_array(plain: Callable[..., Any]) -> Any:
    """Makes an operator that an `Exact` leaves to its array."""

    def forward(self: Exact, other: Any) -> Any:
        if isinstance(other, Exact):
            other = other.__jax_array__()
        return plain(self.__jax_array__(), other)

    return forward


for _name, _exact in dict(
    add=_add, sub=_subtract, mul=_multiply, truediv=_divide
).items():
    _forward, _backward = _exactly(_exact, getattr(operator, _name))
    setattr(Exact, f"__{_name}__", _forward)
    setattr(Exact, f"__r{_name}__", _backward)
for _name in "lt le gt ge eq ne floordiv mod".split():
    setattr(Exact, f"__{_name}__", _as_array(getattr(operator, _name)))
