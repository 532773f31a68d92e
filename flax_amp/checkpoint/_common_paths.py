"""Common paths for what libraries save under different ones.

`migrate` compares the arrays on disk with those of its target by these paths:

    in a state                          common path
    params/kernel/value                 params/kernel                of `nnx.State`
    batch_stats/mean                    variables/batch_stats/mean
                                        (likewise for other unknown fields)
    dynamic_scale/fin_steps             scaler/count                 of Flax
    dynamic_scaler_state/count          scaler/count                 of jaxamp
    opt_state/inner_state/0/mu          opt_state/0/mu               inside of a wrapper
    opt_state/total_notfinite           apply_if_finite/total_notfinite
    opt_state/tx/learning_rate          flax_amp.optim/learning_rate of `small_state`

A wrapper is an optimizer around another one. `AmpTrainState` puts its optimizer inside
`optax.apply_if_finite`, others put theirs inside `optax.MultiSteps`, and optimizers of
`flax_amp.optim` hold the state of optax. With the wrappers taken off, the state of an
optimizer has the same path whether or not it was wrapped.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from flax_amp.checkpoint._arrays import Path
from flax_amp.checkpoint._scaler import SCALER_KEYS, scaler_field

# The first segments of the common paths of hyper-parameters of `flax_amp.optim`.
HYPERPARAMS = "flax_amp.optim"
SMALL_STATE = "small_state"

# Wrapper -> the fields that it is known by, and the field of the state inside of it.
# The order counts: the last one has no field of its own.
WRAPPERS = {
    "apply_if_finite": (
        {"notfinite_count", "last_finite", "total_notfinite"},
        "inner_state",
    ),
    HYPERPARAMS: ({"opt_state"}, "opt_state"),
    "MultiSteps": ({"mini_step", "gradient_step"}, "inner_opt_state"),
    SMALL_STATE: ({"roundings"}, "inner_state"),
    "masked": (set[str](), "inner_state"),
}
_FIELDS = {"step", "params", "opt_state", "rngs", "variables"}


class Leaf(NamedTuple):
    """A leaf of one side, and its path there."""

    path: Path
    value: Any


def by_common_path(leaves: Mapping[Path, Any]) -> dict[Path, Leaf]:
    """Returns leaves, given by their own paths, by their common paths.

    Paths that would have one common path keep their own.
    """
    own = {path: _without_value(path) for path in leaves}
    wrappers = _unwrap(set(own.values()))
    scaler = scaler_field(own.values())
    result = {path: _common(plain, wrappers, scaler) for path, plain in own.items()}
    # A path that is kept may be the common path of another, which is kept then, too.
    while len(count := Counter(result.values())) < len(result):
        result = {
            path: new if count[new] == 1 else path for path, new in result.items()
        }
    return {result[path]: Leaf(path, value) for path, value in leaves.items()}


def _without_value(path: Path) -> Path:
    """Takes off the `value` that an `nnx.State` adds to the path of a Variable."""
    return path[:-1] if path[-1] == "value" and len(path) > 1 else path


def _common(path: Path, wrappers: Mapping[str, Path], scaler: str | None) -> Path:
    if path[0] == "opt_state":
        around = (
            (name, outer)
            for name, outer in wrappers.items()
            if path[: len(outer)] == outer
        )
        *_, (name, outer) = around  # the innermost
        inside = path[len(outer) :]
        if name == HYPERPARAMS and SMALL_STATE in wrappers and inside[0] == "tx":
            inside = inside[1:]  # those of the optimizer that `small_state` got
        return (name, *inside)
    if path[0] == scaler and len(path) == 2:
        return ("scaler", SCALER_KEYS.get(path[1], path[1]))
    return path if path[0] in _FIELDS else ("variables", *path)


def _unwrap(paths: set[Path]) -> dict[str, Path]:
    """Returns the path of each wrapper, the outermost first, then that of the state."""
    wrappers: dict[str, Path] = {}
    inner_path: Path = ("opt_state",)
    while True:
        depth = len(inner_path)
        keys = {path[depth] for path in paths if path[:depth] == inner_path != path}
        for name, (fields, field) in WRAPPERS.items():
            fits = fields <= keys if fields else keys == {field}
            if fits and name not in wrappers:
                wrappers[name] = inner_path
                inner_path = (*inner_path, field)
                break
        else:
            return {**wrappers, "opt_state": inner_path}
