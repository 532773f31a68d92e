"""`call`: what Python adds to each call of a step, and to the start of a script.

A loop calls its step thousands of times. While an accelerator computes, Python has to
be done with the next call, or the accelerator waits.
"""

import functools
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import flax_amp
from benchmarks.request import Request
from benchmarks.show import made_by, markdown_table, write_page
from benchmarks.timing import in_turns

PyTree = Any

WIDTH = 8  # the step computes next to nothing
LAYERS = (3, 25)  # 20 and 152 leaves with Adam
CALLS = 20  # in a burst
_IMPORTS = "import jax, optax, flax.linen, flax.nnx, flax.training.train_state"


class _Guarded(TrainState):
    """What a loop keeps that guards its gradients by hand."""

    scaler: PyTree
    skipped: jax.Array


class _Way(NamedTuple):
    name: str
    step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    state: PyTree


def run(asked: Request, rounds: int) -> None:
    """Writes call.md into the folder of results.

    Args:
      asked: folder of the request.
      rounds: turns of each way.
    """
    jax.config.update("jax_platforms", "cpu")
    rows = [row for layers in LAYERS for row in _rows(layers, rounds)]
    imports = _import_ratio(max(1, rounds // 10))
    text = f"""# What a call of a step costs in Python

{made_by()}, Python {sys.version.split()[0]}.

An MLP of {" and ".join(map(str, LAYERS))} layers, {WIDTH} wide, with Adam, in float32:
it computes next to nothing. Processor time of the calling thread for a call, in bursts
of {CALLS}, in turns; the least of the bursts, with its ratio to the first row, and to
the row above that has a scaler. "one select" checks the gradients and selects;
"scaler" also has a loss scale and counts skipped steps, as flax_amp does. The step of
flax_amp also checks the update, in XLA, unless `check_update=False`.

{markdown_table(["step", "leaves", "µs", "to plain", "to the scaler's"], rows)}

`import flax_amp` behind `{_IMPORTS}` takes {imports:.2f} of the time without it
(compiled Python files at hand, as `pip install` makes them; medians, in turns).
"""
    write_page(asked.folder / "call.md", text)


def _rows(layers: int, rounds: int) -> list[list[str]]:
    ways, batch = _ways(layers)
    gc.freeze()  # a full collection would fall into some bursts and not into others
    bursts = [_burst(way.step, way.state, batch) for way in ways]
    seconds = [min(found) for found in in_turns(bursts, rounds)]
    plain, guarded = seconds[0], seconds[2]
    return [
        [
            way.name,
            str(len(jax.tree.leaves(way.state))),
            f"{found * 1e6:.0f}",
            f"{found / plain:.2f}",
            f"{found / guarded:.2f}",
        ]
        for way, found in zip(ways, seconds, strict=True)
    ]


def _ways(layers: int) -> tuple[list[_Way], PyTree]:
    names = [f"layer_{i:02}" for i in range(layers)]
    square = {"kernel": jnp.eye(WIDTH), "bias": jnp.zeros(WIDTH)}
    params = {name: square for name in names}
    batch = {"x": jnp.ones((4, WIDTH)), "y": jnp.zeros((4, WIDTH))}
    tx = optax.adam(1e-3)

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        x = batch["x"]
        for name in names:
            x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
        return ((x - batch["y"]) ** 2).mean()

    def updated(state: Any, batch: PyTree, scale: PyTree) -> Any:
        def scaled(params: PyTree) -> jax.Array:
            return loss_fn(params, batch) * scale

        loss, grads = jax.value_and_grad(scaled)(state.params)
        grads = jax.tree.map(lambda g: g / scale, grads)
        metrics = {"loss": loss / scale, "grad_norm": optax.tree.norm(grads)}
        finite = flax_amp.all_finite(grads)
        return state.apply_gradients(grads=grads), metrics, finite

    def selected(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    def plain(state: Any, batch: PyTree) -> Any:
        return updated(state, batch, 1.0)[:2]

    def one_select(state: Any, batch: PyTree) -> Any:
        new, metrics, finite = updated(state, batch, 1.0)
        return selected(finite, new, state), metrics

    def with_scaler(state: Any, batch: PyTree) -> Any:
        scale = state.scaler["scaler"]
        new, metrics, finite = updated(state, batch, scale)
        new = selected(finite, new, state).replace(
            scaler=flax_amp.update_scaler(state.scaler, finite),
            skipped=state.skipped + ~finite,
        )
        told = {"grads_finite": finite, "scaler": scale, "skipped": new.skipped}
        return new, metrics | told

    def start(cls: Any, **more: Any) -> Any:
        state = cls.create(apply_fn=None, params=params, tx=tx, **more)
        return jax.tree.map(jnp.array, state)  # which the step may donate

    guard = dict(scaler=flax_amp.init_scaler(), skipped=0)
    amp_states = [start(flax_amp.AmpTrainState, precision="32-true") for _ in range(2)]
    amp_step = flax_amp.make_train_step(loss_fn)
    unchecked = flax_amp.make_train_step(loss_fn, check_update=False)
    return [
        _Way("plain", _jitted(plain), start(TrainState)),
        _Way("by hand, one select", _jitted(one_select), start(TrainState)),
        _Way("by hand, scaler", _jitted(with_scaler), start(_Guarded, **guard)),
        _Way("`make_train_step`, `check_update=False`", unchecked, amp_states[0]),
        _Way("`make_train_step`", amp_step, amp_states[1]),
    ], batch


def _jitted(step: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(step, donate_argnums=0)


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


def _import_ratio(rounds: int) -> float:
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

    def run(program: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True, env=environ)
        return time.perf_counter() - begin

    programs = [_IMPORTS, f"{_IMPORTS}, flax_amp"]
    turns = in_turns([functools.partial(run, text) for text in programs], rounds)
    without, with_ours = map(statistics.median, turns)
    return with_ours / without
