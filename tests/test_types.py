"""What users write keeps its types: for mypy (`make types`), and for pyright.

`assert_type` does nothing when it runs. A type checker fails where the types differ,
and where an ignored error is none.
"""

# mypy: warn-unused-ignores
# pyright: reportUnnecessaryTypeIgnoreComment=error

from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import flax_amp
from flax_amp import AmpTrainState, Precision, checkpoint, debug, optim
from flax_amp.debug import Explanation

pytestmark = pytest.mark.once


class EmaState(AmpTrainState):
    ema: Any


X = jnp.ones((2, 3))


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    return (params["w"] * batch).sum()


def make_state() -> EmaState:
    params = {"w": jnp.ones(3)}
    state = EmaState.create(params=params, tx=optax.sgd(0.1), ema=params)
    assert_type(state, EmaState)
    return state


def predict(params: Any, batch: jax.Array) -> tuple[jax.Array, int]:
    return params["w"] * batch, 3


@pytest.mark.parametrize("jit", [True, False])
def test_a_subclass_of_the_state_comes_back_as_itself(jit: bool) -> None:
    params = {"w": jnp.ones(3)}
    state = EmaState.create(params=params, tx=optim.sgd(0.1), ema=None)
    changed = state.replace(step=1)
    assert_type(changed, EmaState)
    updated = state.apply_gradients(grads=state.params)
    assert_type(updated, EmaState)
    faster = state.replace_hyperparams(learning_rate=0.2)
    assert_type(faster, EmaState)
    assert_type(state.hyperparams, dict[str, jax.Array])
    train_step = flax_amp.make_train_step(loss_fn, donate=False, jit=jit)
    new, metrics = train_step(state, jnp.ones(3))
    assert_type(new, EmaState)
    assert_type(metrics, dict[str, Any])
    assert {type(x) for x in (changed, updated, faster, new)} == {EmaState}
    prediction = flax_amp.make_eval_step(predict, jit=False)(state, jnp.ones(3))
    assert_type(prediction, tuple[jax.Array, int])
    assert isinstance(prediction, tuple)


def test_the_step_of_an_nnx_optimizer() -> None:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = flax_amp.AmpOptimizer(model, optax.sgd(0.1))
    assert_type(optimizer.hyperparams, dict[str, jax.Array])
    train_step = flax_amp.make_nnx_train_step(lambda model, x: model(x).sum())
    metrics = train_step(model, optimizer, jnp.ones((2, 3)))
    assert_type(metrics, dict[str, Any])
    flax_amp.check_progress((model, optimizer), metrics)
    train_step(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), X)
    eval_step = flax_amp.make_eval_step(lambda model, x: 3)
    assert_type(eval_step(model, X), int)


def test_a_word_for_the_precision_is_one_of_eight() -> None:
    params = {"w": jnp.ones(3)}
    state = AmpTrainState.create(
        params=params, tx=optax.sgd(0.1), precision="bf16-mixed"
    )
    assert_type(state.precision, Precision)
    flax_amp.make_nnx_train_step(loss_fn, precision=state.precision)
    flax_amp.make_nnx_train_step(loss_fn, precision="fp16")
    AmpTrainState.create(params=params, tx=optax.sgd(0.1), precision="fp32")
    with pytest.raises(ValueError, match="precision is 'bf8'"):
        flax_amp.make_nnx_train_step(loss_fn, precision="bf8")  # type: ignore[arg-type]


def scale(x: jax.Array, *, by: float = 2.0) -> jax.Array:
    return x * by


@flax_amp.amp_stop
def stopped(x: jax.Array, *, by: float = 2.0) -> jax.Array:
    return x * by


@flax_amp.amp(compute_dtype=jnp.bfloat16)
def lowered(x: jax.Array, *, by: float = 2.0) -> jax.Array:
    with flax_amp.amp_stop() as nothing:
        assert_type(nothing, None)
        return x * by


def test_a_function_keeps_its_type() -> None:
    x = jnp.ones(2)
    for function in (stopped, lowered, flax_amp.amp(scale), flax_amp.amp_stop(scale)):
        assert_type(function(x, by=3.0), jax.Array)
    with pytest.raises(TypeError, match="unexpected keyword"):
        stopped(x, times=3.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword"):
        flax_amp.amp(scale)(x, times=3.0)  # type: ignore[call-arg]


def test_each_tool_is_called_alike() -> None:
    x = jnp.ones(3)
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    pair = model, flax_amp.AmpOptimizer(model, optax.sgd(0.1))

    def of_model(model: nnx.Linear, batch: jax.Array) -> jax.Array:
        return model(batch).sum()

    def weighted(params: Any, batch: jax.Array, weight: jax.Array) -> jax.Array:
        return (params["w"] * batch * weight).sum()

    explain_function = flax_amp.explain(scale)
    assert_type(explain_function, Callable[..., Explanation])
    assert_type(explain_function(jnp.ones(3)), Explanation)
    by_state = flax_amp.explain(make_state(), weighted, x, x, backward=False)
    assert_type(by_state, Explanation)
    assert_type(by_state.report(only="problems"), str)
    by_function = flax_amp.find_nonfinite(loss_fn, precision="fp16", scale=8.0)
    assert_type(by_function, Callable[..., debug.NonfiniteReport])
    found = flax_amp.find_nonfinite(pair, of_model, x)
    assert_type(found, debug.NonfiniteReport)
    assert found.verdict == "nothing"
    compared = flax_amp.compare_precision(pair, of_model, x, remedies=0)
    assert_type(compared, debug.Comparison)
    with pytest.raises(TypeError, match="got int, int; expected"):
        flax_amp.compare_precision(1, 2)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="got str; expected"):
        flax_amp.find_nonfinite("a")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="argument 'presicion'"):
        flax_amp.explain(loss_fn, presicion="fp16")  # type: ignore[call-overload]


def test_optimizers_and_schedules() -> None:
    schedule = optim.cosine_decay_schedule(0.1, 100)
    assert_type(schedule, optim.Schedule)
    assert_type(schedule(0), jax.Array)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule))
    assert_type(tx, optim.Optimizer)
    params = {"w": jnp.ones(3)}
    assert_type(tx.init(params), optim.Optimizer)
    _, tx = tx.init(params).update(params, params)
    assert_type(tx.replace(weight_decay=0.1), optim.Optimizer)
    assert_type(optim.wrap(optax.sgd)(0.1), optim.Optimizer)
    with pytest.raises(AttributeError, match="no 'adamww'"):
        optim.adamww(1e-3)  # type: ignore[attr-defined]
    assert_type(optim.schedule(optax.constant_schedule)(0.1), optim.Schedule)
    assert isinstance(tx, optim.Optimizer) and isinstance(schedule, optim.Schedule)


def test_a_checkpoint_has_the_class_of_its_target(tmp_path: Path) -> None:
    state = make_state()
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, state)
    restored = checkpoint.restore(tmp_path, state)
    assert_type(restored, EmaState)
    assert_type(checkpoint.migrate(tmp_path, state), EmaState)
    assert_type(checkpoint.verify(tmp_path), list[checkpoint.StepReport])
    assert type(restored) is EmaState
