"""Trains and evaluates, from the newest checkpoint in `workdir` if there is one."""

import os
from collections.abc import Callable
from typing import Any

import jax
from clu import parameter_overview
from ml_collections import ConfigDict

import flax_amp
from examples.digits import data
from examples.digits.model import ConvNet, eval_fn, make_loss_fn
from flax_amp import metrics, optim


def create_state(config: ConfigDict, images: Any) -> flax_amp.AmpTrainState:
    """Returns the state at step 0; `images` is any batch of the right shape."""
    model = ConvNet(
        data.NUM_CLASSES, tuple(config.features), config.dropout_rate, config.gain
    )
    params_key, dropout_key = jax.random.split(jax.random.key(config.seed))
    variables = jax.jit(model.init, static_argnames="train")(
        params_key, images, train=False
    )
    schedule = optim.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup_steps, config.num_steps
    )
    state = flax_amp.AmpTrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        variables={"batch_stats": variables["batch_stats"]},
        rngs={"dropout": dropout_key},
        tx=optim.chain(  # optax's, as a pytree: the step reports the learning rate
            optim.clip_by_global_norm(config.clip_norm),
            optim.adamw(schedule, weight_decay=config.weight_decay),
        ),
        precision=config.precision,
    )
    if state.precision == "16-mixed":
        scaler = flax_amp.init_scaler(patience=config.scale_patience)
        if not config.loss_scaling:
            scaler = flax_amp.no_scaler()
        state = state.replace(scaler=scaler)
    return state


def make_steps(config: ConfigDict) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the training and the evaluation step, in the precision of the state."""
    loss_fn = make_loss_fn(config.loss_weight)
    train_step = flax_amp.make_train_step(loss_fn, has_aux=True)
    return train_step, flax_amp.make_eval_step(eval_fn)


def explain_skipped(config: ConfigDict, state: Any, batch: Any, scale: float) -> None:
    """Prints why a step was skipped, unless only its scale was too large."""
    loss_fn = make_loss_fn(config.loss_weight)
    # The parameters are those that the step had, and the scale may be a lower one.
    found = flax_amp.find_nonfinite(state, loss_fn, batch, scale=scale)
    if found.verdict != "scale":
        print(found)


def train_and_evaluate(
    config: ConfigDict,
    workdir: str | os.PathLike[str],
    *,
    should_stop: Callable[[int], bool] = lambda step: False,
) -> tuple[flax_amp.AmpTrainState, dict[str, float]]:
    """Trains up to `config.num_steps`, or until `should_stop(step)`; then evaluates.

    Returns the state and a summary in Python numbers.
    """
    train_data, test_data = data.load(config.split_seed)
    train_step, eval_step = make_steps(config)
    state = create_state(config, train_data["image"][:1])
    print(parameter_overview.get_parameter_overview(state.params))

    manager = flax_amp.checkpoint.manager(
        os.path.join(workdir, "checkpoints"), max_to_keep=config.checkpoints_to_keep
    )
    if manager.latest_step() is not None:
        state = flax_amp.checkpoint.restore(manager, state)
        print(f"resuming from step {int(state.step)}")
    elif config.init_from:  # a run of this model, with flax_amp or plain Flax
        read = {"params": state.params, "variables": state.variables}
        state = state.replace(**flax_amp.checkpoint.migrate(config.init_from, read))
    start = int(state.step)
    writer = metrics.create_writer(
        workdir, first_step=start + 1, total_steps=config.num_steps
    )
    if start == 0:
        writer.write_hparams(config.to_dict())

    def log(group: str, scalars: dict[str, Any]) -> None:
        scalars = {f"{group}/{name}": value for name, value in scalars.items()}
        writer.write_scalars(int(state.step), scalars)

    with manager, writer:
        window = metrics.StepMetrics.empty()
        for step in range(start + 1, config.num_steps + 1):
            batch = data.batch_at(
                train_data, step - 1, batch_size=config.batch_size, seed=config.seed
            )
            # The calls return before the step has run on the device. The loop waits
            # for values only every `log_every` steps.
            scale = float(state.scaler["scaler"]) if config.debug_overflow else 1.0
            state, reported = train_step(state, batch)
            window = window.add(reported)
            if config.debug_overflow and not reported["grads_finite"]:
                explain_skipped(config, state, batch, scale)
            last = step == config.num_steps or should_stop(step)

            if last or step % config.log_every == 0:
                log("train", window.compute())
                window = metrics.StepMetrics.empty()
            if last or step % config.checkpoint_every == 0:
                flax_amp.checkpoint.save(manager, state)
            if not last and step % config.eval_every == 0:
                log("test", eval_step(state, test_data).compute())
            if last:
                break

        test = eval_step(state, test_data).compute()
        if start < config.num_steps:  # or this was logged by the run before
            log("test", test)
    return state, {
        "step": int(state.step),
        "resumed_from": start,
        "test_accuracy": float(test["accuracy"]),
        "test_loss": float(test["loss"]),
        "skipped": int(state.opt_state.total_notfinite),
        "scale": float(state.scaler["scaler"]),
    }
