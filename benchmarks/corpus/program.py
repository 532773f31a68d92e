"""What a program of the corpus is, and what several kinds of programs are made of."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Loss = Callable[..., Any]  # of parameters and of what `args` holds; returns a scalar


def _itself(loss: Loss) -> Loss:
    return loss


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss with its arguments; it is differentiated by the first of them.

    Attributes:
      loss: the function, in float32; `amp` is put around it.
      params: what it is differentiated by.
      args: its other arguments.
      hand: the same function with a dtype set by hand, if its authors have one.
      around: what a program does with the loss outside of `amp`, such as the updates
        of an optimizer: it makes the function that is differentiated.
    """

    loss: Loss
    params: Any
    args: tuple[Any, ...] = ()
    hand: Callable[[Any], Loss] | None = None
    around: Callable[[Loss], Loss] = _itself


# What makes each program of a package when it is run, by name.
Programs = dict[str, Callable[[], Case]]


def rows(text: str) -> Iterator[tuple[str, str]]:
    """Yields names with their expressions, from rows `NAMES: EXPRESSION`.

    `@` stands for the name, and a `~` in a name for a space. A line that is indented
    goes on with the one above it.
    """
    for row in text.replace("\n    ", " ").strip().splitlines():
        names, expression = row.split(": ", 1)
        for name in names.split():
            yield name.replace("~", " "), expression.replace("@", name)


def table(case: Callable[[Any], Case], text: str, names: dict[str, Any]) -> Programs:
    """Returns programs that are made of the value of a row's expression."""

    def make(expression: str) -> Case:
        return case(eval(expression, dict(names)))

    return {name: functools.partial(make, code) for name, code in rows(text)}


def normal(*shape: int, seed: int = 0) -> Any:
    """Returns normal numbers, the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape).astype(np.float32))


def total(found: Any) -> Any:
    """Returns a scalar of all floats of a tree; it grows like their logarithm."""
    leaves = [
        y for y in jax.tree.leaves(found) if jnp.issubdtype(y.dtype, jnp.floating)
    ]
    return sum(jnp.mean(jnp.log1p(y.astype(jnp.float32) ** 2)) for y in leaves)


def of_product(function: Callable[[Any, Any], Any], w: Any, x: Any) -> Case:
    """Returns a program that is a function of a parameter and of data."""
    return Case(lambda w, x: total(function(w, x)), w, (x,))
