"""Checkpoints of other programs, other optimizers, other models.

Both sides are written as `{"params/Dense_0/kernel": array}`, without the `value` in the
paths of an `nnx.State`. Then every array of the target must have a counterpart on disk,
and the reverse. One error names all others.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from flax_amp import _tree
from flax_amp._training.scaler import HIGHEST, LOWEST, init_scaler
from flax_amp.checkpoint import _steps, _trees
from flax_amp.checkpoint._paths import finish_saving
from flax_amp.checkpoint._trees import Path

T = TypeVar("T")
Arrays = dict[str, Any]

_TREE_FILE = "_METADATA"  # Orbax describes the arrays of a tree in it
# What `optax.apply_if_finite` counts, in a new run.
_NO_SKIPS = {
    "notfinite_count": np.int32(0),
    "last_finite": np.bool_(True),
    "total_notfinite": np.int32(0),
}
# Flax's `DynamicScale` and jaxamp. They grow the scale on the finite step after so many
# others and then count from 0 again, as flax_amp does.
_SCALERS = (
    {"scale": "scaler", "fin_steps": "count"},
    {key: key for key in ("scaler", "count", "patience", "adjust_factor")},
)


def migrate(
    source: Any,
    target: T,
    *,
    rename: Mapping[str, str | None] | None = None,
    step: Any = None,
) -> T:
    """Reads a checkpoint that `restore` refuses, because something else wrote it.

    It is strict: an array without a counterpart, on either side, is an error that lists
    all of them. It changes, without being asked,

    - the state of an optimizer that is not in `optax.apply_if_finite`, as in a plain
      `TrainState`, for a target where it is;
    - Flax's `DynamicScale` and the scaler of jaxamp, under whatever name, into the
      scaler of flax_amp, if that of the target moves (float16);
    - the collections of a Linen model that are fields of their own, such as
      `batch_stats`, into `variables`;
    - dtypes, if no value changes by it: bfloat16 into float32, int64 into int32.

    If the checkpoint has no `rngs` or no scaler, those of the target stay. Of a target
    that is a dict, only the fields that it has are read:
    `migrate("run", {"params": state.params})`.

    Args:
      source: the directory of a manager, the folder of one tree that Orbax wrote, a
        `CheckpointManager`, or any tree of arrays in memory.
      target: what to read into: an `AmpTrainState`, NNX objects, a plain `TrainState`,
        or any tree; its arrays say on which devices those of the result lie. NNX
        objects are updated in place; nothing else is changed.
      rename: for one or more whole names in the paths on disk, wherever they are, what
        to put in their place, one after the other: `{"Dense_0": "embed"}`. With `None`,
        what has them in its path is not read, and stays as it is in the target.
      step: which step; by default the newest that is intact.

    Returns:
      `target` with the arrays of the checkpoint. What stayed is shared with `target`.

    Raises:
      ValueError: if something has no counterpart, another shape or a dtype that cannot
        hold its values, or if a name in `rename` is not found.
      TypeError: if a leaf of `target` is no array, or an argument has a wrong type.
      FileNotFoundError: if there is no such checkpoint.
      CorruptCheckpointError: if it is damaged.

    Example:
      A run of a plain `TrainState` goes on with mixed precision:

      >>> import jax.numpy as jnp, optax
      >>> from flax.training.train_state import TrainState
      >>> from flax_amp import AmpTrainState, checkpoint
      >>> new = dict(apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.adam(0.1))
      >>> old = TrainState.create(**new).replace(step=3)
      >>> int(checkpoint.migrate(old, AmpTrainState.create(**new)).step)
      3
    """
    wanted = _by_name(_trees.leaves_of_target(target, "checkpoint.migrate"))
    where, leaves = _read(source, step)
    saved, stays = _renamed(_by_name(leaves), wanted, rename or {})
    saved = _with_scaler(_as_in_target(saved, wanted), wanted)
    if isinstance(target, dict):
        saved = {name: x for name, x in saved.items() if name.split("/")[0] in target}
    for field in ("/rngs/", "/scaler/"):
        if not any(field in f"/{name}" for name in saved):
            stays |= {name for name in wanted if field in f"/{name}"}
    values: Arrays = {
        name: _convert(saved[name], like) if name in saved else None
        for name, like in wanted.items()
        if name not in stays
    }
    problems = [_trees.difference(name, x, wanted[name]) for name, x in values.items()]
    problems += [
        _trees.difference(name, saved[name], None)
        for name in saved.keys() - wanted.keys()
    ]
    problems += [
        f"{name}: to stay as in the target, where it has no value"
        for name in stays
        if not _trees.has_value(wanted[name])
    ]
    if any(problems):
        raise ValueError(
            f"checkpoint.migrate: {where} does not fit the target:\n  "
            + "\n  ".join(sorted(filter(None, problems)))
            + "\nexpected a counterpart for everything, on both sides. Map names on "
            "disk to those of the target with rename={old: new}, and leave parts out "
            "with rename={name: None}."
        )
    likes = ocp.tree.to_flat_dict(_trees.tree_of(target))  # with numbers as they are
    placed = {
        path: _trees.place(values[name], likes[path])
        for path, name in zip(likes, wanted, strict=True)
        if name in values
    }
    return _trees.replace_leaves(target, placed)


# Both sides


def _read(source: Any, step: Any) -> tuple[str, dict[Path, Any]]:
    """Returns what messages call a checkpoint, and its arrays on the host by path."""
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
        return str(folder), _trees.read_on_host(folder, _trees.read_metadata(folder))

    def read(found: _steps.Step) -> tuple[str, dict[Path, Any]]:
        tree = found.verified_tree((jax.process_index(), jax.process_count()))
        return str(found), _trees.read_on_host(found.folder / _steps.ITEM, tree)

    return _steps.newest_intact(folder, read, step, stacklevel=3)


def _by_name(leaves: Mapping[Path, Any]) -> Arrays:
    """Returns leaves by name, in their order: `params/Dense_0/kernel`."""
    # The variables of an `nnx.State` have a `value`.
    paths = (p[:-1] if p[-1] == "value" and len(p) > 1 else p for p in leaves)
    return _together(zip(map("/".join, paths), leaves.values(), strict=True))


def _together(pairs: Iterable[tuple[str, Any]]) -> Arrays:
    found: Arrays = {}
    for name, leaf in pairs:
        if name in found:
            raise ValueError(
                f"checkpoint.migrate: two arrays have the name {name}; expected one. "
                "Choose names in rename that keep them apart."
            )
        found[name] = leaf
    return found


def _renamed(
    saved: Arrays, wanted: Arrays, rename: Mapping[str, str | None]
) -> tuple[Arrays, set[str]]:
    """Returns the arrays by their new names, and what stays as it is in the target."""
    stays: set[str] = set()
    for old, new in rename.items():
        old, put = f"/{old}/", f"/{new}/"
        here = {name for name in wanted if new is None and old in f"/{name}/"}
        there = {name for name in saved if old in f"/{name}/"}
        if not here and not there:
            raise ValueError(
                f"checkpoint.migrate: rename has {old[1:-1]!r}, which is in no path on "
                f"disk; expected whole names of paths such as {sorted(saved)[:3]}."
            )
        stays |= here
        kept = (name for name in saved if new is not None or name not in there)
        saved = _together(
            (f"/{name}/".replace(old, put).strip("/"), saved[name]) for name in kept
        )
    return saved, stays


def _as_in_target(saved: Arrays, wanted: Arrays) -> Arrays:
    """Puts an optimizer inside of `apply_if_finite`, and collections in `variables`."""
    for place in [name for name in wanted if name.endswith("opt_state/last_finite")]:
        outer = place.removesuffix(
            "last_finite"
        )  # of NNX objects, it is `1/opt_state/`
        if place not in saved:
            names = (
                re.sub(f"^{outer}", f"{outer}inner_state/", name) for name in saved
            )
            saved = dict(zip(names, saved.values(), strict=True))
            saved |= {outer + name: value for name, value in _NO_SKIPS.items()}
    inside = {name: f"variables/{name}" for name in saved}
    return _together(
        (inside[name] if inside[name] in wanted else name, x)
        for name, x in saved.items()
    )


def _with_scaler(saved: Arrays, wanted: Arrays) -> Arrays:
    """Puts the scaler of another library in the place of that of flax_amp."""
    paths = _trees.scaler_in(tuple(name.split("/")) for name in wanted)
    target = {key: "/".join(path) for key, path in paths.items()}
    own = {key: wanted[name] for key, name in target.items()}
    for field in sorted({name.partition("/")[0] for name in saved}):
        of = {
            n.removeprefix(f"{field}/"): n for n in saved if n.startswith(f"{field}/")
        }
        names = next((x for x in _SCALERS if x.keys() <= of.keys()), None)
        if not target or not names or of.keys() - names.keys() - {"total_resets"}:
            continue
        found = {new: saved[of[old]] for old, new in names.items()}
        rest = {name: x for name, x in saved.items() if name not in of.values()}
        if _trees.never_moves(own) not in (None, bool(_trees.never_moves(found))):
            return rest  # The precision was changed.
        scaler = init_scaler() | {k: x for k, x in own.items() if _trees.has_value(x)}
        if np.isnan(found["scaler"]).any():
            found["scaler"] = np.asarray(scaler["scaler"])
        # That of jaxamp grows to infinity.
        scale = found["scaler"].astype(np.float32)
        found["scaler"] = np.clip(scale, LOWEST, HIGHEST)
        return rest | {target[k]: np.asarray(x) for k, x in (scaler | found).items()}
    return saved


def _convert(value: np.ndarray, like: Any) -> np.ndarray:
    """Returns a value in the dtype of `like`, or as it is if that would change it."""
    if _tree.is_key(like) or value.dtype == like.dtype or value.dtype.kind in "OUSc":
        return value
    with np.errstate(all="ignore"):
        converted = value.astype(like.dtype)
        before, after = value.astype(np.float64), converted.astype(np.float64)
        same = np.array_equal(before, after, equal_nan=True)
    # A Python float has more digits than JAX gives it.
    is_number = value.shape == () and value.dtype == np.float64
    return converted if same or (is_number and like.dtype == np.float32) else value
