"""Checkpoints of foreign programs, of another optimizer, of another model.

Both sides are written as `{"params/Dense_0/kernel": array}`, without the `value` in the
paths of an `nnx.State`. Then every array of the target must have a counterpart on disk,
and the reverse. A single error names all arrays without a counterpart.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from flax_amp import _tree
from flax_amp._checks import check_type
from flax_amp._training.scaler import HIGHEST, LOWEST
from flax_amp.checkpoint import _steps, _trees
from flax_amp.checkpoint._directory import finish_saving
from flax_amp.checkpoint._trees import Path

T = TypeVar("T")
Arrays = dict[str, Any]

_TREE_FILE = "_METADATA"  # the file in which Orbax describes the arrays of a tree
# The fields of the state of `optax.apply_if_finite` that record skipped steps.
_COUNTERS = ("notfinite_count", "last_finite", "total_notfinite")
# The fields of Flax's `DynamicScale` and their keys in our scaler. The counts have the
# same meaning: like flax_amp, Flax and jaxamp grow the scale on the finite step after
# a given number of finite steps, and then count from 0 again.
_FLAX = {"scale": "scaler", "fin_steps": "count"}


def migrate(
    source: Any,
    target: T,
    *,
    rename: Mapping[str, str | None] | None = None,
    step: Any = None,
) -> T:
    """Reads a checkpoint of another program, which `restore` refuses.

    The reading is strict: an array without a counterpart, on either side, is an error
    that lists all such arrays. These arrays find their counterparts without `rename`:

    - the optimizer of a plain `TrainState`, which is not in `optax.apply_if_finite`;
    - Flax's `DynamicScale` in the field `dynamic_scale`, and a scaler of jaxamp that
      `rename` calls `scaler`, if the scaler of the target moves (float16);
    - collections that are fields of their own, such as `batch_stats`, for `variables`;
    - an array of another dtype, if no value changes in the cast to the dtype of the
      target: bfloat16 to float32, int64 to int32;
    - a float32 array for an array in half precision in the target, outside of
      `opt_state`. The values are rounded, as `flax_amp.half_params` rounds, if the
      rounding makes no finite value an inf.

    Arrays of `rngs`, of the scaler and of the counts of skipped steps that the
    checkpoint lacks stay as they are in the target. If the target is a dict or a tuple
    of NNX objects, only the fields or the objects of the target are read:
    `{"params": state.params}`, or `(model,)` from a checkpoint of `(model, optimizer)`.

    Args:
      source: the directory of a manager, the folder of one tree that Orbax wrote, a
        `CheckpointManager`, or any tree of arrays in memory.
      target: an `AmpTrainState`, NNX objects, which are updated in place, or a tree of
        any kind. The result lies on the devices of the target.
      rename: a dict from names on disk to the names in their place, applied in order:
        `{"Dense_0": "embed"}`. A key is a whole name in a path, or several in a row
        (`"block/Dense_0"`), and is replaced wherever a path has the key. With `None`,
        arrays whose paths have the key are not read, and stay as in the target.
      step: the number of the step; by default the newest intact step.

    Returns:
      `target` with the arrays of the checkpoint. All arrays that stayed are shared with
      `target`.

    Raises:
      TypeError: if `source`, `target` or `rename` is of a wrong kind.
      ValueError: if an array has no counterpart, another shape or a dtype that cannot
        hold its values, or if a name in `rename` is not found.
      FileNotFoundError, CorruptCheckpointError, OSError: as `restore`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax.training.train_state import TrainState
      >>> from flax_amp import AmpTrainState, checkpoint
      >>> new = dict(apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.adam(0.1))
      >>> old = TrainState.create(**new).replace(step=3)
      >>> int(checkpoint.migrate(old, AmpTrainState.create(**new)).step)
      3
    """
    check_type(
        rename,
        Mapping | None,
        "checkpoint.migrate: rename",
        "a dict of names on disk. Pass {old: new} with their names in the target, or "
        "{name: None} for arrays that are not to be read.",
    )
    if not _trees.is_nnx(target) and (inside := _tree.nodes(target, nnx.Pytree)):
        raise TypeError(
            f"checkpoint.migrate: the target holds a {type(inside[0]).__name__}; "
            "expected a tuple of NNX objects, which are updated in place, such as "
            "(model,), or a tree with nnx.state(model)."
        )
    likes = _trees.leaves_of_target(target, "checkpoint.migrate")
    wanted = _by_name(likes)
    where, leaves = _read(source, step)
    saved, stays = _renamed(_by_name(leaves), wanted, rename or {})
    saved = _only_parts_of_target(_as_in_target(saved, wanted), target)
    stays |= {name for name in wanted.keys() - saved.keys() if _may_stay(name)}
    values = {n: _convert(n, x, wanted[n]) for n, x in saved.items() if n in wanted}
    problems = [
        _difference(n, values.get(n, saved.get(n)), wanted.get(n))
        for n in {**wanted, **saved}.keys() - stays
    ]
    problems += [
        f"{name}: to stay as in the target, where the array has no value"
        for name in stays
        if not _trees.has_value(wanted[name])
    ]
    if any(problems):
        raise ValueError(
            f"checkpoint.migrate: {where} does not fit the target:\n  "
            + "\n  ".join(sorted(filter(None, problems)))
            + "\nexpected a counterpart for every array, on both sides. Map names on "
            "disk to names of the target with rename={old: new}, and leave parts out "
            "with rename={name: None}."
        )
    placed = {
        path: _trees.place(values[name], like)
        for (path, like), name in zip(likes.items(), wanted, strict=True)
        if name not in stays
    }
    return _trees.replace_leaves(target, placed)


def _read(source: Any, step: Any) -> tuple[str, dict[Path, Any]]:
    """Returns the name of a checkpoint in messages, and its arrays on the host."""
    if not isinstance(source, str | os.PathLike | ocp.CheckpointManager):
        tree = ocp.tree.to_flat_dict(_trees.tree_of(source))
        leaves = _trees.numpy_leaves(tree)
        if not leaves or any(not p or x.dtype == object for p, x in leaves.items()):
            raise TypeError(
                f"checkpoint.migrate: cannot read a {type(source).__name__}; expected "
                "a path, a manager, or a tree of arrays such as a TrainState or a dict."
            )
        return "the tree", leaves
    folder = finish_saving(source)
    if (folder / _TREE_FILE).exists():
        read = _trees.read_tree(folder, _trees.read_metadata(folder), {})
        return str(folder), _trees.numpy_leaves(read)

    def read_step(step: _steps.Step) -> tuple[str, dict[Path, Any]]:
        return str(step), _trees.numpy_leaves(step.read(step.tree(), {}))

    # A warning points to the line that calls `migrate`: the third frame from here.
    return _steps.read_newest_intact(folder, read_step, step, stacklevel=3)


# Names


def _by_name(leaves: Mapping[Path, Any]) -> Arrays:
    """Returns leaves by name, in their order: `params/Dense_0/kernel`."""
    return _together((_name_from_path(path), leaf) for path, leaf in leaves.items())


def _name_from_path(path: Path) -> str:
    # The variables of an `nnx.State` have a `value`.
    if path[-1] == "value" and len(path) > 1:
        path = path[:-1]
    return "/".join(path)


def _together(pairs: Iterable[tuple[str, Any]]) -> Arrays:
    found: Arrays = {}
    for name, leaf in pairs:
        if name in found:
            raise ValueError(
                f"checkpoint.migrate: two arrays have the name {name}; expected a "
                "single array. Choose names in rename that tell the arrays apart."
            )
        found[name] = leaf
    return found


def _renamed(
    saved: Arrays, wanted: Arrays, rename: Mapping[str, str | None]
) -> tuple[Arrays, set[str]]:
    """Returns the arrays by their new names, and the names that stay in the target.

    `saved` and `wanted` hold the arrays on disk and in the target.
    """
    stays: set[str] = set()
    for old, new in rename.items():
        old_part = f"/{old}/"
        new_part = f"/{new}/"
        here = {name for name in wanted if new is None and old_part in f"/{name}/"}
        there = {name for name in saved if old_part in f"/{name}/"}
        if not here and not there:
            raise ValueError(
                f"checkpoint.migrate: rename has {old!r}, which is in no path on "
                f"disk; expected whole names of paths such as {sorted(saved)[:3]}."
            )
        stays |= here
        names = (name for name in saved if new is not None or name not in there)
        saved = _together(
            (f"/{name}/".replace(old_part, new_part).strip("/"), saved[name])
            for name in names
        )
    return saved, stays


def _only_parts_of_target(saved: Arrays, target: Any) -> Arrays:
    """Returns the arrays of the fields, or of the NNX objects, that a target has.

    For `(model,)`, whose only object is `0`, `1/step` is left out. Every name that does
    not start with the number of an object stays.
    """
    fields = {name: name.partition("/")[0] for name in saved}
    if isinstance(target, dict):
        return {n: x for n, x in saved.items() if fields[n] in target}
    if not _trees.is_nnx(target):
        return saved
    others = {n for n, x in fields.items() if x.isdigit() and int(x) >= len(target)}
    return {n: x for n, x in saved.items() if n not in others}


def _as_in_target(saved: Arrays, wanted: Arrays) -> Arrays:
    """Returns the arrays by the names that they have in a target of flax_amp.

    The scale of another library has no limits: the scale is clipped to the limits of
    flax_amp.
    """

    def name_of(name: str) -> str:
        field, _, last = name.rpartition("/")
        inside = re.sub("(^|/)opt_state/", r"\g<0>inner_state/", name, count=1)
        candidates = [name, f"variables/{name}", inside]
        if field == "dynamic_scale":
            candidates.append(scaler.get(_FLAX.get(last, ""), ""))
        return next((x for x in candidates if x in wanted), name)

    paths = _trees.scaler_in(tuple(name.split("/")) for name in wanted)
    scaler = {key: "/".join(path) for key, path in paths.items()}
    found = _together((name_of(name), x) for name, x in saved.items())
    own, theirs = (
        {key: of[name] for key, name in scaler.items() if name in of}
        for of in (wanted, found)
    )
    is_nan = np.isnan(theirs.get("scaler", np.nan)).any()
    if is_nan or not _trees.both_move_or_neither(theirs, own):
        # The precision was changed, or the scale is NaN or missing: the scaler of the
        # target stays.
        return {name: x for name, x in found.items() if name not in scaler.values()}
    scale = theirs["scaler"].astype(np.float32)
    return found | {scaler["scaler"]: np.clip(scale, LOWEST, HIGHEST)}


def _may_stay(name: str) -> bool:
    """Whether an array of the target may be missing in the checkpoint."""
    *around, last = name.split("/")
    is_counter = around[-1:] == ["opt_state"] and last in _COUNTERS
    return is_counter or "rngs" in around or bool(_trees.scaler_in([(*around, last)]))


def _difference(name: str, value: np.ndarray | None, like: Any) -> str:
    """Describes how an array differs, and names a value that would become an inf."""
    told = _trees.difference(name, value, like)
    if value is None or like is None or np.shape(value) != np.shape(like):
        return told
    if told and _tree.is_half(like) and value.dtype == np.float32:
        largest = np.abs(value[np.isfinite(value)]).max(initial=0)
        if largest > (most := float(jnp.finfo(like.dtype).max)):
            told += f", where {largest:.3g} would be an inf (largest: {most:.5g})"
    return told


def _convert(name: str, value: np.ndarray, like: Any) -> np.ndarray:
    """Returns an array cast to the dtype of `like`, or uncast if values would change.

    A float32 array is rounded to half precision if every finite value stays finite.
    Moments of an optimizer are not rounded: a small moment would be lost.
    """
    if _tree.is_key(like) or value.dtype == like.dtype or value.dtype.kind in "OUSc":
        return value
    with np.errstate(all="ignore"):
        converted = value.astype(like.dtype)
        before = value.astype(np.float64)
        after = converted.astype(np.float64)
        same = np.array_equal(before, after, equal_nan=True)
        stays_finite = np.array_equal(np.isfinite(before), np.isfinite(after))
    is_moment = "opt_state" in name.split("/")
    if _tree.is_half(like) and value.dtype == np.float32 and not is_moment:
        same |= stays_finite
    # A Python float has more digits than the float32 scalar that JAX makes.
    is_number = value.shape == () and value.dtype == np.float64
    if same or (is_number and like.dtype == np.float32):
        return converted
    return value
