"""Peers: an expert's softmax, and jmp, mpx and jaxamp, as their READMEs use them.

The three packages are optional.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

PyTree = Any
Loss = Callable[..., tuple[Any, PyTree]]

NAMES = ("jmp", "mpx", "jaxamp")


def jmp_loss(loss: Loss, dtype: DTypeLike) -> Loss:
    """jmp: parameters and inputs are cast at the top of the loss, without a scaler."""
    import jmp

    policy = jmp.Policy(jnp.float32, dtype, jnp.float32)

    def cast_loss(params, others, batch):
        params, batch = policy.cast_to_compute((params, batch))
        value, others = loss(params, others, batch)
        return policy.cast_to_output(value), others

    return cast_loss


def jaxamp_loss(loss: Loss, dtype: DTypeLike) -> Loss:
    """jaxamp: `amp` around the loss."""
    return load_jaxamp().amp(loss, compute_dtype=jnp.dtype(dtype))


def load_jaxamp() -> Any:
    """Returns jaxamp, corrected to run on current JAX.

    `Primitive.get_bind_params` used to return `(subfuns, params)` and now returns
    `params`. jaxamp 0.0.4 gets the one line changed that calls it.
    """
    import jaxamp

    module = importlib.import_module("jaxamp._amp")
    if "corrected" not in vars(module):
        text = inspect.getsource(module.amp_eval_jaxpr)
        text = text.replace("subfuns, bind_params =", "subfuns, bind_params = (),")
        exec(f"{text}\ncorrected = True", vars(module))
    return jaxamp


def mpx_gradients(loss: Loss, dtype: DTypeLike) -> Callable[..., tuple[Any, ...]]:
    """mpx: `filter_grad`, with a loss scale of 1 because bfloat16 needs none.

    It is not `filter_value_and_grad`, which in 0.1.8 forgets to cast its arguments and
    computes in float32. The loss comes back as aux instead. What is returned gives
    loss, other variables, gradients, whether they are finite, and the new scaler, which
    is a counter and a scale.
    """
    import mpx  # mixed-precision-for-JAX

    def gradients(params, others, scaler, batch):
        def with_aux(params, batch):
            value, new_others = loss(params, others, batch)
            return value, (value, new_others)

        mpx.set_half_precision_datatype(dtype)  # global; read while tracing
        counter, scale = scaler
        scaling = mpx.DynamicLossScaling(scale, jnp.ones(()), counter=counter)
        grad = mpx.filter_grad(with_aux, scaling, has_aux=True)
        new, finite, grads, (value, new_others) = grad(params, batch)
        return value, new_others, grads, finite, (new.counter, new.loss_scaling)

    return gradients


def softmax_in_float32(loss: Loss) -> Loss:
    """Casts the scores of each half-precision softmax up, and its result back.

    One that is written out, or that casts its scores itself, stays as it is.
    """
    softmax = jax.nn.softmax

    def cast(scores: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        if scores.dtype not in (jnp.bfloat16, jnp.float16):
            return softmax(scores, *args, **kwargs)
        wide = softmax(scores.astype(jnp.float32), *args, **kwargs)
        return wide.astype(scores.dtype)

    def changed(*args: Any) -> Any:
        replaced = functools.partial(mock.patch.object, attribute="softmax", new=cast)
        with replaced(jax.nn), replaced(nn):
            return loss(*args)

    return changed
