"""What `compare_precision` found. Data only."""

import dataclasses
import os
from typing import Any, NamedTuple


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
      own: the errors that it adds: all that it reads, forward and backward, is that of
        the float32 program, rounded where the dtype asks for it.
      total: the errors that leave it, with those that arrive.
      iterations: its largest own error in each iteration of the loops around it.
      nonfinite: the share of elements that are finite in float32 only.
      flushed: the share of nonzero gradients, of cotangents and parameters, that
        float16 without a scale rounds to zero.
      flushed_scaled: the same with the scale of the loss.
      largest_value: the largest magnitude of its activations.
      largest_gradient: that of its gradients, times the scale of the loss.
      values: how many activations have each exponent, for the exponents of
        `Comparison.exponents`.
      gradients: how many gradients have each exponent, without the scale.
    """

    path: str
    own: Errors
    total: Errors
    iterations: tuple[float, ...]
    nonfinite: float
    flushed: float
    flushed_scaled: float
    largest_value: float
    largest_gradient: float
    values: tuple[int, ...]
    gradients: tuple[int, ...]

    @property
    def harm(self) -> float:
        """The largest error that the module adds."""
        return self.own.largest


@dataclasses.dataclass(frozen=True)
class Setting:
    """The program with other options of `amp`.

    Attributes:
      name: what it is called.
      policy: the entry of the policy that it adds, if it is a remedy.
      loss_error: the relative error of the loss.
      gradient_error: the relative L2 error of all gradients together.
      nonfinite: the share of gradients that are finite in float32 only.
      stored: the bytes that the backward pass stores; `None` if that is not known.
      low_share: the share of products in half precision; `None` without products.
    """

    name: str
    policy: str
    loss_error: float
    gradient_error: float
    nonfinite: float
    stored: int | None
    low_share: float | None


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """How a program differs from itself in float32. Made by `compare_precision`.

    It prints as a report.

    Attributes:
      name: the name of the function.
      compute_dtype: the dtype of low-precision values.
      scale: the scale of the loss.
      loss: the loss in float32 and in this precision.
      modules: the modules, the most harmful first.
      threshold: the harm from which on a remedy is tried.
      settings: the program as it is, and then with the other settings asked for.
      remedies: the program with entries of the policy that run the worst modules in
        float32, one by one and then all together.
      compared: the bytes of what was kept on the device at a time to be compared.
      notes: what limits these figures.
      exponents: the first and the last exponent of the histograms.
    """

    name: str
    compute_dtype: str
    scale: float
    loss: tuple[float, float]
    modules: tuple[ModuleErrors, ...]
    threshold: float
    settings: tuple[Setting, ...]
    remedies: tuple[Setting, ...]
    compared: int
    notes: tuple[str, ...]
    exponents: tuple[int, int]

    def report(self, *, top: int = 12) -> str:
        """Returns the report as text.

        Args:
          top: how many modules to show.

        Raises:
          ValueError: if `top` is not a positive number.
        """
        from flax_amp.debug._compare_report import as_text

        return as_text(self, top)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as dicts, lists, strings and numbers, for `json.dump`."""
        fields = dataclasses.asdict(self)
        for row, module in zip(fields["modules"], self.modules, strict=True):
            row |= {
                "harm": module.harm,
                "own": module.own._asdict(),
                "total": module.total._asdict(),
            }
        return _as_lists(fields)

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

        draw(self, path, top)

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        count = len(self.modules)
        return f"<Comparison of {self.name}: {count} modules; print it to read it>"


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_lists(item) for key, item in value.items()}
    return [*map(_as_lists, value)] if isinstance(value, tuple | list) else value
