"""Trains and evaluates, from the newest checkpoint in `workdir` if there is one."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

import flax_amp
from examples.char_lm import data
from examples.char_lm.model import NNXGPT, LinenGPT, loss_fn, next_char
from flax_amp import metrics, optim


def create_state(config: ConfigDict) -> flax_amp.AmpTrainState:
    """Returns the state at step 0."""
    schedule = optim.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup_steps, config.num_steps
    )
    state = flax_amp.AmpTrainState.create(
        **create_model(config),
        tx=optim.chain(
            optim.clip_by_global_norm(config.clip_norm),
            optim.adamw(schedule, weight_decay=config.weight_decay),
        ),
        precision=config.precision,
    )
    if state.precision == "16-mixed":
        state = state.replace(
            scaler=flax_amp.init_scaler(patience=config.scale_patience)
        )
    return state


def create_model(config: ConfigDict) -> dict[str, Any]:
    """Returns what `AmpTrainState.create` takes for a model of Linen or of NNX."""
    if config.api == "nnx":
        return {"model": NNXGPT(config, rngs=nnx.Rngs(config.seed))}
    if config.api != "linen":
        raise ValueError(f"config.api is {config.api!r}; expected 'linen' or 'nnx'")
    model = LinenGPT(config)
    tokens = jnp.zeros((1, config.length), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(config.seed), tokens)
    return {"apply_fn": model.apply, "params": variables["params"]}


def train_and_evaluate(
    config: ConfigDict,
    workdir: str | os.PathLike[str],
    *,
    should_stop: Callable[[int], bool] = lambda step: False,
) -> tuple[flax_amp.AmpTrainState, dict[str, Any]]:
    """Trains up to `config.num_steps`, or until `should_stop(step)`.

    At the end it evaluates and samples; where it is told to stop, it only saves, since
    the machine may be taken away. Returns the state and a summary in Python numbers.
    """
    text, test_text = data.load(config)
    test = data.test_batch(config, test_text)
    tables = data.baselines(text, test)
    state = create_state(config)
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    print(f"{len(text):,} characters to train on, {len(test_text):,} to test on")
    print(f"{config.api} GPT of {size:,} parameters in {config.precision}")
    for name, bits in tables.items():
        print(f"a table of {name}: {bits:.3f} bits per character")

    manager = flax_amp.checkpoint.manager(
        os.path.join(workdir, "checkpoints"), max_to_keep=config.checkpoints_to_keep
    )
    if manager.latest_step() is not None:
        state = flax_amp.checkpoint.restore(manager, state)
        print(f"resuming from step {int(state.step)}")
    start = int(state.step)
    train_step = flax_amp.make_train_step(loss_fn, has_aux=True)
    eval_step = flax_amp.make_eval_step(loss_fn)
    writer = metrics.create_writer(
        workdir, first_step=start + 1, total_steps=config.num_steps
    )
    if start == 0:
        writer.write_hparams(config.to_dict())

    def log(group: str, scalars: dict[str, Any]) -> None:
        scalars = {f"{group}/{name}": value for name, value in scalars.items()}
        writer.write_scalars(int(state.step), scalars)

    with manager, writer:
        window, told_to_stop = metrics.StepMetrics.empty(), False
        for step in range(start + 1, config.num_steps + 1):
            # The calls return before the step has run on the device. The loop waits
            # for values only every `log_every` steps.
            state, reported = train_step(state, data.train_batch(config, text, step))
            window = window.add(reported)
            told_to_stop = should_stop(step)
            last = told_to_stop or step == config.num_steps
            if last or step % config.log_every == 0:
                log("train", window.compute())
                flax_amp.check_progress(state, reported)
                window = metrics.StepMetrics.empty()
            if last or step % config.checkpoint_every == 0:
                flax_amp.checkpoint.save(manager, state)
            if not last and step % config.eval_every == 0:
                log("test", eval_step(state, test)[1])
            if last:
                break
        summary = {
            "step": int(state.step),
            "resumed_from": start,
            "bits_of_tables": tables,
            "skipped": int(state.opt_state.total_notfinite),
            "scale": float(state.scaler["scaler"]),
        }
        if not told_to_stop:
            found = eval_step(state, test)[1]
            log("test", found)  # also if the run before has saved its last step
            summary["bits"] = float(found["bits"])
            summary["sample"] = write_on(config, state, test_text)
    return state, summary


def write_on(config: ConfigDict, state: flax_amp.AmpTrainState, text: Any) -> str:
    """Returns the first window of a text, and what the model writes after it."""
    draw, window = flax_amp.make_eval_step(next_char), text[: config.length]
    written = []
    for key in jax.random.split(jax.random.key(config.seed), config.sample_chars):
        batch = {"window": window, "key": key, "temperature": config.temperature}
        written.append(int(draw(state, batch)))
        window = np.append(window[1:], np.int32(written[-1]))
    return bytes([*text[: config.length], *written]).decode("ascii")
