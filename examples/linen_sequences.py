"""Linen: digits read row by row, with most features of a Linen training loop.

    python -m examples.linen_sequences

The model has an `nn.RNN` over an LSTM, layers under `nn.scan` and `nn.remat`,
BatchNorm, a collection of its own and two streams of random numbers. The train state
has one more field, a moving average of the parameters (EMA), which is evaluated at the
end. A skipped step leaves all of them as they were.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import flax_amp
from examples.digits import data

LAYERS, WIDTH, STEPS = 3, 64, 300
COLLECTIONS = ["batch_stats", "usage"]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        y = nn.relu(nn.Dense(WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.1, deterministic=not train)(y), None


class Reader(nn.Module):
    @nn.compact
    def __call__(self, images, train=True):
        rows = images[..., 0]  # [examples, rows, pixels]
        used = self.variable("usage", "examples", jnp.zeros, (), jnp.int32)
        if train:
            used.value += len(images)
            noise = jax.random.normal(self.make_rng("noise"), rows.shape)
            rows = rows + 0.1 * noise
        x = nn.RNN(nn.OptimizedLSTMCell(WIDTH))(nn.Dense(WIDTH)(rows))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)[:, -1]
        layers = nn.scan(
            nn.remat(Layer, static_argnums=2),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        x, _ = layers(name="layers")(x, train)
        return nn.Dense(data.NUM_CLASSES)(x)


class EmaState(flax_amp.AmpTrainState):
    """A train state with a moving average of its parameters."""

    ema: dict

    def apply_gradients(self, *, grads, **changes):
        new = super().apply_gradients(grads=grads, **changes)
        ema = optax.incremental_update(new.params, self.ema, step_size=0.02)
        return new.replace(ema=ema)


def loss_fn(params, batch, *, state, rngs):
    logits, updates = state.apply_fn(
        {"params": params, **state.variables},
        batch["image"],
        mutable=COLLECTIONS,
        rngs=rngs,
    )
    loss = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, batch["label"]
    ).mean()
    return loss, {"variables": updates}


def accuracy(params, batch, *, state):
    variables = {"params": params, **state.variables}
    logits = state.apply_fn(variables, batch["image"], train=False)
    return (logits.argmax(-1) == batch["label"]).mean()


def create_state(images):
    model = Reader()
    keys = jax.random.split(jax.random.key(0), 4)
    streams = dict(zip(("params", "dropout", "noise"), keys, strict=False))
    variables = model.init(streams, images)
    params = variables["params"]
    return EmaState.create(
        apply_fn=model.apply,
        params=params,
        ema=params,
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3)),
        variables={name: variables[name] for name in COLLECTIONS},
        rngs={"dropout": keys[1], "noise": keys[2]},
    )


def main():
    train_images, test_images = data.load(split_seed=0)
    state = create_state(train_images["image"][:2])
    start = int(state.variables["usage"]["examples"])
    train_step = flax_amp.make_train_step(loss_fn, has_aux=True)
    for step in range(1, STEPS + 1):
        batch = data.batch_at(train_images, step, batch_size=64, seed=0)
        if step == 100:
            batch["image"] = batch["image"] + jnp.inf  # one bad batch is skipped
        state, metrics = train_step(state, batch)
        if step % 100 == 0:
            print(f"step {step} loss {float(metrics['loss']):.4f}")
            flax_amp.check_progress(state, metrics)

    evaluate = flax_amp.make_eval_step(accuracy)
    averaged = state.replace(params=state.ema)
    print(f"accuracy {float(evaluate(state, test_images)):.2%},", end=" ")
    print(f"of the moving average {float(evaluate(averaged, test_images)):.2%}")
    used = int(state.variables["usage"]["examples"]) - start
    skipped = int(metrics["skipped_total"])
    print(f"{used} examples used, {skipped} steps skipped")


if __name__ == "__main__":
    main()
