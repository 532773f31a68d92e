"""What `compare_precision` found. Data only."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from flax_amp._training.arguments import check_count
from flax_amp.debug._report import Report, as_data, as_text

_MODULES = "of modules"
_HELPS = 0.9  # what a remedy that helps leaves of the error of the gradients, at most


class Errors(NamedTuple):
    """Relative L2 errors against float32; `None` where there is nothing to compare.

    Infinite: an element is not finite, though it is in float32.

    Attributes:
      forward: of what a module computes for others.
      backward: of the cotangents that it passes back to others.
      parameters: of the gradients of its own parameters.
    """

    forward: float | None
    backward: float | None
    parameters: float | None

    @property
    def largest(self) -> float:
        return max((error for error in self if error is not None), default=0.0)


@dataclasses.dataclass(frozen=True)
class ModuleErrors:
    """What the code of a module itself does, without that of the modules inside.

    Attributes:
      path: its path; empty for the code outside of all modules.
      harm: the largest error that it adds.
      own: the errors that it adds: all that it reads, forward and backward, is that of
        the float32 program, rounded where the dtype asks for it.
      total: the errors that leave it, with those that arrive.
      iterations: its own error in each iteration of the loops around it.
      flushed: the share of nonzero gradients, of cotangents and parameters, that
        float16 without a scale rounds to zero.
      largest_value: the largest magnitude of its activations.
      largest_gradient: that of its gradients, times the scale of the loss.
      values: how many activations have each exponent: `e` has the magnitudes above
        `2**(e - 1)`, up to `2**e`.
      gradients: how many gradients have each exponent, without the scale.
    """

    path: str
    harm: float
    own: Errors
    total: Errors
    iterations: tuple[float, ...]
    flushed: float
    largest_value: float
    largest_gradient: float
    values: dict[int, int]
    gradients: dict[int, int]


@dataclasses.dataclass(frozen=True)
class Setting:
    """The program with other options of `amp`.

    Attributes:
      name: what it is called.
      scale: the scale of the loss.
      policy: the entries that it puts first in the policy, if it is a remedy of one.
      loss_error: the relative error of the loss.
      gradient_error: the relative L2 error of all gradients together.
      stored: the bytes that the backward pass stores; `None` if that is not known.
      low_share: the share of products in half precision; `None` without products.
    """

    name: str
    scale: float
    policy: str
    loss_error: float
    gradient_error: float
    stored: int | None
    low_share: float | None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Comparison(Report):
    """How a program differs from itself in float32. Made by `compare_precision`.

    It prints as a report.

    Attributes:
      name: the name of the function.
      compute_dtype: the dtype of low-precision values.
      scale: the scale of the loss.
      loss: the loss in float32 and in this precision.
      modules: the modules, the most harmful first; before them come those whose
        remedy helps, the best one first.
      threshold: the harm from which on a remedy is tried.
      settings: the program as it is, and then with the other settings asked for.
      remedies: the program with a scale at which gradients fit into float16, if they
        do not; unless that is enough, then with entries of the policy that run the
        worst modules in float32, one by one and, if none of them is enough, all
        together.
      notes: what limits these figures.
      budget: the largest error of the gradients that is acceptable, if one was given.
    """

    name: str
    compute_dtype: str
    scale: float
    loss: tuple[float, float]
    modules: tuple[ModuleErrors, ...]
    threshold: float
    settings: tuple[Setting, ...]
    remedies: tuple[Setting, ...]
    notes: tuple[str, ...]
    budget: float | None = None

    @property
    def cheapest(self) -> Setting | None:
        """The cheapest program within the budget, as it is or with a remedy.

        That is the one with the most products in half precision and, among equals, the
        fewest bytes stored. `None` if none is within the budget, or without a budget.
        """
        every = (self.settings[0], *self.remedies)
        within = (run for run in every if run.gradient_error <= (self.budget or -1))

        # Half precision is there for the speed of products. In memory, a module in
        # float32 may even cost less: no casts are stored.
        def cost(run: Setting) -> tuple[float, int]:
            return -(run.low_share or 0), run.stored or 0

        return min(within, key=cost, default=None)

    @property
    def helpful(self) -> list[Setting]:
        """The remedies that help; if some are enough, only those."""
        return helpful_remedies(self.settings[0], self.remedies, self.threshold)

    def report(self, *, top: int = 12) -> str:
        """Returns the report as text.

        Args:
          top: how many modules to show.

        Raises:
          ValueError: if `top` is not a positive number.
        """
        from flax_amp.debug._compare_report import parts

        check_count(top, f"report: {top=}", _MODULES)
        return as_text(parts(self, top))

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"cheapest": as_data(self.cheapest)}

    def plot(self, path: str | os.PathLike[str], *, top: int = 20) -> None:
        """Draws the errors of the modules, and exponents beside the range of float16.

        Args:
          path: the file to write; its suffix is the format, such as `.png`.
          top: how many modules to show.

        Raises:
          ImportError: if matplotlib is not installed.
          ValueError: if `top` is not a positive number.
        """
        from flax_amp.debug._compare_plot import draw

        check_count(top, f"plot: {top=}", _MODULES)
        draw(self, path, top)

    def _summary(self) -> str:
        return f"{len(self.modules)} modules"


def helpful_remedies(
    as_it_is: Setting, remedies: Sequence[Setting], threshold: float
) -> list[Setting]:
    """Returns the remedies that help; if some are enough, only those."""
    before = as_it_is.gradient_error
    found = []
    for run in remedies:
        if run.gradient_error < _HELPS * before:
            found.append(run)
        if not run.policy:  # the entries that follow build on a scale that helps
            before = min(before, run.gradient_error)
    return [run for run in found if run.gradient_error <= threshold] or found
