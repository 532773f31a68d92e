"""What a task of these runs is, and the ways in which it is trained."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import flax_amp
from flax_amp.policy import PolicyEntries

PyTree = Any
Carry = dict[str, Any]  # the states that train, by name, and whatever else a step needs
PATIENCE = 50  # so small that the scale grows too far, and steps are skipped


@dataclasses.dataclass(frozen=True)
class Way:
    """A precision to train in.

    Attributes:
      precision: what `AmpTrainState` follows. With "32-true", nothing of a step is
        from flax_amp: it differentiates the loss as it is.
      dtype: what the layers get as their `dtype` by hand.
      small_moments: whether the moments are stored in bfloat16.
      param_dtype: what the parameters are stored in.
      amp_policy: see `flax_amp.amp`.
    """

    precision: flax_amp.Precision = "32-true"
    dtype: DTypeLike | None = None
    small_moments: bool = False
    param_dtype: DTypeLike = jnp.float32
    amp_policy: PolicyEntries | None = None

    def state(self, tx: Any, **options: Any) -> flax_amp.AmpTrainState:
        """Makes a state as users do, but with a scale that grows faster."""
        half = self.precision == "16-mixed"
        scaler = flax_amp.init_scaler(patience=PATIENCE) if half else None
        if self.small_moments:
            tx = flax_amp.optim.small_state(tx)
        return flax_amp.AmpTrainState.create(
            tx=tx,
            precision=self.precision,
            param_dtype=self.param_dtype,
            scaler=scaler,
            **options,
        )

    def train_step(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Makes `step(state, batch) -> (state, metrics)`, to be called inside of jit.

        `loss_fn(params, batch, *, state)` returns `(loss, aux)`.
        """
        if self.precision == "32-true":
            return functools.partial(_plain_step, loss_fn)
        options: Any = dict(amp_policy=self.amp_policy, jit=False)
        return flax_amp.make_train_step(loss_fn, has_aux=True, **options)

    def eval_step(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Makes `step(state, batch)` of `fn(params, batch)`, in this precision."""
        if self.precision == "32-true":
            return lambda state, batch: fn(state.params, batch)
        options: Any = dict(amp_policy=self.amp_policy, jit=False)
        return flax_amp.make_eval_step(fn, **options)


# The models are too small for matmuls in fp8 to pay, and a CPU has none.
_FP8 = flax_amp.default_amp_policy | {"*": flax_amp.use_fp8(emulate=True)}
WAYS = {
    "float32": Way(),
    "bfloat16": Way("bf16-mixed"),
    "float16": Way("16-mixed"),
    "hand_bf16": Way(dtype=jnp.bfloat16),
    "small_moments": Way("bf16-mixed", small_moments=True),
    "small_state": Way("bf16-mixed", small_moments=True, param_dtype=jnp.bfloat16),
    "fp8": Way("bf16-mixed", amp_policy=_FP8),
}


def _plain_step(
    loss_fn: Callable[..., Any], state: flax_amp.AmpTrainState, batch: PyTree
) -> tuple[flax_amp.AmpTrainState, dict[str, jax.Array]]:
    grad = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, aux), grads = grad(state.params, batch, state=state)
    variables = aux.get("variables", state.variables)
    return state.apply_gradients(grads=grads, variables=variables), {"loss": loss}


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
    """Something to train.

    Attributes:
      title: the model and its data, in words.
      metric: what is held out and measured, in words.
      make: makes the program of a way, for so many steps.
      steps: the length of a run.
      higher: whether a higher metric is better.
      resolution: the least difference of the metric that means something, such as one
        test image.
      seeds: the least number of float32 runs: more where their ends vary widely.
    """

    title: str
    metric: str
    make: Callable[[Way, int], Program]
    steps: int
    higher: bool = False
    resolution: float = 0.0
    seeds: int = 5


def supervised(
    way: Way,
    model: Callable[..., Any],
    inputs: Sequence[Any],
    tx: Any,
    data: PyTree,
    sample: Callable[[PyTree, jax.Array], PyTree],
    loss: Callable[..., tuple[jax.Array, PyTree]],
    metric: Callable[..., jax.Array] | None = None,
) -> Program:
    """Makes the program of one model that learns from batches.

    Args:
      way: the precision.
      model: `model(dtype=None)` makes the Linen module.
      inputs: what the module is initialized with.
      tx: the optimizer.
      data: all arrays, "train" and "test".
      sample: `sample(data, key)` draws a batch.
      loss: `loss(module, variables, batch)` returns the loss, and the collections that
        change.
      metric: `metric(module, variables, data["test"])`, by default the loss.
    """
    trained, reference = model(dtype=way.dtype), model()

    def loss_fn(params: PyTree, batch: PyTree, *, state: Any) -> Any:
        value, updates = loss(trained, {"params": params, **state.variables}, batch)
        return value, {"variables": updates}

    train_step = way.train_step(loss_fn)

    def start(key: jax.Array) -> Carry:
        variables = dict(trained.init(key, *inputs))
        params, _ = variables.pop("params"), variables.pop("losses", None)
        return {"model": way.state(params=params, variables=variables, tx=tx)}

    def step(carry: Carry, data: PyTree, key: jax.Array) -> Carry:
        state, _ = train_step(carry["model"], sample(data, key))
        return {"model": state}

    def evaluate(carry: Carry, data: PyTree) -> jax.Array:
        state = carry["model"]
        variables = {"params": state.params, **state.variables}
        if metric is None:
            return loss(reference, variables, data["test"])[0]
        return metric(reference, variables, data["test"])

    return Program(data, start, step, evaluate)
