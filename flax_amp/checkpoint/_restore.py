"""Restoring a state: compare first, then read.

A restore never writes. Whatever fails, the state in hand and the files stay as they
were. Orbax casts silently to the dtype of its target and leaves sharding to the target;
`restore` rejects another dtype and passes on the sharding.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from flax_amp._training.train_state import StateT
from flax_amp.checkpoint import _arrays, _scaler, _steps
from flax_amp.checkpoint._arrays import Path
from flax_amp.checkpoint._errors import CheckpointWarning


def restore(manager: Any, target: StateT, *, step: Any = None) -> StateT:
    """Reads a checkpoint into a state like `target`.

    The arrays get the shardings of `target`, so a checkpoint fits another mesh, and the
    next training step is not traced again. Keys of the scaler that an older version did
    not save keep the values of `target`. Keys that this version does not know are
    dropped with a warning. `precision` is that of `target`. If one scaler is static and
    the other dynamic, because the precision was changed, the scaler of `target` is
    used, with a warning.

    Args:
      manager: the result of `manager`, any `orbax.checkpoint.CheckpointManager`, or the
        path of its directory.
      target: a state of the same model and optimizer, or its `jax.eval_shape`. It is
        not changed, and its arrays may have been donated.
      step: the number of the step, an integer or an array that holds one. By default
        the newest intact step is read, and a `CheckpointWarning` names the damaged
        steps that were passed over.

    Returns:
      `target` with every array replaced.

    Raises:
      TypeError: if `target` is no `AmpTrainState`, or an argument has a wrong type.
      FileNotFoundError: if there is no such checkpoint.
      ValueError: if the checkpoint does not fit (the error lists every path that
        differs), or if a newer version of flax_amp wrote it.
      CorruptCheckpointError: if the step, or every step, was damaged on disk.
      OSError: if the files cannot be read for another reason.
    """
    _arrays.check_state(target, "checkpoint.restore: target")
    directory = _steps.finish_saving(manager)
    wanted = _arrays.leaves_of_target(target, "checkpoint.restore")

    def read(found: _steps.Step) -> tuple[StateT, list[str]]:
        return _state_like(target, _read_arrays(found, wanted), str(found))

    state, remarks = _steps.newest_intact(
        directory, _steps.steps_in, read, step, stacklevel=2
    )
    for remark in remarks:
        warnings.warn(f"checkpoint.restore: {remark}", CheckpointWarning, stacklevel=2)
    return state


def _read_arrays(step: _steps.Step, wanted: Mapping[Path, Any]) -> dict[Path, Any]:
    """Returns the arrays of a step by path, where the target has them.

    Each process reads for itself; together they check the files.
    """
    tree = step.verified_tree((jax.process_index(), jax.process_count()))
    on_disk = ocp.tree.to_flat_dict(tree)
    _check_fit(on_disk, wanted, str(step))
    # Keys of the scaler that the target lacks become arrays of JAX as well.
    like = {**dict.fromkeys(on_disk), **wanted}
    read = _arrays.read_tree(step.folder / _steps.ITEM, tree, like)
    return dict(zip(on_disk, jax.tree.leaves(read), strict=True))


def _state_like(
    target: StateT, read: Mapping[Path, Any], where: str
) -> tuple[StateT, list[str]]:
    """Returns the target with the arrays that were read, and what to tell of them."""
    leaves = ocp.tree.to_flat_dict(target)
    values = {
        path: _arrays.commit_like(value, leaves[path]) if path in leaves else value
        for path, value in read.items()
    }
    remarks = []
    saved = {path[1]: value for path, value in values.items() if path[0] == "scaler"}
    if unknown := sorted(saved.keys() - _scaler.KEYS):
        remarks.append(
            f"{where}: dropped {unknown} of the scaler, unknown to this version."
        )
        saved = {key: saved[key] for key in saved.keys() & _scaler.KEYS}
    name = f"checkpoint.restore: {where}: scaler"
    scaler, remark = _scaler.resume(saved, target.scaler, name)
    if remark:
        remarks.append(f"{where}: {remark}; the target's is used.")
    state = _arrays.replace_leaves(target, values).replace(scaler=scaler)
    return state, remarks


def _check_fit(
    on_disk: Mapping[Path, Any], wanted: Mapping[Path, Any], where: str
) -> None:
    """Raises one ValueError that lists all that differs, with both sides."""
    all_leaves = {**on_disk, **wanted}
    # The scaler of a run may lack keys that are new, and have keys that are newer.
    optional = {
        path
        for path in wanted.keys() ^ on_disk.keys()
        if path[0] == "scaler" and getattr(all_leaves[path], "shape", ()) == ()
    }
    differences = [
        _arrays.difference(path, on_disk.get(path), wanted.get(path))
        for path in sorted(all_leaves.keys() - optional)
    ]
    problems = [*filter(None, differences), *_arrays.unfit_shardings(wanted)]
    if problems:
        raise ValueError(
            f"checkpoint.restore: {where} does not fit the target:\n  "
            + "\n  ".join(problems)
            + "\nexpected the checkpoint of the same model and optimizer. Make the "
            "target with the model and tx that were saved, restore another step, or "
            "read what else wrote it, or only a part, with checkpoint.migrate."
        )
