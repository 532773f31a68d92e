"""Reading trees with Orbax, in each process by itself.

Orbax lets all processes wait for each other after each read, and a process that failed
never comes. Nothing here writes.
"""

from typing import Any

import jax
import orbax.checkpoint as ocp


def restored(folder: Any, **how: Any) -> Any:
    """Returns the arrays of a tree that Orbax saved.

    Args:
      folder: the folder of the tree.
      **how: arguments of `orbax.checkpoint.args.PyTreeRestore`.
    """
    options = _alone()
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    with ocp.Checkpointer(handler, multiprocessing_options=options) as reader:
        return reader.restore(folder, args=ocp.args.PyTreeRestore(**how))


def metadata_of(folder: Any) -> Any:
    """Returns Orbax's description of the arrays of a tree, as a tree."""
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=_alone())
    return handler.metadata(folder).tree


def _alone() -> ocp.options.MultiprocessingOptions:
    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me,
        active_processes={me},
        barrier_sync_key_prefix=f"flax_amp_{me}",
    )
