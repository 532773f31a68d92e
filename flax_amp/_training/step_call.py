"""The call of a step, and the array to blame if it fails.

A step donates its state: the new state takes over the memory of the old one, which is
then deleted. JAX reports misuse by the position of a flattened argument only. Nothing
here walks over the leaves of what the last step left, unless the call has failed.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from flax_amp._training.arguments import Array, PyTree


class Known:
    """Remembers what the last call of a step left, without keeping it alive."""

    def __init__(self) -> None:
        self._last: Callable[[], Any] = lambda: None

    def __contains__(self, value: object) -> bool:
        return self._last() is value

    def set(self, value: Any) -> None:
        """Remembers a value."""
        self._last = weakref.ref(value)


def call_step(
    call: Callable[[], Any],
    caller: str,
    arguments: Callable[[], tuple[dict[str, PyTree], dict[str, PyTree]]],
    look_first: bool,
) -> Any:
    """Calls a step; if it fails, names an array that is deleted or passed twice.

    `arguments` returns what the step donates and its other arguments, by name. With
    several devices, each of them refuses an array that is passed twice by itself, which
    ends the process on CPUs: `look_first` says that the step donates, and what is not
    what the last step left.
    """
    if look_first:
        check_distinct(caller, *arguments())
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        donated, others = arguments()
        if "deleted" in str(error):
            for name, argument in (donated | others).items():
                check_not_deleted(caller, name, argument, error)
        if "donate" in str(error):
            check_distinct(caller, donated, others)
        raise


def check_distinct(
    caller: str, donated: Mapping[str, PyTree], others: Mapping[str, PyTree]
) -> None:
    """Raises a ValueError if a donated array is a second time among the arguments."""
    leaves = jax.tree.leaves((donated, others))
    if len(set(map(id, leaves))) == len(leaves):  # nearly always, and no path is made
        return
    paths: dict[int, str] = {}
    for arguments in (donated, others):
        for path, array in _arrays(arguments):
            if first := paths.get(id(array)):
                raise ValueError(
                    f"{caller}: {first} and {path} are the same array; expected two, "
                    "because the step donates the memory of the old ones to the new "
                    "ones. Copy one of them, jax.tree.map(jnp.copy, ...), or make the "
                    "training step with donate=False."
                )
            # Two arguments that are only read may be one array.
            if arguments is donated:
                paths[id(array)] = path


def check_not_deleted(
    caller: str, name: str, argument: PyTree, cause: Exception | None = None
) -> None:
    """Raises a RuntimeError that names the first deleted array of an argument."""
    arrays = _arrays({name: argument})
    if deleted := [path for path, array in arrays if array.is_deleted()]:
        raise RuntimeError(
            f"{caller}: {deleted[0]} was deleted ({len(deleted)} arrays of {name} "
            "were): an earlier step took its memory for the new one. Expected what the "
            "last step left. To keep an old state, as for early stopping or a teacher, "
            "copy it before the step (jax.tree.map(jnp.copy, state), or the same with "
            "nnx.state(model)), or make the training step with donate=False."
        ) from cause


def _arrays(arguments: Mapping[str, PyTree]) -> Iterator[tuple[str, Array]]:
    """Yields each array that is not traced, with its path."""
    for name, tree in arguments.items():
        for path, leaf in tree_leaves_with_path(tree):
            if isinstance(leaf, Array) and not isinstance(leaf, jax.core.Tracer):
                yield f"{name}{keystr(path)}", leaf
