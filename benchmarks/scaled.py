"""float16 with a loss scaler: Flax's own recipe, and the whole step of flax_amp."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax.training.dynamic_scale import DynamicScale
from jax.typing import DTypeLike

import flax_amp
from benchmarks.method import OPTIMIZER, Method, Result, Training
from benchmarks.problem import problem

PyTree = Any


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
    **options: Any,
) -> Training:
    """`flax_amp.make_train_step` on an `AmpTrainState`, which is all of the carry.

    Args:
      variant: the name of the variant.
      model: the name of the model.
      size: "full" or "tiny".
      compute_dtype: float16 or bfloat16.
      scaling: scale the loss dynamically.
      **options: further keywords of `make_train_step`.

    Returns:
      The training.
    """
    task = problem(model, size)
    new_scaler = flax_amp.init_scaler if scaling else flax_amp.no_scaler

    # With `state` and `variables` the same function serves Linen and NNX: both are
    # pure functions of dicts here.
    def loss_fn(params: PyTree, batch: PyTree, *, state: Any) -> tuple[Any, PyTree]:
        loss, others = task.loss(params, state.variables, batch)
        return loss, {"variables": others}

    train_step = flax_amp.make_train_step(
        loss_fn,
        has_aux=True,
        compute_dtype=compute_dtype,
        jit=False,
        donate=False,
        **options,
    )

    def carry(key: jax.Array) -> PyTree:
        others = dict(task.init(key))
        return flax_amp.AmpTrainState.create(
            params=others.pop("params"),
            variables=others,
            tx=OPTIMIZER,
            scaler=new_scaler(),
        )

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
        _, ((loss, _), grads) = grad(
            params, others, batch, dynamic_scaler_state=new_scaler()
        )
        return loss, grads

    return Training(variant, task.name, step, carry, task.batch, gradients, task.init)
