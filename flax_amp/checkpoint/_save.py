"""Saving a state, in the background."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from flax_amp import _tree
from flax_amp.checkpoint import _steps, _trees
from flax_amp.checkpoint._directory import whole_number
from flax_amp.checkpoint._manager import Manager
from flax_amp.checkpoint._restore import names_of_optimizers


def save(
    manager: Manager,
    state: Any,
    metrics: Mapping[str, Any] | None = None,
    *,
    force: bool = False,
) -> bool:
    """Saves a state under its own step, in the background.

    The state may be donated to the next step as soon as this returns.

    Args:
      manager: the result of `checkpoint.manager`.
      state: the `AmpTrainState` that the last step returned, or NNX objects:
        `(model, optimizer)`. Of these, `nnx.state((model, optimizer))` is saved.
      metrics: scalars to save with the state, for `best_metric`.
      force: saves although `save_interval_steps` says not to.

    Returns:
      Whether the state was saved. It is not saved between intervals, nor if its step is
      not newer than the newest intact checkpoint, whoever wrote that; a warning says so
      if that may be a surprise. Newer steps that are damaged are renamed.

    Raises:
      ValueError, TypeError: if leaves cannot be saved (the error lists all of them), if
        the `best_metric` of the manager is missing, or if the manager only reads.
        Nothing is written then.
      RuntimeError: if another process saves into the same directory.
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
    if not isinstance(manager, Manager):
        raise TypeError(
            f"checkpoint.save: the first argument is a {type(manager).__name__}; "
            "expected a manager. Open one with checkpoint.manager(directory)."
        )
    if manager.read_only:
        raise ValueError(
            f"checkpoint.save: {manager.directory} was opened with read_only=True; "
            "expected a manager that may write."
        )
    step = _step_of(state)
    if not manager.is_due(step, force):
        return False
    tree = _trees.tree_of(state)
    _check_leaves(tree)
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
        # An item of our own would hold this and the checksums, but plain Orbax reads
        # no step with a second item.
        custom_metadata=_steps.record_of(step, names_of_optimizers(state)),
    )


def _step_of(state: Any) -> int:
    """Returns the step of a state; that of several runs, which `vmap` makes, is one."""
    # Runs at one step are one checkpoint, so that nothing else has to know of a sweep.
    step = _trees.step_of(state, "checkpoint.save: state")
    name, steps = "checkpoint.save: the state's step", np.unique(step)
    if len(steps) > 1:
        raise ValueError(f"{name} has the values {steps.tolist()}; expected one.")
    return whole_number(steps[0] if steps.dtype.kind in "iu" else step, name, 0)


def _check_leaves(tree: Any) -> None:
    """Raises one ValueError that lists all leaves that cannot be saved."""
    leaves = ocp.tree.to_flat_dict(tree)
    bad = [f"{'/'.join(p)}: {why}" for p, x in leaves.items() if (why := _problem(x))]
    # Orbax joins the names of a path with dots, and reads one array for both.
    names = Counter(".".join(path) for path in leaves)
    bad += [f"{n}: the name of {k} arrays on disk" for n, k in names.items() if k > 1]
    if bad:
        raise ValueError(
            f"checkpoint.save: {'; '.join(bad)}; expected arrays with elements, and "
            "with different names. Save the state that the last step returned."
        )


def _problem(leaf: Any) -> str:
    """Returns why Orbax cannot save a leaf, or the empty string if it can."""
    if not _tree.is_array(leaf) or isinstance(leaf, jax.core.Tracer):
        return f"a {type(leaf).__name__}"
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "deleted, its memory was donated"
    return "" if leaf.size else f"empty, its shape is {leaf.shape}"
