"""Which entries of a saved scaler a run resumes with, whichever library wrote them.

    flax_amp            scaler/{scaler, count, patience, ...}
    jaxamp              any field/{scaler, count, patience, adjust_factor, total_resets}
    Flax DynamicScale   any field/{scale, fin_steps}

All three grow the scale on the finite step after `patience` (`growth_interval`) others
and then count from 0 again, so a count means the same in each of them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from flax_amp._training.scaler import (
    DynamicScalerState,
    check_scaler,
    complete_scaler,
)
from flax_amp.checkpoint._arrays import Path, has_value

Scaler = Mapping[str, Any]

KEYS = set(DynamicScalerState.__annotations__)
# The keys of Flax, and those of flax_amp for them.
SCALER_KEYS = {"scale": "scaler", "fin_steps": "count"}


def scaler_field(paths: Iterable[Path]) -> str | None:
    """Returns the name of the top-level field that holds a scaler, if one does."""
    fields: dict[str, set[str]] = {}
    for path in paths:
        if len(path) == 2:
            fields.setdefault(path[0], set()).add(path[1])
    if {"scaler", "count"} <= fields.get("scaler", set()):
        return "scaler"
    # Other libraries leave the name to the user. Between two fields nobody can tell.
    found = [name for name, keys in fields.items() if _is_scaler(keys)]
    return found[0] if len(found) == 1 else None


def _is_scaler(keys: set[str]) -> bool:
    jaxamp = {"scaler", "count", "patience"} <= keys <= KEYS
    return jaxamp or keys == set(SCALER_KEYS)


def resume(
    saved: Scaler, target: Scaler, where: str, *, clip: bool = False
) -> tuple[dict[str, Any], str]:
    """Returns the scaler to resume with, and a remark if it is not the saved one.

    A run that changes between float16 and bfloat16 changes between a dynamic and a
    static scaler. One says nothing about the other, so the scaler of the target is used
    then, and only the number of resets goes on.

    What `saved` lacks is taken from `target`, or has its default where `target` is
    abstract or was donated. The scalers of several runs, which are arrays with axes,
    go on as they were saved, unchecked.

    Args:
      saved: what was saved of a scaler.
      target: the scaler of the target.
      where: what a message calls the scaler.
      clip: whether to bring the scale within its limits; a NaN becomes the target's.

    Raises:
      ValueError: if a value is out of its range.
    """
    if is_batched(saved) or is_batched(target):
        return {**target, **saved}, ""
    remark, was, is_now = "", kind_of(saved), kind_of(target)
    if was and is_now and was != is_now:
        remark = f"the scaler is {was} on disk and {is_now} in the target"
        saved = {key: saved[key] for key in ("total_resets",) if key in saved}
    own = complete_scaler(_with_values(target))
    scaler = {**own, **saved}
    if clip:
        # Other libraries have no limits: the scale of jaxamp grows to infinity.
        scale = own["scaler"] if np.isnan(scaler["scaler"]) else scaler["scaler"]
        low, high = np.asarray(scaler["min_scaler"]), np.asarray(scaler["max_scaler"])
        scaler["scaler"] = np.clip(np.asarray(scale), low, high)
    check_scaler(scaler, where)
    return scaler, remark


def kind_of(scaler: Scaler) -> str:
    """Returns "static" or "dynamic", or "" if the limits of a scaler are unknown."""
    known = _with_values(scaler)
    if not {"min_scaler", "max_scaler"} <= set(known):
        return ""
    fixed = float(known["min_scaler"]) == float(known["max_scaler"])
    return "static" if fixed else "dynamic"


def is_batched(scaler: Scaler) -> bool:
    """Whether a scaler holds the values of several runs, as under `jax.vmap`."""
    return any(np.shape(value) != () for value in scaler.values())


def _with_values(scaler: Scaler) -> dict[str, Any]:
    return {key: value for key, value in scaler.items() if has_value(value)}
