"""float16 with a loss scaler: Flax's own recipe, and the whole step of flax_amp."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale
from jax.typing import DTypeLike

import flax_amp
from benchmarks.method import OPTIMIZER, Method, Result, Training
from benchmarks.models.base import Problem
from benchmarks.problem import problem
from flax_amp._training.finite import apply_if_finite

PyTree = Any

# As `AmpTrainState.create` does it: never give up. Wrapped here, so that all the states
# of a training share one optimizer object, and its step is compiled once.
_NEVER = int(np.iinfo(np.int32).max)
GUARDED = apply_if_finite(OPTIMIZER)


def hand_fp16(model: str, size: str) -> Method:
    """A hand-set float16 model with Flax's `DynamicScale`, as in its ImageNet example.

    Unlike there, batch statistics are restored too when a step is skipped.
    """
    task = problem(model, size, jnp.float16)

    def gradients(
        params: PyTree, others: PyTree, scaler: PyTree, batch: PyTree
    ) -> Result:
        grad = DynamicScale(**scaler).value_and_grad(task.loss, has_aux=True)
        new, finite, (loss, others), grads = grad(params, others, batch)
        scaler = {"fin_steps": new.fin_steps, "scale": new.scale}
        return Result(loss, others, grads, finite, scaler)

    def scaler() -> PyTree:
        # Its defaults, but as arrays, so that the step is traced once.
        default = DynamicScale()
        return {
            "fin_steps": jnp.asarray(default.fin_steps, jnp.int32),
            "scale": jnp.asarray(default.scale, jnp.float32),
        }

    return Method(task, gradients, scaler)


def amp_step(
    variant: str,
    model: str,
    size: str,
    compute_dtype: DTypeLike,
    scaling: bool,
    branch: bool = False,
    **options: Any,
) -> Training:
    """`flax_amp.make_train_step` on an `AmpTrainState`, which is all of the carry.

    Args:
      variant: the name of the variant.
      model: the name of the model.
      size: "full" or "tiny".
      compute_dtype: float16 or bfloat16.
      scaling: scale the loss dynamically.
      branch: skip steps by the `cond` of `optax.apply_if_finite`, not by a select.
      **options: further keywords of `make_train_step`.

    Returns:
      The training.
    """
    task = problem(model, size)
    optimizer = optax.apply_if_finite(OPTIMIZER, _NEVER) if branch else GUARDED
    train_step = make_train_step(
        task, compute_dtype=compute_dtype, jit=False, donate=False, **options
    )

    def start(variables: dict[str, PyTree]) -> PyTree:
        return new_state(variables, optimizer, scaling)

    def step(carry: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array]:
        carry, metrics = train_step(carry, batch)
        return carry, metrics["loss"]

    def gradients(
        params: PyTree, others: PyTree, batch: PyTree
    ) -> tuple[jax.Array, PyTree]:
        known = inspect.signature(flax_amp.amp).parameters
        shared = {key: value for key, value in options.items() if key in known}
        loss_amp = flax_amp.amp(task.loss, compute_dtype=compute_dtype, **shared)
        grad = flax_amp.dynamic_scale_value_and_grad(
            loss_amp, has_aux=True, redo_on_nan=24 if scaling else 0
        )
        scaler = flax_amp.init_scaler() if scaling else flax_amp.no_scaler()
        _, ((loss, _), grads) = grad(params, others, batch, dynamic_scaler_state=scaler)
        return loss, grads

    return Training(variant, task.name, step, start, task.batch, gradients, task.init)


def make_train_step(task: Problem, **options: Any) -> Callable[..., Any]:
    """Returns `flax_amp.make_train_step` of a problem's loss.

    Args:
      task: the problem.
      **options: further keywords of `make_train_step`.

    Returns:
      The step, a function of an `AmpTrainState` and a batch.
    """

    # With `state` and `variables` the same function serves Linen and NNX: both are
    # pure functions of dicts here.
    def loss_fn(params: PyTree, batch: PyTree, *, state: Any) -> tuple[Any, PyTree]:
        loss, others = task.loss(params, state.variables, batch)
        return loss, {"variables": others}

    return flax_amp.make_train_step(loss_fn, has_aux=True, **options)


def new_state(
    variables: dict[str, PyTree],
    optimizer: Any,
    scaling: bool = True,
    **scaler: Any,
) -> flax_amp.AmpTrainState:
    """Returns the `AmpTrainState` of a new run.

    Args:
      variables: what `Problem.init` gives.
      optimizer: an optax optimizer.
      scaling: scale the loss dynamically.
      **scaler: keywords of `flax_amp.init_scaler`.

    Returns:
      The state.
    """
    others = dict(variables)
    return flax_amp.AmpTrainState.create(
        params=others.pop("params"),
        variables=others,
        tx=optimizer,
        scaler=flax_amp.init_scaler(**scaler) if scaling else flax_amp.no_scaler(),
    )
