"""Orbax's reader of trees: alone in its process, and quiet where it fails.

Nothing here writes.
"""

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any

import jax
import orbax.checkpoint as ocp


def restored(folder: Any, **how: Any) -> Any:
    """Returns the arrays of a tree that Orbax saved, without waiting for the others.

    Orbax lets all processes wait for each other after each read, and one that failed
    never comes.

    Args:
      folder: of the tree.
      **how: arguments of `orbax.checkpoint.args.PyTreeRestore`.
    """
    options = _alone()
    with ocp.Checkpointer(_handler(options), multiprocessing_options=options) as reader:
        return reader.restore(folder, args=ocp.args.PyTreeRestore(**how))


def metadata_of(folder: Any) -> Any:
    """Returns Orbax's description of the arrays of a tree, as a tree."""
    return _handler(_alone()).metadata(folder).tree


def _alone() -> ocp.options.MultiprocessingOptions:
    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me,
        active_processes={me},
        barrier_sync_key_prefix=f"flax_amp_{me}",
    )


def _handler(
    options: ocp.options.MultiprocessingOptions,
) -> ocp.PyTreeCheckpointHandler:
    return ocp.PyTreeCheckpointHandler(
        multiprocessing_options=options, type_handler_registry=_Handlers()
    )


class _Handlers(ocp.type_handlers.TypeHandlerRegistry):
    """The handlers of Orbax, each of which ends all of its reads before it fails.

    Of the arrays that Orbax reads at the same time the first one that fails ends the
    event loop. The others go on in threads of TensorStore, and each prints a traceback
    of its own when it finds the loop closed.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}

    def get(self, ty: Any) -> Any:
        handler = ocp.type_handlers.get_type_handler(ty)
        if id(handler) not in self._handlers:  # arrays are read together by handler
            mine = copy.copy(handler)
            mine.deserialize = _to_the_end(handler.deserialize)
            mine.metadata = _to_the_end(handler.metadata)
            self._handlers[id(handler)] = mine
        return self._handlers[id(handler)]

    def has(self, ty: Any) -> bool:
        return ocp.type_handlers.has_type_handler(ty)

    def add(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("checkpoint: handlers are registered with Orbax")


def _to_the_end(read: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def deserialize(*args: Any, **kwargs: Any) -> Any:
        others = asyncio.all_tasks()
        try:
            return await read(*args, **kwargs)
        except Exception:
            while left := asyncio.all_tasks() - others:
                await asyncio.wait(left)
            raise

    return deserialize
