"""A state to a directory, in the background, and back: compared first, then read.

A restore never writes. After every failure, the state in hand and the files are as they
were. Orbax casts silently to the dtype of its target and leaves sharding to the target;
`restore` rejects another dtype and passes on the sharding.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from flax_amp import _tree
from flax_amp._checks import check_count
from flax_amp._training.step_call import check_not_deleted
from flax_amp.checkpoint import _steps, _trees
from flax_amp.checkpoint._damage import CheckpointWarning
from flax_amp.checkpoint._directory import finish_saving
from flax_amp.checkpoint._manager import Manager
from flax_amp.checkpoint._trees import Leaves, Path
from flax_amp.optim._optimizer import INJECTED, Optimizer

T = TypeVar("T")


def save(
    manager: Manager,
    state: Any,
    metrics: Mapping[str, Any] | None = None,
    *,
    force: bool = False,
) -> bool:
    """Saves a state under its own step, in the background.

    The state may be donated to the next step as soon as `save` returns.

    Args:
      manager: the result of `checkpoint.manager`.
      state: the `AmpTrainState` that the last step returned, or NNX objects:
        `(model, optimizer)`. For NNX objects, `nnx.state((model, optimizer))` is saved.
      metrics: scalars to save with the state, for `best_metric`.
      force: saves although `save_interval_steps` says not to.

    Returns:
      Whether the state was saved. The state is not saved between intervals, nor if its
      step is not newer than the newest intact checkpoint, whoever wrote that
      checkpoint; a warning tells of a refusal that may be a surprise. Damaged steps
      that are as new as the state, or newer, are renamed if no intact step is as new.

    Raises:
      ValueError, TypeError: if names would fall together on disk, if the `best_metric`
        of the manager is missing, or if the manager only reads.
      RuntimeError: if a step has deleted the state, or if another process saves into
        the same directory.
      CheckpointSaveError: if this state cannot be written, or if the save before it
        failed in the background. Earlier checkpoints are as they were.

    Example:
      >>> import tempfile, optax, jax.numpy as jnp
      >>> from flax_amp import AmpTrainState, checkpoint
      >>> state = AmpTrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     with checkpoint.manager(directory) as manager:
      ...         saved = checkpoint.save(manager, state)
      ...     restored = checkpoint.restore(directory, state)
      >>> saved, restored.params["w"].tolist()
      (True, [1.0, 1.0])
    """
    if not isinstance(manager, Manager) or manager.read_only:
        raise TypeError(
            f"checkpoint.save: the first argument is a {type(manager).__name__}, or "
            "has read_only=True; expected a manager that may write. Open a manager "
            "with checkpoint.manager(directory)."
        )
    step = _step_of(state)
    if not manager.is_due(step, force):
        return False
    tree = jax.tree.map(_trees.as_array, _trees.tree_of(state))
    check_not_deleted("checkpoint.save", "state", tree)
    _check_names(tree)
    numbers = {name: float(value) for name, value in (metrics or {}).items()}
    if manager.best_metric not in {None, *numbers}:
        raise ValueError(
            f"checkpoint.save: metrics has {sorted(numbers)}; expected the best_metric "
            f"{manager.best_metric!r} of the manager."
        )
    return manager.save(
        step,
        args=ocp.args.StandardSave(tree),
        metrics=numbers if metrics else None,
        force=force,
        # An item of our own could hold the record and the checksums, but plain Orbax
        # reads no step with a second item.
        custom_metadata=_steps.record_of(step, _names_of_optimizers(state)),
    )


def _step_of(state: Any) -> int:
    """Returns the step of a state, also of the state of several runs under `vmap`."""
    # Runs at the same step are a single checkpoint, so that no further code has to know
    # of a sweep.
    steps = np.unique(_trees.step_of(state, "checkpoint.save: state"))
    seen = f"checkpoint.save: the state's step is {steps.tolist()}"
    one = steps[0] if len(steps) == 1 else steps
    return check_count(one, seen, "of its step", 0)


def _check_names(tree: Any) -> None:
    """Raises an error if Orbax, which joins names with dots, would mix up leaves."""
    names = Counter(".".join(path) for path in ocp.tree.to_flat_dict(tree))
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(
            f"checkpoint.save: {', '.join(twice)} would each be the name of several "
            "arrays on disk; expected different names."
        )


def restore(manager: Any, target: T, *, step: Any = None) -> T:
    """Reads a checkpoint into a state like `target`.

    The arrays get the shardings of `target`, so a checkpoint fits another mesh, and the
    next training step is not traced again. A setting that the code has made and the
    state holds, such as a learning rate of `flax_amp.optim`, gets the value of the
    checkpoint: if `target` has another value, a warning names both. If only the scaler
    of the checkpoint or only the scaler of `target` moves, because the precision was
    changed, the scaler of `target` is used, with a warning.

    Args:
      manager: any `orbax.checkpoint.CheckpointManager`, or the path of its directory.
      target: a state of the same model and optimizer, or its `jax.eval_shape`. Its
        arrays may have been donated. NNX objects, as `(model, optimizer)`, are updated
        in place, when all has been read. A target of another kind is not changed.
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

    values, remarks = _steps.read_newest_intact(directory, read, step, stacklevel=2)
    for remark in remarks:
        told = f"checkpoint.restore: {directory}: {remark}"
        warnings.warn(told, CheckpointWarning, stacklevel=2)  # the caller of `restore`
    return _trees.replace_leaves(target, values)


def _read_arrays(step: _steps.Step, wanted: Mapping[Path, Any]) -> Leaves:
    """Returns the arrays of a step by path, placed like the arrays of the target."""
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
            "read a checkpoint of another program, or only a part of a checkpoint, "
            "with checkpoint.migrate."
        )
    read = step.read(tree, wanted).items()
    return {path: _trees.place(x, wanted[path]) for path, x in read}


def _fit_scaler(read: Leaves, wanted: Mapping[Path, Any]) -> Iterator[str]:
    """Keeps the scaler of the target if only a single scale of the two moves."""
    scaler = _trees.scaler_in(wanted)
    there, here = ({key: of[x] for key, x in scaler.items()} for of in (read, wanted))
    if not _trees.both_move_or_neither(there, here):
        for path in scaler.values():
            del read[path]
        scale = _text(here["scaler"])
        saved_scale = _text(there["scaler"])
        yield (
            f"the scaler of the target is used, with a scale of {scale}, not "
            f"{saved_scale}: one scale moves and the other never does."
        )


# Settings that the code has made


def _changed_settings(read: Leaves, target: Any) -> Iterator[str]:
    """Describes the settings whose numbers on disk and in the target differ."""
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
            f"{'; '.join(differ)}. The run goes on with the values on disk; change "
            "them after restore, as with state.replace_hyperparams(learning_rate=...)."
        )


def _text(value: Any) -> str:
    # The exact number does not matter: a warning names a few numbers of an array.
    return " ".join(f"{x:g}" for x in np.ravel(value)[:4])


def _parts(state: Any, name: str) -> list[Any]:
    """Returns a field of a state, or of each of its NNX objects with this field."""
    parts = state if _trees.is_nnx(state) else [state]
    return [getattr(part, name) for part in parts if hasattr(part, name)]


def _hyperparams(tree: Any) -> Iterator[Any]:
    """Yields the arrays of a state that the code gave to its optimizers."""
    for node in _tree.nodes(tree, (Optimizer, *INJECTED)):
        if isinstance(node, Optimizer):
            inside = node.opt_state
            yield from jax.tree.leaves({**node._arrays, "opt_state": None})
        else:  # A hyper-parameter with a state is a schedule's, and changes by itself.
            inside = node.inner_state
            states = getattr(node, "hyperparams_states", {})
            values = node.hyperparams.items()
            yield from (x for name, x in values if name not in states)
        yield from _hyperparams(inside)


def _another_optimizer(step: _steps.Step, target: Any) -> Iterator[str]:
    """Tells of another optimizer with the same arrays, such as adamax after adam."""
    saved = step.record().get("optimizer")
    here = _names_of_optimizers(target)
    if saved is not None and saved != here:
        yield (
            f"the optimizer is {' and '.join(saved) or 'another'} on disk and "
            f"{' and '.join(here) or 'another'} in the target; the run goes on with "
            "the arrays on disk."
        )


def _names_of_optimizers(state: Any) -> list[str]:
    """Returns the names of optimizers: `scale_by_adam` of optax, `adam` of `optim`."""
    nodes = _tree.nodes(_parts(state, "opt_state"), Optimizer)
    names = {node._name for node in nodes} | _scalings(_parts(state, "tx"), set())
    return sorted(names - {"scale_by_learning_rate", "scale_by_schedule"})


def _scalings(parts: Any, seen: set[int]) -> set[str]:
    """Returns the names of the functions of optax that given functions close over."""
    names = set()
    for part in jax.tree.leaves(parts):
        module = getattr(part, "__module__", None) or ""
        if id(part) in seen or not module.startswith(("optax.", "flax_amp.")):
            continue
        seen.add(id(part))
        name = getattr(part, "__qualname__", "").split(".")[0]
        if name.startswith("scale_by_"):
            names.add(name)
        inside = [getattr(part, "__self__", None), getattr(part, "__dict__", {})]
        for cell in getattr(part, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # The cell is empty.
                inside.append(cell.cell_contents)
        names |= _scalings(inside, seen)
    return names
