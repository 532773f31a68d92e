"""What a task of these runs is, and the ways in which it is trained."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import flax_amp
from benchmarks import variants
from benchmarks.models import base
from benchmarks.variants import Way, stepped
from examples.digits import data as digits

PyTree = Any
Carry = dict[str, flax_amp.AmpTrainState]  # the states that train, by name
BATCH = 64  # digits


# The patience is so small that the scale grows too far, and steps are skipped.
WAYS = {
    name: dataclasses.replace(way, patience=50) for name, way in variants.WAYS.items()
}


class Program(NamedTuple):
    """A task in one precision; its functions are traced, `data` is their argument.

    Attributes:
      data: arrays, of training and of what is held out.
      start: `start(key) -> carry`.
      step: `step(carry, data, key) -> carry`, one step with a key of its own.
      evaluate: `evaluate(carry, data) -> metric`, in float32.
    """

    data: PyTree
    start: Callable[[jax.Array], Carry]
    step: Callable[[Carry, PyTree, jax.Array], Carry]
    evaluate: Callable[[Carry, PyTree], jax.Array]


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to train: a model and its data, and the metric of what is held out."""

    title: str
    metric: str
    make: Callable[[Way, int], Program]  # for so many steps
    steps: int
    higher: bool = False  # whether a higher metric is better
    resolution: float = 0.0  # the least difference that means something: one test image
    seeds: int = 5  # of float32, at least: more where their ends vary widely


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
        make = base.problem_of(model, {"": config}, batch, *options)
        return make("", dtype)

    trained = stepped(problem(way.dtype, loss_of), way, tx)
    reference = problem(None, metric_of or loss_of, 0.0)

    def start(key: jax.Array) -> Carry:
        return {"model": trained.start(*trained.problem.init(key))}

    def step(carry: Carry, data: PyTree, key: jax.Array) -> Carry:
        return {"model": trained.step(carry["model"], sample(data, key))[0]}

    def evaluate(carry: Carry, data: PyTree) -> jax.Array:
        state = carry["model"]
        return reference.loss(state.params, state.variables, data["test"])[0]

    return Program(data, start, step, evaluate)


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
