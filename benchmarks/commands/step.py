"""`step`: what Python adds to each call of a training step.

While an accelerator computes, Python has to be done with the next step.
"""

import contextlib
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_amp
from benchmarks.request import Request, in_turns
from benchmarks.results import made_by
from benchmarks.show import markdown_table, write_page
from benchmarks.variants import Guarded, guarded_step

PyTree = Any

LAYERS = (3, 25)  # 27 and 159 leaves with Adam
CALLS = 20  # in a burst
DEVICES = (1, 8)  # this processor counts as so many
_WIDTH = 8


def run(asked: Request, rounds: int = 100) -> None:
    """Writes step.md into the folder of results."""
    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):  # JAX runs already, with as many devices
        jax.config.update("jax_num_cpu_devices", max(DEVICES))
    rows = [row for n in DEVICES for x in LAYERS for row in _calls(x, n, rounds)]
    text = f"""# What `make_train_step` adds to a step by hand

{made_by()}.

Twice the same step with Adam, whose loss computes in bfloat16 under `flax_amp.amp`:
with a loss scale, one decision from the loss and the square norm of the gradients, one
select and three counters, by hand; and `make_train_step`. What an accelerator computes
in the two, `guarded_bf16` and `amp_step_bf16`, is among [all figures](README.md). Here
an MLP that is {_WIDTH} wide computes next to nothing. Its state lies on each device,
its batch is split. Processor time of the calling thread, the least of the bursts.

{markdown_table(["step", "devices", "leaves", "µs", "to by hand"], rows, words=1)}
"""
    write_page(asked.folder / "step.md", text)


def _loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
    x = batch["x"]
    for name in sorted(params):
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
    return ((x - batch["y"]) ** 2).mean()


def _ways(params: PyTree) -> dict[str, tuple[Any, PyTree]]:
    """Returns each step with its first state, which it donates."""
    tx, lowered = optax.adam(1e-3), flax_amp.amp(_loss_fn)

    def with_variables(params: PyTree, variables: PyTree, batch: PyTree) -> Any:
        return lowered(params, batch), variables

    by_hand = functools.partial(guarded_step, with_variables)
    return {
        "by hand": (
            jax.jit(by_hand, donate_argnums=0),
            Guarded.new(params, {}, tx),
        ),
        "`make_train_step`": (
            flax_amp.make_train_step(_loss_fn),
            flax_amp.AmpTrainState.create(params=params, tx=tx),
        ),
    }


def _calls(layers: int, devices: int, rounds: int) -> list[list[str]]:
    """Returns a row for each step: what a call of it costs, and its ratio."""
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    everywhere, split = (NamedSharding(mesh, P(*axes)) for axes in ((), ("data",)))
    kernel, bias = jnp.eye(_WIDTH), jnp.zeros(_WIDTH)
    params = {f"{i:02}": {"kernel": kernel, "bias": bias} for i in range(layers)}
    batch = {"x": jnp.ones((16, _WIDTH)), "y": jnp.zeros((16, _WIDTH))}
    batch = jax.device_put(batch, split)
    ways = {
        name: (step, jax.device_put(jax.tree.map(jnp.array, state), everywhere))
        for name, (step, state) in _ways(params).items()
    }
    gc.freeze()  # a full collection would fall into some bursts and not into others
    bursts = [_burst(*way, batch) for way in ways.values()]
    us = [min(found) * 1e6 for found in in_turns(bursts, rounds)]
    leaves = [len(jax.tree.leaves(state)) for _, state in ways.values()]
    return [
        [name, str(devices), str(count), f"{each:.0f}", f"{each / us[0]:.2f}"]
        for name, count, each in zip(ways, leaves, us, strict=True)
    ]


def _burst(
    step: Callable[..., Any], state: PyTree, batch: PyTree
) -> Callable[[], float]:
    """Returns a function that gives the seconds of a call, from a burst of them."""

    def run() -> float:
        nonlocal state
        begin = time.thread_time()
        for _ in range(CALLS):
            state, _ = step(state, batch)
        seconds = (time.thread_time() - begin) / CALLS
        jax.block_until_ready(state)
        return seconds

    return run
