"""A compiled step that explains which donated arrays were used wrongly.

A step donates its state: the new state takes over the memory of the old one, which is
then deleted. JAX reports misuse by the position of a flattened argument; the errors
here name the path in the state and say what to do.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

from flax_amp._training.aliases import Array, Batch, PyTree

_Named = Mapping[str, PyTree]


class JittedStep:
    """A jitted step whose errors name arrays that were deleted or donated twice."""

    def __init__(self, jitted: Callable[..., Any], *, donates: bool) -> None:
        functools.update_wrapper(self, jitted)
        self._jitted, self._donates = jitted, donates

    def __call__(self, state: PyTree, batch: Batch) -> Any:
        with explain_donation(
            self.__name__, lambda: {"state": state}, lambda: {"batch": batch}
        ):
            if self._donates:
                _check_no_leaf_twice(state, batch)
            return self._jitted(state, batch)

    def __getattr__(self, name: str) -> Any:
        """Returns `lower`, `trace` and every other attribute of a jitted function."""
        if name == "_jitted":  # the object is still being copied, and has no attributes
            raise AttributeError(name)
        return getattr(self._jitted, name)


def _check_no_leaf_twice(state: PyTree, batch: Batch) -> None:
    """Raises the error of JAX for arrays that would be donated twice.

    JAX itself finds them when the step starts. On several CPU devices, it crashes.
    """
    leaves = jax.tree.leaves((state, batch))
    if len(set(map(id, leaves))) < len(leaves) and _shared_memory(
        {"state": state}, {"batch": batch}
    ):
        raise ValueError("Attempt to donate the same buffer twice.")


@contextlib.contextmanager
def explain_donation(
    caller: str, donated: Callable[[], _Named], others: Callable[[], _Named]
) -> Iterator[None]:
    """Explains errors of a call that donates arrays.

    Args:
      caller: the function that the messages name.
      donated: returns the donated arguments, by name. The user gets a new value of the
        first one back.
      others: returns the other arguments, by name.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        name, tree = next(iter(donated().items()))
        deleted = [path for path, leaf in _arrays({name: tree}) if leaf.is_deleted()]
        if deleted and "deleted" in str(error):
            raise RuntimeError(
                f"{caller}: {deleted[0]} was deleted ({len(deleted)} arrays of it "
                f"were): an earlier step took its memory for the new {name}. Expected "
                f"the {name} that the last step returned. Go on with that, or make the "
                "training step with donate=False."
            ) from error
        if "donate" in str(error) and (shared := _shared_memory(donated(), others())):
            raise ValueError(
                f"{caller}: {' and '.join(shared)} are the same array; expected two "
                "arrays, because the step donates the memory of the old ones to the "
                "new ones. Copy one of them with jnp.copy, or make the training step "
                "with donate=False."
            ) from error
        raise


def _arrays(arguments: _Named) -> Iterator[tuple[str, Array]]:
    """Yields each array on a device, with its path."""
    for name, tree in arguments.items():
        for path, leaf in tree_leaves_with_path(tree):
            if isinstance(leaf, Array) and not isinstance(leaf, jax.core.Tracer):
                yield f"{name}{keystr(path)}", leaf


def _shared_memory(donated: _Named, others: _Named) -> tuple[str, str] | None:
    """Returns the paths of a donated array and of another one in the same memory."""
    seen: dict[tuple[Any, int], str] = {}
    for arguments in (donated, others):
        for path, array in _arrays(arguments):
            for place in _memory(array):
                first = seen.get(place, path)
                if first != path:
                    return first, path
                if arguments is donated:
                    seen[place] = path
    return None


def _memory(array: Array) -> list[tuple[Any, int]]:
    """Returns the device and the address of each part of an array."""
    if array.is_deleted() or not array.size:
        return []
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return [(None, id(array))]  # JAX does not show the address of a key
    shards = array.addressable_shards
    return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in shards]
