"""Every kind of checkpoint that a Flax program leaves behind, as a flat dict of arrays.

    run/300/default  of an `orbax.checkpoint.CheckpointManager`, under whatever name
    model/           what `StandardCheckpointer.save` or `PyTreeCheckpointer.save` wrote
    checkpoint_300   of `flax.training.checkpoints`: a file of msgpack, or a directory
    bytes, any tree  of `flax.serialization`, and what else can be read into memory

Paths are those of Orbax: names of dict keys and fields, numbers of list items.
"""

import os
import re
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import serialization

from flax_amp import _tree
from flax_amp.checkpoint._errors import read_or_explain
from flax_amp.checkpoint._layout import Path
from flax_amp.checkpoint._reader import metadata_of, restored
from flax_amp.checkpoint._steps import (
    ITEM,
    agreed,
    candidates,
    describe,
    finish_saving,
    items_of,
    newest_intact,
    steps_in,
)

PyTree = Any
Leaves = dict[Path, np.ndarray]

_TREE_FILE = "_METADATA"  # Orbax describes the arrays of a tree in it
_STEP = re.compile(r"(.*_)?([0-9]+)")  # 00000300, checkpoint_300, ckpt_300


class Source(NamedTuple):
    """What a checkpoint holds, as NumPy arrays; of a typed key, its data."""

    name: str
    leaves: Leaves


def read(source: Any, step: int | None, stacklevel: int) -> Source:
    """Reads a checkpoint of any kind into the memory of the host.

    Args:
      source: a path, a manager, or a tree.
      step: which one where there are several; the newest intact by default.
      stacklevel: for the warning about damaged steps.

    Raises:
      FileNotFoundError: if there is no such checkpoint.
      TypeError: if `source` is nothing of the kind.
      ValueError: if there is one, but none of these kinds, or a newer version wrote it.
      CorruptCheckpointError: if it is damaged.
    """
    if isinstance(source, bytes):
        source = _read_msgpack(source)
    if not isinstance(source, str | os.PathLike | ocp.CheckpointManager):
        return Source("the tree", _only(step, "a tree", _of_tree(source)))
    path = finish_saving(source)
    if not path.exists():
        raise FileNotFoundError(
            f"checkpoint: {path} does not exist; expected a file or a directory that "
            "Orbax or Flax saved to. Check the path."
        )
    if path.is_file():
        return Source(str(path), _only(step, "one file", _read_entry(path)))
    folders = _steps_in(path)
    if not folders:
        return Source(str(path), _only(step, "one tree", _read_entry(path)))

    def steps() -> list[int]:
        folders.update(now := _steps_in(path))
        return candidates(now, path, step)

    def read_step(number: int) -> Source:
        name = f"step {number} in {path}"
        return Source(name, agreed(lambda: _read_step(path, number, folders[number])))

    return newest_intact(steps, read_step, path, stacklevel + 1)


def _only(step: int | None, what: str, leaves: Leaves) -> Leaves:
    if step is not None:
        raise ValueError(
            f"checkpoint: step={step} of {what}; expected a directory with several "
            "steps. Leave step out."
        )
    return leaves


def arrays_on_host(folder: epath.Path, tree: PyTree = None) -> Leaves:
    """Reads arrays as NumPy arrays by path, whatever devices they were saved from.

    Args:
      folder: an item that Orbax saved.
      tree: the metadata of its arrays, if they have been read already.

    Raises:
      CorruptCheckpointError: if they are damaged.
      OSError: if they cannot be read for another reason.
    """
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def how(leaf: Any) -> ocp.RestoreArgs:
        if not hasattr(leaf, "dtype"):  # a string
            return ocp.RestoreArgs()
        if _tree.is_key(leaf):
            return ocp.ArrayRestoreArgs(sharding=here)
        return ocp.RestoreArgs(restore_type=np.ndarray)

    def read() -> Leaves:
        described = metadata_of(folder) if tree is None else tree
        return _flat(restored(folder, restore_args=jax.tree.map(how, described)))

    return read_or_explain(read)


def _steps_in(path: epath.Path) -> dict[int, str]:
    """Returns the name of each step in a directory; empty if it is a tree itself.

    What else has a number in its name is no step where a manager has written some.

    Raises:
      ValueError: if steps have names of different forms.
    """
    if _is_tree(path):
        return {}
    if ours := steps_in(path):
        return {step: str(step) for step in ours}
    found = [_STEP.fullmatch(child.name) for child in path.iterdir()]
    matches = [match for match in found if match]
    if len(kinds := sorted({match[1] or "" for match in matches})) > 1:
        names = ", ".join(f"`{kind}<number>`" for kind in kinds[:-1])
        raise ValueError(
            f"checkpoint: {path} holds steps with different names, {names} and "
            f"`{kinds[-1]}<number>`; expected one form. Pass the path of the step to "
            "take."
        )
    return {int(match[2]): match[0] for match in matches}


def _read_step(path: epath.Path, step: int, name: str) -> Leaves:
    if name == str(step) and not (path / name).is_file():
        items = read_or_explain(lambda: items_of(path / name))
        if ITEM in items or not items:
            part = jax.process_index(), jax.process_count()
            return arrays_on_host(path / name / ITEM, describe(path, step, part).tree)
    return _read_entry(path / name)


def _read_entry(path: epath.Path) -> Leaves:
    """Reads a file of msgpack, a tree of Orbax, or the only tree in a directory."""
    if path.is_file():
        return _flat(_read_msgpack(path.read_bytes()))
    if _is_tree(path):
        return arrays_on_host(path)
    inside = sorted(child.name for child in path.iterdir() if _is_tree(child))
    if len(inside) == 1:
        return arrays_on_host(path / inside[0])
    what = f"the trees {inside}" if inside else f"{_names(path)}, but no tree"
    raise ValueError(
        f"checkpoint: {path} holds {what}; expected steps such as '300' or "
        "'checkpoint_300', or one tree that Orbax saved. Pass the directory that was "
        "given to the library that saved it, or that of the tree to take."
    )


def _is_tree(path: epath.Path) -> bool:
    return (path / _TREE_FILE).exists()


def _names(path: epath.Path) -> list[str]:
    return sorted(child.name for child in path.iterdir())[:8]


def _read_msgpack(content: bytes) -> PyTree:
    return read_or_explain(lambda: serialization.msgpack_restore(content))


def _of_tree(tree: PyTree) -> Leaves:
    leaves = _flat(tree)
    if not leaves or any(not path or x.dtype == object for path, x in leaves.items()):
        raise TypeError(
            f"checkpoint: cannot read a {type(tree).__name__}; expected a path, a "
            "manager, or a tree of arrays such as a TrainState or a dict."
        )
    return leaves


def _flat(tree: PyTree) -> Leaves:
    flat = ocp.tree.to_flat_dict(tree)
    return {tuple(map(str, path)): _as_numpy(leaf) for path, leaf in flat.items()}


def _as_numpy(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and _tree.is_key(leaf):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)
