"""Checkpoints of other programs, other optimizers, other models.

What differs is brought into one flat form first, path by path: names that the user
maps, then the forms that other libraries give the same thing, each by a rule of its
own. Then every array of the target must have found exactly one on disk, and the
reverse, or all that have not are named in one error.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from flax_amp import _saved_optimizer, _saved_scaler, _sources
from flax_amp._integrity import CheckpointWarning
from flax_amp._layout import Path, differences, is_key, leaf_of, name_of
from flax_amp._paths import Choice, Patterns, renamed
from flax_amp._placement import is_concrete, place

PyTree = Any
T = TypeVar("T")

Leaves = dict[Path, np.ndarray]


def migrate(
    source: Any,
    target: T,
    *,
    step: int | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
    rename: Mapping[str, str] | None = None,
) -> T:
    """Reads a checkpoint that `restore` refuses, because something else wrote it.

    It reads what Orbax wrote (`CheckpointManager`, `StandardCheckpointer`, ...), what
    `flax.training.checkpoints` and `flax.serialization.to_bytes` wrote, and any tree
    that is in memory. It is strict: an array without a counterpart, on either side, is
    an error that lists all of them. It changes, without being asked,

    - the optimizer's wrappers `apply_if_finite`, `MultiSteps` and `masked`, where one
      side has them and the other has not; one that was not saved starts afresh;
    - the scaler of jaxamp and the `DynamicScale` of Flax, under whatever name, into the
      scaler of flax_amp and back; without one, the target's stays, and so it does where
      one of them is static and the other dynamic (float16 to bfloat16 and back);
    - the collections of a Linen model that are fields of their own, such as
      `batch_stats`, into `variables` and back;
    - the `value` in the paths of an `nnx.State`;
    - dtypes, if no value changes by it: bfloat16 into float32, int64 into int32;

    and `rngs`, which a plain `TrainState` does not have, are then those of the target.

    Paths are written with slashes, as the error shows them: `params/Dense_0/kernel`.

    Args:
      source: the directory or file, a `CheckpointManager`, or a tree of arrays.
      target: what to read into: an `AmpTrainState`, a plain `TrainState`, or any tree;
        its arrays say on which devices those of the result lie. It is not changed.
      step: which step; by default the newest that is intact.
      include: glob patterns of paths of the target; only these are read. A pattern
        matches all that lies below it: `"params"` reads parameters only.
      exclude: patterns of paths that stay as they are in the target.
      rename: regular expressions for whole segments of paths on disk, and what to put
        in their place: `{"Dense_0": "linear1", r"blocks_(\\d+)": r"blocks/\\1"}`. They
        are applied one after the other, to the moments of the optimizer as well.

    Returns:
      `target` with the arrays of the checkpoint. What stayed is shared with `target`.

    Raises:
      ValueError: if something has no counterpart, another shape or a dtype that cannot
        hold its values, or if a pattern matches nothing.
      TypeError: if a leaf of `target` is no array, or an argument has a wrong type.
      FileNotFoundError: if there is no such checkpoint.
      CorruptCheckpointError: if it is damaged.

    Example:
      A run of a plain `TrainState` goes on with mixed precision:

      >>> import tempfile, jax.numpy as jnp, optax, orbax.checkpoint as ocp
      >>> from flax.training.train_state import TrainState
      >>> from flax_amp import AmpTrainState, checkpoint
      >>> new = dict(apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.adam(0.1))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     with ocp.StandardCheckpointer() as checkpointer:
      ...         checkpointer.save(f"{directory}/x", TrainState.create(**new))
      ...     state = checkpoint.migrate(f"{directory}/x", AmpTrainState.create(**new))
      >>> float(state.scaler["scaler"])
      32768.0
    """
    tree = ocp.tree.to_flat_dict(target)
    wanted = {path: _sample(path, leaf) for path, leaf in tree.items()}
    chosen = Choice(include, exclude)
    name, leaves = _sources.read(source, step, stacklevel=2)
    leaves = renamed(leaves, rename or {})
    leaves, unknown = _translate(leaves, wanted, name)
    chosen.check([*leaves, *wanted])

    found = {path: leaf for path, leaf in leaves.items() if path in chosen}
    found |= {p: _convert(found[p], wanted[p]) for p in found.keys() & wanted.keys()}
    found = _with_scaler(found, tree)
    stays = {p for p in wanted if p not in chosen} - found.keys() | unknown
    problems = differences(
        {path: leaf_of(leaf) for path, leaf in found.items()},
        {path: leaf_of(leaf) for path, leaf in wanted.items() if path not in stays},
    )
    problems += [
        f"{name_of(path)}: to stay as in the target, where it has no value"
        for path in sorted(stays)
        if not is_concrete(tree[path])
    ]
    if problems:
        raise ValueError(
            f"checkpoint.migrate: {name} does not fit the target:\n  "
            + "\n  ".join(problems)
            + "\nexpected a counterpart for everything, on both sides. Map names on "
            "disk to those of the target with rename=, leave arrays of the target as "
            "they are with exclude=, or read only some with include=."
        )
    placed = [
        place(found[path], like) if path in found else like
        for path, like in tree.items()
    ]
    migrated: T = jax.tree.unflatten(jax.tree.structure(target), placed)
    return migrated


def _sample(path: Path, leaf: Any) -> Any:
    """Returns something with the shape and dtype of a leaf of the target."""
    if isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf)
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise TypeError(
            f"checkpoint.migrate: {name_of(path)} of the target is a "
            f"{type(leaf).__name__}; expected arrays and numbers. Pass an "
            "AmpTrainState, a TrainState or a dict of arrays."
        )
    return leaf


def _translate(leaves: Leaves, wanted: Leaves, name: str) -> tuple[Leaves, set[Path]]:
    """Brings what others wrote into the form of the target.

    Returns:
      The arrays on disk by the paths of the target, and the paths of the target that
      stay as they are because whoever wrote the checkpoint had no such thing.
    """
    leaves = _without_value(leaves, wanted)
    leaves = {_in_collections(path, wanted): leaf for path, leaf in leaves.items()}
    to_scaler = _saved_scaler.translate(leaves, wanted)
    optimizer = _saved_optimizer.align(leaves, wanted)
    new_path: dict[Path, Path | None] = {path: path for path in leaves}
    new_path |= optimizer.paths | to_scaler
    rngs = {path for path in wanted if path[0] == "rngs"}
    saved_rngs = {path for path in leaves if path[0] == "rngs"}
    if not rngs:
        new_path |= dict.fromkeys(saved_rngs)

    translated = {path: _initial(path, wanted[path]) for path in optimizer.fresh}
    translated |= {new: leaves[old] for old, new in new_path.items() if new is not None}
    if around := optimizer.added.get("MultiSteps"):
        # It counts updates, of which there were some before it was there.
        translated[*around, "gradient_step"] = _updates(leaves)
    if around := optimizer.removed.get("MultiSteps"):
        summed = int(leaves[*around, "mini_step"])
        if summed:
            warnings.warn(
                f"checkpoint.migrate: {name}: dropped the sum of the gradients of "
                f"{summed} steps that MultiSteps had not applied yet; the optimizer of "
                "the target has no MultiSteps.",
                CheckpointWarning,
                stacklevel=3,
            )
    return translated, set() if saved_rngs else rngs


def _initial(path: Path, like: Any) -> np.ndarray:
    """Returns what a wrapper of an optimizer begins with."""
    return np.full(like.shape, path[-1] == "last_finite", like.dtype)


def _without_value(leaves: Leaves, wanted: Iterable[Path]) -> Leaves:
    """Removes what `nnx.State` adds to the path of each of its Variables."""
    if any(path[-1] == "value" for path in wanted):
        return leaves
    return {
        path[:-1] if path[-1] == "value" and len(path) > 1 else path: leaf
        for path, leaf in leaves.items()
    }


def _in_collections(path: Path, wanted: Iterable[Path]) -> Path:
    """Moves a collection of a Linen model to where the target has it."""
    fields = {other[0] for other in wanted}
    if path[0] in fields:
        return path
    if path[0] == "variables" and path[1] in fields:
        return path[1:]
    inside = any(other[:2] == ("variables", path[0]) for other in wanted)
    return ("variables", *path) if inside else path


def _updates(leaves: Leaves) -> np.ndarray:
    """Returns how many updates the optimizer had made."""
    skipped = leaves.get(("opt_state", "total_notfinite"), 0)
    return np.asarray(leaves.get(("step",), 0) - skipped, np.int32)


def _convert(value: np.ndarray, like: Any) -> np.ndarray:
    """Returns a value in the dtype of `like`, or as it is if that would change it."""
    if is_key(like) or value.dtype == like.dtype:
        return value
    with np.errstate(all="ignore"):
        converted = value.astype(like.dtype)
        back = converted.astype(value.dtype)
    same = (back == value) | ((back != back) & (value != value))
    return converted if same.all() else value


def _with_scaler(found: Leaves, tree: Mapping[Path, Any]) -> Leaves:
    """Returns what was found, with a scaler that suits the target."""
    field = str(_saved_scaler.field_of(tree))
    target = {path[1]: leaf for path, leaf in tree.items() if path[0] == field}
    if "min_scaler" not in target:
        return found
    saved = {path[1]: leaf for path, leaf in found.items() if path[0] == field}
    scaler = _saved_scaler.resume(saved, target)
    rest = {path: leaf for path, leaf in found.items() if path[0] != field}
    return {(field, key): np.asarray(value) for key, value in scaler.items()} | rest
