"""Reading every kind of checkpoint that a Flax program writes, as arrays by path.

run/300/default  of an `orbax.checkpoint.CheckpointManager`, under any item name
model/           of `StandardCheckpointer.save` or `PyTreeCheckpointer.save`
checkpoint_300   of `flax.training.checkpoints`: a file of msgpack, or a directory
bytes            of `flax.serialization`; any tree in memory is read as well
"""

import os
import re
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax import serialization

from flax_amp.checkpoint._arrays import (
    NumpyLeaves,
    numpy_leaves,
    read_metadata,
    read_on_host,
)
from flax_amp.checkpoint._errors import CorruptCheckpointError, reason_of
from flax_amp.checkpoint._steps import (
    ITEM,
    Step,
    finish_saving,
    newest_intact,
    steps_in,
)

_TREE_FILE = "_METADATA"  # Orbax describes the arrays of a tree in it
_STEP = re.compile(r"(.*_)?([0-9]+)")  # 00000300, checkpoint_300, ckpt_300


def read(source: Any, step: int | None, stacklevel: int) -> tuple[str, NumpyLeaves]:
    """Reads a checkpoint of any kind into the memory of the host.

    Args:
      source: a path, a manager, or a tree.
      step: the step to read if there are several; by default the newest intact one.
      stacklevel: for the warning about damaged steps.

    Returns:
      What error messages call the checkpoint, and its arrays.

    Raises:
      FileNotFoundError: if there is no such checkpoint.
      TypeError: if `source` is neither a path nor a manager nor a tree of arrays.
      ValueError: if it is of another kind, or if a newer version wrote it.
      CorruptCheckpointError: if it is damaged.
    """
    if isinstance(source, bytes):
        source = _read_msgpack(source, "the bytes")
    if not isinstance(source, str | os.PathLike | ocp.CheckpointManager):
        _reject_step(step, "a tree")
        return "the tree", _leaves_of_tree(source)
    path = finish_saving(source)
    if not path.exists():
        raise FileNotFoundError(
            f"checkpoint: {path} does not exist; expected a file or a directory that "
            "Orbax or Flax saved to. Check the path."
        )
    if not _steps_of_any_kind(path):
        _reject_step(step, "one tree")
        return str(path), _read_entry(path)

    def read_step(found: Step) -> tuple[str, NumpyLeaves]:
        return str(found), _read_step(found)

    return newest_intact(path, _steps_of_any_kind, read_step, step, stacklevel + 1)


def _reject_step(step: int | None, what: str) -> None:
    if step is not None:
        raise ValueError(
            f"checkpoint: step={step} of {what}; expected a directory with several "
            "steps. Leave step out."
        )


def _steps_of_any_kind(path: epath.Path) -> list[Step]:
    """Returns the steps in a directory; none for a file or a single tree.

    If a manager has saved steps there, other names with numbers are no steps.

    Raises:
      ValueError: if steps have names of different forms.
    """
    if path.is_file() or _is_orbax_tree(path):
        return []
    if ours := steps_in(path):
        return ours
    found = [(_STEP.fullmatch(child.name), child) for child in path.iterdir()]
    matches = [(match, child) for match, child in found if match]
    if len(kinds := sorted({match[1] or "" for match, _ in matches})) > 1:
        raise ValueError(
            f"checkpoint: {path} holds steps with different names, "
            f"{' and '.join(f'`{kind}<number>`' for kind in kinds)}; expected one "
            "form. Pass the path of the step to take."
        )
    return [Step(int(match[2]), child) for match, child in matches]


def _read_step(step: Step) -> NumpyLeaves:
    if step.folder.name == str(step.number) and not step.folder.is_file():
        items = step.items()
        # A folder without items is a step of a manager that has lost what it held.
        if ITEM in items or not items:
            return step.arrays((jax.process_index(), jax.process_count()))
    return _read_entry(step.folder)


def _read_entry(path: epath.Path) -> NumpyLeaves:
    """Reads a file of msgpack, a tree of Orbax, or the only tree in a directory."""
    if path.is_file():
        return numpy_leaves(_read_msgpack(path.read_bytes(), path.name))
    children = [path] if _is_orbax_tree(path) else list(path.iterdir())
    trees = sorted(child for child in children if _is_orbax_tree(child))
    if len(trees) == 1:
        return read_on_host(trees[0], read_metadata(trees[0]))
    names = [child.name for child in trees or sorted(children)]
    what = f"the trees {names}" if trees else f"{names[:8]}, but no tree"
    raise ValueError(
        f"checkpoint: {path} holds {what}; expected steps such as '300' or "
        "'checkpoint_300', or one tree that Orbax saved. Pass the directory that was "
        "given to the library that saved it, or that of the tree to take."
    )


def _is_orbax_tree(path: epath.Path) -> bool:
    return (path / _TREE_FILE).exists()


def _read_msgpack(content: bytes, name: str) -> Any:
    try:
        return serialization.msgpack_restore(content)
    except Exception as error:  # what is no msgpack makes its reader raise anything
        raise CorruptCheckpointError(
            f"{name} is not what flax.serialization or flax.training.checkpoints "
            f"writes: {reason_of(error)}"
        ) from error


def _leaves_of_tree(tree: Any) -> NumpyLeaves:
    leaves = numpy_leaves(tree)
    if not leaves or any(not path or x.dtype == object for path, x in leaves.items()):
        raise TypeError(
            f"checkpoint: cannot read a {type(tree).__name__}; expected a path, a "
            "manager, or a tree of arrays such as a TrainState or a dict."
        )
    return leaves
