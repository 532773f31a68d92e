"""`measure`: what a step takes in float32, bfloat16 and float16, side by side."""

import dataclasses
import functools
import gc
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp

from flax_amp import _tree
from flax_amp._rewriter.rewritten import only_before_amp
from flax_amp._rewriter.transform import amp
from flax_amp._training.arguments import check_count
from flax_amp._training.scaler import first_scaler
from flax_amp._training.step_call import check_not_deleted
from flax_amp._training.train_state import AmpTrainState
from flax_amp._training.train_step import make_train_step
from flax_amp.debug._call import Asked, Call, Loss, Trained, on_arrays
from flax_amp.debug._report import Part, Report, table
from flax_amp.policy import Policy, Precision

_PRECISIONS: dict[str, Precision] = {
    "float32": "32-true",
    "bfloat16": "bf16-mixed",
    "float16": "16-mixed",
}
_Program = tuple[Callable[[], Any], tuple[Any, ...]]  # made anew for each trace
_HEADERS = ("trace + lower, s", "compile, s", "step, ms", "temporary, MB")
_ON_A_CPU = (
    "On a CPU, XLA emulates half precision. Only the seconds of tracing and lowering",
    "are similar on a GPU or a TPU.",
)


class Figures(NamedTuple):
    """What a step takes in one dtype."""

    trace_s: float  # processor seconds of tracing and lowering, the less of two times
    compile_s: float  # seconds of compiling
    step_ms: float | None  # from the call to the end, the least; `None` if not run
    temp_mb: float | None  # temporary memory on each device, if the backend tells


@dataclasses.dataclass(frozen=True, repr=False)
class Measurement(Report):
    """What `flax_amp.debug.measure` found. It prints as a table.

    Attributes:
      name: the name of the function.
      platform: the platform of the devices, such as "gpu".
      devices: how many there are, and of which kind.
      turns: how many steps in each dtype were timed. It is 0 if none was run.
      figures: what a step takes, by the name of the dtype.
      state_mb: megabytes of the parameters of a state, and of the rest of it. `None`
        if a function was measured.
    """

    name: str
    platform: str
    devices: str
    turns: int
    figures: dict[str, Figures]
    state_mb: tuple[float, float] | None = None

    def _parts(self) -> Iterator[Part]:
        how = f"the least of {self.turns} turns" if self.turns else "not run"
        yield f"{self.name} on {self.devices}, {how}"
        if self.state_mb is not None:
            params, rest = self.state_mb
            of_both = f"{params:,.4g} MB of parameters, {rest:,.4g} MB beside them"
            yield f"its state: {of_both}"
        yield from _ON_A_CPU if self.platform == "cpu" else ()
        yield ""
        rows = ([name, *self._cells(name)] for name in self.figures)
        yield table(["", *_HEADERS], rows)

    def _cells(self, name: str) -> Iterator[str]:
        """Yields each figure with its ratio to that of float32."""
        pairs = zip(self.figures[name], self.figures["float32"], strict=True)
        for value, base in pairs:
            if value is None:
                yield "-"
                continue
            shown = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
            yield f"{shown} x{value / base:.2f}" if base else shown


@overload
def measure(fun: Trained, /, *step: Any, **options: Any) -> Measurement: ...
@overload
def measure(fun: Loss, /, **options: Any) -> Callable[..., Measurement]: ...
def measure(fun: Any, /, *step: Any, turns: int = 20, **options: Any) -> Any:
    """Measures what a step takes in float32, bfloat16 and float16, on this device.

    `measure(state, loss_fn, batch, *args)` measures the step of `make_train_step` in
    each precision. `measure(loss)(params, batch)`, and `measure((model, optimizer),
    loss_fn, batch, *args)`, measure a loss with its gradient with respect to the first
    argument: in float32 as it is, in the others under `amp`, without a loss scale.

    Sharp edges:
      It empties JAX's caches, so that each program is traced anew. What you have
      compiled before compiles again when it is next called. The device must have room
      for the state twice, and for the temporary memory of a float32 step. Each turn
      starts from the given state, with the scale of the turn before: with
      `optax.MultiSteps`, the same step of a cycle is timed. With a persistent
      compilation cache, `compile_s` may be the time of reading from it.

    Args:
      fun: a float32 function that returns a loss, or `(loss, aux)`; or a state, or a
        pair `(model, optimizer)`. The arguments may be shapes, as for `explain`. Then
        nothing is run.
      *step: the loss function and what the step takes after the state, if `fun` is one.
      turns: how many steps to time in each dtype. The dtypes take turns, so that what
        else the machine does affects all of them.
      **options: those of `make_train_step`, such as `amp_policy`, `accum_steps` and
        `state_shardings`; or those of `amp`. `has_aux` is not needed.

    Returns:
      A `Measurement`, or a function that returns one. Print it.

    Raises:
      TypeError: if an argument is of a wrong kind, or if an option is unknown.
      ValueError: if `turns` is not a positive integer.
      RuntimeError: if a program cannot be compiled or run, such as for lack of memory,
        if it is called inside of `jax.jit`, or if a step has deleted the state.

    Example:
      >>> import jax, jax.numpy as jnp, flax_amp
      >>> def loss(w, x):
      ...     return jnp.mean((x @ w) ** 2)
      >>> found = flax_amp.debug.measure(loss)(jnp.ones((8, 8)), jnp.ones((4, 8)))
      >>> list(found.figures), found.figures["bfloat16"].step_ms > 0
      (['float32', 'bfloat16', 'float16'], True)
    """
    turns = check_count(turns, f"measure: {turns=}", "of steps to time")
    asked = Asked.read("measure", fun, step)
    state = fun if isinstance(fun, AmpTrainState) else None

    def measured(*args: Any, **kwargs: Any) -> Measurement:
        # Inside of a trace a new array is traced, even if no argument is.
        leaves = jax.tree.leaves((args, kwargs))
        if any(isinstance(x, jax.core.Tracer) for x in (*leaves, jnp.zeros(()))):
            raise RuntimeError("measure: expected a call outside of jax.jit: it runs.")
        check_not_deleted("measure", "args", args)
        programs = {
            name: _gradient(asked, args, kwargs, options, precision)
            if state is None
            else _train_step(state, *step, options=options, precision=precision)
            for name, precision in _PRECISIONS.items()
        }
        is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        times = 0 if is_abstract else turns
        figures, devices = _figures(programs, times)
        return Measurement(
            name=asked.name,
            platform=devices[0].platform,
            devices=f"{len(devices)} x {devices[0].device_kind}",
            turns=times,
            figures=figures,
            state_mb=None if state is None else _state_mb(state),
        )

    return measured if asked.args is None else measured(*asked.args)


def _state_mb(state: AmpTrainState) -> tuple[float, float]:
    """Returns the megabytes of the parameters of a state, and of the rest of it."""
    params, every = (
        sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 1e6
        for tree in (state.params, state)
    )
    return params, every - params


def _figures(
    programs: dict[str, _Program], turns: int
) -> tuple[dict[str, Figures], list[Any]]:
    """Compiles and runs programs; returns what they take, and the devices."""
    trace_s, step_ms = defaultdict(list), defaultdict(list)
    lowered, compiled, compile_s = {}, {}, {}
    for name in [*programs] * 2:  # the first trace of all also warms Python up
        make, args = programs[name]
        # What is jitted inside of the loss has traces of its own.
        jax.clear_caches()
        gc.collect()
        start = time.thread_time()
        lowered[name] = make().trace(*args).lower()
        trace_s[name].append(time.thread_time() - start)
    for name in programs:
        start = time.perf_counter()
        compiled[name] = lowered[name].compile()
        compile_s[name] = time.perf_counter() - start
    for name in [*programs] * (turns and turns + 1):  # the first step takes longer
        make, args = programs[name]
        # The step deletes the state that it is given.
        given = jax.block_until_ready(jax.tree.map(_tree.own, args))
        start = time.perf_counter()
        out = jax.block_until_ready(compiled[name](*given))
        step_ms[name].append(1e3 * (time.perf_counter() - start))
        if isinstance(args[0], AmpTrainState):
            # A run searches for its scale once, and not in every step.
            scaler = jax.device_get(out[0].scaler)
            programs[name] = make, (args[0].replace(scaler=scaler), *args[1:])
    figures = {}
    for name, program in compiled.items():
        memory = program.memory_analysis()
        figures[name] = Figures(
            trace_s=min(trace_s[name]),
            compile_s=compile_s[name],
            step_ms=min(step_ms[name], default=None),
            temp_mb=None if memory is None else memory.temp_size_in_bytes / 1e6,
        )
    shardings = jax.tree.leaves(compiled["float32"].input_shardings)
    return figures, [*set().union(*(x.device_set for x in shardings))]


def _train_step(
    state: Any, loss_fn: Any, *given: Any, options: Any, precision: Precision
) -> _Program:
    """Returns the step of `make_train_step` in a precision."""
    if precision != state.precision:
        state = state.replace(precision=precision, scaler=first_scaler(precision))
    options = {**options, "has_aux": True}
    if isinstance(shardings := options.get("state_shardings"), AmpTrainState):
        options["state_shardings"] = shardings.replace(precision=precision)

    @functools.wraps(loss_fn)
    def with_aux(*args: Any, **kwargs: Any) -> Any:
        with only_before_amp(f"measure: {getattr(loss_fn, '__name__', 'loss_fn')}"):
            out = loss_fn(*args, **kwargs)
        return out if isinstance(out, tuple) else (out, {})

    make = functools.partial(make_train_step, with_aux, jit=True, **options)
    return make, (state, *given)


def _gradient(
    asked: Asked, args: Any, kwargs: Any, options: Any, precision: Precision
) -> _Program:
    """Returns a loss with its gradient, under `amp` unless it is in float32."""
    is_float32 = precision == "32-true"
    rewrite = (lambda f: f) if is_float32 else amp(precision=precision, **options)
    open_scopes = Policy(options.get("amp_policy")).names_scopes

    def gradient(*args: Any, **kwargs: Any) -> Any:
        call = Call(asked, args, kwargs, open_scopes=open_scopes)
        return call.gradients(rewrite(call.loss))(1.0, call.arrays)

    run, arrays = on_arrays(gradient, args, kwargs, asked.where)
    return lambda: jax.jit(lambda arrays: run(arrays)), (arrays,)
