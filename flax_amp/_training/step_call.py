"""The call of a step whose donated state gives its memory to the new state."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from flax_amp import _tree
from flax_amp._training import Array, PyTree
from flax_amp._training.arguments import first_foreign

# The patterns match the beginnings of JAX's errors. The error of a user's callback may
# hold the same words later in its text.
_DELETED = re.compile("Array has been deleted|INVALID_ARGUMENT: .*deleted or donated")
_DONATED = re.compile("(INVALID_ARGUMENT: )?[^:]*(donate the same|previously donated)")
_FOREIGN = re.compile("Error interpreting argument to|.*not a valid JAX type")
_HINT = (
    "To keep an old state, as for early stopping or a teacher, copy the state before "
    "the step (jax.tree.map(jnp.copy, state), or the same with nnx.state(model)), or "
    "make the training step with donate=False."
)


def copy_aliases(donated: PyTree, others: PyTree) -> PyTree:
    """Copies each array that `donated` holds twice, or that `others` holds as well.

    JAX refuses to donate such an array. With several devices, the donation of such an
    array ends the process on CPUs.
    """
    seen = set(map(id, jax.tree.leaves(others)))

    def own(leaf: Any) -> Any:
        leaf = _tree.own(leaf) if id(leaf) in seen else leaf
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, donated)


@contextlib.contextmanager
def naming_arrays(caller: str, **arguments: PyTree) -> Iterator[None]:
    """If JAX refuses an argument of a step, the error names the argument."""
    try:
        yield
    except TypeError as error:
        if not _FOREIGN.match(str(error)):
            raise
        found = (first_foreign(tree, name) for name, tree in arguments.items())
        if not (foreign := next(filter(None, found), "")):
            raise
        raise TypeError(
            f"{caller}: {foreign}; expected arrays and numbers. Leave this value out "
            "of the call, bind the value to the loss with functools.partial, or encode "
            "the value as an integer."
        ) from error
    except (RuntimeError, ValueError) as error:
        is_deleted, is_donated = (x.match(str(error)) for x in (_DELETED, _DONATED))
        if is_deleted:
            for name, argument in arguments.items():
                check_not_deleted(caller, name, argument, error)
        if is_deleted or is_donated:
            raise ValueError(f"{caller}: {error}. {_HINT}") from error
        raise


def check_not_deleted(
    caller: str, name: str, argument: PyTree, cause: Exception | None = None
) -> None:
    """Raises a RuntimeError that names the first deleted array of an argument."""
    deleted = [
        f"{name}{keystr(path)}"
        for path, leaf in tree_leaves_with_path(argument)
        if isinstance(leaf, Array) and not isinstance(leaf, jax.core.Tracer)
        if leaf.is_deleted()
    ]
    if deleted:
        raise RuntimeError(
            f"{caller}: {deleted[0]} was deleted ({len(deleted)} arrays of {name} "
            "were): an earlier step took its memory for the new arrays. Expected the "
            f"arrays that the last step left. {_HINT}"
        ) from cause
