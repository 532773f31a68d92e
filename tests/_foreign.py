"""States of plain Flax, and the calls of Orbax that save them."""

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

from _models import FEATURES, LinenNet, cross_entropy, linen_loss, make_batch, optimizer
from flax_amp import make_train_step


class ImageState(TrainState):
    """The train state of Flax's ImageNet example."""

    batch_stats: dict
    dynamic_scale: DynamicScale


def image_state(tx=None, cls=ImageState, **fields):
    model = LinenNet()
    variables = model.init(jax.random.key(0), jnp.ones((2, FEATURES)), train=False)
    return cls.create(apply_fn=model.apply, **variables, tx=tx or optimizer(), **fields)


@jax.jit
def image_step(state, batch):
    """A step of that example, without its pmap."""

    def loss_fn(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["x"],
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.key(2)},
        )
        return cross_entropy(logits, batch["y"]), updates["batch_stats"]

    grad_fn = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True)
    dynamic_scale, finite, (_, batch_stats), grads = grad_fn(state.params)
    new = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    kept = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (new.params, new.opt_state, new.batch_stats),
        (state.params, state.opt_state, state.batch_stats),
    )
    params, opt_state, batch_stats = kept
    return new.replace(
        params=params,
        opt_state=opt_state,
        batch_stats=batch_stats,
        dynamic_scale=dynamic_scale,
    )


def trained(steps=3, poisoned=1, **fields):
    fields.setdefault("dynamic_scale", DynamicScale(growth_interval=4))
    state = image_state(**fields)
    for i in range(steps):
        state = image_step(state, make_batch(i, poisoned=i == poisoned))
    return state


def by_manager(directory, tree):
    with ocp.CheckpointManager(directory) as manager:
        manager.save(3, args=ocp.args.StandardSave(tree))
    return directory


def by_standard_checkpointer(directory, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "model", tree)
    return directory / "model"


def run(state, steps):
    step = make_train_step(linen_loss, has_aux=True, precision="32-true")
    for i in range(steps):
        state, _ = step(state, make_batch(i))
    return state
