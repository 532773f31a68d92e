"""The variants: ways to train one model in mixed precision, as steps to compile.

The optimizer, the skipping of steps that are not finite, and the form of the step are
the same for all of them; they differ in how they get their gradients.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, Fp8DotGeneral
from flax.training.dynamic_scale import DynamicScale
from jax.typing import DTypeLike

import flax_amp
from benchmarks import peers, softmax
from benchmarks.models import Problem, problem
from benchmarks.twin import cast_products
from flax_amp import optim

PyTree = Any

OPTIMIZER = optax.adamw(1e-3)


class Result(NamedTuple):
    """What a forward and a backward pass give; gradients are float32 and unscaled."""

    loss: jax.Array
    others: PyTree
    grads: PyTree
    finite: Any = None  # None: never looked at, never skipped
    scaler: PyTree = ()


class Training(NamedTuple):
    """A training step of one variant of one model.

    Every function works under `jax.eval_shape`; jit `step` with `donate_argnums=0`.

    Attributes:
      problem: the model with its loss and data, whose `init` is the same for all
        variants of a model.
      step: `step(carry, batch) -> (carry, loss)`.
      start: `start(variables) -> carry`, where `variables` is what `init` gives.
      gradients: `gradients(params, others, batch) -> grads`, to compare variants.
    """

    problem: Problem
    step: Callable[[PyTree, PyTree], tuple[PyTree, jax.Array]]
    start: Callable[[dict[str, PyTree]], PyTree]
    gradients: Callable[..., PyTree]

    def shapes(self) -> tuple[PyTree, PyTree]:
        """Returns the shapes and dtypes of a carry and of a batch."""
        key = jax.random.key(0)
        carry = jax.eval_shape(lambda key: self.start(self.problem.init(key)), key)
        return carry, jax.eval_shape(self.problem.batch, key)


def training(variant: str, model: str, size: str = "full", **options: Any) -> Training:
    """Makes the training step of a variant of a model.

    The variants `amp_*` pass further options to `flax_amp.amp` or `make_train_step`,
    the others take none. A missing package is an `ImportError`.
    """
    if variant not in _BUILDERS:
        raise ValueError(f"training: got {variant!r}; expected one of {NAMES}.")
    return _BUILDERS[variant](model, size, **options)


def reason_missing(variant: str) -> str | None:
    """Returns why a variant cannot run here, or None if it can."""
    try:
        training(variant, "mlp", "tiny")
    except ImportError as error:
        return str(error)
    return None


def _training(
    task: Problem,
    gradients: Callable[..., Result],
    scaler: Callable[[], PyTree] = tuple,
) -> Training:
    """Makes the training step around `gradients(params, others, scaler, batch)`."""

    def start(variables):
        others = dict(variables)
        params = others.pop("params")
        return params, others, OPTIMIZER.init(params), scaler()

    def step(carry, batch):
        params, others, opt_state, scale = carry
        result = gradients(params, others, scale, batch)
        updates, new_opt_state = OPTIMIZER.update(result.grads, opt_state, params)
        old = params, others, opt_state
        new = optax.apply_updates(params, updates), result.others, new_opt_state
        if (finite := result.finite) is not None:
            new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        return (*new, result.scaler), result.loss

    def compared(params, others, batch):
        return gradients(params, others, scaler(), batch).grads

    return Training(task, step, start, compared)


def _of_loss(
    model: str,
    size: str,
    dtype: DTypeLike | None = None,
    wrap: Callable[..., Any] = lambda loss: loss,
    **options: Any,
) -> Training:
    """Differentiates the loss of a model, as it is or in a package's function."""
    task = problem(model, size, dtype)
    grad = jax.value_and_grad(wrap(task.loss, **options), has_aux=True)

    def gradients(params, others, _, batch):
        (value, others), grads = grad(params, others, batch)
        return Result(value, others, grads)

    return _training(task, gradients)


def _scaled(
    model: str,
    size: str,
    dtype: DTypeLike | None = None,
    wrap: Callable[..., Any] = lambda loss: loss,
    **options: Any,
) -> Training:
    """A loss with Flax's `DynamicScale`, as in its ImageNet example.

    Unlike there, batch statistics are restored too when a step is skipped. The
    gradients to compare are those of the first scale at which they are finite.
    """
    task = problem(model, size, dtype)
    scaled = wrap(task.loss, **options)

    def gradients(params, others, scaler, batch):
        grad = scaler.value_and_grad(scaled, has_aux=True)
        scaler, finite, (loss, others), grads = grad(params, others, batch)
        return Result(loss, others, grads, finite, scaler)

    def scaler():
        # Its defaults, but as arrays, so that the step is traced once.
        scale = jnp.asarray(DynamicScale().scale, jnp.float32)
        return DynamicScale().replace(fin_steps=jnp.zeros((), jnp.int32), scale=scale)

    def compared(params, others, batch):
        def step(carry):
            result = gradients(params, others, carry[-1], batch)
            return result.grads, result.finite, result.scaler

        def is_to_repeat(carry):
            _, finite, scale = carry
            return ~finite & (scale.scale >= 1)

        start = jax.tree.map(jnp.zeros_like, params), jnp.asarray(False), scaler()
        return jax.lax.while_loop(is_to_repeat, step, start)[0]

    return _training(task, gradients, scaler)._replace(gradients=compared)


def _flax_fp8(model: str, size: str) -> Training:
    """A hand-set model whose Dense layers in bfloat16 have the matmuls of Flax in fp8.

    Their statistics become what their gradients are, as in Flax's `TrainState`. The
    router of experts is in float32 and stays so.
    """
    task = problem(model, size, _BF16)

    def set_matmuls(call, args, kwargs, context):
        layer = context.module
        if isinstance(layer, nn.Dense | nn.DenseGeneral) and layer.dtype == _BF16:
            # A module refuses to be changed.
            object.__setattr__(layer, "dot_general_cls", Fp8DotGeneral)
        return call(*args, **kwargs)

    def in_fp8(function):
        def changed(*args):
            with nn.intercept_methods(set_matmuls):
                return function(*args)

        return changed

    task = dataclasses.replace(task, init=in_fp8(task.init), loss=in_fp8(task.loss))
    grad = jax.value_and_grad(task.loss, argnums=(0, 1), has_aux=True)

    def gradients(params, others, _, batch):
        (value, new), (grads, of_others) = grad(params, others, batch)
        name = OVERWRITE_WITH_GRADIENT
        return Result(value, {**new, name: of_others[name]}, grads)

    return _training(task, gradients)


def _mpx(model: str, size: str) -> Training:
    task = problem(model, size)
    grad = peers.mpx_gradients(task.loss, jnp.bfloat16)
    return _training(
        task,
        lambda *args: Result(*grad(*args)),
        scaler=lambda: (jnp.int32(0), jnp.float32(1)),
    )


def _amp_step(
    model: str,
    size: str,
    dtype: DTypeLike,
    scaling: bool,
    tx: Any = OPTIMIZER,
    param_dtype: DTypeLike = jnp.float32,
    **options: Any,
) -> Training:
    """`flax_amp.make_train_step` on an `AmpTrainState`, which is all of the carry.

    The step keeps its gradients; those to compare are of the same loss, scaled as the
    hand-set model's.
    """
    task = problem(model, size)
    compared = _scaled if scaling else _of_loss

    # With `state` and `variables` the same function serves Linen and NNX: both are
    # pure functions of dicts here.
    def loss_fn(params, batch, *, state):
        loss, others = task.loss(params, state.variables, batch)
        return loss, {"variables": others}

    rewrite = flax_amp.amp(compute_dtype=dtype, **options) if options else None
    train_step = flax_amp.make_train_step(
        rewrite(loss_fn) if rewrite else loss_fn, has_aux=True, jit=False, donate=False
    )

    def start(variables):
        others = dict(variables)
        return flax_amp.AmpTrainState.create(
            params=others.pop("params"),
            variables=others,
            tx=tx,
            param_dtype=param_dtype,
            precision="16-mixed" if scaling else "bf16-mixed",
        )

    def step(carry, batch):
        carry, metrics = train_step(carry, batch)
        return carry, metrics["loss"]

    def gradients(*args):
        made = compared(model, size, wrap=flax_amp.amp, compute_dtype=dtype, **options)
        return made.gradients(*args)

    return Training(task, step, start, gradients)


_BF16, _F16 = jnp.bfloat16, jnp.float16
_partial = functools.partial
_amp = _partial(_of_loss, wrap=flax_amp.amp, compute_dtype=_BF16)
_bf16_step = _partial(_amp_step, dtype=_BF16, scaling=False)
_small_step = _partial(_bf16_step, tx=optim.small_state(OPTIMIZER))


def _everywhere(emulate: bool) -> dict[Any, Any]:
    """Returns a policy of all scopes: their matmuls run in fp8 at any size."""
    recipe: Any = flax_amp.use_fp8(emulate=emulate)
    return flax_amp.default_amp_policy | {"*": recipe}


_BUILDERS: dict[str, Callable[..., Training]] = {
    "float32": _of_loss,
    "hand_bf16": _partial(_of_loss, dtype=_BF16),
    "smcast_bf16": _partial(_of_loss, dtype=_BF16, wrap=softmax.in_float32),
    "amp_bf16": _amp,
    "twin_bf16": _partial(_of_loss, wrap=_partial(cast_products, dtype=_BF16)),
    # The device that a step is compiled for is not asked whether it has such matmuls.
    "amp_fp8": _partial(_amp, matmul_dtype=flax_amp.use_fp8(emulate=False)),
    "amp_fp8_all": _partial(_amp, amp_policy=_everywhere(emulate=False)),
    "flax_fp8": _flax_fp8,
    "amp_step_bf16": _bf16_step,
    "amp_small_moments": _small_step,
    "amp_small_state": _partial(_small_step, param_dtype=_BF16),
    "jmp_bf16": _partial(_of_loss, wrap=_partial(peers.jmp_loss, dtype=_BF16)),
    "mpx_bf16": _mpx,
    "jaxamp_bf16": _partial(_of_loss, wrap=_partial(peers.jaxamp_loss, dtype=_BF16)),
    "hand_fp16": _partial(_scaled, dtype=_F16),
    "amp_fp16": _partial(_amp_step, dtype=_F16, scaling=True),
    # For gradients alone, whose numbers are those of hardware
    "amp_fp8_emulated": _partial(_amp, amp_policy=_everywhere(emulate=True)),
}
NAMES = tuple(_BUILDERS)
# Steps with a state in bfloat16
STATES = ("amp_small_moments", "amp_small_state")
