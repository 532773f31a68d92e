"""Restoring a state: compare first, then read.

A restore never writes. Whatever fails, the state in hand and the files stay as they
were. Orbax casts silently to the dtype of its target and leaves sharding to the target;
`restore` rejects another dtype and passes on the sharding.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from flax_amp import _tree
from flax_amp.checkpoint import _steps, _trees
from flax_amp.checkpoint._damage import CheckpointWarning
from flax_amp.checkpoint._directory import finish_saving
from flax_amp.checkpoint._trees import Leaves, Path
from flax_amp.optim._optimizer import INJECTED, Optimizer

T = TypeVar("T")


def restore(manager: Any, target: T, *, step: Any = None) -> T:
    """Reads a checkpoint into a state like `target`.

    The arrays get the shardings of `target`, so a checkpoint fits another mesh, and the
    next training step is not traced again. What the code has set and the state holds,
    such as a learning rate of `flax_amp.optim`, is that of the checkpoint: if `target`
    has other numbers, a warning names both. If one scaler never moves and the other
    does, because the precision was changed, that of `target` is used, with a warning.

    Args:
      manager: any `orbax.checkpoint.CheckpointManager`, or the path of its directory.
      target: a state of the same model and optimizer, or its `jax.eval_shape`. Its
        arrays may have been donated. NNX objects, as `(model, optimizer)`, are updated
        in place, when all has been read; nothing else is changed.
      step: the number of the step. By default the newest intact step is read, and a
        `CheckpointWarning` names the damaged steps that were passed over.

    Returns:
      `target` with every array replaced.

    Raises:
      FileNotFoundError: if there is no such checkpoint.
      ValueError: if the checkpoint does not fit (the error lists every path that
        differs), or if another version of flax_amp wrote it.
      CorruptCheckpointError: if the step, or every step, was damaged on disk.
      OSError: if the files cannot be read for another reason.
    """
    _trees.step_of(target, "checkpoint.restore: target")
    directory = finish_saving(manager)
    wanted = _trees.leaves_of_target(target, "checkpoint.restore")

    def read(found: _steps.Step) -> tuple[Leaves, list[str]]:
        arrays = _read_arrays(found, wanted)
        remarks = [
            *_fit_scaler(arrays, wanted),
            *_changed_settings(arrays, target),
            *_another_optimizer(found, target),
        ]
        return arrays, remarks

    values, remarks = _steps.newest_intact(directory, read, step, stacklevel=2)
    for remark in remarks:
        told = f"checkpoint.restore: {directory}: {remark}"
        warnings.warn(told, CheckpointWarning, stacklevel=2)
    return _trees.replace_leaves(target, values)


def _read_arrays(step: _steps.Step, wanted: Mapping[Path, Any]) -> Leaves:
    """Returns the arrays of a step by path, as the target has them."""
    tree = step.tree()
    on_disk = ocp.tree.to_flat_dict(tree)
    problems = [
        _trees.difference("/".join(path), on_disk.get(path), wanted.get(path))
        for path in sorted({**on_disk, **wanted})
    ]
    if any(problems):
        raise ValueError(
            f"checkpoint.restore: {step} does not fit the target:\n  "
            + "\n  ".join(filter(None, problems))
            + "\nexpected the checkpoint of the same model and optimizer. Make the "
            "target with the model and tx that were saved, restore another step, or "
            "read what else wrote it, or only a part, with checkpoint.migrate."
        )
    read = step.read(tree, wanted).items()
    return {path: _trees.place(x, wanted[path]) for path, x in read}


def _fit_scaler(read: Leaves, wanted: Mapping[Path, Any]) -> Iterator[str]:
    """Leaves the scaler of the target as it is if it is of another kind."""
    scaler = _trees.scaler_in(wanted)
    saved, here = (
        _trees.never_moves({key: of[path] for key, path in scaler.items()})
        for of in (read, wanted)
    )
    if None not in (saved, here) and saved != here:
        for path in scaler.values():
            del read[path]
        how = "never moves" if here else "moves"
        yield f"the scaler of the target is used: its scale {how}, unlike that on disk."


# What the code has set


def _changed_settings(read: Leaves, target: Any) -> Iterator[str]:
    """Describes the settings that are other numbers on disk than in the target."""
    leaves = ocp.tree.to_flat_dict(_trees.tree_of(target))
    ids = {id(leaf) for leaf in _hyperparams(_parts(target, "opt_state"))}
    scaler = _trees.scaler_in(leaves)
    scaler_settings = {scaler.get(key) for key in ("patience", "adjust_factor")}
    differ = [
        f"{'/'.join(path)} is {_text(read[path])} on disk and {_text(leaf)} in the "
        "target"
        for path, leaf in leaves.items()
        if (id(leaf) in ids or path in scaler_settings) and path in read
        if _trees.has_value(leaf) and not np.array_equal(read[path], leaf)
    ]
    if differ:
        yield (
            f"{'; '.join(differ)}. The run goes on with those on disk; change them "
            "after restore, as with state.replace_hyperparams(learning_rate=...)."
        )


def _text(value: Any) -> str:
    return " ".join(f"{x:g}" for x in np.ravel(value)[:4])


def _parts(state: Any, name: str) -> list[Any]:
    """Returns a field of a state, or of each of its NNX objects that has it."""
    parts = state if _trees.is_nnx(state) else [state]
    return [getattr(part, name) for part in parts if hasattr(part, name)]


def _hyperparams(tree: Any) -> Iterator[Any]:
    """Yields the arrays of a state that the code gave to its optimizers."""
    for node in _tree.nodes(tree, (Optimizer, *INJECTED)):
        if isinstance(node, Optimizer):
            inside = node.opt_state
            yield from jax.tree.leaves({**node._arrays, "opt_state": None})
        else:  # Those of a schedule are of this step.
            inside, of = node.inner_state, getattr(node, "hyperparams_states", {})
            yield from (x for name, x in node.hyperparams.items() if name not in of)
        yield from _hyperparams(inside)


def _another_optimizer(step: _steps.Step, target: Any) -> Iterator[str]:
    """Tells of another optimizer with the same arrays, as adam and adamax have."""
    saved, here = step.record().get("optimizer"), names_of_optimizers(target)
    if saved is not None and saved != here:
        yield (
            f"the optimizer is {' and '.join(saved) or 'another'} on disk and "
            f"{' and '.join(here) or 'another'} in the target; the run goes on with "
            "the arrays on disk."
        )


def names_of_optimizers(state: Any) -> list[str]:
    """Returns what updates a state, by name: of optax `scale_by_adam`, or `adam`."""
    nodes = _tree.nodes(_parts(state, "opt_state"), Optimizer)
    names = {node._name for node in nodes} | _scalings(_parts(state, "tx"), set())
    return sorted(names - {"scale_by_learning_rate", "scale_by_schedule"})


def _scalings(parts: Any, seen: set[int]) -> set[str]:
    """Returns the names of the functions of optax that other functions close over."""
    names = set()
    for part in jax.tree.leaves(parts):
        module = getattr(part, "__module__", None) or ""
        if id(part) in seen or not module.startswith(("optax.", "flax_amp.")):
            continue
        seen.add(id(part))
        name = getattr(part, "__qualname__", "").split(".")[0]
        names |= {name} if name.startswith("scale_by_") else set()
        inside = [getattr(part, "__self__", None), getattr(part, "__dict__", {})]
        for cell in getattr(part, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # it is empty
                inside.append(cell.cell_contents)
        names |= _scalings(inside, seen)
    return names
