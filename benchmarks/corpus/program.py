"""What a program of the corpus is."""

import dataclasses
from collections.abc import Callable
from typing import Any

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


# A program: the package that it is from, its name, and what makes it when it is run.
Program = tuple[str, str, Callable[[], Case]]
