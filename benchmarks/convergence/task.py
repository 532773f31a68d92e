"""What a task of these runs is, and the precisions in which it is trained."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import flax_amp
from benchmarks import variants
from benchmarks.models import base
from benchmarks.variants import Way
from examples.digits import data as digits

PyTree = Any
BATCH = 64  # digits


# The patience is so small that the scale grows too far, and steps are skipped.
WAYS = {
    name: dataclasses.replace(way, patience=50) for name, way in variants.WAYS.items()
}


class Program(NamedTuple):
    """A task in one precision, as `flax_amp.debug.compare_training` takes it.

    Attributes:
      make: `make(seed)` returns the state at step 0.
      loss_fn: `loss_fn(params, batch, *, state)` returns `(loss, aux)`.
      batches: `batches(seed)` returns an iterator without an end.
      evaluate: `evaluate(state)` returns the metric of what is held out, in float32.
    """

    make: Callable[[int], flax_amp.AmpTrainState]
    loss_fn: Callable[..., Any]
    batches: Callable[[int], Iterator[PyTree]]
    evaluate: Callable[[flax_amp.AmpTrainState], jax.Array]


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to train: a model and its data, and the metric of what is held out."""

    title: str
    metric: str
    make: Callable[[Way, int], Program]  # for so many steps
    steps: int
    higher: bool = False  # whether a higher metric is better
    resolution: float = 0.0  # the least difference that means something: one test image

    def compare(
        self,
        ways: Sequence[str],
        seeds: int,
        steps: int | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> flax_amp.debug.TrainingComparison:
        """Trains in float32 and in some of the `WAYS`."""
        plain = self.make(WAYS["float32"], self.steps)
        sign = -1.0 if self.higher else 1.0

        def evaluate(state: flax_amp.AmpTrainState) -> Any:
            return sign * plain.evaluate(state)

        precisions = {}
        for name in ways:
            program = self.make(WAYS[name], self.steps)
            precisions[name] = {
                "make": program.make,
                "loss_fn": program.loss_fn,
                "amp_policy": WAYS[name].amp_policy,
            }
        return flax_amp.debug.compare_training(
            plain.make,
            plain.loss_fn,
            plain.batches,
            precisions=precisions,
            seeds=seeds,
            steps=steps or self.steps,
            evaluate=evaluate,
            tolerance=self.resolution,
            directory=directory,
            has_aux=True,
        )


def drawing(
    data: PyTree, sample: Callable[[PyTree, jax.Array], PyTree]
) -> Callable[[int], Iterator[PyTree]]:
    """Returns `batches(seed)` of what draws a batch from the data with a key."""
    data, draw = jax.device_put(data), jax.jit(sample)

    def batches(seed: int) -> Iterator[PyTree]:
        key = jax.random.key(seed)
        for index in itertools.count():
            yield draw(data, jax.random.fold_in(key, index))

    return batches


def supervised(
    way: Way,
    model: type[base.Module],
    config: base.Config,
    tx: Any,
    data: PyTree,
    sample: Callable[[PyTree, jax.Array], base.Batch],
    loss_of: Callable[..., jax.Array] = base.cross_entropy,
    metric_of: Callable[..., jax.Array] | None = None,
) -> Program:
    """Makes the program of one of the models that learns from batches.

    `sample(data, key)` draws a batch, and `data["test"]` is one. `loss_of` and
    `metric_of`, by default the same, are of outputs and labels.
    """

    def batch(config: base.Config, key: jax.Array) -> base.Batch:
        return sample(data, key)

    def problem(dtype: DTypeLike | None, *options: Any) -> base.Problem:
        made = base.problem_of(model, {"": config}, batch, *options)
        return made("", dtype)

    trained = problem(way.dtype, loss_of)
    reference = problem(None, metric_of or loss_of, 0.0)
    init, metric = jax.jit(trained.init), jax.jit(reference.loss)

    def make(seed: int) -> flax_amp.AmpTrainState:
        params, others = init(jax.random.key(seed))
        return way.state(params=params, variables=others, tx=tx)

    def evaluate(state: flax_amp.AmpTrainState) -> jax.Array:
        return metric(state.params, state.variables, data["test"])[0]

    loss_fn = variants.with_variables(trained.loss)
    return Program(make, loss_fn, drawing(data, sample), evaluate)


# --- handwritten digits -----------------------------------------------------------


def load(train: Any, test: Any = None) -> dict[str, PyTree]:
    """Returns what functions make of the images that train, and of those that test."""
    parts = digits.load(split_seed=0)
    return {"train": train(parts[0]), "test": (test or train)(parts[1])}


def batch_of(data: PyTree, key: jax.Array) -> PyTree:
    """Draws a batch of those that train."""
    count = len(jax.tree.leaves(data["train"])[0])
    rows = jax.random.randint(key, (BATCH,), 0, count)
    return jax.tree.map(lambda x: jnp.asarray(x)[rows], data["train"])
