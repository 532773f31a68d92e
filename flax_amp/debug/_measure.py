"""`measure`: what a step takes in float32, bfloat16 and float16, side by side."""

import contextlib
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from flax_amp import _tree
from flax_amp._rewriter.rewritten import only_before_amp
from flax_amp._rewriter.transform import amp
from flax_amp._training.precision import Precision, compute_dtype_of, first_scaler
from flax_amp._training.train_state import AmpTrainState
from flax_amp._training.train_step import make_train_step
from flax_amp.debug._call import (
    FlatLoss,
    Target,
    UsersCall,
    on_arrays,
    read_target,
    split_given,
)
from flax_amp.debug._measure_model import Figures, Measurement
from flax_amp.policy import Policy

_WORDS: dict[str, Precision] = {
    "float32": "32-true",
    "bfloat16": "bf16-mixed",
    "float16": "16-mixed",
}
_TRACES = 2  # the first of all also warms Python up


def measure(
    fun: Any, *step: Any, beside: Any = None, turns: int = 20, **options: Any
) -> Any:
    """Measures what mixed precision takes beside float32, on the device that is here.

    The same step is compiled and run in float32, bfloat16 and float16. There are two
    ways to call it: `measure(state, loss_fn, batch)` for the step of `make_train_step`,
    and `measure(fun)(*args)` for a loss and its gradient with respect to the first
    argument, which runs in float32 as it is, and otherwise under `amp`, without a loss
    scale. Steps take turns, so that what else the machine does hits all alike. Each
    starts from the same state, which stays as it is.

    Sharp edges:
      JAX's caches are emptied, so that each program is traced anew. What you have
      compiled before compiles again when it is next called. The device must have room
      for the state twice, and for the temporary memory of a float32 step.

    Args:
      fun: a float32 function that returns a loss, or `(loss, aux)`; or a state. The
        arguments may be shapes, as for `explain`: then nothing is run.
      *step: the loss function and a batch, if `fun` is a state.
      beside: what else to measure, such as the model with dtypes that are set by hand:
        `(state, loss_fn, batch)`, or `(loss_fn, args)`. It runs as it is.
      turns: how many steps of each program to time.
      **options: those of `make_train_step`, such as `amp_policy`, `accum_steps` and
        `state_shardings`; or those of `amp`.

    Returns:
      A `Measurement`, or a function that returns one. Print it.

    Raises:
      TypeError: if an argument is of a wrong kind.
      ValueError: if `turns` is not a positive number.
      RuntimeError: if a program cannot be compiled or run, such as for lack of memory.

    Example:
      >>> import jax, jax.numpy as jnp, flax_amp
      >>> def loss(w, x):
      ...     return jnp.mean((x @ w) ** 2)
      >>> found = flax_amp.debug.measure(loss)(jnp.ones((8, 8)), jnp.ones((4, 8)))
      >>> [row.name for row in found.rows], found.rows[0].step_ms > 0
      (['float32', 'bfloat16', 'float16'], True)
    """
    if type(turns) is not int or turns < 1:
        raise ValueError(f"measure: got {turns=!r}; expected a number of steps.")
    target = read_target("measure", fun, step)
    hand = None if beside is None else _read_beside(beside, step)
    build = _train_step if step else _gradient

    def measured(*args: Any, **kwargs: Any) -> Measurement:
        asked = _Asked(target, step, args, kwargs)
        programs = [
            _Program(name, *build(asked, options, word))
            for name, word in _WORDS.items()
        ]
        if hand:
            programs.append(_Program("beside", *build(hand, options, None)))
        what = "training step" if step else "loss and gradient"
        return _measured(target.name, what, programs, turns)

    return measured() if step else measured


class _Asked(NamedTuple):
    """What the user asks about.

    Attributes:
      target: the function.
      step: the loss and the batch, if it is called with a state.
      args, kwargs: its arguments, if it is not.
    """

    target: Target
    step: Sequence[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _read_beside(beside: Any, step: Sequence[Any]) -> _Asked:
    caller = "measure: beside"
    (fun, *own_step), args = split_given(f"{caller} is", beside)
    if len(own_step) != len(step):
        kinds = ["state" if x else "function" for x in (own_step, step)]
        raise TypeError(
            f"{caller} is a {kinds[0]}, but what is measured is a {kinds[1]}; expected "
            "(state, loss_fn, batch) for both, or (loss_fn, args)."
        )
    return _Asked(read_target(caller, fun, own_step), own_step, args, {})


def _train_step(asked: _Asked, options: dict[str, Any], word: Precision | None) -> Any:
    """Returns what makes a train step, and its arguments.

    The step is in the precision of `word`, or as its author wrote it.
    """
    assert asked.target.args is not None
    _, state, batch = asked.target.args
    options = {**options, "has_aux": True}
    if word is None:
        options["amp_policy"] = None
    elif word != state.precision:
        state = state.replace(scaler=first_scaler(word))
    state = state.replace(precision=word or "32-true")
    if isinstance(shardings := options.get("state_shardings"), AmpTrainState):
        # They have the precision of another state in them.
        leaves = jax.tree.leaves(shardings)
        treedef = jax.tree.structure(state)
        options["state_shardings"] = jax.tree.unflatten(treedef, leaves)

    def make() -> Any:
        loss_fn = asked.step[0]

        @functools.wraps(loss_fn)
        def with_aux(*args: Any, **kwargs: Any) -> Any:
            with only_before_amp(f"measure: {asked.target.name}"):
                out = loss_fn(*args, **kwargs)
            return out if isinstance(out, tuple) else (out, {})

        return make_train_step(with_aux, **options)

    return make, (state, batch)


def _gradient(asked: _Asked, options: dict[str, Any], word: Precision | None) -> Any:
    """Returns what makes a loss with its gradient, and its arguments.

    It is in the precision of `word`, or as its author wrote it.
    """
    name = f"measure: {asked.target.name}"
    rewrite = amp(compute_dtype=compute_dtype_of(word or "32-true", None), **options)
    open_scopes = Policy(options.get("amp_policy")).names_scopes

    def gradient(*args: Any, **kwargs: Any) -> Any:
        fun = asked.target.fun
        call = UsersCall(fun, args, kwargs, open_scopes=open_scopes, caller=name)
        flat = FlatLoss.of(call, name)
        held = [not trained for trained in flat.trained]

        def loss(trained: list[Any], others: list[Any]) -> Any:
            arrays = _tree.fill(others, held, flat.arrays)
            return flat(_tree.fill(trained, flat.trained, arrays))

        is_plain = word in (None, "32-true")
        function = jax.value_and_grad(loss if is_plain else rewrite(loss), has_aux=True)
        return function(*(_tree.pick(flat.arrays, x) for x in (flat.trained, held)))

    run, arrays = on_arrays(gradient, asked.args, asked.kwargs, name)
    return lambda: jax.jit(lambda arrays: run(arrays)), (arrays,)


@dataclasses.dataclass
class _Program:
    """A function that is compiled and run.

    Attributes:
      name: what its row is called.
      make: returns it, jitted: a new function each time, of which JAX has no trace.
      args: its arguments.
    """

    name: str
    make: Callable[[], Any]
    args: tuple[Any, ...]
    trace_s: float = math.inf
    compile_s: float = math.inf
    step_s: float = math.inf
    lowered: Any = None
    compiled: Any = None

    def trace(self) -> None:
        jax.clear_caches()
        gc.collect()
        start = time.thread_time()
        self.lowered = self.make().trace(*self.args).lower()
        self.trace_s = min(self.trace_s, time.thread_time() - start)

    def compile(self) -> None:
        start = time.perf_counter()
        self.compiled = self.lowered.compile()
        self.compile_s = time.perf_counter() - start
        self.lowered = None

    def run(self) -> float:
        """Takes a step and returns its seconds; the arguments stay as they are."""
        # A train step deletes its state.
        args = jax.tree.map(_tree.own, self.args)
        jax.block_until_ready(args)
        start = time.perf_counter()
        jax.block_until_ready(self.compiled(*args))
        return time.perf_counter() - start

    def figures(self) -> Figures:
        memory = self.compiled.memory_analysis()
        accessed = (self.compiled.cost_analysis() or {}).get("bytes accessed")
        return Figures(
            name=self.name,
            trace_s=self.trace_s,
            compile_s=self.compile_s,
            step_ms=None if self.step_s == math.inf else 1e3 * self.step_s,
            temp_bytes=None if memory is None else memory.temp_size_in_bytes,
            accessed_bytes=None if accessed is None else int(accessed),
        )


def _measured(
    name: str, what: str, programs: list[_Program], turns: int
) -> Measurement:
    for _ in range(_TRACES):
        for program in programs:
            program.trace()
    for program in programs:
        with _named(program):
            program.compile()
    leaves = jax.tree.leaves([program.args for program in programs])
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        turns = 0
    else:
        _time(programs, turns)
    shardings = jax.tree.leaves(programs[0].compiled.input_shardings)
    devices = set().union(*(sharding.device_set for sharding in shardings))
    first = next(iter(devices))
    return Measurement(
        name=name,
        program=what,
        platform=first.platform,
        devices=f"{len(devices)} x {first.device_kind}",
        turns=turns,
        rows=tuple(program.figures() for program in programs),
        notes=tuple(_notes()),
    )


def _time(programs: list[_Program], turns: int) -> None:
    for program in programs:
        with _named(program):
            program.run()  # the first step of a program takes longer
    for turn in range(turns):
        shift = turn % len(programs)
        for program in programs[shift:] + programs[:shift]:
            program.step_s = min(program.step_s, program.run())


@contextlib.contextmanager
def _named(program: _Program) -> Iterator[None]:
    """Names the program that the device cannot compile or run."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(f"measure: in {program.name}: {error}") from error


def _notes() -> Iterator[str]:
    yield "bytes accessed are XLA's estimate, which counts the body of a loop once"
    if jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        yield "a program may come from the cache of compilations (its folder is set)"
