"""The rule of the scale once more, from docs/scaler.md, in plain Python."""

import dataclasses

DYNAMIC = "16-mixed"  # the precision whose scale moves
LOWEST, HIGHEST = 2.0**-24, 2.0**24


@dataclasses.dataclass(frozen=True)
class Rule:
    """A scale with its counters, and how they go on.

    Attributes:
      scale: the scale of the next step.
      count: finite steps since the scale moved.
      patience: the scale grows after one finite step more than these, in a row.
      factor: it grows and falls by this; a static one is 1.
    """

    scale: float
    patience: int
    factor: float
    count: int = 0

    def after(self, forward_finite: bool, grads_finite: bool) -> "Rule":
        """Returns what the scale and its counters are after a step."""
        scale, count = self.scale, self.count
        if not forward_finite:
            return self
        if not grads_finite:
            scale, count = scale / self.factor, 0
        elif count >= self.patience:
            scale, count = scale * self.factor, 0
        else:
            count += 1
        scale = min(max(scale, LOWEST), HIGHEST)
        return dataclasses.replace(self, scale=scale, count=count)

    def resumed_as(self, fresh: "Rule") -> "Rule":
        """Returns what a run goes on with whose own scaler would be `fresh`."""
        if self.is_static == fresh.is_static:
            return self
        return fresh

    @property
    def is_static(self) -> bool:
        return self.factor == 1


# What a run of each precision starts with.
FIRST = {
    DYNAMIC: Rule(scale=2.0**15, patience=30, factor=2.0),
    "bf16-mixed": Rule(scale=1.0, patience=2000, factor=1.0),
    "32-true": Rule(scale=1.0, patience=2000, factor=1.0),
}
