"""The variants: ways to train one model in mixed precision, as steps to compile."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

import flax_amp
from benchmarks import peers, scaled
from benchmarks.method import (
    Method,
    NotInstalledError,
    Training,
    from_method,
    unscaled,
)
from benchmarks.problem import problem

PyTree = Any


def training(variant: str, model: str, size: str = "full", **options: Any) -> Training:
    """Makes the training step of a variant of a model.

    Args:
      variant: one of `NAMES`.
      model: one of `benchmarks.problem.NAMES`.
      size: "full" or "tiny".
      **options: further keywords for `flax_amp.amp` or `flax_amp.make_train_step`
        (the variants `amp_*`); the other variants take none.

    Returns:
      The training.

    Raises:
      ValueError: if there is no such variant or model.
      NotInstalledError: if the variant needs a package that is missing.
    """
    if variant not in _BUILDERS:
        raise ValueError(f"training: got {variant!r}; expected one of {NAMES}.")
    return _BUILDERS[variant](variant, model, size, **options)


def reason_missing(variant: str) -> str | None:
    """Returns why a variant cannot run here, or None if it can."""
    try:
        training(variant, "mlp", "tiny")
    except NotInstalledError as error:
        return str(error)
    return None


def _plain(
    variant: str,
    model: str,
    size: str,
    dtype: DTypeLike | None = None,
    softmax_dtype: DTypeLike | None = None,
) -> Training:
    """float32, or hand-set: the model as it is, without a scaler."""
    task = problem(model, size, dtype, softmax_dtype)

    return from_method(variant, unscaled(task))


def _amp(
    variant: str, model: str, size: str, compute_dtype: DTypeLike, **options: Any
) -> Training:
    """`flax_amp.amp` around the loss of the untouched model."""
    task = problem(model, size)
    loss_amp = flax_amp.amp(task.loss, compute_dtype=compute_dtype, **options)

    return from_method(variant, unscaled(task, loss_amp))


def _method(
    variant: str,
    model: str,
    size: str,
    method: Callable[..., Method],
    **options: Any,
) -> Training:
    return from_method(variant, method(model, size, **options))


_BUILDERS: dict[str, Callable[..., Training]] = {
    "float32": _plain,
    "hand_bf16": functools.partial(_plain, dtype=jnp.bfloat16),
    "smcast_bf16": functools.partial(
        _plain, dtype=jnp.bfloat16, softmax_dtype=jnp.float32
    ),
    "amp_bf16": functools.partial(_amp, compute_dtype=jnp.bfloat16),
    "amp_step_bf16": functools.partial(
        scaled.amp_step, compute_dtype=jnp.bfloat16, scaling=False
    ),
    "jmp_bf16": functools.partial(_method, method=peers.jmp_bf16),
    "mpx_bf16": functools.partial(_method, method=peers.mpx_bf16),
    "jaxamp_bf16": functools.partial(_method, method=peers.jaxamp_bf16),
    "hand_fp16": functools.partial(_method, method=scaled.hand_fp16),
    "amp_fp16": functools.partial(
        scaled.amp_step, compute_dtype=jnp.float16, scaling=True
    ),
    "amp_fp16_cond": functools.partial(
        scaled.amp_step, compute_dtype=jnp.float16, scaling=True, branch=True
    ),
    "jmp_fp16": functools.partial(_method, method=peers.jmp_fp16),
}
NAMES = tuple(_BUILDERS)
