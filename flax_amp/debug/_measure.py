"""`measure`: time and memory of a step in float32, bfloat16 and float16."""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from flax_amp import _tree
from flax_amp._checks import check_count
from flax_amp._rewriter.transform import rewrite
from flax_amp._training.scaler import first_scaler
from flax_amp._training.train_state import AmpTrainState
from flax_amp._training.train_step import make_train_step
from flax_amp.debug._call import Call, tool
from flax_amp.debug._processor import about_cpu, half_instructions
from flax_amp.debug._report import Block, Report, table
from flax_amp.policy import Policy, Precision, read_options

_PRECISIONS: dict[str, Precision] = {
    "float32": "32-true",
    "bfloat16": "bf16-mixed",
    "float16": "16-mixed",
}


@dataclasses.dataclass(frozen=True)
class Figures:
    """Time and memory of a step in a dtype."""

    compile_s: float  #: seconds of tracing and compiling
    step_ms: float  #: from the call to the end, the least of all timed steps
    temp_mb: float | None  #: temporary memory on each device, if the backend tells


@dataclasses.dataclass(frozen=True, repr=False)
class Measurement(Report):
    """The figures that `flax_amp.debug.measure` found, which print as a table."""

    platform: str  #: of the devices, such as "gpu"
    devices: str  #: the number of devices, and their kind
    steps: int  #: the number of steps that were timed in each dtype
    figures: dict[str, Figures]  #: time and memory of a step, by the name of the dtype

    def _parts(self, only: str | None = None) -> Iterator[Block]:
        yield f"{self.name} on {self.devices}, the least of {self.steps} steps"
        yield ""
        headers = ["", "compile, s", "step, ms", "temporary, MB"]
        yield table(headers, ([name, *self._cells(name)] for name in self.figures))

    def _cells(self, name: str) -> Iterator[str]:
        base = self.figures["float32"]
        for field, value in vars(self.figures[name]).items():
            yield _with_ratio(value, getattr(base, field))


def _with_ratio(value: float | None, base: float | None) -> str:
    """Returns a figure with its ratio to the figure in float32."""
    if value is None:
        return "-"
    shown = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    if not value or not base:
        return shown
    return f"{shown} x{value / base:.2f}"


@tool
def measure(
    call: Call,
    *,
    # On a CPU under full load, the least time of 20 steps was 2.1 times the least time
    # of 1,280 steps on average; of 10 steps 2.5 times, and of 40 steps 1.9 times. So
    # twice as many steps gain little.
    steps: int = 20,
) -> Measurement:
    """Measures a step in float32, bfloat16 and float16, on this device.

    For a state, the step of `make_train_step` is measured. For a function, and for a
    pair `(model, optimizer)`, the loss with its gradient is measured. The call and the
    options are as for `flax_amp.explain`, with arrays that have values.

    Sharp edges:
      The device must have room for the state twice. With a persistent compilation
      cache, `compile_s` is the time of reading from the cache.

    Args:
      steps: how many steps to time in each dtype, after a step to warm up. The dtypes
        take turns, and their order moves on by one in each round, so that a further
        load of the machine affects all dtypes alike.

    Returns:
      A `Measurement`, or a function that returns a `Measurement`. Print the result.

    Raises:
      TypeError: if an argument is of a wrong kind, or abstract.
      ValueError: if `steps` is not a positive integer.
      RuntimeError: if a step has deleted the state, or for lack of memory.

    Example:
      >>> import jax, jax.numpy as jnp, flax_amp
      >>> def loss(w, x):
      ...     return jnp.mean((x @ w) ** 2)
      >>> found = flax_amp.debug.measure(loss)(jnp.ones((8, 8)), jnp.ones((4, 8)))
      >>> list(found.figures), found.figures["bfloat16"].step_ms > 0
      (['float32', 'bfloat16', 'float16'], True)
    """
    steps = check_count(steps, f"measure: {steps=}", "of steps to time")
    compiled = {}
    compile_s = {}
    step_ms: dict[str, list[float]] = {name: [] for name in _PRECISIONS}
    for name, precision in _PRECISIONS.items():
        program, args = _program(call, precision)
        start = time.perf_counter()
        compiled[name] = program.lower(*args).compile(), args
        compile_s[name] = time.perf_counter() - start
    # The first round warms up, and is not counted.
    for name in _turns(steps + 1):
        run, args = compiled[name]
        # A step deletes its state, so each step gets a copy.
        args = jax.block_until_ready(jax.tree.map(_tree.own, args))
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        step_ms[name].append(1e3 * (time.perf_counter() - start))
    figures = {}
    for name, (run, _) in compiled.items():
        memory = run.memory_analysis()
        temp_mb = None if memory is None else memory.temp_size_in_bytes / 1e6
        least = min(step_ms[name][1:])
        figures[name] = Figures(compile_s[name], least, temp_mb)
    shardings = jax.tree.leaves(compiled["float32"][0].input_shardings)
    devices = [*set().union(*(x.device_set for x in shardings))]
    platform = devices[0].platform
    return Measurement(
        name=call.request.name,
        notes=_about_a_cpu() if platform == "cpu" else (),
        platform=platform,
        devices=f"{len(devices)} x {devices[0].device_kind}",
        steps=steps,
        figures=figures,
    )


def _turns(rounds: int) -> Iterator[str]:
    """Yields the dtypes once in each round; the order moves on by one in each round."""
    names = [*_PRECISIONS]
    for turn in range(rounds):
        first = turn % len(names)
        yield from names[first:] + names[:first]


def _about_a_cpu() -> tuple[str, ...]:
    version = f"JAX {jax.__version__}"
    last = f"times of {version} on a CPU say nothing of a GPU or a TPU"
    return *about_cpu(half_instructions()), last


def _program(call: Call, precision: Precision) -> tuple[Any, tuple[Any, ...]]:
    """Returns a step, or a loss with its gradient, and the arguments for a call."""
    request = call.request
    state = request.holder
    entries = request.entries
    reduces: Any = dict(reduce_in_float32=request.reduce_in_float32)
    if not isinstance(state, AmpTrainState):
        dtype, own = read_options("measure", precision, None, None, entries)
        loss = rewrite(call.loss, Policy(own), dtype, request.recompute, **reduces)
        return jax.jit(call.gradients(loss)), (jnp.float32(1), call.arrays)
    loss_fn, *given = request.step

    # `has_aux` is fixed below, so a loss without `aux` gets an empty `aux`.
    @functools.wraps(loss_fn)
    def with_aux(*args: Any, **kwargs: Any) -> Any:
        out = loss_fn(*args, **kwargs)
        return out if isinstance(out, tuple) else (out, {})

    step: Any = make_train_step(with_aux, has_aux=True, amp_policy=entries, **reduces)
    state = state.replace(precision=precision, scaler=first_scaler(precision))
    return step, (state, *given)
