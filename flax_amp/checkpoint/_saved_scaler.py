"""What a run goes on with of a scaler that was saved, by flax_amp or by others.

    flax_amp            scaler/{scaler, count, patience, ...}
    jaxamp              any field/{scaler, count, patience, adjust_factor, total_resets}
    Flax DynamicScale   any field/{scale, fin_steps}

All three grow the scale on the finite step after `patience` (`growth_interval`) others
and then count from 0 again, so a count means the same in each of them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_amp._training.scaler import (
    DynamicScalerState,
    Scaler,
    check_scaler,
    complete_scaler,
)
from flax_amp.checkpoint._layout import Path
from flax_amp.checkpoint._placement import is_concrete

_OF_DYNAMIC_SCALE = {"scale": "scaler", "fin_steps": "count"}
KEYS = set(DynamicScalerState.__annotations__)
_TO_DYNAMIC_SCALE = {ours: theirs for theirs, ours in _OF_DYNAMIC_SCALE.items()}


def field_of(paths: Iterable[Path]) -> str | None:
    """Returns the name of the top-level field that holds a scaler, if one does."""
    fields: dict[str, set[str]] = {}
    for path in paths:
        if len(path) == 2:
            fields.setdefault(path[0], set()).add(path[1])
    if {"scaler", "count"} <= fields.get("scaler", set()):
        return "scaler"
    found = [name for name, keys in fields.items() if _is_scaler(keys)]
    return found[0] if len(found) == 1 else None


def _is_scaler(keys: set[str]) -> bool:
    jaxamp = {"scaler", "count", "patience"} <= keys <= KEYS
    return jaxamp or keys == set(_OF_DYNAMIC_SCALE)


def translate(paths: Iterable[Path], wanted: Iterable[Path]) -> dict[Path, Path | None]:
    """Says under which path the target wants each array of a saved scaler.

    Args:
      paths: those of the checkpoint.
      wanted: those of the target.

    Returns:
      For each path of the scaler in the checkpoint, its path in the target; `None` if
      the target has no such thing. Keys that nobody knows are left alone.
    """
    paths, wanted = list(paths), set(wanted)
    saved, ours = field_of(paths), field_of(wanted)
    result: dict[Path, Path | None] = {}
    for path in paths:
        if path[0] != saved or len(path) != 2:
            continue
        key = _OF_DYNAMIC_SCALE.get(path[1], path[1])
        names = [key, _TO_DYNAMIC_SCALE.get(key, key)]
        found = [(ours, name) for name in names if ours and (ours, name) in wanted]
        if found or key in KEYS:
            result[path] = found[0] if found else None
    return result


def resumable_entries(
    saved: Mapping[str, Any], target: Mapping[str, Any]
) -> tuple[Any, str]:
    """Returns what of a saved scaler to go on with, and a remark if that is not all.

    A static scaler says nothing to a run that needs a dynamic one, nor the reverse;
    that is how a run changes between float16 and bfloat16: what the target was made
    with counts, and only the number of resets goes on.
    """
    was, is_now = _kind(saved), _kind(target)
    if not was or not is_now or was == is_now:
        return dict(saved), ""
    taken = {key: saved[key] for key in ("total_resets",) if key in saved}
    return taken, f"the scaler is {was} on disk and {is_now} in the target"


def fit_scaler(
    found: Mapping[Path, np.ndarray],
    saved: Mapping[Path, np.ndarray],
    target: Mapping[Path, Any],
) -> tuple[dict[Path, np.ndarray], set[Path]]:
    """Puts the scaler to go on with among the arrays for a target.

    Args:
      found: the arrays for the target, by path; the scaler as it was saved.
      saved: the arrays on disk.
      target: the leaves of the target.

    Returns:
      `found` with that scaler, and the paths of the target's that stays instead.
    """
    field, source = field_of(target), field_of(saved)
    if field is None:
        return dict(found), set()
    paths = {path for path in target if path[0] == field}
    rest = {path: leaf for path, leaf in found.items() if path not in paths}
    taken = {path[1]: leaf for path, leaf in found.items() if path in paths}
    if any(leaf.shape != () for leaf in taken.values()):
        return dict(found), set()  # of several devices: it will not fit
    if (field, "min_scaler") not in target:
        own = {path[1]: leaf for path, leaf in saved.items() if path[0] == source}
        if not taken or _kind(own) == "static":
            return rest, paths
        return dict(found), set()
    scaler = _resumed(taken, {path[1]: target[path] for path in paths})
    return rest | {(field, k): np.asarray(x) for k, x in scaler.items()}, set()


def _resumed(saved: Mapping[str, Any], target: Mapping[str, Any]) -> Scaler:
    """Returns the scaler to go on with, whoever saved it.

    A scale that was saved is brought within its limits, which others do not have:
    jaxamp's grows to infinity.
    """
    taken, _ = resumable_entries(saved, target)
    fresh = completed(target)
    scaler = complete_scaler(fresh | taken)
    if "scaler" not in taken:
        return scaler
    scale = np.asarray(scaler["scaler"])
    if np.isnan(scale):
        scale = np.asarray(fresh["scaler"])
    low, high = np.asarray(scaler["min_scaler"]), np.asarray(scaler["max_scaler"])
    scaler |= {"scaler": jnp.asarray(np.clip(scale, low, high))}
    checked(scaler, "checkpoint.migrate: scaler")
    return scaler


def completed(scaler: Mapping[str, Any]) -> Scaler:
    """Returns a target's scaler, with defaults for what is abstract or was donated."""
    return complete_scaler(_known(scaler))


def checked(scaler: Mapping[str, Any], where: str) -> None:
    """Raises a ValueError if a restored scaler could not find its scale.

    Those of several devices or runs are left alone.
    """
    if all(np.shape(value) == () for value in scaler.values()):
        check_scaler(scaler, where)


def _known(scaler: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in scaler.items() if is_concrete(value)}


def _kind(scaler: Mapping[str, Any]) -> str:
    known = _known(scaler)
    if not {"min_scaler", "max_scaler"} <= set(known):
        return ""
    fixed = float(known["min_scaler"]) == float(known["max_scaler"])
    return "static" if fixed else "dynamic"
