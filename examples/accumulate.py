"""Gradient accumulation: a large batch in the memory of a small one, four ways.

    python -m examples.accumulate

`accum_steps` splits the batch within one step: one scan, float32 sums, one update, one
decision to skip. `optax.MultiSteps` accumulates over several steps, for batches that
arrive in parts. In both, clipping sees the mean gradient of the whole batch. The table
shows how far the parameters end from those of the full batch, and how much memory XLA
takes. The scale of float16 starts low, so that no step is skipped: a skipped step loses
a full batch with `accum_steps`, and a part of one with `MultiSteps`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import flax_amp
from examples.digits import data

BATCH_SIZE, UPDATES = 256, 10


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Conv(32, (3, 3))(x))
        x = nn.gelu(nn.Conv(64, (3, 3), strides=2)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


def loss_fn(params, batch):
    logits = Network().apply({"params": params}, batch["image"])
    return optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, batch["label"]
    ).mean()


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


def create_state(tx):
    params = Network().init(jax.random.key(0), jnp.ones((1, 8, 8, 1)))["params"]
    scaler = flax_amp.init_scaler(scaler=2.0**8)
    return flax_amp.AmpTrainState.create(
        params=params, tx=tx, precision="16-mixed", scaler=scaler
    )


def train(tx, accum_steps, steps_per_update):
    """Trains on the same examples, however many steps they are split over."""
    images, _ = data.load(split_seed=0)
    state = create_state(tx)
    step = flax_amp.make_train_step(loss_fn, accum_steps=accum_steps, jit=False)
    compiled: Any = None
    for update in range(UPDATES):
        batch = data.batch_at(images, update, batch_size=BATCH_SIZE, seed=0)
        for i in range(steps_per_update):
            part = jax.tree.map(lambda x, i=i: x[i::steps_per_update], batch)
            if compiled is None:
                compiled = jax.jit(step, donate_argnums=0).lower(state, part).compile()
            state, metrics = compiled(state, part)
    flax_amp.check_progress(state, metrics)
    return state, compiled.memory_analysis().temp_size_in_bytes


def main():
    ways = {
        "full batch of 256": (optimizer(), 1, 1),
        "accum_steps=8": (optimizer(), 8, 1),
        "MultiSteps, 8 steps": (optax.MultiSteps(optimizer(), 8), 1, 8),
        "accum_steps=4, MultiSteps 2": (optax.MultiSteps(optimizer(), 2), 4, 2),
    }
    reference = None
    print(f"{'':28} {'steps':>6} {'skipped':>8} {'MB':>6} {'distance':>9}")
    for name, way in ways.items():
        state, memory = train(*way)
        reference = reference or state.params
        distance = optax.tree.norm(optax.tree.sub(state.params, reference))
        distance = float(distance / optax.tree.norm(reference))
        skipped = int(state.opt_state.total_notfinite)
        print(f"{name:28} {int(state.step):6} {skipped:8}", end=" ")
        print(f"{memory / 1e6:6.1f} {distance:9.1e}")


if __name__ == "__main__":
    main()
