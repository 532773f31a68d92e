"""`save`: what the checksums of `flax_amp.checkpoint` add to a save and a restore.

A state of 1 GB (parameters and the two moments of adam) is saved and restored by plain
Orbax calls and by `flax_amp.checkpoint`, in turns. Orbax writes in the background: told
are the time until `save` returns, for which training stands still, and the time until
the files are complete. The least of several times is told, as other programs on the
machine only add to them.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp

from benchmarks.process import new_folder
from benchmarks.request import Request
from benchmarks.show import made_by, markdown_table, write_page
from benchmarks.timing import in_turns
from flax_amp import AmpTrainState, checkpoint

ROUNDS = 9
_SIZES = {"full": 1e9, "tiny": 1e6}
_LEAVES = 100
_HEADER = ["", "save returns s", "files complete s", "restore s"]
Seconds = tuple[float, float, float]


def run(asked: Request) -> None:
    """Writes save.md into the folder of results."""
    state = make_state(_SIZES[asked.size])
    ways = {
        "plain Orbax": functools.partial(_plain, state),
        "flax_amp.checkpoint": functools.partial(_with_checksums, state),
    }
    turns = in_turns([*ways.values()], ROUNDS)
    least = [[*map(min, zip(*found, strict=True))] for found in turns]
    rows = [
        [name, *(f"{a:.3f} ({a / b:.2f})" for a, b in zip(row, least[0], strict=True))]
        for name, row in zip(ways, least, strict=True)
    ]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e9
    text = f"""# Checksums in checkpoints

{made_by()}.
Least times of {ROUNDS} turns, a state of {size:.2f} GB in {3 * _LEAVES} arrays; in
brackets the ratio to plain Orbax. Checksums of the files are listed in the background
before a step is committed; a restore compares them before it reads.

{markdown_table(_HEADER, rows, words=1)}
"""
    write_page(asked.folder / "save.md", text)


def make_state(size: float) -> AmpTrainState:
    """Returns a state of about so many bytes."""
    width = int(size / 3 / 4 / _LEAVES)
    keys = jax.random.split(jax.random.key(0), _LEAVES)
    params = {f"w{i}": jax.random.normal(key, (width,)) for i, key in enumerate(keys)}
    state = AmpTrainState.create(params=params, tx=optax.adam(1e-3))
    # Zeros would be compressed to nothing, and moments do not stay zero.
    adam = state.opt_state.inner_state[0]._replace(mu=params, nu=params)
    inner = (adam, *state.opt_state.inner_state[1:])
    return state.replace(opt_state=state.opt_state._replace(inner_state=inner))


def _plain(state: AmpTrainState) -> Seconds:
    with new_folder() as directory, ocp.CheckpointManager(directory) as manager:
        return _time(
            lambda: manager.save(0, args=ocp.args.StandardSave(state)),
            manager,
            lambda: manager.restore(0, args=ocp.args.StandardRestore(state)),
        )


def _with_checksums(state: AmpTrainState) -> Seconds:
    with new_folder() as directory, checkpoint.manager(directory) as manager:
        return _time(
            lambda: checkpoint.save(manager, state),
            manager,
            lambda: checkpoint.restore(manager, state),
        )


def _time(
    save: Callable[[], Any], manager: ocp.CheckpointManager, restore: Callable[[], Any]
) -> Seconds:
    start = time.perf_counter()
    save()
    returned = time.perf_counter()
    manager.wait_until_finished()
    complete = time.perf_counter()
    jax.block_until_ready(restore().params)
    end = time.perf_counter()
    return returned - start, complete - start, end - complete
