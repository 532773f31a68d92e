"""Every kind of checkpoint that a Flax program leaves behind, as a flat dict of arrays.

    run/            directory of an `orbax.checkpoint.CheckpointManager`
      300/default/    a state; `migrate` takes an item of another name too
    model/          what `StandardCheckpointer.save` or `PyTreeCheckpointer.save` wrote
    checkpoint_300  of `flax.training.checkpoints`: a file of msgpack, or a directory
    any tree        what else can be read into memory

Paths are those of Orbax: names of dict keys and fields, numbers of list items.
"""

import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import serialization

from flax_amp._integrity import CorruptCheckpointError, check_arrays
from flax_amp._layout import Path, is_key
from flax_amp._steps import (
    ITEM,
    METRICS,
    agreed,
    alone,
    candidates,
    describe,
    finish_saving,
    newest_intact,
    open_reader,
    reason_of,
)

PyTree = Any

_TREE_FILE = "_METADATA"  # Orbax describes the arrays of a tree in it
_LEGACY = re.compile(r"checkpoint_(\d+)")


class Source(NamedTuple):
    """What a checkpoint holds, as NumPy arrays; of a typed key, its data."""

    name: str
    leaves: dict[Path, np.ndarray]


def read(source: Any, step: int | None, stacklevel: int) -> Source:
    """Reads a checkpoint of any kind into the memory of the host.

    Args:
      source: a path, a manager, or a tree.
      step: which one where there are several; the newest intact by default.
      stacklevel: for the warning about damaged steps.

    Raises:
      FileNotFoundError: if there is no such checkpoint.
      ValueError: if there is one, but none of these kinds, or a newer version wrote it.
      CorruptCheckpointError: if it is damaged.
    """
    if not isinstance(source, str | os.PathLike | ocp.CheckpointManager):
        return Source("the tree", _flat(source))
    path = finish_saving(source)
    if not path.exists():
        raise FileNotFoundError(
            f"checkpoint: {path} does not exist; expected a file or a directory that "
            "Orbax or Flax saved to. Check the path."
        )
    if path.is_file():
        return Source(str(path), _flat(_read_msgpack(path)))
    if (path / _TREE_FILE).exists():
        return Source(str(path), _flat(read_on_host(path)))
    steps, attempt = _steps_in(path, step)

    def read_step(number: int) -> Source:
        read = agreed(lambda: _flat(attempt(number)))
        return Source(f"step {number} in {path}", read)

    return newest_intact(steps, read_step, path, stacklevel + 1)


def read_on_host(folder: epath.Path, tree: PyTree = None) -> dict[str, Any]:
    """Reads arrays as NumPy arrays, whatever devices they were saved from.

    Args:
      folder: an item that Orbax saved.
      tree: the metadata of its arrays, if they have been read already.

    Raises:
      CorruptCheckpointError: if they cannot be read.
    """
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def how(leaf: Any) -> ocp.RestoreArgs:
        if is_key(leaf):
            return ocp.ArrayRestoreArgs(sharding=here)
        return ocp.RestoreArgs(restore_type=np.ndarray)

    try:
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone())
        with ocp.Checkpointer(handler, multiprocessing_options=alone()) as checkpointer:
            if tree is None:
                tree = checkpointer.metadata(folder).item_metadata.tree
            return checkpointer.restore(folder, restore_args=jax.tree.map(how, tree))
    except Exception as error:  # Orbax raises whatever its parts raise
        raise CorruptCheckpointError(reason_of(error)) from error


def _steps_in(
    path: epath.Path, step: int | None
) -> tuple[list[int], Callable[[int], PyTree]]:
    """Returns the steps in a directory to try, and how to read one of them."""
    names = {child.name for child in path.iterdir()}
    if legacy := {int(m[1]): m[0] for m in map(_LEGACY.fullmatch, names) if m}:
        steps = candidates(legacy, path, step)
        return steps, lambda number: _read_legacy(path / legacy[number])
    if not any(map(str.isdecimal, names)):
        raise ValueError(
            f"checkpoint: {path} holds {sorted(names)[:8]}; expected steps such as "
            "'300' or 'checkpoint_300', or a tree that Orbax saved. Pass the directory "
            "that was given to the library that saved it, and step= to choose one."
        )
    with open_reader(path) as reader:
        steps = candidates(reader.all_steps(), path, step)
    return steps, lambda number: _read_step(path, number)


def _read_step(path: epath.Path, step: int) -> PyTree:
    folder = path / str(step)
    items = {child.name for child in folder.iterdir() if child.is_dir()} - {METRICS}
    if ITEM not in items and items:
        trees = sorted(x for x in items if (folder / x / _TREE_FILE).exists())
        if len(trees) != 1:
            raise ValueError(
                f"checkpoint: step {step} in {path} holds the items {sorted(items)}; "
                f"expected one that is a tree of arrays. Pass the directory of the one "
                "to take."
            )
        return read_on_host(folder / trees[0])
    with open_reader(path) as reader:
        tree, record = describe(reader, path, step)
    read = read_on_host(folder / ITEM, tree)
    if record is not None:
        check_arrays(record, read)
    return read


def _read_legacy(path: epath.Path) -> PyTree:
    return _read_msgpack(path) if path.is_file() else read_on_host(path)


def _read_msgpack(path: epath.Path) -> PyTree:
    try:
        return serialization.msgpack_restore(path.read_bytes())
    except Exception as error:  # msgpack's own, and whatever arrays make of bytes
        raise CorruptCheckpointError(f"{path.name}: {reason_of(error)}") from error


def _flat(tree: PyTree) -> dict[Path, np.ndarray]:
    flat = ocp.tree.to_flat_dict(tree)
    return {tuple(map(str, path)): _as_numpy(leaf) for path, leaf in flat.items()}


def _as_numpy(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and is_key(leaf):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)
