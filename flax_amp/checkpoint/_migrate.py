"""Checkpoints of other programs, other optimizers, other models.

What differs is brought into one flat form first, path by path: names that the user
maps, then the forms that other libraries give the same thing, each by a rule of its
own. Then every array of the target must have found exactly one on disk, and the
reverse, or all that have not are named in one error.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import orbax.checkpoint as ocp

from flax_amp import _tree
from flax_amp.checkpoint import _saved_optimizer, _saved_scaler, _sources
from flax_amp.checkpoint._errors import CheckpointWarning
from flax_amp.checkpoint._layout import Path, differences, leaf_of, name_of
from flax_amp.checkpoint._paths import Choice, Patterns, renamed
from flax_amp.checkpoint._placement import is_concrete, place, rebuilt, samples

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
    - an optimizer of `flax_amp.optim` and the same one of optax, either way; hyper-
      parameters that were not saved are those of the target, saved ones that it does
      not have are dropped with a warning;
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
      include: glob patterns of paths, on disk or in the target; only these are read. A
        pattern matches all that lies below it: `"params"` reads parameters only.
      exclude: patterns of paths that are not read and stay as they are in the target.
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
    wanted = samples(target, "checkpoint.migrate")
    chosen = Choice(include, exclude)
    name, leaves = _sources.read(source, step, stacklevel=2)
    leaves = renamed(leaves, rename or {})

    real = {_plain(path): path for path in wanted}
    optimizer = _saved_optimizer.align(map(_plain, leaves), real)
    counterparts = _counterparts(leaves, real, optimizer, hasattr(target, "rngs"))
    on_disk = {real.get(n, n): o for o, n in counterparts.items() if n is not None}
    chosen.check([*leaves, *on_disk, *wanted])

    found = {path: leaves[old] for path, old in on_disk.items()}
    found |= _beginnings(optimizer, leaves, real, wanted)
    found = _taken(found, wanted, on_disk, chosen)
    found, kept = _saved_scaler.fit_scaler(found, leaves, tree)
    stays = kept | {real[path] for path in optimizer.kept}
    stays |= _left_alone(wanted, leaves, on_disk, chosen)
    stays -= found.keys()

    if problems := _problems(found, wanted, stays, on_disk, tree):
        raise ValueError(
            f"checkpoint.migrate: {name} does not fit the target:\n  "
            + "\n  ".join(problems)
            + "\nexpected a counterpart for everything, on both sides. Map names on "
            "disk to those of the target with rename=, leave arrays of the target as "
            "they are with exclude=, or read only some with include=."
            + _hint({path: leaves[old] for path, old in on_disk.items()}, wanted)
        )
    _warn_of_lost_sums(optimizer, leaves, chosen, name)
    _warn_of_lost_hyperparams(optimizer, name)
    return rebuilt(target, {path: place(x, tree[path]) for path, x in found.items()})


def _taken(
    found: Leaves,
    wanted: Mapping[Path, Any],
    on_disk: Mapping[Path, Path],
    chosen: Choice,
) -> Leaves:
    """Returns the arrays that the user's patterns take, in the dtypes of the target.

    A pattern may name an array by its path on disk or by that in the target.
    """
    taken = {
        path: leaf
        for path, leaf in found.items()
        if chosen.takes(path, on_disk.get(path, path))
    }
    return {
        path: _convert(leaf, wanted[path]) if path in wanted else leaf
        for path, leaf in taken.items()
    }


def _left_alone(
    wanted: Iterable[Path],
    leaves: Iterable[Path],
    on_disk: Mapping[Path, Path],
    chosen: Choice,
) -> set[Path]:
    """Returns the paths of the target that keep their values by the user's choice.

    So do random keys, if there are none on disk.
    """
    has_rngs = any(path[0] == "rngs" for path in leaves)
    return {
        path
        for path in wanted
        if not chosen.takes(path, on_disk.get(path, path))
        or (path[0] == "rngs" and not has_rngs)
    }


def _problems(
    found: Leaves,
    wanted: Mapping[Path, Any],
    stays: set[Path],
    on_disk: Mapping[Path, Path],
    tree: Mapping[Path, Any],
) -> list[str]:
    """Returns a line for each array without a counterpart or a value."""
    return differences(
        {path: leaf_of(leaf) for path, leaf in found.items()},
        {path: leaf_of(leaf) for path, leaf in wanted.items() if path not in stays},
        called={new: old for new, old in on_disk.items() if new != old},
    ) + [
        f"{name_of(path)}: to stay as in the target, where it has no value"
        for path in sorted(stays)
        if not is_concrete(tree[path])
    ]


def _warn_of_lost_hyperparams(optimizer: _saved_optimizer.Alignment, name: str) -> None:
    if optimizer.lost:
        warnings.warn(
            f"checkpoint.migrate: {name}: dropped the hyper-parameters "
            f"{', '.join(optimizer.lost)}, which the optimizer of the target does not "
            "have as leaves.",
            CheckpointWarning,
            stacklevel=3,
        )


def _counterparts(
    paths: Iterable[Path],
    wanted: Iterable[Path],
    optimizer: _saved_optimizer.Alignment,
    has_rngs: bool,
) -> dict[Path, Path | None]:
    """Says where the target has what is on disk; `None` where it cannot have it.

    Raises:
      ValueError: if it has two things in one place.
    """
    paths = list(paths)
    result: dict[Path, Path | None] = {}
    collections = _collections(wanted)
    plain = {path: _moved(_plain(path), collections) for path in paths}
    moved = _saved_scaler.translate(plain.values(), wanted) | optimizer.paths
    taken: dict[Path, Path] = {}
    for path in paths:
        new = plain[path]
        target = moved.get(new, new)
        if new[0] == "rngs" and not has_rngs:
            target = None
        if target in taken:
            raise ValueError(
                f"checkpoint.migrate: {name_of(path)} and {name_of(taken[target])} "
                f"would both be {name_of(target)}; expected one. Leave one of them out "
                "of the tree, or give it another name with rename=."
            )
        if target is not None:
            taken[target] = path
        result[path] = target
    return result


def _beginnings(
    optimizer: _saved_optimizer.Alignment,
    leaves: Leaves,
    real: Mapping[Path, Path],
    wanted: Leaves,
) -> Leaves:
    """Returns what the wrappers of an optimizer begin with that were not saved."""
    found = {real[p]: _initial(p, wanted[real[p]]) for p in optimizer.fresh}
    if around := optimizer.added.get("MultiSteps"):
        # It counts updates, of which there were some before it was there.
        found[real[*around, "gradient_step"]] = _updates(leaves)
    return found


def _warn_of_lost_sums(
    optimizer: _saved_optimizer.Alignment, leaves: Leaves, chosen: Choice, name: str
) -> None:
    around = optimizer.removed.get("MultiSteps")
    if around is None or not chosen.takes((*around, "mini_step")):
        return
    summed = int(leaves[*around, "mini_step"])
    if summed:
        warnings.warn(
            f"checkpoint.migrate: {name}: dropped the sum of the gradients of {summed} "
            "steps that MultiSteps had not applied yet; the optimizer of the target "
            "has no MultiSteps.",
            CheckpointWarning,
            stacklevel=3,
        )


def _hint(saved: Leaves, wanted: Leaves) -> str:
    """Returns further advice, if the reason can be guessed."""
    both = saved.keys() & wanted.keys()
    if both and all(
        saved[p].shape[1:] == wanted[p].shape != saved[p].shape for p in both
    ):
        return (
            " Every array has one axis more than in the target: a state of pmap is to "
            "be saved after flax.jax_utils.unreplicate."
        )
    return ""


def _initial(path: Path, like: Any) -> np.ndarray:
    """Returns what a wrapper of an optimizer begins with."""
    return np.full(like.shape, path[-1] == "last_finite", like.dtype)


def _plain(path: Path) -> Path:
    """Removes what `nnx.State` adds to the path of each of its Variables."""
    return path[:-1] if path[-1] == "value" and len(path) > 1 else path


def _collections(wanted: Iterable[Path]) -> dict[Path, Path]:
    """Says where the target has the collections of a Linen model, by where others do.

    In `variables`, or as fields of their own.
    """
    fields = {path[0] for path in wanted}
    inside = {path[1] for path in wanted if path[0] == "variables" and len(path) > 1}
    moves: dict[Path, Path] = {(name,): ("variables", name) for name in inside - fields}
    if "variables" not in fields:
        moves |= {("variables", name): (name,) for name in fields}
    return moves


def _moved(path: Path, moves: Mapping[Path, Path]) -> Path:
    """Returns a path with its beginning replaced, if that is to be."""
    for depth in (1, 2):
        if path[:depth] in moves:
            return moves[path[:depth]] + path[depth:]
    return path


def _updates(leaves: Leaves) -> np.ndarray:
    """Returns how many updates the optimizer had made."""
    steps = leaves.get(("step",), np.int32(0))
    skipped = leaves.get(("opt_state", "total_notfinite"), np.int32(0))
    return np.maximum(steps - skipped, 0).astype(np.int32)


def _convert(value: np.ndarray, like: Any) -> np.ndarray:
    """Returns a value in the dtype of `like`, or as it is if that would change it.

    A Python float, which has more digits than JAX gives it, is rounded.
    """
    if _tree.is_key(like) or value.dtype == like.dtype or value.dtype.kind in "OUS":
        return value
    if value.shape == () and value.dtype == np.float64 and like.dtype == np.float32:
        return value.astype(np.float32)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        converted = value.astype(like.dtype)
        # Back and forth alone, a number that wraps around comes back.
        same = (converted.astype(value.dtype) == value) & (
            (converted < 0) == (value < 0)
        )
        same |= (converted != converted) & (value != value)
    return converted if same.all() else value
