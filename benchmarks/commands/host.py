"""`host`: what Python does before and between the steps, measured on the CPU.

Tracing and lowering of the models in full size, which costs no more than that of tiny
ones; the dispatch of compiled steps of tiny copies; retraces over a run.
"""

import dataclasses
import functools
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import absl.logging
import jax
import jax.numpy as jnp

from benchmarks import request, show
from benchmarks.method import OPTIMIZER
from benchmarks.problem import problem
from benchmarks.request import Request
from benchmarks.results import Results
from benchmarks.scaled import GUARDED, make_train_step, new_state
from benchmarks.sections import section
from benchmarks.stages import lower
from flax_amp import checkpoint

TRACED_MODELS = ("gpt_24", *request.MODELS)
TRACED = request.BFLOAT16
DISPATCHED_MODELS = ("mlp", "vit_s16", "gpt_scan", "resnet50")
# The bare jitted steps, and `make_train_step` itself.
DISPATCHED = ("float32", "hand_bf16", "amp_bf16", "amp_step_bf16", "amp_fp16")
RUNS = ("amp_fp16",)
STEPS = 20
_WARM_UP = 10

PyTree = Any
# Measures some variants of a model: their figures by the name of the variant.
Measure = Callable[[Request, str, Sequence[str]], dict[str, dict[str, Any]]]


def run(asked: Request, repeats: int = 3, calls: int = 200) -> None:
    """Measures tracing, dispatch and retraces.

    Args:
      asked: the request.
      repeats: how often each variant is traced.
      calls: how often each step is called.
    """
    jax.config.update("jax_platforms", "cpu")
    absl.logging.set_verbosity("error")  # Orbax tells of every restore
    results = Results.open(asked.folder, "host", "cpu", asked.size)
    trace = functools.partial(_trace, repeats=repeats)
    dispatch = functools.partial(_dispatch, calls=calls)
    tiny = dataclasses.replace(asked, size="tiny")
    _part(asked, results, "trace", trace, TRACED_MODELS, TRACED)
    _part(tiny, results, "dispatch", dispatch, DISPATCHED_MODELS, DISPATCHED)
    _part(tiny, results, "retraces", _retraces, DISPATCHED_MODELS, RUNS)
    show.results(results)


def _part(
    asked: Request,
    results: Results,
    part: str,
    measure: Measure,
    models: Sequence[str],
    variants: Sequence[str],
) -> None:
    """Measures a part of the cells, all the variants of a model together."""
    if asked.models:
        models = [name for name in asked.models if part == "trace" or name in models]
    if asked.variants and part != "trace":
        variants = [name for name in asked.variants if name in variants]
        asked = dataclasses.replace(asked, variants=tuple(variants))
    if not models or not variants:
        return
    asked = dataclasses.replace(asked, models=tuple(models))
    cells = asked.cells(models, variants)
    shown = section("host", part)
    progress = show.Progress(sum(len(names) for _, names in cells))
    for model, names in cells:
        labels = {name: asked.label(name) for name in names}
        if asked.resume and all(results.has(model, v, part) for v in labels.values()):
            for label in labels.values():
                progress.cell(model, label, "there already")
            continue
        for name, figures in measure(asked, model, names).items():
            results.put(model, labels[name], part, figures)
            progress.cell(model, labels[name], shown.line(figures))
        request.free_memory()


# Tracing and lowering


def _trace(
    asked: Request, model: str, variants: Sequence[str], repeats: int
) -> dict[str, dict[str, Any]]:
    """Traces and lowers each variant in turn, with nothing cached."""
    figures: dict[str, dict[str, Any]] = {}
    seconds = ("trace_s", "lower_s", "cpu_s")
    shapes: dict[str, tuple[Any, Any]] = {}
    for turn in range(repeats + 1):  # the first warms Python up and counts for nothing
        for name in variants:
            cell = figures.setdefault(name, {key: [] for key in seconds})
            if "error" in cell:
                continue
            try:
                training = asked.training(name, model)
                if name not in shapes:
                    shapes[name] = training.shapes()
                request.free_memory()
                jitted = jax.jit(training.step, donate_argnums=0)
                lowering = lower(jitted, *shapes[name])
            except Exception as error:  # whatever a package or XLA may raise
                figures[name] = {"error": request.reason(error)}
                continue
            if turn == 0:
                cell["ops"] = count_ops(lowering.lowered)
            else:
                for key in seconds:
                    cell[key].append(getattr(lowering, key))
    return figures


def count_ops(lowered: jax.stages.Lowered) -> int:
    """Returns the number of operations in the text of a StableHLO module."""
    return len(re.findall(r"^\s*(?:%\S+ = )?\"?stablehlo\.", lowered.as_text(), re.M))


# Dispatch


def _dispatch(
    asked: Request, model: str, variants: Sequence[str], calls: int
) -> dict[str, dict[str, Any]]:
    """Calls the compiled step of each variant in turn, and a step without work."""
    figures: dict[str, dict[str, Any]] = {}
    steps: dict[str, _Step] = {}
    for name in variants:
        try:
            steps[name] = _started(asked, model, name)
        except Exception as error:  # whatever a package or XLA may raise
            figures[name] = {"error": request.reason(error)}
            continue
        step, idle, carry, batch = steps[name]
        results = jax.tree.leaves(jax.eval_shape(step, carry, batch))
        figures[name] = {
            "leaves_in": len(jax.tree.leaves((carry, batch))),
            "leaves_out": len(results),
            "call_s": [],
            "dispatch_s": [],
            "step_s": [],
        }
    for turn in range(calls + _WARM_UP):
        for name, (step, idle, carry, batch) in steps.items():
            carry, call_s, _ = _timed(idle, carry, batch)
            carry, dispatch_s, step_s = _timed(step, carry, batch)
            steps[name] = _Step(step, idle, carry, batch)
            if turn >= _WARM_UP:
                figures[name]["call_s"].append(call_s)
                figures[name]["dispatch_s"].append(dispatch_s)
                figures[name]["step_s"].append(step_s)
    return figures


class _Step(NamedTuple):
    """A jitted step, one of the same arguments and results without work, and both."""

    step: Any
    idle: Any
    carry: PyTree
    batch: PyTree


def _timed(step: Any, carry: PyTree, batch: PyTree) -> tuple[PyTree, float, float]:
    """Returns the new carry, the seconds of the call, and those to its results."""
    start = time.perf_counter()
    results = step(carry, batch)
    returned = time.perf_counter()
    jax.block_until_ready(results)
    end = time.perf_counter()
    return results[0], round(returned - start, 7), round(end - start, 7)


def _started(asked: Request, model: str, variant: str) -> _Step:
    """Makes a jitted step as its user has it, with a carry and a batch."""
    training = asked.training(variant, model)
    keys = jax.random.split(jax.random.key(0))
    batch = jax.jit(training.batch)(keys[1])
    variables = jax.jit(training.init)(keys[0])
    if variant.startswith(("amp_step", "amp_fp16")):
        half = jnp.float16 if "fp16" in variant else jnp.bfloat16
        task, options = problem(model, asked.size), asked.options_of(variant)
        step = make_train_step(task, compute_dtype=half, **options)
        carry = new_state(variables, OPTIMIZER, scaling=half == jnp.float16)
    else:
        step = jax.jit(training.step, donate_argnums=0)
        carry = training.start(variables)
    results = jax.eval_shape(step, carry, batch)[1]

    def idle(carry: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        return carry, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), results)

    return _Step(step, jax.jit(idle, donate_argnums=0), carry, batch)


# Retraces


def _retraces(
    asked: Request, model: str, variants: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Counts how often the loss is traced in a run with all that may happen in one."""
    figures = {}
    for name in variants:
        try:
            figures[name] = _run_with_events(model, asked.options_of(name))
        except Exception as error:  # whatever a package or XLA may raise
            figures[name] = {"error": request.reason(error)}
    return figures


def _run_with_events(model: str, options: dict[str, Any]) -> dict[str, Any]:
    task = problem(model, "tiny")
    traces = 0

    def loss(params: PyTree, others: PyTree, batch: PyTree) -> Any:
        nonlocal traces
        traces += 1
        value, others = task.loss(params, others, batch)
        return value * batch["factor"], others

    counted = dataclasses.replace(task, loss=loss)
    train_step = make_train_step(counted, compute_dtype=jnp.float16, **options)
    keys = jax.random.split(jax.random.key(0))
    variables, batch = task.init(keys[0]), task.batch(keys[1])
    state = new_state(variables, GUARDED, scaler=1.0, patience=3)
    bad, restored_at = 5, STEPS // 2
    growths = skips = 0
    for index in range(STEPS):
        factor = jnp.float32(jnp.inf if index == bad else 1)
        before = float(state.scaler["scaler"])
        state, metrics = train_step(state, {**batch, "factor": factor})
        growths += float(metrics["scaler"]) > before
        skips = int(metrics["skipped_total"])
        if index + 1 == restored_at:
            fresh = new_state(variables, GUARDED, scaler=1.0, patience=3)
            state = _saved_and_restored(state, fresh)
    return {
        "steps": STEPS,
        "traces": traces,
        "growths": growths,
        "skips": skips,
        "restored_at": restored_at,
    }


def _saved_and_restored(state: Any, fresh: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        with checkpoint.manager(folder) as manager:
            checkpoint.save(manager, state)
        return checkpoint.restore(folder, fresh)
