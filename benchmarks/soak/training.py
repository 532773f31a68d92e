"""The model that is trained, and what is looked at after each of its steps."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flax_amp
from benchmarks.soak.rule import DYNAMIC, FIRST
from benchmarks.soak.stream import CLASSES, FEATURES
from flax_amp import AmpTrainState

_WIDTH = 64


class Net(nn.Module):
    """Dense, BatchNorm, dropout, a residual block with LayerNorm, dense.

    What enters a dense layer or the block, and what leaves a dense layer, can be
    perturbed: the gradient of a perturbation tells how large the gradients inside of
    the network are.
    """

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = self._dense(_WIDTH, x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
        x = nn.Dropout(0.1, deterministic=False)(nn.relu(x))
        # Where the gradients of the residual and of the LayerNorm meet.
        x = self.perturb("block", x)
        y = self._dense(2 * _WIDTH, nn.LayerNorm()(x))
        y = self._dense(_WIDTH, nn.gelu(y))
        return self._dense(CLASSES, nn.LayerNorm()(x + y))

    def _dense(self, width: int, x: Any) -> Any:
        layer = nn.Dense(width)
        x = self.perturb(f"before_{layer.name}", x)
        return self.perturb(f"after_{layer.name}", layer(x))


_MODEL = Net()


def loss_fn(params: Any, batch: Any, *, state: Any, rngs: Any) -> Any:
    """The loss as a user writes it, in float32."""
    loss, (plain, updates) = losses({"params": params, **state.variables}, batch, rngs)
    return loss, {"variables": updates, "plain_loss": plain}


def losses(variables: Any, batch: Any, rngs: Any) -> Any:
    """Returns the weighted loss, the plain one, and the updated statistics."""
    logits, updates = _MODEL.apply(
        variables, batch["x"], mutable=["batch_stats"], rngs=rngs
    )
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return (batch["weight"] * each).mean(), (each.mean(), updates)


def init(seed: int) -> tuple[Any, Any]:
    """Returns parameters and batch statistics."""
    keys = {"params": jax.random.key(seed), "dropout": jax.random.key(0)}
    variables = _MODEL.init(keys, jnp.ones((2, FEATURES)))
    return variables["params"], {"batch_stats": variables["batch_stats"]}


def optimizer(horizon: int) -> optax.GradientTransformation:
    """Returns adamw with a schedule that falls over so many steps."""
    warmup = min(200, horizon // 10)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, 2e-3, warmup, horizon, end_value=2e-4
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


class Training:
    """A process's part of the run: a state on a mesh of all its devices, and its step.

    It is made as docs/devices.md makes it.
    """

    def __init__(self, seed: int, precision: Any, horizon: int) -> None:
        mesh = Mesh(jax.devices(), ("data",))
        first, tx = FIRST[precision], optimizer(horizon)

        def create() -> AmpTrainState:
            params, variables = init(seed)
            scaler = None  # that of the precision
            if precision == DYNAMIC:
                scaler = flax_amp.init_scaler(
                    scaler=first.scale,
                    patience=first.patience,
                )
            return AmpTrainState.create(
                params=params,
                variables=variables,
                rngs={"dropout": jax.random.key(seed + 1)},
                tx=tx,
                precision=precision,
                scaler=scaler,
            )

        replicated = NamedSharding(mesh, P())
        shardings = jax.tree.map(lambda _: replicated, jax.eval_shape(create))
        self.first_state = jax.jit(create, out_shardings=shardings)()
        self._examples = NamedSharding(mesh, P("data"))
        self.step = flax_amp.make_train_step(
            loss_fn, has_aux=True, state_shardings=shardings
        )

    def put(self, batch: Any) -> Any:
        """Splits a batch over the devices."""
        return jax.device_put(batch, self._examples)


@jax.jit
def observe(state: AmpTrainState) -> dict[str, Any]:
    """Returns what is recorded after every step, without functions of flax_amp."""
    inner = state.opt_state.inner_state
    kept = (state.params, inner, state.variables, state.rngs)
    floats = [x for x in jax.tree.leaves(kept) if jnp.issubdtype(x.dtype, jnp.inexact)]
    counts = optax.tree_utils.tree_get_all_with_path(inner, "count")
    return {
        "step": state.step,
        "scale": state.scaler["scaler"],
        "count": state.scaler["count"],
        "skipped": state.opt_state.total_notfinite,
        "in_a_row": state.opt_state.notfinite_count,
        "updates": jnp.stack([count for _, count in counts]),
        "leaves_finite": jnp.stack([jnp.isfinite(x).all() for x in floats]).all(),
        "digest": _digest(kept),
    }


def _digest(tree: Any) -> Any:
    """Returns two words that change when a bit of a tree does."""
    total = jnp.zeros(2, jnp.uint32)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32).ravel()
        at = jnp.arange(bits.size, dtype=jnp.uint32)
        # Odd factors: no change of one element is lost.
        factors = jnp.stack([2 * at + 1, (at * jnp.uint32(2654435761)) | 1])
        total = total * jnp.uint32(31) + (factors * bits).sum(1, dtype=jnp.uint32)
    return total


@jax.jit
def plain_gradients(state: AmpTrainState, batch: Any) -> dict[str, Any]:
    """Judges the next step by float32 gradients of the unscaled loss, of JAX alone.

    `rounded` is the largest element of the gradients that a step in float16 rounds:
    those of the kernels, and those before and after each dense layer but the one
    before the first, which no step computes. `largest` also takes in the gradient
    before the residual block, which XLA may keep in float32.
    """
    rngs = {
        name: jax.random.fold_in(key, state.step) for name, key in state.rngs.items()
    }
    keys = {"params": jax.random.key(0), **rngs}
    taps = jax.eval_shape(lambda: _MODEL.init(keys, batch["x"]))["perturbations"]
    taps = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), taps)

    def loss(params: Any, taps: Any) -> Any:
        variables = {"params": params, "perturbations": taps, **state.variables}
        return losses(variables, batch, rngs)

    result, grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        state.params, taps
    )
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves((result, grads))]
    del grads[1]["before_Dense_0"]
    block = jnp.abs(grads[1].pop("block")).max()
    sizes = [jnp.abs(x).max() for x in jax.tree.leaves(grads) if x.ndim == 2]
    rounded = jnp.stack(sizes).max()
    return {
        "finite": jnp.stack(finite).all(),
        "rounded": rounded,
        "largest": jnp.maximum(rounded, block),
    }
