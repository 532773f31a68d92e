"""Trains the digits model with sixteen learning rates in one compiled step.

    python -m examples.sweep

The optimizer is a pytree, and the peak of its learning rate is a leaf. So `jax.vmap`
turns one state into sixteen, and one step into a step that trains all of them, each
with its own schedule, its own loss scale and its own skipped steps. The table marks the
rate with the lowest loss on images that were held out. The loss decides, and not the
accuracy, because the accuracies of good rates differ by a few images only.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flax_amp
from examples.digits import data, model
from flax_amp import optim

STEPS, WARM_UP, BATCH_SIZE = 120, 12, 64
PEAKS = np.geomspace(1e-5, 1.0, 16).astype(np.float32)


@optim.schedule
def warm_up_and_decay(peak):
    # optax.warmup_cosine_decay_schedule asks whether the peak is 0; an array has no
    # answer to that inside of vmap.
    warm_up = optax.linear_schedule(0.0, peak, WARM_UP)
    decay = optax.cosine_decay_schedule(peak, STEPS - WARM_UP)
    return optax.join_schedules([warm_up, decay], [WARM_UP])


def create_state(peak):
    network = model.ConvNet(data.NUM_CLASSES)
    rate = warm_up_and_decay(peak)
    variables = network.init(jax.random.key(0), jnp.ones((1, 8, 8, 1)), train=False)
    return flax_amp.AmpTrainState.create(
        apply_fn=network.apply,
        params=variables["params"],
        variables={"batch_stats": variables["batch_stats"]},
        rngs={"dropout": jax.random.key(1)},
        tx=optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate)),
        precision="16-mixed",
    )


def train(peaks):
    images, test = data.load(split_seed=0)
    states = jax.jit(jax.vmap(create_state))(peaks)
    step = flax_amp.make_train_step(model.make_loss_fn(), has_aux=True, jit=False)
    step = jax.jit(jax.vmap(step, in_axes=(0, None)), donate_argnums=0)
    for i in range(STEPS):
        batch = data.batch_at(images, i, batch_size=BATCH_SIZE, seed=0)
        states, metrics = step(states, batch)
        if i == WARM_UP:
            rates = metrics["hyperparams/learning_rate"]
            print(f"after the warm-up, rates from {rates.min():.1e} to {rates.max()}")
    evaluate = flax_amp.make_eval_step(model.eval_fn, jit=False)
    found = jax.jit(jax.vmap(evaluate, in_axes=(0, None)))(states, test)
    found = jax.vmap(lambda metrics: metrics.compute())(found)
    return states, {**jax.device_get(found), "count": len(test["label"])}


def main():
    states, found = train(PEAKS)
    skipped = jax.device_get(states.opt_state.total_notfinite)
    finite = np.where(np.isfinite(found["loss"]), found["loss"], np.inf)
    best = int(np.argmin(finite))
    print(f"{'rate':>9} {'loss':>8} {'accuracy':>9} {'skipped':>8}")
    rows = zip(PEAKS, found["loss"], found["accuracy"], skipped, strict=True)
    for index, (rate, loss, accuracy, skips) in enumerate(rows):
        mark = "  <- lowest loss" if index == best else ""
        print(f"{rate:9.1e} {loss:8.4f} {accuracy:9.2%} {skips:8}{mark}")
    print(
        f"{STEPS} steps of {len(PEAKS)} runs, compiled once; {found['count']} images "
        f"were held out, so one of them is {1 / found['count']:.2%} of the accuracy"
    )
    print(f"best: {PEAKS[best]:.1e}, by the loss")


if __name__ == "__main__":
    main()
