"""The result of `compare_precision`, as text."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from rich.text import Text

from flax_amp._training.arguments import check_count
from flax_amp.debug._report import Part, Report, as_text, percent, policy_text, table

_HELPS = 0.9  # what a remedy that helps leaves of the error of the gradients, at most


class GradientErrors(NamedTuple):
    """How the gradients of a group of parameters differ from those in float32."""

    path: str  # what the group has in common, such as `params/Dense_0`
    error: float  # relative, L2; infinite if one is not finite that is in float32
    largest: float  # the largest magnitude in float32, times the scale of the loss


class Setting(NamedTuple):
    """A run of the program."""

    name: str  # what it is called
    scale: float  # of the loss
    keys: tuple[str, ...]  # the modules that are in float32, as keys of a policy
    lines: tuple[str, ...]  # lines outside of modules in float32, as by `amp_stop`
    loss_error: float  # relative
    gradient_error: float  # relative, L2, of all gradients together
    low_share: float | None  # of matmuls in half precision; `None` without matmuls


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Comparison(Report):
    """How a program differs from itself in float32. Made by `compare_precision`.

    It prints as a report.

    Attributes:
      name: the name of the function.
      compute_dtype: the dtype of low-precision values.
      loss: the loss in float32 and in this precision.
      gradients: the groups of parameters, that with the largest error first.
      threshold: the error of the gradients from which on remedies are tried.
      as_it_is: the program as it is.
      remedies: what was tried: the program without fp8, if it has products in fp8; with
        another scale, in float16; and, unless one of them is enough, with the modules
        in float32 that are at fault, one by one and together.
      own_policy: whether the policy is the user's own.
      notes: what limits these figures.
    """

    name: str
    compute_dtype: str
    loss: tuple[float, float]
    gradients: tuple[GradientErrors, ...]
    threshold: float
    as_it_is: Setting
    remedies: tuple[Setting, ...] = ()
    own_policy: bool = False
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Setting | None:
        """The remedy that leaves the least error, if one helps."""
        best = min(self.remedies, key=lambda run: run.gradient_error, default=None)
        limit = _HELPS * self.as_it_is.gradient_error
        return best if best and best.gradient_error < limit else None

    @property
    def policy(self) -> str:
        """The policy of the best remedy, as code; empty if it has none."""
        keys = self.best.keys if self.best else ()
        return policy_text(keys, self.own_policy) if keys else ""

    def report(self, *, top: int = 12) -> str:
        """Returns the report as text, with so many groups of parameters.

        Raises:
          ValueError: if `top` is not a positive number.
        """
        check_count(top, f"report: {top=}", "of groups of parameters")
        return as_text(self._parts(top))

    def _parts(self, top: int = 12) -> Iterator[Part]:
        run, threshold = self.as_it_is, _error(self.threshold)
        scale = f", loss scale {run.scale:g}" if run.scale != 1 else ""
        before, after = self.loss
        yield f"{self.name} in {self.compute_dtype} against float32{scale}"
        yield f"loss {before:.6g} in float32, {after:.6g} here\n"
        rows = ([g.path, _error(g.error), f"{g.largest:.2g}"] for g in self.gradients)
        yield table(["gradients of", "error", "largest"], [*rows][:top])
        if self.gradients[top:]:
            yield f"... and {len(self.gradients) - top} more"
        yield ""
        headers = ["\nthe program", "error of\nloss", "\ngradients", "in\nhalf"]
        yield table(headers, map(_cells, (run, *self.remedies)))
        best = self.best
        if run.gradient_error <= self.threshold:
            yield f"\nThe gradients are as exact as usual: below {threshold}."
        elif best is None:
            yield f"\nThe error is above {threshold}, and nothing that was tried helps."
        else:
            yield f"\nThis was tried and helps: {best.name}."
            if best.scale != run.scale:
                yield f"  flax_amp.init_scaler(scaler={best.scale:.8g})"
            if self.policy:
                yield f"  amp_policy={self.policy}"
            if best.lines:
                yield f"  flax_amp.amp_stop around {', '.join(best.lines)}"
        yield from (Text(f"Note: {note}.") for note in self.notes)

    def _summary(self) -> str:
        return f"gradients differ by {_error(self.as_it_is.gradient_error)}"


def _cells(run: Setting) -> list[str]:
    share = "" if run.low_share is None else percent(run.low_share, 1)
    return [run.name, _error(run.loss_error), _error(run.gradient_error), share]


def _error(value: float) -> str:
    """Returns a relative error in a few characters."""
    if not math.isfinite(value):
        return "inf"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+") if value else "0"
