"""One process of the soak: it goes on from the newest checkpoint until it is killed.

Usage: python -m benchmarks.soak DIRECTORY RECORD SEED UNTIL SAVE_EVERY

It writes a line of JSON for its start, for each step and each save into RECORD, and
says on its standard output when it begins to save.
"""

import contextlib
import hashlib
import json
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import flax_amp
from flax_amp import AmpTrainState, checkpoint

_FEATURES, _CLASSES, _EXAMPLES, _WIDTH = 32, 10, 32, 64
_BAD = (np.nan, np.inf, 1e30)


class Net(nn.Module):
    """Dense, BatchNorm, dropout, a residual block with LayerNorm, dense."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.BatchNorm(False, momentum=0.9)(nn.Dense(_WIDTH)(x))
        x = nn.Dropout(0.1, deterministic=False)(nn.relu(x))
        y = nn.gelu(nn.Dense(2 * _WIDTH)(nn.LayerNorm()(x)))
        return nn.Dense(_CLASSES)(nn.LayerNorm()(x + nn.Dense(_WIDTH)(y)))


_MODEL = Net()


def loss_fn(params: Any, batch: Any, *, state: Any, rngs: Any) -> Any:
    """The loss as a user writes it, in float32."""
    variables = {"params": params, **state.variables}
    logits, updates = _MODEL.apply(
        variables, batch["x"], mutable=["batch_stats"], rngs=rngs
    )
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return (batch["weight"] * each).mean(), {"variables": updates}


def new_state(seed: int) -> AmpTrainState:
    """Returns the state that the run begins with."""
    keys = {"params": jax.random.key(seed), "dropout": jax.random.key(0)}
    variables = _MODEL.init(keys, jnp.ones((2, _FEATURES)))
    return AmpTrainState.create(
        params=variables["params"],
        variables={"batch_stats": variables["batch_stats"]},
        rngs={"dropout": jax.random.key(seed + 1)},
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3)),
        precision="16-mixed",
        scaler=flax_amp.init_scaler(patience=30),
    )


def fault(seed: int, number: int) -> tuple[float | None, float]:
    """Returns a value that a batch has in it, and the weight of its losses.

    One batch in a hundred has a NaN, an infinity or 1e30. In bursts the weight is so
    large that gradients overflow until the scale falls; in quiet stretches it is so
    small that the scale grows.
    """
    chance = np.random.default_rng((seed, 1, number))
    bad = float(chance.choice(_BAD)) if chance.random() < 0.01 else None
    block = np.random.default_rng((seed, 2, number // 250))
    kind, start, length = block.random(), block.integers(250), block.integers(1, 21)
    weight = 1.0
    if kind < 0.25 and start <= number % 250 < start + length:
        weight = 2.0 ** block.integers(9, 16)
    elif kind > 0.94:
        weight = 2.0**-8
    return bad, weight


def batch_of(seed: int, number: int) -> dict[str, np.ndarray]:
    """Returns a batch with its fault; it depends on nothing but its number."""
    chance = np.random.default_rng((seed, 0, number))
    x = chance.normal(size=(_EXAMPLES, _FEATURES)).astype(np.float32)
    y = np.argmax(x[:, :_CLASSES], axis=1).astype(np.int32)
    bad, weight = fault(seed, number)
    if bad is not None:
        x[chance.integers(_EXAMPLES), chance.integers(_FEATURES)] = bad
    return {"x": x, "y": y, "weight": np.full(_EXAMPLES, weight, np.float32)}


def main(directory: str, record: str, seed: int, until: int, save_every: int) -> None:
    step = flax_amp.make_train_step(loss_fn, has_aux=True)
    # A line is written when it ends, so that a kill loses none.
    with open(record, "w", buffering=1) as lines:
        state, told = _resume(directory, new_state(seed))
        print(json.dumps({"told": told, **_seen(state)}), file=lines)
        with checkpoint.manager(directory) as manager:
            for number in range(int(state.step), until):
                state, _ = step(state, batch_of(seed, number))
                print(json.dumps(_seen(state)), file=lines)
                if (number + 1) % save_every == 0:
                    manager.wait_until_finished()  # a save holds arrays until then
                    print(json.dumps({"arrays": len(jax.live_arrays())}), file=lines)
                    print(number + 1, flush=True)
                    checkpoint.save(manager, state)


def _resume(directory: str, state: AmpTrainState) -> tuple[AmpTrainState, list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", checkpoint.CheckpointWarning)
        with contextlib.suppress(FileNotFoundError):  # the first process
            state = checkpoint.restore(directory, state)
    return state, [str(warning.message) for warning in said]


def _seen(state: AmpTrainState) -> dict[str, Any]:
    """Returns what is compared of a state; of all that an update changes, a digest."""
    changed = (state.params, state.opt_state.inner_state, state.variables)
    digest = hashlib.sha256()
    for leaf in jax.device_get(jax.tree.leaves(changed)):
        digest.update(leaf.tobytes())
    return {
        "step": int(state.step),
        "scale": float(state.scaler["scaler"]),
        "skipped": int(state.opt_state.total_notfinite),
        "digest": digest.hexdigest()[:16],
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
