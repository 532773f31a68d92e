"""Trains and evaluates, from the newest checkpoint in `workdir` if there is one."""

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

import flax_amp
from examples.imagenet import input_pipeline
from examples.imagenet.model import Metrics, create, eval_fn, make_loss_fn
from flax_amp import metrics, optim


def make_schedule(config: ConfigDict, steps_per_epoch: int) -> Any:
    """Returns the learning rate, which is in proportion to the batch."""
    warm_up = int(config.warmup_epochs * steps_per_epoch)
    decay = max(int(config.num_epochs * steps_per_epoch) - warm_up, steps_per_epoch)
    peak = config.learning_rate * config.batch_size / 256
    return optim.warmup_cosine_decay_schedule(0.0, peak, warm_up, warm_up + decay)


def create_state(
    config: ConfigDict, num_classes: int, steps_per_epoch: int
) -> flax_amp.AmpTrainState:
    """Returns the state at step 0."""
    model = create(config.model, num_classes, config.width)
    image = jnp.zeros((1, config.image_size, config.image_size, 3), jnp.uint8)
    variables = model.init(jax.random.key(config.seed), image, train=False)
    schedule = make_schedule(config, steps_per_epoch)
    return flax_amp.AmpTrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        variables={"batch_stats": variables["batch_stats"]},
        tx=optim.chain(
            optim.add_decayed_weights(config.weight_decay, mask=is_kernel),
            optim.sgd(schedule, momentum=config.momentum, nesterov=True),
        ),
        precision=config.precision,
    )


def is_kernel(params: Any) -> Any:
    """Biases, and the scales of BatchNorm, do not decay."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def train_and_evaluate(
    config: ConfigDict,
    workdir: str | os.PathLike[str],
    *,
    should_stop: Callable[[int], bool] = lambda step: False,
) -> tuple[flax_amp.AmpTrainState, dict[str, float]]:
    """Trains for `config.num_epochs`, or until `should_stop(step)`.

    At the end it evaluates; where it is told to stop, it only saves, since the machine
    may be taken away. Every device has the whole state and a part of each batch.
    Returns the state and a summary in Python numbers.
    """
    if config.batch_size % jax.device_count():
        raise ValueError(
            f"batch_size={config.batch_size} does not split over {jax.device_count()} "
            "devices; expected a multiple of their number"
        )
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    dataset = input_pipeline.load(config)
    epoch = max(dataset.train_examples // config.batch_size, 1)  # steps
    num_steps = config.num_train_steps
    if num_steps == -1:
        num_steps = int(config.num_epochs * epoch)

    state = jax.jit(
        lambda: create_state(config, dataset.num_classes, epoch), out_shardings=whole
    )()
    manager = flax_amp.checkpoint.manager(
        os.path.join(workdir, "checkpoints"), max_to_keep=config.checkpoints_to_keep
    )
    if manager.latest_step() is not None:
        state = flax_amp.checkpoint.restore(manager, state)
        print(f"resuming from step {int(state.step)}", flush=True)
    start = int(state.step)
    train_step = flax_amp.make_train_step(
        make_loss_fn(config.label_smoothing), has_aux=True, state_shardings=whole
    )
    eval_step = flax_amp.make_eval_step(eval_fn)
    writer = metrics.create_writer(workdir, first_step=start + 1, total_steps=num_steps)
    if start == 0:
        writer.write_hparams(config.to_dict())

    def log(group: str, scalars: dict[str, Any]) -> None:
        scalars = {f"{group}/{name}": value for name, value in scalars.items()}
        writer.write_scalars(int(state.step), scalars)

    def evaluate() -> dict[str, Any]:
        result = Metrics.empty()
        steps = config.steps_per_eval if config.steps_per_eval != -1 else None
        for batch in itertools.islice(dataset.test(), steps):
            result = result.merge(eval_step(state, jax.device_put(batch, split)))
        return result.compute()

    with manager, writer:
        window, began = metrics.StepMetrics.empty(), time.monotonic()
        told_to_stop = False
        batches = dataset.train(start) if start < num_steps else iter(())
        for step, batch in zip(range(start + 1, num_steps + 1), batches, strict=False):
            # The call returns before the step has run, and the next batch is sent
            # meanwhile. The loop waits for values only every `log_every_steps`.
            state, reported = train_step(state, jax.device_put(batch, split))
            window = window.add(reported)
            told_to_stop = should_stop(step)
            last = told_to_stop or step == num_steps
            save = last or step % (config.checkpoint_epochs * epoch) == 0
            # A window ends with the epoch, too: what is saved and tested then takes
            # time in which no image is trained on.
            if save or step % epoch == 0 or step % config.log_every_steps == 0:
                images = int(window.steps.sum()) * config.batch_size  # waits for them
                scalars = window.compute()
                scalars["images_per_s"] = images / (time.monotonic() - began)
                log("train", scalars)
                flax_amp.check_progress(state, reported)
                if save:
                    flax_amp.checkpoint.save(manager, state)
                if not last and step % epoch == 0:
                    log("test", evaluate())
                window, began = metrics.StepMetrics.empty(), time.monotonic()
            if last:
                break
        summary = {
            "step": int(state.step),
            "resumed_from": start,
            "skipped": int(state.opt_state.total_notfinite),
            "scale": float(state.scaler["scaler"]),
        }
        if not told_to_stop:
            test = evaluate()
            log("test", test)  # also if the run before has saved its last step
            summary |= {f"test_{name}": float(test[name]) for name in test}
    return state, summary
