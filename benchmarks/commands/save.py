"""`save`: what the checksums of `flax_amp.checkpoint` add to a save and a restore.

A state of 1 GB (parameters and the two moments of adam) is saved and restored by plain
Orbax calls and by `flax_amp.checkpoint`, in turns. Orbax writes in the background: told
are the time until `save` returns, for which training stands still, and the time until
the files are complete. The least of several times is told, as other programs on the
machine only add to them.
"""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp

from benchmarks import environment
from benchmarks.request import Request
from benchmarks.show import markdown_table
from flax_amp import AmpTrainState, checkpoint

ROUNDS = 9
_SIZES = {"full": 1e9, "tiny": 1e6}
_LEAVES = 100
_HEADER = ["", "save returns s", "files complete s", "restore s"]
Seconds = tuple[float, float, float]


def run(asked: Request) -> None:
    """Writes save.md into the folder of results."""
    state = make_state(_SIZES[asked.size])
    ways = {"plain Orbax": _plain, "flax_amp.checkpoint": _with_checksums}
    found: dict[str, list[Seconds]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):  # the first one compiles and is left out
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as directory:
                seconds = way(directory, state)
            if turn:
                found[name].append(seconds)
    least = {
        name: [min(column) for column in zip(*rows, strict=True)]
        for name, rows in found.items()
    }
    plain = least["plain Orbax"]
    rows = [
        [name, *(f"{a:.3f} ({a / b:.2f})" for a, b in zip(row, plain, strict=True))]
        for name, row in least.items()
    ]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e9
    text = f"""# Checksums in checkpoints

Made by `{environment.command_line()}`, {environment.machine()}, JAX {jax.__version__}.
Least times of {ROUNDS} turns, a state of {size:.2f} GB in {3 * _LEAVES} arrays; in
brackets the ratio to plain Orbax. Checksums of the files are listed in the background
before a step is committed; a restore compares them before it reads.

{markdown_table(_HEADER, rows, words=1)}
"""
    path = asked.folder / "save.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text)


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


def _plain(directory: str, state: AmpTrainState) -> Seconds:
    with ocp.CheckpointManager(directory) as manager:
        return _time(
            lambda: manager.save(0, args=ocp.args.StandardSave(state)),
            manager,
            lambda: manager.restore(0, args=ocp.args.StandardRestore(state)),
        )


def _with_checksums(directory: str, state: AmpTrainState) -> Seconds:
    with checkpoint.manager(directory) as manager:
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
