"""One model on eight devices: data parallel, FSDP, tensor parallel, `shard_map`.

    python -m examples.sharded

The devices are eight parts of this machine's CPU. To use real ones, delete the first
two lines of `main`. Each way trains the same network on the same batches, and creates
its state sharded. The table shows how many bytes a device holds, and how far the
parameters end from those of one device.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import flax_amp
from examples.digits import data

STEPS, BATCH_SIZE = 30, 64


class Network(nn.Module):
    """Two wide layers, the way transformers have them, and a head."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, name="embed")(x.reshape(len(x), -1))
        x = x + nn.Dense(64, name="down")(nn.gelu(nn.Dense(512, name="up")(x)))
        return nn.Dense(10, name="head")(nn.LayerNorm()(x))


def loss_fn(params, batch):
    logits = Network().apply({"params": params}, batch["image"])
    return optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, batch["label"]
    ).mean()


def create_state():
    params = Network().init(jax.random.key(0), jnp.ones((1, 8, 8, 1)))["params"]
    return flax_amp.AmpTrainState.create(
        params=params, tx=optax.adamw(3e-3), precision="16-mixed"
    )


# Each rule returns where a leaf of the state lies: parameters, moments and scaler.


def replicated(path, leaf, mesh):
    return PartitionSpec()


def fully_sharded(path, leaf, mesh):
    """FSDP: splits the largest axis that is divisible by the number of devices."""
    fits = [i for i, size in enumerate(leaf.shape) if size % mesh.size == 0]
    if not fits:
        return PartitionSpec()
    return PartitionSpec(*[None] * max(fits, key=lambda i: leaf.shape[i]), "data")


def tensor_parallel(path, leaf, mesh):
    """Splits the wide layer by columns, the next one by rows, and nothing else."""
    rules = {"['up']['kernel']": (None, "model"), "['up']['bias']": ("model",)}
    rules["['down']['kernel']"] = ("model", None)
    name = jax.tree_util.keystr(path)
    spec = next((spec for end, spec in rules.items() if name.endswith(end)), ())
    return PartitionSpec(*spec)


def shardings_of(create, mesh, rule):
    """Returns the shardings of the state that `create` makes, without making it."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, rule(path, leaf, mesh)),
        jax.eval_shape(create),
    )


def make_mesh(**axes):
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def with_jit(mesh, rule):
    """The ordinary step: JAX splits the work by the shardings of the arguments."""
    shardings = shardings_of(create_state, mesh, rule)
    state = jax.jit(create_state, out_shardings=shardings)()
    step = flax_amp.make_train_step(loss_fn, state_shardings=shardings)
    return state, step, NamedSharding(mesh, PartitionSpec("data"))


def with_shard_map(mesh):
    """Each device runs the step on its own examples, and `axis_name` averages."""
    step = flax_amp.make_train_step(loss_fn, axis_name="data", jit=False)
    whole, split = PartitionSpec(), PartitionSpec("data")
    step = jax.shard_map(step, mesh=mesh, in_specs=(whole, split), out_specs=whole)
    sharding = NamedSharding(mesh, whole)
    state = jax.jit(create_state, out_shardings=sharding)()
    return state, jax.jit(step, donate_argnums=0), NamedSharding(mesh, split)


def train(state, step, sharding):
    """Returns the state after training, and the last loss."""
    images, _ = data.load(split_seed=0)
    metrics = {}
    for i in range(STEPS):
        batch = data.batch_at(images, i, batch_size=BATCH_SIZE, seed=0)
        state, metrics = step(state, jax.device_put(batch, sharding))
        if i % 10 == 9:
            flax_amp.check_progress(state, metrics)
    return state, float(metrics["loss"])


def bytes_held(state):
    """Returns the number of bytes that the first device holds."""
    device = jax.devices()[0]
    shards = [s for x in jax.tree.leaves(state) for s in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    one = make_mesh(data=1)
    ways = {
        "one device": with_jit(one, replicated),
        "data parallel": with_jit(make_mesh(data=8), replicated),
        "FSDP": with_jit(make_mesh(data=8), fully_sharded),
        "tensor parallel 2 x 4": with_jit(make_mesh(data=2, model=4), tensor_parallel),
        "shard_map": with_shard_map(make_mesh(data=8)),
    }
    reference = None
    print(f"{'':22} {'loss':>8} {'KB a device':>12} {'distance':>9}")
    for name, way in ways.items():
        state, loss = train(*way)
        params = jax.device_get(state.params)
        reference = reference or params
        distance = optax.tree.norm(optax.tree.sub(params, reference))
        distance = float(distance / optax.tree.norm(reference))
        print(f"{name:22} {loss:8.4f} {bytes_held(state) / 1e3:12.0f} {distance:9.1e}")


if __name__ == "__main__":
    main()
