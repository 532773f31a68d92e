"""Reads trees with Orbax without barriers between processes, and without stray
tracebacks.

Nothing here writes.
"""

import asyncio
import copy
import functools
from collections.abc import Callable, Generator
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
        self._reading: set[Any] = set()

    def get(self, ty: Any) -> Any:
        handler = ocp.type_handlers.get_type_handler(ty)
        if id(handler) not in self._handlers:  # arrays are read together by handler
            mine = copy.copy(handler)
            mine.deserialize = functools.partial(self._read, handler.deserialize)
            mine.metadata = functools.partial(self._read, handler.metadata)
            self._handlers[id(handler)] = mine
        return self._handlers[id(handler)]

    def has(self, ty: Any) -> bool:
        return ocp.type_handlers.has_type_handler(ty)

    def add(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "checkpoint: this reader cannot register a type handler; expected one that "
            "is registered with Orbax: call "
            "orbax.checkpoint.type_handlers.register_type_handler."
        )

    def _read(self, read: Callable[..., Any], *args: Any, **kwargs: Any) -> "_Read":
        return _Read(functools.partial(read, *args, **kwargs), self._reading)


class _Read:
    """What a handler reads; it begins when it is awaited, and may never be.

    Attributes:
      read: begins it.
      reading: the tasks of this event loop that do the same for other handlers.
    """

    def __init__(self, read: Callable[[], Any], reading: set[Any]) -> None:
        self.read, self.reading = read, reading

    def __await__(self) -> Generator[Any, None, Any]:
        return self._finish_others().__await__()

    async def _finish_others(self) -> Any:
        me, before = asyncio.current_task(), asyncio.all_tasks()
        self.reading.add(me)
        try:
            return await self.read()
        except Exception:
            self.reading.discard(me)
            await asyncio.sleep(0)  # the other handlers begin, too
            while (left := asyncio.all_tasks() - before) or self.reading:
                await asyncio.wait(left) if left else await asyncio.sleep(0.001)
            raise
        finally:
            self.reading.discard(me)
