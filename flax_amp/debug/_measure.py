"""`measure`: what a step takes in float32, bfloat16 and float16, side by side."""

import dataclasses
import functools
import gc
import math
import time
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
    asked = Asked.about("measure", fun, step)
    state = fun if isinstance(fun, AmpTrainState) else None

    def measured(*args: Any, **kwargs: Any) -> Measurement:
        # Inside of a trace a new array is traced, even if no argument is.
        leaves = [*jax.tree.leaves((args, kwargs)), jnp.zeros(())]
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise RuntimeError("measure: expected a call outside of jax.jit: it runs.")
        check_not_deleted("measure", "args", args)
        programs = {}
        for name, precision in _PRECISIONS.items():
            if state is not None:
                loss_fn, *given = step
                program = _train_step(state, loss_fn, given, options, precision)
            else:
                program = _gradient(asked, args, kwargs, options, precision)
            programs[name] = program
        found = _measured(asked.name, programs, turns)
        return dataclasses.replace(found, state_mb=_state_mb(state) if state else None)

    return measured if asked.args is None else measured(*asked.args)


def _state_mb(state: AmpTrainState) -> tuple[float, float]:
    """Returns the megabytes of the parameters of a state, and of the rest of it."""
    params, every = (
        sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 1e6
        for tree in (state.params, state)
    )
    return params, every - params


class _Program:
    """A function, made anew for each trace, that is compiled and run."""

    def __init__(self, make: Callable[[], Any], *args: Any) -> None:
        self.make, self.args = make, args
        self.trace_s = self.step_s = math.inf

    def trace(self) -> None:
        # What is jitted inside of the loss has traces of its own.
        jax.clear_caches()
        gc.collect()
        start = time.thread_time()
        self.lowered = self.make().trace(*self.args).lower()
        self.trace_s = min(self.trace_s, time.thread_time() - start)

    def compile(self) -> None:
        start = time.perf_counter()
        self.compiled = self.lowered.compile()
        self.compile_s = time.perf_counter() - start

    def run(self) -> None:
        # The step deletes the state that it is given.
        args = jax.block_until_ready(jax.tree.map(_tree.own, self.args))
        start = time.perf_counter()
        out = jax.block_until_ready(self.compiled(*args))
        self.step_s = min(self.step_s, time.perf_counter() - start)
        if isinstance(self.args[0], AmpTrainState):
            # A run searches for its scale once, and not in every step.
            scaler = jax.device_get(out[0].scaler)
            self.args = (self.args[0].replace(scaler=scaler), *self.args[1:])

    def figures(self) -> Figures:
        memory = self.compiled.memory_analysis()
        return Figures(
            trace_s=self.trace_s,
            compile_s=self.compile_s,
            step_ms=None if self.step_s == math.inf else 1e3 * self.step_s,
            temp_mb=None if memory is None else memory.temp_size_in_bytes / 1e6,
        )


def _train_step(
    state: Any, loss_fn: Any, given: Any, options: Any, precision: Precision
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

    def make() -> Any:
        return make_train_step(with_aux, jit=True, **options)

    return _Program(make, state, *given)


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
    return _Program(lambda: jax.jit(lambda arrays: run(arrays)), arrays)


def _measured(name: str, programs: dict[str, _Program], turns: int) -> Measurement:
    every = [*programs.values()]
    leaves = jax.tree.leaves([program.args for program in every])
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        turns = 0
    for program in every * 2:  # the first trace of all also warms Python up
        program.trace()
    for dtype, program in programs.items():
        try:
            program.compile()
            if turns:
                program.run()  # the first step takes longer
        except jax.errors.JaxRuntimeError as error:
            raise RuntimeError(f"measure: in {dtype}: {error}") from error
    for program in every * turns:
        program.run()
    shardings = jax.tree.leaves(every[0].compiled.input_shardings)
    devices = set().union(*(sharding.device_set for sharding in shardings))
    first = next(iter(devices))
    return Measurement(
        name=name,
        platform=first.platform,
        devices=f"{len(devices)} x {first.device_kind}",
        turns=turns,
        figures={dtype: program.figures() for dtype, program in programs.items()},
    )
