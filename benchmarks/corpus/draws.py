"""Errors of gradients, over several draws of the numbers of a program.

One draw tells little: which of two programs is nearer to float32 changes with the
numbers. Each further draw multiplies every float among parameters and data by
`exp(0.1 n)` with a normal `n`, which keeps signs and the kind of numbers.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.commands.error import relative_error
from benchmarks.corpus.program import Case, Loss
from benchmarks.exact import with_exact_products

WORSE = 1.1  # a ratio above it is a shortfall
MOST = 32
STEP = 8  # after as many draws, it is asked whether they are enough
# Powers of two, tried in turn until the float16 gradients are finite.
_SCALES = {jnp.float16: (2.0**12, 2.0**6, 1.0)}
_EXACT = 1e-6  # an error below it is as good as float32

Gradient = Any  # a jitted function, with all methods of one


class NotFiniteError(Exception):
    """A gradient has an infinity or a NaN."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Errors of a function beside those of its twin.

    Attributes:
      error: the root mean square of its errors.
      draws: how many there were.
      twin: the root mean square of its twin's errors, if those are finite.
      ratio: the geometric mean of the ratios of the two.
      spread: the standard error of the logarithm of the ratio.
    """

    error: float
    draws: int
    twin: float | None = None
    ratio: float = 1.0
    spread: float = 0.0

    @property
    def is_worse(self) -> bool:
        """Whether the ratio is above `WORSE`, and is not 1 up to its own error."""
        return self.ratio > WORSE and self.ratio > math.exp(2 * self.spread)

    @property
    def is_known(self) -> bool:
        """Whether the ratio is above `WORSE`, or below, by two standard errors."""
        return abs(math.log(self.ratio / WORSE)) > 2 * self.spread


class Draws:
    """The draws of a program with their gradients in float32, made when asked for."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._gradients: dict[Loss, Gradient] = {}
        self._made: list[tuple[Any, list[np.ndarray]]] = []
        self.first = (case.params, *case.args)

    def __iter__(self) -> Iterator[tuple[Any, list[np.ndarray]]]:
        plain = self.gradient(self._case.loss)
        for number in range(MOST):
            if number == len(self._made):
                call = drawn(self.first, number)
                self._made.append((call, run(plain, call)))
            yield self._made[number]

    def gradient(self, loss: Loss) -> Gradient:
        """Returns the function of the program and its gradient, times a scale."""
        if loss not in self._gradients:
            program = self._case.around(loss)

            def scaled(params: Any, *rest: Any) -> Any:
                *args, scale = rest
                return program(params, *args).astype(jnp.float32) * scale

            # JAX traces and compiles a jitted function once.
            gradient = jax.value_and_grad(scaled, allow_int=True)
            self._gradients[loss] = jax.jit(with_exact_products(gradient))
        return self._gradients[loss]

    def works(self, loss: Loss) -> bool:
        """Whether a loss can be differentiated."""
        try:
            run(self.gradient(loss), self.first)
        except Exception:  # its authors never tried
            return False
        return True

    def compare(
        self, loss: Loss, twin: Loss | None, dtype: Any, most: int = MOST
    ) -> Comparison:
        """Compares the errors of two losses until the ratio is known well enough.

        Args:
          loss: the one under `amp`.
          twin: what it is compared with, if it works.
          dtype: the compute dtype; float16 gradients are scaled.
          most: the most draws that are made.

        Raises:
          NotFiniteError: a gradient of `loss` is not finite, one of float32 is.
        """
        fn, beside = self.gradient(loss), twin and self.gradient(twin)
        ours: list[float] = []
        theirs: list[float] = []
        for call, expected in itertools.islice(self, most):
            if not finite(expected):
                continue
            ours.append(_error(fn, call, expected, dtype))
            if math.isinf(ours[-1]):
                raise NotFiniteError
            if beside:
                theirs.append(_error(beside, call, expected, dtype))
            if len(ours) % STEP == 0 and compared(ours, theirs).is_known:
                break
        return compared(ours, theirs)


def run(fn: Gradient, call: Any, scale: float = 1.0) -> list[np.ndarray]:
    """Returns the leaves of a gradient, divided by the scale again."""
    _, grads = fn(*call, scale)
    leaves = [x for x in jax.tree.leaves(grads) if x.dtype != jax.dtypes.float0]
    return [np.asarray(x, _wide(x)) / scale for x in leaves]


def finite(leaves: list[np.ndarray]) -> bool:
    """Whether all numbers are."""
    return all(bool(np.isfinite(x).all()) for x in leaves)


def drawn(call: Any, number: int) -> Any:
    """Returns the arguments of a program, with other floats from the second draw on."""
    rng = np.random.default_rng(number)

    def draw(x: Any) -> Any:
        if not number or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return x
        factors = np.exp(0.1 * rng.normal(size=np.shape(x)))
        return (np.asarray(x) * factors).astype(jnp.result_type(x))

    return jax.tree.map(draw, call)


def _error(fn: Gradient, call: Any, expected: list[np.ndarray], dtype: Any) -> float:
    for scale in _SCALES.get(dtype, (1.0,)):
        grads = run(fn, call, scale)
        if finite(grads):
            return relative_error(grads, expected)
    return math.inf


def compared(ours: list[float], theirs: list[float]) -> Comparison:
    """Compares errors, draw by draw; `theirs` may be empty."""
    errors, count = np.array(ours), len(ours)
    found = Comparison(float(np.sqrt(np.mean(errors**2))), count)
    twin = np.array(theirs)
    if not theirs or np.isinf(twin).any():
        return found
    logs = np.log(np.maximum(errors, _EXACT) / np.maximum(twin, _EXACT))
    return dataclasses.replace(
        found,
        twin=float(np.sqrt(np.mean(twin**2))),
        ratio=float(np.exp(np.mean(logs))),
        spread=float(np.std(logs, ddof=1) / math.sqrt(count)) if count > 1 else 0.0,
    )


def _wide(x: Any) -> Any:
    return np.complex128 if jnp.iscomplexobj(x) else np.float64
