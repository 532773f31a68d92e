"""`step`: what `make_train_step` adds to the same step by hand.

Whole steps: their time on this processor, the bytes that XLA accesses, and its estimate
for TPUs. Then what Python adds to each call: while an accelerator computes, Python has
to be done with the next one.
"""

import contextlib
import functools
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flax_amp
from benchmarks import hlo
from benchmarks.commands import compiled
from benchmarks.models import problem
from benchmarks.request import Request
from benchmarks.show import made_by, markdown_table, write_page
from benchmarks.timing import Running, in_turns

PyTree = Any

LAYERS = (3, 25)  # 20 and 152 leaves with Adam, and 7 of the guard
CALLS = 20  # in a burst
DEVICES = (1, 8)  # this processor counts as so many


class Guarded(TrainState):
    """What a loop keeps that guards its gradients by hand, as flax_amp does."""

    scaler: PyTree
    in_a_row: jax.Array
    total: jax.Array
    last_finite: jax.Array


class _Task(NamedTuple):
    name: str
    loss: Callable[[PyTree, PyTree], jax.Array]
    params: PyTree
    batch: PyTree


def plain(loss: Any, state: Any, batch: PyTree) -> tuple[Any, PyTree]:
    """A step without any guard."""
    value, grads = jax.value_and_grad(loss)(state.params, batch)
    norm = optax.tree.norm(grads)
    return state.apply_gradients(grads=grads), {"loss": value, "grad_norm": norm}


def guarded(loss: Any, state: Any, batch: PyTree) -> tuple[Any, PyTree]:
    """A step with a scale, one decision, one select and the counters of skips."""
    scale = state.scaler["scaler"]

    def scaled(params: PyTree) -> tuple[jax.Array, jax.Array]:
        value = loss(params, batch)
        return value * scale, value

    grads, value = jax.grad(scaled, has_aux=True)(state.params)
    grads = jax.tree.map(lambda g: g * (1 / scale), grads)
    square = optax.tree.norm(grads, squared=True)
    forward, backward = jnp.isfinite(value), jnp.isfinite(square)
    finite = forward & backward
    new = state.apply_gradients(grads=grads)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state).replace(
        step=new.step,
        scaler=flax_amp.update_scaler(state.scaler, backward, loss_finite=forward),
        in_a_row=jnp.where(finite, 0, state.in_a_row + 1),
        total=jnp.where(finite, state.total, state.total + 1),
        last_finite=finite,
    )
    told = {"loss": value, "grad_norm": jnp.sqrt(square), "grads_finite": finite}
    told |= {"scaler": new.scaler["scaler"], "skipped_total": new.total}
    return new, told


def run(asked: Request, rounds: int) -> None:
    """Writes step.md into the folder of results."""
    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):  # JAX runs already, with as many devices
        jax.config.update("jax_num_cpu_devices", max(DEVICES))
    has_tpu = importlib.util.find_spec("libtpu") is not None
    targets = ("v5e", "tpu7x") if has_tpu else ()
    tasks = list(_tasks(asked.size))
    wholes = [row for task in tasks for row in _whole(task, targets, rounds // 5)]
    header = ["program", "step", "ms", *(f"{t}, Mcycles" for t in targets), "GB"]
    calls = [row for n in DEVICES for x in LAYERS for row in _calls(x, n, rounds)]
    text = f"""# What `make_train_step` adds to a step by hand

{made_by()}.

Three times the same step with Adam, whose loss computes in bfloat16 under
`flax_amp.amp`: without any guard; with a loss scale, one decision from the loss and the
square norm of the gradients, one select and three counters, by hand; and
`make_train_step`. The medians of {rounds // 5} turns on this processor, XLA's estimates
for TPUs, and the bytes that XLA accesses on this processor. In brackets: to the guarded
step by hand.

{markdown_table(header, wholes)}

The same in Python: an MLP of {" and ".join(map(str, LAYERS))} layers, 8 wide, computes
next to nothing. Its state lies on each device, its batch is split. Processor time of
the calling thread for a call, in bursts of {CALLS}, in turns; the least of the bursts.

{markdown_table(["step", "devices", "leaves", "µs", "to guarded"], calls, words=1)}
"""
    write_page(asked.folder / "step.md", text)


def _tasks(size: str) -> Iterator[_Task]:
    for layers, width in ((2, 16),) if size == "tiny" else ((16, 512), (3, 4096)):
        task = _mlp(layers, width)
        count = sum(x.size for x in jax.tree.leaves(task.params)) / 1e6
        yield task._replace(name=f"MLP, {count:.2g} M parameters, batch 16")
    vit = problem("vit_s16", size)
    params = vit.init(jax.random.key(0))["params"]
    batch = jax.tree.map(lambda x: x[:16], vit.batch(jax.random.key(1)))
    yield _Task("ViT, batch 16", lambda p, b: vit.loss(p, {}, b)[0], params, batch)


def _mlp(layers: int, width: int) -> _Task:
    names = [f"layer_{i:02}" for i in range(layers)]
    kernel = jax.random.normal(jax.random.key(0), (width, width)) / width**0.5
    params = {name: {"kernel": kernel, "bias": jnp.zeros(width)} for name in names}
    batch = {"x": jnp.ones((16, width)), "y": jnp.zeros((16, width))}

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        x = batch["x"]
        for name in names:
            x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
        return ((x - batch["y"]) ** 2).mean()

    return _Task("", loss_fn, params, batch)


def _ways(task: _Task, jit: bool) -> dict[str, tuple[Any, PyTree]]:
    """Returns each step with its first state, which it may donate."""
    tx = optax.adam(1e-3)
    lowered = flax_amp.amp(task.loss)

    def start(cls: Any, **more: Any) -> PyTree:
        state = cls.create(apply_fn=None, params=task.params, tx=tx, **more)
        return jax.tree.map(jnp.array, state)

    def by_hand(step: Any) -> Any:
        step = functools.partial(step, lowered)
        return jax.jit(step, donate_argnums=0) if jit else step

    guard: Any = dict(in_a_row=jnp.int32(0), total=jnp.int32(0))
    guard |= dict(scaler=flax_amp.no_scaler(), last_finite=jnp.array(True))
    return {
        "plain, by hand": (by_hand(plain), start(TrainState)),
        "guarded, by hand": (by_hand(guarded), start(Guarded, **guard)),
        "`make_train_step`": (
            flax_amp.make_train_step(task.loss, jit=jit),
            start(flax_amp.AmpTrainState),
        ),
    }


def _whole(task: _Task, targets: tuple[str, ...], rounds: int) -> list[list[str]]:
    ways = _ways(task, jit=False)
    cycles = [
        [_cycles(*way, task.batch, compiled.tpu_devices(t)[0]) for way in ways.values()]
        for t in targets
    ]
    steps = [Running(*way, task.batch) for way in ways.values()]
    times = in_turns([step.seconds for step in steps], rounds)
    ms = [statistics.median(found) * 1e3 for found in times]
    gb = [hlo.measure(step.compiled)["gb_accessed"] for step in steps]
    figures = [ms, *cycles, gb]
    cells = [[f"{x:.3g} ({x / of[1]:.3f})" for x in of] for of in figures]
    return [[task.name, name, *row] for name, *row in zip(ways, *cells, strict=True)]


def _cycles(step: Any, state: PyTree, batch: PyTree, device: jax.Device) -> float:
    shapes = jax.eval_shape(lambda *args: args, state, batch)
    one = jax.sharding.SingleDeviceSharding(device)
    made = compiled.compile_for(step, shapes, one)
    return hlo.measure(made)["estimated_mcycles"]


def _calls(layers: int, devices: int, rounds: int) -> list[list[str]]:
    """Returns a row for each step: what a call of it costs, and its ratio."""
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    everywhere, split = (NamedSharding(mesh, P(*axes)) for axes in ((), ("data",)))
    task = _mlp(layers, 8)
    task = task._replace(
        params=jax.device_put(task.params, everywhere),
        batch=jax.device_put(task.batch, split),
    )
    ways = {
        name: (step, jax.device_put(state, everywhere))
        for name, (step, state) in _ways(task, jit=True).items()
    }
    gc.freeze()  # a full collection would fall into some bursts and not into others
    bursts = [_burst(*way, task.batch) for way in ways.values()]
    us = [min(found) * 1e6 for found in in_turns(bursts, rounds)]
    leaves = [len(jax.tree.leaves(state)) for _, state in ways.values()]
    return [
        [name, str(devices), str(count), f"{each:.0f}", f"{each / us[1]:.2f}"]
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
