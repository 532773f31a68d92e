"""The rule of the scale once more, from docs/scaler.md, in plain Python."""

import dataclasses

DYNAMIC = "16-mixed"  # the precision whose scale moves


@dataclasses.dataclass(frozen=True)
class Rule:
    """A scale with its counters, and how they go on.

    Attributes:
      scale: the scale of the next step.
      count: finite steps since the scale moved.
      resets: steps that were not finite.
      lowest, highest: the limits of the scale; of a static one they are the scale.
      patience: so many finite steps in a row, and one more, and the scale grows.
    """

    scale: float
    lowest: float
    highest: float
    patience: int
    count: int = 0
    resets: int = 0

    def after(self, forward_finite: bool, grads_finite: bool) -> "Rule":
        """Returns what the scale and its counters are after a step."""
        scale, count, resets = self.scale, self.count, self.resets
        if not forward_finite:
            resets += 1
        elif not grads_finite:
            scale, count, resets = scale / 2, 0, resets + 1
        elif count >= self.patience:
            scale, count = scale * 2, 0
        else:
            count += 1
        scale = min(max(scale, self.lowest), self.highest)
        return dataclasses.replace(self, scale=scale, count=count, resets=resets)

    def resumed_as(self, fresh: "Rule") -> "Rule":
        """Returns what a run goes on with whose own scaler would be `fresh`."""
        if self.is_static == fresh.is_static:
            return self
        return dataclasses.replace(fresh, resets=self.resets)

    @property
    def is_static(self) -> bool:
        return self.lowest == self.highest


# What a run of each precision starts with.
FIRST = {
    DYNAMIC: Rule(scale=2.0**15, lowest=2.0**8, highest=2.0**24, patience=30),
    "bf16-mixed": Rule(scale=1.0, lowest=1.0, highest=1.0, patience=2000),
    "32-true": Rule(scale=1.0, lowest=1.0, highest=1.0, patience=2000),
}
