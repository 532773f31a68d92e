"""The arrays of a tree by path: what they are, how Orbax reads them, where they lie.

A path is the one that Orbax gives a leaf: names of fields and dict keys, and numbers of
list items. Orbax lets all processes wait for each other after each read, and they
would wait forever for a process that failed; here each process reads by itself. Nothing
here writes.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from flax_amp import _tree
from flax_amp._training.train_state import AmpTrainState
from flax_amp.checkpoint._errors import explained

T = TypeVar("T")
PyTree = Any
Path = tuple[str, ...]
NumpyLeaves = dict[Path, np.ndarray]


def spec_of(leaf: Any) -> str:
    """Describes an array, a shape or Orbax's metadata: `float32[3]`, `str[]`.

    Of a typed key, it describes the data, which is what lies on disk.
    """
    if not hasattr(leaf, "dtype"):
        return "str[]"
    if _tree.is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def description_of(value: Any) -> str:
    """Describes a value in an error message: `float32[3]`, `a str`."""
    if getattr(value, "is_deleted", bool)():
        return "deleted, its memory was donated"
    if hasattr(value, "dtype"):
        return spec_of(value)
    return f"a {type(value).__name__}"


def path_text(path: Iterable[str]) -> str:
    """Returns a path as the error messages show it."""
    return "/".join(path)


def difference(
    path: Path, saved: Any, wanted: Any, saved_path: Path | None = None
) -> str:
    """Describes how an array on disk differs from its counterpart, with both sides.

    Args:
      path: the path in the target, or on disk if there is no such path in the target.
      saved: the array on disk or what describes it; `None` if there is none.
      wanted: the array of the target; `None` if there is none.
      saved_path: the path on disk.

    Returns:
      A line, or the empty string if shape and dtype are the same.
    """
    there = None if saved is None else spec_of(saved)
    here = None if wanted is None else spec_of(wanted)
    if there == here:
        return ""
    left = f"{there} on disk" if there else "not on disk"
    if there and saved_path and saved_path != path:
        left += f" as {path_text(saved_path)}"
    right = f"{here} in the target" if here else "not in the target"
    return f"{path_text(path)}: {left}, {right}"


def check_state(state: Any, name: str, otherwise: str = "") -> None:
    """Raises a TypeError if a value is no `AmpTrainState`.

    Args:
      state: the value.
      name: what the message calls it.
      otherwise: a sentence to end the message.
    """
    if not isinstance(state, AmpTrainState):
        raise TypeError(
            f"{name} is a {type(state).__name__}; expected an AmpTrainState. Make it "
            f"with AmpTrainState.create, as for a new run.{otherwise}"
        )


# Reading


@explained
def read_tree(folder: Any, metadata: PyTree, like: Mapping[Path, Any]) -> PyTree:
    """Returns the arrays of a tree that Orbax saved, in the structure it has on disk.

    Args:
      folder: the folder of the tree.
      metadata: what `read_metadata` returns for it.
      like: by path, the arrays to whose devices those on disk are read; `None` stands
        for the default device. Where it has no array, or one of NumPy, arrays are read
        into the memory of the host.
    """
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def how(path: Path, leaf: Any) -> ocp.RestoreArgs:
        if not hasattr(leaf, "dtype"):  # a string
            return ocp.RestoreArgs()
        on_host = path not in like or isinstance(like[path], np.ndarray | np.generic)
        if on_host and not _tree.is_key(leaf):  # Orbax makes no NumPy arrays of keys.
            return ocp.RestoreArgs(restore_type=np.ndarray)
        sharding = getattr(like.get(path), "sharding", None)
        return ocp.ArrayRestoreArgs(sharding=sharding or here)

    # Orbax is asked for the structure on disk: another empty dict is no difference.
    leaves = [how(*item) for item in ocp.tree.to_flat_dict(metadata).items()]
    restore_args = jax.tree.unflatten(jax.tree.structure(metadata), leaves)
    options = _without_other_processes()
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    with ocp.Checkpointer(handler, multiprocessing_options=options) as reader:
        return reader.restore(
            folder, args=ocp.args.PyTreeRestore(restore_args=restore_args)
        )


@explained
def read_on_host(folder: Any, metadata: PyTree) -> NumpyLeaves:
    """Reads a tree as NumPy arrays, whatever devices its arrays were saved from."""
    return numpy_leaves(read_tree(folder, metadata, {}))


def numpy_leaves(tree: PyTree) -> NumpyLeaves:
    """Returns the leaves of a tree as NumPy arrays; of typed keys, their data."""
    flat = ocp.tree.to_flat_dict(tree)
    return {
        tuple(map(str, path)): np.asarray(_key_data_or_leaf(x))
        for path, x in flat.items()
    }


@explained
def read_metadata(folder: Any) -> Any:
    """Returns Orbax's description of the arrays of a tree, as a tree."""
    options = _without_other_processes()
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return handler.metadata(folder).tree


def _without_other_processes() -> ocp.options.MultiprocessingOptions:
    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me,
        active_processes={me},
        barrier_sync_key_prefix=f"flax_amp_{me}",
    )


# Targets


def leaves_of_target(target: Any, where: str) -> dict[Path, Any]:
    """Returns the leaves of a target by path, each with a shape and a dtype.

    Raises:
      TypeError: if a leaf has none.
    """
    found = {}
    for path, leaf in ocp.tree.to_flat_dict(target).items():
        if type(leaf) in (bool, int, float, complex):  # np.float64 is a float, too
            leaf = np.asarray(jnp.asarray(leaf))
        if not (path and hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"{where}: {path_text(path) or 'the whole'} of the target is a "
                f"{type(leaf).__name__}; expected arrays and numbers. Pass an "
                "AmpTrainState, a TrainState or a dict of arrays."
            )
        found[path] = leaf
    return found


def replace_leaves(target: T, values: Mapping[Path, Any]) -> T:
    """Returns a target with the given leaves; it keeps the others."""
    leaves = ocp.tree.to_flat_dict(target)
    new = [values.get(path, leaf) for path, leaf in leaves.items()]
    result: T = jax.tree.unflatten(jax.tree.structure(target), new)
    return result


def has_value(leaf: Any) -> bool:
    """Whether a leaf is neither abstract nor was donated."""
    if isinstance(leaf, jax.Array):
        return not leaf.is_deleted()
    return not isinstance(leaf, jax.ShapeDtypeStruct)


def unfit_shardings(wanted: Mapping[Path, Any]) -> list[str]:
    """Returns a line for each leaf whose shape its sharding does not divide."""
    lines = []
    for path, leaf in wanted.items():
        sharding = getattr(leaf, "sharding", None)
        try:
            if sharding is not None:
                sharding.shard_shape(leaf.shape)
        except ValueError:
            lines.append(
                f"{path_text(path)}: {list(leaf.shape)} not to be split by {sharding}"
            )
    return lines


def place(value: np.ndarray, like: Any) -> Any:
    """Copies a NumPy array to the devices of `like`, which may be abstract.

    Where `like` is a typed key, the array is its data. Where it is a Python number or a
    NumPy array, so is the result.
    """
    if isinstance(like, bool | int | float | complex):
        return type(like)(value.item())
    if isinstance(like, np.ndarray | np.generic):
        return np.array(value, like.dtype)
    array: jax.Array
    if _is_committed(like):
        array = jax.make_array_from_callback(
            value.shape, like.sharding, lambda index: value[index]
        )
    else:
        array = jnp.array(value)
    if _tree.is_key(like):
        return jax.random.wrap_key_data(array, impl=_tree.key_impl(like))
    return array


def commit_like(leaf: Any, like: Any) -> Any:
    """Undoes Orbax's commitment to a device where `like` is not committed to one.

    Whether an array is committed is part of what a compiled step is looked up by: the
    step would be compiled a second time after each restore.
    """
    if _is_committed(like):
        return leaf
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct) and not _tree.is_key(like):
        # Nobody else holds this array, so the CPU need not copy it.
        return jax.device_put(np.asarray(leaf))
    return place(np.asarray(_key_data_or_leaf(leaf)), like)


def _key_data_or_leaf(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and _tree.is_key(leaf)
    return jax.random.key_data(leaf) if is_key else leaf


def _is_committed(leaf: Any) -> bool:
    """Whether the devices of an array were chosen, and are not just JAX's default."""
    if isinstance(leaf, jax.Array):
        return leaf.committed
    return getattr(leaf, "sharding", None) is not None
