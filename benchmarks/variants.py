"""The variants: ways to train one model in mixed precision, as steps to compile.

The optimizer, the skipping of steps that are not finite, and the form of the step are
the same for all of them; they differ in how they get their gradients.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.typing import DTypeLike

import flax_amp
from benchmarks import peers
from benchmarks.models import Problem, problem
from flax_amp.policy import PolicyEntries

PyTree = Any
Loss = Callable[..., Any]

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
      start: `start(params, others) -> carry`, of what `init` gives.
      gradients: `gradients(params, others, batch) -> grads`, to compare variants.
      forward: `forward(params, others, batch) -> (loss, others)` in the precision of
        the variant; `None` if its package has no such function.
    """

    problem: Problem
    step: Callable[[PyTree, PyTree], tuple[PyTree, jax.Array]]
    start: Callable[[PyTree, PyTree], PyTree]
    gradients: Any
    forward: Any = None

    def shapes(self) -> tuple[PyTree, PyTree]:
        """Returns the shapes and dtypes of a carry and of a batch."""
        key = jax.random.key(0)
        carry = jax.eval_shape(lambda key: self.start(*self.problem.init(key)), key)
        return carry, jax.eval_shape(self.problem.batch, key)


def training(variant: str, model: str, size: str = "full") -> Training:
    """Makes the training step of a variant of a model."""
    return _BUILDERS[variant](model, size)


def missing_package(variant: str) -> str | None:
    """Returns the package of others that a variant needs and that is not installed."""
    package = variant.removesuffix("_bf16")
    is_there = package not in peers.NAMES or importlib.util.find_spec(package)
    return None if is_there else package


def _training(
    task: Problem,
    gradients: Callable[..., Result],
    scaler: Callable[[], PyTree] = tuple,
) -> Training:
    """Makes the training step around `gradients(params, others, scaler, batch)`."""

    def start(params, others):
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
    wrap: Callable[[Loss], Loss] = lambda loss: loss,
) -> Training:
    """Differentiates the loss of a model, as it is or in a package's function."""
    task = problem(model, size, dtype)
    forward = wrap(task.loss)
    grad = jax.value_and_grad(forward, has_aux=True)

    def gradients(params, others, _, batch):
        (value, others), grads = grad(params, others, batch)
        return Result(value, others, grads)

    return _training(task, gradients)._replace(forward=forward)


def _scaled(
    model: str,
    size: str,
    dtype: DTypeLike | None = None,
    wrap: Callable[[Loss], Loss] = lambda loss: loss,
) -> Training:
    """A loss with Flax's `DynamicScale`, as in its ImageNet example.

    Unlike there, batch statistics are restored too when a step is skipped. The
    gradients to compare are those of the first scale at which they are finite.
    """
    task = problem(model, size, dtype)
    scaled = wrap(task.loss)

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

        start = jax.tree.map(jnp.zeros_like, params), jnp.asarray(False), scaler()
        return jax.lax.while_loop(lambda x: ~x[1] & (x[2].scale >= 1), step, start)[0]

    made = _training(task, gradients, scaler)
    return made._replace(gradients=compared, forward=scaled)


@dataclasses.dataclass(frozen=True)
class Way:
    """A precision to train in.

    `dtype` is what the layers get by hand; with `small_moments` the moments are stored
    in bfloat16.
    """

    precision: flax_amp.Precision = "32-true"
    dtype: DTypeLike | None = None
    small_moments: bool = False
    param_dtype: DTypeLike = jnp.float32
    amp_policy: PolicyEntries | None = None
    patience: int = 2000

    def state(self, tx: Any, **options: Any) -> flax_amp.AmpTrainState:
        """Makes a state as users do."""
        if self.precision == "16-mixed":
            options["scaler"] = flax_amp.init_scaler(patience=self.patience)
        options |= dict(precision=self.precision, param_dtype=self.param_dtype)
        tx = flax_amp.optim.small_state(tx) if self.small_moments else tx
        return flax_amp.AmpTrainState.create(tx=tx, **options)


def with_variables(loss: Loss) -> Callable[..., Any]:
    """Returns the loss of a problem as `make_train_step` takes it, with `aux`."""

    def loss_fn(params, batch, *, state):
        value, others = loss(params, state.variables, batch)
        return value, {"variables": others}

    return loss_fn


def stepped(task: Problem, way: Way, tx: Any) -> Training:
    """Makes the training step of a way; an `AmpTrainState` is all of the carry.

    The step does not tell its gradients.
    """

    train_step = flax_amp.make_train_step(
        with_variables(task.loss), has_aux=True, amp_policy=way.amp_policy, jit=False
    )

    def start(params, others):
        return way.state(params=params, variables=others, tx=tx)

    def step(carry, batch):
        carry, told = train_step(carry, batch)
        return carry, told["loss"]

    return Training(task, step, start, None)


def _amp_step(model: str, size: str, way: Way) -> Training:
    """A step, with gradients to compare: of a loss scaled as the hand-set model's."""
    of_loss = _scaled if way.precision == "16-mixed" else _of_loss
    wrap = functools.partial(flax_amp.amp, precision=way.precision)
    plain = of_loss(model, size, wrap=wrap)
    made = stepped(problem(model, size), way, OPTIMIZER)
    return made._replace(gradients=plain.gradients, forward=plain.forward)


class Guarded(TrainState):
    """What a loop stores that guards its gradients by hand, as flax_amp does."""

    variables: PyTree
    scaler: PyTree = struct.field(default_factory=flax_amp.no_scaler)
    in_a_row: Any = struct.field(default_factory=lambda: jnp.int32(0))
    total: Any = struct.field(default_factory=lambda: jnp.int32(0))
    last_finite: Any = struct.field(default_factory=lambda: jnp.array(True))

    @classmethod
    def new(cls, params: PyTree, variables: PyTree, tx: Any) -> "Guarded":
        return cls.create(apply_fn=None, params=params, tx=tx, variables=variables)


def guarded_step(loss: Loss, state: Guarded, batch: PyTree) -> tuple[Guarded, PyTree]:
    """A step with a scale, one decision, one select and the counters of skips.

    `loss(params, variables, batch)` returns `(value, variables)`.
    """
    scale = state.scaler["scaler"]

    def scaled(params: PyTree) -> tuple[jax.Array, PyTree]:
        value, variables = loss(params, state.variables, batch)
        return value * scale, (value, variables)

    grads, (value, variables) = jax.grad(scaled, has_aux=True)(state.params)
    grads = jax.tree.map(lambda g: g * (1 / scale), grads)
    square = optax.tree.norm(grads, squared=True)
    forward, backward = jnp.isfinite(value), jnp.isfinite(square)
    finite = forward & backward
    new = state.apply_gradients(grads=grads, variables=variables)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state).replace(
        step=new.step,
        scaler=flax_amp.update_scaler(state.scaler, backward, loss_finite=forward),
        in_a_row=jnp.where(finite, 0, state.in_a_row + 1),
        total=jnp.where(finite, state.total, state.total + 1),
        last_finite=finite,
    )
    told = {"loss": value, "grad_norm": jnp.sqrt(square), "grads_finite": finite}
    told |= {"scaler": new.scaler["scaler"], "skipped_total": new.total}
    return new, told


def _guarded(model: str, size: str) -> Training:
    """The same as `_amp_step`, by hand."""
    task, plain = problem(model, size), _of_loss(model, size, wrap=_amp)

    def start(params, others):
        return Guarded.new(params, others, OPTIMIZER)

    def step(carry, batch):
        carry, told = guarded_step(_amp(task.loss), carry, batch)
        return carry, told["loss"]

    return Training(task, step, start, plain.gradients, plain.forward)


def _mpx(model: str, size: str) -> Training:
    task = problem(model, size)
    grad = peers.mpx_gradients(task.loss, jnp.bfloat16)
    return _training(
        task,
        lambda *args: Result(*grad(*args)),
        scaler=lambda: (jnp.int32(0), jnp.float32(1)),
    )


# --- the table -----------------------------------------------------------------------

_BF16, _F16 = jnp.bfloat16, jnp.float16
_partial = functools.partial
_amp = _partial(flax_amp.amp, compute_dtype=_BF16)
# Matmuls of all scopes run in fp8 at any size, with its numbers on any device.
_EMULATED = flax_amp.default_amp_policy | {"*": flax_amp.use_fp8(emulate=True)}
# The device that a step is compiled for is not asked whether it has such matmuls.
_fp8 = _partial(_amp, matmul_dtype=flax_amp.use_fp8(emulate=False))
WAYS = {
    "float32": Way(),
    "bfloat16": Way("bf16-mixed"),
    "float16": Way("16-mixed"),
    "hand_bf16": Way(dtype=_BF16),
    "small_moments": Way("bf16-mixed", small_moments=True),
    "small_state": Way("bf16-mixed", small_moments=True, param_dtype=_BF16),
    "fp8": Way("bf16-mixed", amp_policy=_EMULATED),
}
_step_of = {name: _partial(_amp_step, way=way) for name, way in WAYS.items()}

_BUILDERS: dict[str, Callable[..., Training]] = {
    "float32": _of_loss,
    "hand_bf16": _partial(_of_loss, dtype=_BF16),
    "smcast_bf16": _partial(_of_loss, dtype=_BF16, wrap=peers.softmax_in_float32),
    "amp_bf16": _partial(_of_loss, wrap=_amp),
    "amp_graph": _partial(
        _of_loss, wrap=_partial(_amp, amp_policy=flax_amp.graph_policy)
    ),
    "amp_reduce_float32": _partial(
        _of_loss, wrap=_partial(_amp, reduce_in_float32=True)
    ),
    "amp_fp8": _partial(_of_loss, wrap=_fp8),
    "amp_step_bf16": _step_of["bfloat16"],
    "guarded_bf16": _guarded,
    "amp_small_moments": _step_of["small_moments"],
    "amp_small_state": _step_of["small_state"],
    "jmp_bf16": _partial(_of_loss, wrap=_partial(peers.jmp_loss, dtype=_BF16)),
    "mpx_bf16": _mpx,
    "jaxamp_bf16": _partial(_of_loss, wrap=_partial(peers.jaxamp_loss, dtype=_BF16)),
    "hand_fp16": _partial(_scaled, dtype=_F16),
    "amp_fp16": _step_of["float16"],
    # For gradients alone
    "amp_fp8_emulated": _partial(_of_loss, wrap=_partial(_amp, amp_policy=_EMULATED)),
}
# Models that by hand compute a softmax in half precision
SOFTMAX_IN_HALF = frozenset(
    "vit_s16 gpt_scan gpt_scan_noremat gpt_fsdp moe bert t5 unet dit swin".split()
)
NAMES = tuple(_BUILDERS)
