"""Checkpoints of other programs, other optimizers, other models.

Both sides are brought to common paths first (see `_common_paths`): that is one rule for
both directions, and messages still name each array by its own path. Then every array of
the target must have a counterpart on disk, and the reverse; the exceptions are in
`_problems`, and wrappers of optimizers that were not saved start afresh (`_initial`).
One error names all other arrays.
"""

import warnings
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from flax_amp import _tree
from flax_amp.checkpoint import _arrays, _scaler, _sources
from flax_amp.checkpoint._arrays import NumpyLeaves, Path
from flax_amp.checkpoint._common_paths import (
    HYPERPARAMS,
    SMALL_STATE,
    WRAPPERS,
    Leaf,
    by_common_path,
)
from flax_amp.checkpoint._errors import CheckpointWarning
from flax_amp.checkpoint._patterns import Choice, Patterns, renamed

T = TypeVar("T")


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

    - the optimizer's wrappers `apply_if_finite`, `MultiSteps`, `masked` and
      `small_state`, where one side has them and the other has not; one that was not
      saved starts afresh;
    - an optimizer of `flax_amp.optim` and the same one of optax, either way; hyper-
      parameters that were not saved are those of the target, saved ones that it does
      not have are dropped with a warning;
    - the scaler of jaxamp and the `DynamicScale` of Flax, under whatever name, into the
      scaler of flax_amp and back. The target's scaler stays if the checkpoint has none,
      or if one is static and the other dynamic (float16 to bfloat16 and back);
    - the collections of a Linen model that are fields of their own, such as
      `batch_stats`, into `variables` and back;
    - the `value` in the paths of an `nnx.State`;
    - dtypes, if no value changes by it: bfloat16 into float32, int64 into int32; and
      float32 into bfloat16, to the nearest number and with a warning, if the target has
      a `small_state`.

    If the checkpoint has no `rngs`, as that of a plain `TrainState`, those of the
    target stay.

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
      >>> state.params["w"].tolist(), float(state.scaler["scaler"])
      ([1.0, 1.0], 1.0)
    """
    wanted = _arrays.leaves_of_target(target, "checkpoint.migrate")
    choice = Choice(include, exclude)
    name, found = _sources.read(source, step, stacklevel=2)
    found = renamed(found, rename or {})
    choice.check([*found, *wanted])

    sides = _Sides(by_common_path(wanted), by_common_path(found))
    chosen = sides.chosen(choice)
    values = _values(sides, chosen)
    _fit_scaler(values, sides)
    problems = _problems(sides, chosen, values, has_rngs=hasattr(target, "rngs"))
    if any(problems):
        raise ValueError(
            f"checkpoint.migrate: {name} does not fit the target:\n  "
            + "\n  ".join(sorted(filter(None, problems)))
            + "\nexpected a counterpart for everything, on both sides. Map names on "
            "disk to those of the target with rename=, leave arrays of the target as "
            "they are with exclude=, or read only some with include=."
            + _hint(sides, chosen)
        )
    for text in [*_describe_dropped(sides, chosen), *_describe_rounded(sides, chosen)]:
        warnings.warn(
            f"checkpoint.migrate: {name}: {text}.", CheckpointWarning, stacklevel=2
        )
    likes = ocp.tree.to_flat_dict(target)  # with Python numbers as they are
    read = {sides.target[path].path: value for path, value in values.items()}
    placed = {path: _arrays.place(value, likes[path]) for path, value in read.items()}
    return _arrays.replace_leaves(target, placed)


class _Sides(NamedTuple):
    """The leaves of a target and of a checkpoint, each by common path."""

    target: Mapping[Path, Leaf]
    saved: Mapping[Path, Leaf]

    def chosen(self, choice: Choice) -> set[Path]:
        """Returns the common paths that are to be read, by their paths on each side."""
        return {
            path
            for path in self.target.keys() | self.saved.keys()
            if choice.takes(*(side[path].path for side in self if path in side))
        }


def _values(sides: _Sides, chosen: Set[Path]) -> NumpyLeaves:
    """Returns the arrays for a target by common path, the scaler as it was saved."""
    values = {}
    # Hyper-parameters do not start afresh: those of the target stay.
    unsaved = WRAPPERS.keys() - _tops(sides.saved) - {HYPERPARAMS}
    for path in chosen & sides.target.keys():
        like = sides.target[path].value
        if path in sides.saved:
            value = sides.saved[path].value
            rounds = _is_rounded(sides, path)
            values[path] = value.astype(like.dtype) if rounds else _convert(value, like)
        elif path[0] in unsaved:
            values[path] = _initial(path, like, sides.saved)
    return values


def _problems(
    sides: _Sides, chosen: Set[Path], values: NumpyLeaves, has_rngs: bool
) -> list[str]:
    """Returns a line for each array, which is empty if there is no problem with it.

    An array needs a counterpart of its shape and dtype. What stays as it is in the
    target needs none, but a value.
    """
    # By the first segment of their common paths. Hyper-parameters that were not saved
    # stay as they are in the target, random keys if there are none on disk, and a
    # scaler if there is none to resume with.
    may_stay = {HYPERPARAMS}
    may_stay |= {"scaler"} - _tops(values)
    may_stay |= {"rngs"} - _tops(sides.saved)
    # The target may have other wrappers, no hyper-parameters and no random keys.
    may_be_dropped = {HYPERPARAMS, *WRAPPERS.keys() - _tops(sides.target)}
    may_be_dropped |= set() if has_rngs else {"rngs"}
    lines = []
    for path, (own_path, like) in sides.target.items():
        if path in values:
            saved_path = sides.saved[path].path if path in sides.saved else None
            lines.append(
                _arrays.difference(own_path, values[path], like, saved_path=saved_path)
            )
        elif path in chosen and path[0] not in may_stay:
            lines.append(_arrays.difference(own_path, None, like))
        elif not _arrays.has_value(like):
            name = _arrays.path_text(own_path)
            lines.append(f"{name}: to stay as in the target, where it has no value")
    for path in chosen - sides.target.keys():
        # The target may have no scaler, or another one. What is no key of a scaler may
        # be something else, which must not vanish.
        is_of_scaler = path[0] == "scaler" and path[1] in _scaler.KEYS
        if path[0] not in may_be_dropped and not is_of_scaler:
            own_path, value = sides.saved[path]
            lines.append(_arrays.difference(own_path, value, None))
    return lines


def _tops(paths: Iterable[Path]) -> set[str]:
    """Returns the first segments of common paths: fields, and names of wrappers."""
    return {path[0] for path in paths}


def _initial(path: Path, like: Any, saved: Mapping[Path, Leaf]) -> np.ndarray:
    """Returns what a wrapper of an optimizer that was not saved begins with."""
    if path == ("MultiSteps", "gradient_step"):
        # It counts updates, and the optimizer inside has made some already.
        steps, skipped = (
            saved[path].value if path in saved else 0
            for path in (("step",), ("apply_if_finite", "total_notfinite"))
        )
        return np.maximum(np.subtract(steps, skipped), 0).astype(np.int32)
    return np.full(like.shape, path[-1] == "last_finite", like.dtype)


def _fit_scaler(values: NumpyLeaves, sides: _Sides) -> None:
    """Puts the scaler to resume with among the values by common path."""
    found = {path[1]: value for path, value in values.items() if path[0] == "scaler"}
    target, saved = (
        {path[1]: leaf.value for path, leaf in side.items() if path[0] == "scaler"}
        for side in sides
    )
    if _scaler.is_batched(found) or _scaler.is_batched(target):
        return  # The scalers of several runs go on as they were saved.
    if "min_scaler" in target:
        if not found and all(map(_arrays.has_value, target.values())):
            return  # It stays as it is.
        where = "checkpoint.migrate: scaler"
        scaler, _ = _scaler.resume(found, target, where, clip=True)
        for key in target:
            values["scaler", key] = np.asarray(scaler[key])
    elif _scaler.kind_of(saved) == "static":
        # Other libraries have dynamic scalers only: theirs begins as the target's.
        for key in found:
            del values["scaler", key]


def _describe_dropped(sides: _Sides, chosen: Set[Path]) -> list[str]:
    """Describes what was dropped of an optimizer that a user may miss."""
    dropped = chosen - sides.target.keys()
    texts = []
    summed = ("MultiSteps", "mini_step")
    if summed in dropped and (steps := np.max(sides.saved[summed].value)):
        texts.append(
            f"dropped the sum of the gradients of {steps} steps that MultiSteps had "
            "not applied yet; the optimizer of the target has no MultiSteps"
        )
    lost = sorted("/".join(path[1:]) for path in dropped if path[0] == HYPERPARAMS)
    if lost and HYPERPARAMS in _tops(sides.target):
        texts.append(
            f"dropped the hyper-parameters {', '.join(lost)}, which the optimizer of "
            "the target does not have as leaves"
        )
    return texts


def _is_rounded(sides: _Sides, path: Path) -> bool:
    """Whether an array on both sides is float32 on disk, and stored in bfloat16."""
    saved, wanted = sides.saved[path].value, sides.target[path].value
    is_narrower = saved.dtype == np.float32 and wanted.dtype == jnp.bfloat16
    return is_narrower and SMALL_STATE in _tops(sides.target)


def _describe_rounded(sides: _Sides, chosen: Set[Path]) -> list[str]:
    """Tells which arrays were rounded, because the target stores them in bfloat16."""
    both = chosen & sides.saved.keys() & sides.target.keys()
    rounded = sorted(path for path in both if _is_rounded(sides, path))
    if not rounded:
        return []
    first = _arrays.path_text(sides.target[rounded[0]].path)
    return [
        f"rounded {len(rounded)} arrays from float32 to bfloat16, in which the target "
        f"stores them, such as {first}"
    ]


def _hint(sides: _Sides, chosen: Set[Path]) -> str:
    """Returns further advice if every saved array has one axis more."""
    shapes = [
        (sides.saved[path].value.shape, sides.target[path].value.shape)
        for path in chosen & sides.target.keys() & sides.saved.keys()
    ]
    if shapes and all(saved[1:] == wanted != saved for saved, wanted in shapes):
        return (
            " Every array has one axis more than in the target: a state of pmap is to "
            "be saved after flax.jax_utils.unreplicate."
        )
    return ""


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
