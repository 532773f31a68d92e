"""The arrays of a state by path: their types, their devices, and reading with Orbax.

Orbax gives each leaf a path: names of fields and dict keys, and numbers of list items.
After each read, Orbax makes every process wait for all processes, which would wait
forever for a process that failed. So here each process reads by itself.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from flax_amp import _tree
from flax_amp._training.train_state import AmpTrainState

T = TypeVar("T")
PyTree = Any
Path = tuple[str, ...]
Leaves = dict[Path, Any]


# States: an `AmpTrainState`, or a tuple of NNX objects


def is_nnx(state: Any) -> bool:
    """Whether a state is a tuple of NNX objects, such as `(model, optimizer)`."""
    is_sequence = isinstance(state, tuple | list) and bool(state)
    return is_sequence and all(isinstance(x, nnx.Pytree) for x in state)


def tree_of(state: Any) -> PyTree:
    """Returns the tree that is saved of a state; for NNX objects, their `nnx.state`."""
    return nnx.state(tuple(state)) if is_nnx(state) else state


def as_array(leaf: Any) -> Any:
    """Returns a Python number as an array with JAX's dtype, which Orbax does not use.

    The type is compared, because `np.float64` is a subclass of `float`.
    """
    is_number = type(leaf) in (bool, int, float, complex)
    return np.asarray(jnp.asarray(leaf)) if is_number else leaf


def step_of(state: Any, name: str) -> Any:
    """Returns the step of a state, or raises a TypeError if it is no state."""
    if isinstance(state, AmpTrainState):
        return state.step
    for part in state if is_nnx(state) else ():
        if isinstance(step := getattr(part, "step", None), nnx.Variable):
            return step.get_value()
    raise TypeError(
        f"{name} is a {type(state).__name__}; expected an AmpTrainState, or NNX "
        "objects with an nnx.Optimizer among them: (model, optimizer). Save other "
        "trees with manager.save(step, args=orbax.checkpoint.args.StandardSave(tree)), "
        "and read a part of a state with checkpoint.migrate."
    )


def replace_leaves(target: T, values: Mapping[Path, Any]) -> T:
    """Returns a state with new leaves; NNX objects get the leaves in place."""
    tree = tree_of(target)
    leaves = ocp.tree.to_flat_dict(tree)
    new = [values.get(path, leaf) for path, leaf in leaves.items()]
    result: Any = jax.tree.unflatten(jax.tree.structure(tree), new)
    if not is_nnx(target):
        return result  # type: ignore[no-any-return]
    nnx.update(tuple(target), result)  # type: ignore[arg-type]
    return target


def scaler_in(leaves: Iterable[Path]) -> dict[str, Path]:
    """Returns the paths of a scaler by key: of a state, or of an NNX object in a state.

    `leaves` are the paths of the leaves of the state.
    """
    found = {}
    for path in leaves:
        names = [name for name in path if name != "value"]  # of NNX's variables
        if names[-2:-1] == ["scaler"] and (len(names) == 2 or names[0].isdigit()):
            found[names[-1]] = path
    return found


def both_move_or_neither(saved: Mapping[str, Any], target: Mapping[str, Any]) -> bool:
    """Whether both scales move, or none moves; true if `target` holds no value.

    A scaler of another program that has no factor moves.
    """
    abstract = jax.ShapeDtypeStruct((), "float32")
    own, other = (of.get("adjust_factor", abstract) for of in (target, saved))
    fixed = has_value(other) and bool(np.all(other == 1))
    return not has_value(own) or bool(np.all(own == 1)) == fixed


def has_value(leaf: Any) -> bool:
    """Whether a leaf is neither abstract nor was donated."""
    if isinstance(leaf, jax.Array):
        return not leaf.is_deleted()
    return not isinstance(leaf, jax.ShapeDtypeStruct)


def difference(name: str, saved: Any, wanted: Any) -> str:
    """Describes how an array on disk differs from the target's; `None` is no array."""
    there, here = ("not" if x is None else _description(x) for x in (saved, wanted))
    if there == here:
        return ""
    return f"{name}: {there} on disk, {here} in the target"


def _description(value: Any) -> str:
    if not hasattr(value, "dtype"):
        return f"a {type(value).__name__}"
    if _tree.is_key(value):  # Orbax writes the data of keys.
        value = jax.eval_shape(jax.random.key_data, value)
    return f"{np.dtype(value.dtype).name}{list(value.shape)}"


# Reading


def _reader() -> ocp.Checkpointer:
    me = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=me,
        active_processes={me},
        barrier_sync_key_prefix=f"flax_amp_{me}",
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def read_metadata(folder: Any) -> Any:
    """Returns Orbax's description of the arrays of a tree, as a tree."""
    with _reader() as reader:
        return reader.handler.metadata(folder).tree


def read_tree(folder: Any, metadata: PyTree, like: Mapping[Path, Any]) -> Leaves:
    """Returns the arrays of a tree that Orbax saved, by path.

    `metadata` is Orbax's description of the tree. An array is read to the devices of
    the array in `like` at the same path. Where `like` has no array, or a NumPy array,
    the array is read into the memory of the host.
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

    # Orbax is asked for the structure on disk: an empty dict that only the target or
    # only the disk has is no difference.
    leaves = ocp.tree.to_flat_dict(metadata)
    args = jax.tree.unflatten(
        jax.tree.structure(metadata), [how(*item) for item in leaves.items()]
    )
    with _reader() as reader:
        read = reader.restore(folder, args=ocp.args.PyTreeRestore(restore_args=args))
    return dict(zip(leaves, jax.tree.leaves(read), strict=True))


def numpy_leaves(leaves: Leaves) -> Leaves:
    """Returns leaves as NumPy arrays; for typed keys, their data."""
    return {
        path: np.asarray(jax.random.key_data(x) if _tree.is_key(x) else x)
        for path, x in leaves.items()
    }


# Targets


def leaves_of_target(target: Any, where: str) -> Leaves:
    """Returns the leaves of a target by path, each with a shape and a dtype."""
    found = {}
    for path, leaf in ocp.tree.to_flat_dict(tree_of(target)).items():
        leaf = as_array(leaf)
        if not (path and hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"{where}: {'/'.join(path) or 'the whole'} of the target is a "
                f"{type(leaf).__name__}; expected arrays and numbers."
            )
        if getattr(leaf, "sharding", None) is not None:
            # JAX raises an error if the sharding does not fit the shape.
            leaf.sharding.shard_shape(leaf.shape)
        found[path] = leaf
    return found


def place(value: Any, like: Any) -> Any:
    """Returns an array in the form of `like`: on its devices, or as a NumPy array.

    `value` is an array that Orbax has read to these devices, or a NumPy array, which
    for typed keys holds their data. Arrays that Orbax reads are committed. JAX looks up
    a compiled step by its arguments, and also by whether they are committed: with a
    committed array for an uncommitted array, the step would be compiled a second time
    after each restore.
    """
    if isinstance(like, np.ndarray | np.generic):
        return np.array(value, like.dtype)
    has_sharding = getattr(like, "sharding", None) is not None
    committed = like.committed if isinstance(like, jax.Array) else has_sharding
    if isinstance(value, jax.Array) and committed:
        return value
    if _tree.is_key(value):
        value = jax.random.key_data(value)
    value = np.asarray(value)
    # No other code holds these arrays, so the CPU need not copy them.
    array: jax.Array
    if committed:
        array = jax.make_array_from_callback(
            value.shape, like.sharding, lambda at: value[at]
        )
    else:
        array = jax.device_put(value)
    if not _tree.is_key(like):
        return array
    return jax.random.wrap_key_data(array, impl=_tree.key_impl(like))
