"""A state subclass keeps its class through `create`, the steps and `replace`.

`assert_type` does nothing when it runs; a type checker fails where the types differ,
and where an ignored error is none.
"""

# mypy: warn-unused-ignores

import subprocess
import sys
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax
import pytest

from flax_amp import (
    AmpTrainState,
    Precision,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
)


class EmaState(AmpTrainState):
    ema: Any


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    return (params["w"] * batch).sum()


def test_a_subclass_comes_back_as_itself() -> None:
    params = {"w": jnp.ones(3)}
    state = EmaState.create(params=params, tx=optax.sgd(0.1), ema=params)
    assert_type(state, EmaState)
    for jit in (True, False):
        new, metrics = make_train_step(loss_fn, donate=False, jit=jit)(
            state, params["w"]
        )
        assert_type(new, EmaState)
        assert_type(metrics, dict[str, Any])
        assert isinstance(new, EmaState)
    assert_type(state.replace(step=1), EmaState)
    assert_type(make_eval_step(loss_fn)(state, params["w"]), jax.Array)


def test_a_word_for_the_precision_is_one_of_three() -> None:
    params = {"w": jnp.ones(3)}
    state = AmpTrainState.create(
        params=params, tx=optax.sgd(0.1), precision="bf16-mixed"
    )
    assert_type(state.precision, Precision)
    make_nnx_train_step(loss_fn, precision=state.precision)
    with pytest.raises(ValueError, match="precision is 'bf16'"):
        make_nnx_train_step(loss_fn, precision="bf16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="precision is 'bf16'"):
        AmpTrainState.create(params=params, tx=None, precision="bf16")  # type: ignore[arg-type]


@pytest.mark.slow
def test_mypy_agrees() -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", __file__]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout
