"""A compiled step that says what is wrong when it is given a state twice."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

PyTree = Any


class Compiled:
    """What `jax.jit` returns, with a clear error for arrays that were donated."""

    def __init__(self, jitted: Callable[..., Any]) -> None:
        functools.update_wrapper(self, jitted)
        self._jitted = jitted

    def __call__(self, state: PyTree, batch: PyTree) -> Any:
        with explaining_donation(self.__name__, "state", state):
            return self._jitted(state, batch)

    def __getattr__(self, name: str) -> Any:
        """Returns `lower`, `trace` and whatever else a jitted function has."""
        if name == "_jitted":  # of an object that is still being copied
            raise AttributeError(name)
        return getattr(self._jitted, name)


@contextlib.contextmanager
def explaining_donation(where: str, name: str, given: PyTree) -> Iterator[None]:
    """Names the first array of `given` that was deleted, if a call fails for that."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        gone = [
            jax.tree_util.keystr(path)
            for path, leaf in jax.tree_util.tree_leaves_with_path(given)
            if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
            if leaf.is_deleted()
        ]
        if not gone or "deleted" not in str(error):
            raise
        raise RuntimeError(
            f"{where}: {name}{gone[0]} was deleted ({len(gone)} arrays of it were): an "
            f"earlier step took its memory for the new {name}. Expected the {name} "
            "that the last step returned. Go on with that, or make the training step "
            "with donate=False."
        ) from error
