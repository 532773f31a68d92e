"""What a program of the corpus is, and what several kinds of programs are made of."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Loss = Callable[..., Any]  # of parameters and of what `args` holds; returns a scalar


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss with its arguments; it is differentiated by the first of them.

    Attributes:
      loss: the function, in float32; `amp` is put around it.
      params: what it is differentiated by.
      args: its other arguments.
      hand: the same function with a dtype set by hand, if its authors have one.
    """

    loss: Loss
    params: Any
    args: tuple[Any, ...] = ()
    hand: Callable[[Any], Loss] | None = None


class Kind(NamedTuple):
    """How the expression of a row becomes a program.

    Attributes:
      arguments: what the expression is a function of, as names.
      case: makes a program of that function.
      names: further names of expressions.
    """

    arguments: str
    case: Callable[[Callable[..., Any]], Case]
    names: Mapping[str, Any] = MappingProxyType({})


def normal(*shape: int, seed: int = 0) -> Any:
    """Returns normal numbers, the same ones for the same seed."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def total(found: Any) -> Any:
    """Returns a scalar of all floats of a tree; it grows like their logarithm."""
    leaves = [jnp.abs(y) if jnp.iscomplexobj(y) else y for y in jax.tree.leaves(found)]
    floats = [y for y in leaves if jnp.issubdtype(y.dtype, jnp.floating)]
    return sum(jnp.mean(jnp.log1p(y.astype(jnp.float32) ** 2)) for y in floats)


def of_data(w: Any, x: Any, function: Callable[[Any, Any], Any]) -> Case:
    """Returns a program that is a function of a parameter and of data."""
    return Case(lambda w, x: total(function(w, x)), w, (x,))


def of_matmul(w: Any, x: Any, function: Callable[[Any], Any]) -> Case:
    """Returns a program that is a function of what a matmul returns."""
    return of_data(w, x, lambda w, x: function(jnp.matmul(x, w)))
