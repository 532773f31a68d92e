"""`step`: what `make_train_step` adds to the same step by hand.

Whole steps: their time on this processor, the bytes that XLA accesses, and its estimate
for TPUs. Then what Python adds to each call: while an accelerator computes, Python has
to be done with the next one.
"""

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

import flax_amp
from benchmarks import hlo
from benchmarks.commands import compiled
from benchmarks.models import problem
from benchmarks.request import Request
from benchmarks.show import made_by, markdown_table, write_page
from benchmarks.timing import in_turns

PyTree = Any

LAYERS = (3, 25)  # 20 and 152 leaves with Adam, and 8 of the guard
CALLS = 20  # in a burst


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
    """Writes step.md into the folder of results.

    Args:
      asked: folder and size of the request.
      rounds: turns of each way.
    """
    jax.config.update("jax_platforms", "cpu")
    has_tpu = importlib.util.find_spec("libtpu") is not None
    targets = ("v5e", "tpu7x") if has_tpu else ()
    tasks = list(_tasks(asked.size))
    wholes = [row for task in tasks for row in _whole(task, targets, rounds // 5)]
    header = ["program", "step", "ms", *(f"{t}, Mcycles" for t in targets), "GB"]
    calls = [row for layers in LAYERS for row in _calls(layers, rounds)]
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
next to nothing. Processor time of the calling thread for a call, in bursts of {CALLS},
in turns; the least of the bursts.

{markdown_table(["step", "leaves", "µs", "to guarded"], calls, words=1)}
"""
    write_page(asked.folder / "step.md", text)


def _tasks(size: str) -> Iterator[_Task]:
    for layers, width in ((2, 16),) if size == "tiny" else ((16, 512), (3, 4096)):
        params, batch, loss = _mlp(layers, width)
        count = sum(x.size for x in jax.tree.leaves(params)) / 1e6
        yield _Task(f"MLP, {count:.2g} M parameters, batch 16", loss, params, batch)
    vit = problem("vit_s16", size)
    params = vit.init(jax.random.key(0))["params"]
    batch = jax.tree.map(lambda x: x[:16], vit.batch(jax.random.key(1)))
    yield _Task("ViT, batch 16", lambda p, b: vit.loss(p, {}, b)[0], params, batch)


def _mlp(layers: int, width: int) -> tuple[PyTree, PyTree, Any]:
    names = [f"layer_{i:02}" for i in range(layers)]
    kernel = jax.random.normal(jax.random.key(0), (width, width)) / width**0.5
    params = {name: {"kernel": kernel, "bias": jnp.zeros(width)} for name in names}
    batch = {"x": jnp.ones((16, width)), "y": jnp.zeros((16, width))}

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        x = batch["x"]
        for name in names:
            x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
        return ((x - batch["y"]) ** 2).mean()

    return params, batch, loss_fn


def _ways(task: _Task, **options: Any) -> dict[str, tuple[Any, Callable[[], PyTree]]]:
    """Returns each step, and what makes its first state."""
    tx = optax.adam(1e-3)
    lowered = flax_amp.amp(task.loss)

    def start(cls: Any, **more: Any) -> PyTree:
        state = cls.create(apply_fn=None, params=task.params, tx=tx, **more)
        return jax.tree.map(jnp.array, state)  # which the step may donate

    zero = jnp.int32(0)
    guard = dict(scaler=flax_amp.no_scaler(), in_a_row=zero, total=zero)
    return {
        "plain, by hand": (
            functools.partial(plain, lowered),
            functools.partial(start, TrainState),
        ),
        "guarded, by hand": (
            functools.partial(guarded, lowered),
            functools.partial(start, Guarded, last_finite=jnp.array(True), **guard),
        ),
        "`make_train_step`": (
            flax_amp.make_train_step(task.loss, **options),
            functools.partial(start, flax_amp.AmpTrainState),
        ),
    }


def _whole(task: _Task, targets: tuple[str, ...], rounds: int) -> list[list[str]]:
    ways = _ways(task, jit=False)
    steps = [_Timed(step, start(), task.batch) for step, start in ways.values()]
    ms = [statistics.median(found) * 1e3 for found in in_turns(steps, rounds)]
    figures = [ms]
    for target in targets:
        devices = compiled.tpu_devices(target)
        figures.append(
            [
                _figures(step, (start, task.batch), devices)["estimated_mcycles"]
                for step, start in ways.values()
            ]
        )
    figures.append([step.gb_accessed for step in steps])
    cells = [[f"{x:.3g} ({x / of[1]:.3f})" for x in of] for of in figures]
    return [[task.name, name, *row] for name, *row in zip(ways, *cells, strict=True)]


class _Timed:
    """A compiled step; each call gives the seconds of one."""

    def __init__(self, step: Any, state: PyTree, batch: PyTree) -> None:
        self._state, self._batch = state, batch
        self._step = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
        self.gb_accessed = hlo.figures(self._step.as_text() or "")["gb_accessed"]

    def __call__(self) -> float:
        begin = time.perf_counter()
        self._state, _ = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return time.perf_counter() - begin


def _figures(step: Any, args: Any, devices: Any) -> dict[str, Any]:
    start, batch = args
    shapes = jax.eval_shape(start), jax.eval_shape(lambda: batch)
    one = jax.sharding.SingleDeviceSharding(devices[0])
    return hlo.figures(compiled.compile_for(step, shapes, one).as_text() or "")


def _calls(layers: int, rounds: int) -> list[list[str]]:
    """Returns a row for each step: what a call of it costs, and its ratio."""
    params, batch, loss = _mlp(layers, 8)
    ways = _ways(_Task("", loss, params, batch))
    states = [start() for _, start in ways.values()]
    steps = [
        step if name.startswith("`") else jax.jit(step, donate_argnums=0)
        for name, (step, _) in ways.items()
    ]
    gc.freeze()  # a full collection would fall into some bursts and not into others
    bursts = [_burst(*each, batch) for each in zip(steps, states, strict=True)]
    us = [min(found) * 1e6 for found in in_turns(bursts, rounds)]
    leaves = [len(jax.tree.leaves(state)) for state in states]
    return [
        [name, str(count), f"{each:.0f}", f"{each / us[1]:.2f}"]
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
