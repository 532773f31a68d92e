"""Training on the small problem, with plain optax and with a pytree optimizer."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.optimizers.cases import Case, inputs, loss_of, params_of

PyTree = Any

FEW = 3

# Without the optimizations that make compiling slow.
_QUICK = {"xla_backend_optimization_level": 0}
quick_jit: Any = functools.partial(jax.jit, compiler_options=_QUICK)


class Training(NamedTuple):
    """A training, whatever the state is of which it is made.

    Attributes:
      init: parameters -> state.
      step: parameters, state -> the next of both.
    """

    init: Callable[[PyTree], Any]
    step: Callable[[PyTree, Any], tuple[PyTree, Any]]


# Makes a training from a case and a learning rate.
Way = Callable[[Case, Any], Training]


def ours(case: Case, rate: Any) -> Training:
    """Returns the training with a pytree optimizer, which is its state."""

    def step(params: PyTree, tx: Any) -> tuple[PyTree, Any]:
        grads, extra = inputs(case, params)
        updates, tx = tx.update(grads, params, **extra)
        return optax.apply_updates(params, updates), tx

    return Training(case.pytree(rate).init, step)


def in_optax(case: Case, rate: Any) -> Training:
    """Returns the training with plain optax."""
    tx = case.plain(rate)

    def step(params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        grads, extra = inputs(case, params)
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return Training(tx.init, step)


def run(
    training: Training, steps: int = FEW, jit: Any = quick_jit
) -> tuple[PyTree, Any]:
    """Returns parameters and state after some compiled steps."""
    return steps_from(
        jit(training.step), params_of(), training.init(params_of()), steps
    )


def steps_from(
    step: Any, params: PyTree, state: Any, steps: int = FEW
) -> tuple[PyTree, Any]:
    """Returns parameters and state some steps later."""
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def final_params(training: Training, dtype: Any = jnp.float32) -> PyTree:
    """Returns the parameters after a few steps; to be traced as a whole."""
    params = params_of(dtype=dtype)
    return steps_from(training.step, params, training.init(params))[0]


def final_loss(way: Way, case: Case, dtype: Any = jnp.float32) -> Any:
    """Returns the loss after a few steps, as a function of the learning rate."""
    return lambda rate: loss_of(final_params(way(case, rate), dtype))


def distance(a: PyTree, b: PyTree) -> float:
    """Returns the relative L2 distance of two trees, 0 if all bits are equal.

    Relative to 0.01 at least: the derivative of `schedule_free` by its rate is 0.
    """
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    as64 = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
    if all(np.array_equal(x, y, equal_nan=True) for x, y in as64):
        return 0.0
    difference = sum(float(np.sum((x - y) ** 2)) for x, y in as64)
    size = sum(float(np.sum(y**2)) for _, y in as64)
    return float(np.sqrt(difference / max(size, 1e-4)))
