"""`Method` and `Training`: a way to get gradients, and the training step around it.

The optimizer, the skipping of steps that are not finite, and the form of the step are
the same for all the variants; they differ in how they get their gradients.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.problem import Problem

PyTree = Any

OPTIMIZER = optax.adamw(1e-3)


class Result(NamedTuple):
    """What a forward and a backward pass give; gradients are float32 and unscaled."""

    loss: jax.Array
    others: PyTree
    grads: PyTree
    finite: Any = None  # None: never looked at, never skipped
    scaler: PyTree = ()


@dataclasses.dataclass(frozen=True)
class Method:
    """How a variant computes gradients.

    Attributes:
      problem: the model, hand-set or untouched.
      gradients: `gradients(params, others, scaler, batch) -> Result`.
      scaler: makes the state of the loss scaler, arrays only.
    """

    problem: Problem
    gradients: Callable[[PyTree, PyTree, PyTree, PyTree], Result]
    scaler: Callable[[], PyTree] = tuple


@dataclasses.dataclass(frozen=True)
class Training:
    """A training step of one variant of one model.

    Every function works under `jax.eval_shape`; jit `step` with `donate_argnums=0`.

    Attributes:
      variant: the name of the variant.
      model: the name of the model.
      step: `step(carry, batch) -> (carry, loss)`.
      start: `start(variables) -> carry`, where `variables` is what `init` gives.
      batch: `batch(key) -> batch`.
      gradients: `gradients(params, others, batch) -> (loss, grads)`, to compare
        variants; a loss scale that is too large is lowered until they are finite.
      init: `init(key) -> {"params": ..., ...}`, the same for all variants of a model.
    """

    variant: str
    model: str
    step: Callable[[PyTree, PyTree], tuple[PyTree, jax.Array]]
    start: Callable[[dict[str, PyTree]], PyTree]
    batch: Callable[[jax.Array], PyTree]
    gradients: Callable[[PyTree, PyTree, PyTree], tuple[jax.Array, PyTree]]
    init: Callable[[jax.Array], dict[str, PyTree]]

    def carry(self, key: jax.Array) -> PyTree:
        """Returns the carry of a new run."""
        return self.start(self.init(key))

    def shapes(self) -> tuple[PyTree, PyTree]:
        """Returns the shapes and dtypes of a carry and of a batch."""
        key = jax.random.key(0)
        return jax.eval_shape(self.carry, key), jax.eval_shape(self.batch, key)


def unscaled(task: Problem, loss: Callable[..., Any] | None = None) -> Method:
    """Returns the method that differentiates a loss as it is, without a scaler.

    Args:
      task: the problem.
      loss: what to differentiate in place of the problem's own loss.
    """
    grad = jax.value_and_grad(loss or task.loss, has_aux=True)

    def gradients(
        params: PyTree, others: PyTree, scaler: PyTree, batch: PyTree
    ) -> Result:
        (value, others), grads = grad(params, others, batch)
        return Result(value, others, grads)

    return Method(task, gradients)


class NotInstalledError(ImportError):
    """A variant needs a package that is not installed, or does not import."""


def from_method(variant: str, method: Method) -> Training:
    """Makes the training step around a way to get gradients."""
    task = method.problem

    def start(variables: dict[str, PyTree]) -> PyTree:
        others = dict(variables)
        params = others.pop("params")
        return params, others, OPTIMIZER.init(params), method.scaler()

    def step(carry: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        params, others, opt_state, scaler = carry
        result = method.gradients(params, others, scaler, batch)
        updates, new_opt_state = OPTIMIZER.update(result.grads, opt_state, params)
        old = params, others, opt_state
        new = optax.apply_updates(params, updates), result.others, new_opt_state
        if (finite := result.finite) is not None:
            new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        return (*new, result.scaler), result.loss

    def gradients(
        params: PyTree, others: PyTree, batch: PyTree
    ) -> tuple[jax.Array, PyTree]:
        def attempt(scaler: PyTree) -> Result:
            return method.gradients(params, others, scaler, batch)

        result = attempt(method.scaler())
        if result.finite is not None:
            result = jax.lax.while_loop(
                lambda result: ~result.finite,
                lambda result: attempt(result.scaler),
                result,
            )
        return result.loss, result.grads

    return Training(variant, task.name, step, start, task.batch, gradients, task.init)
