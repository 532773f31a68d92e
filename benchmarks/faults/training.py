"""The run that is disturbed: small, but with all that a state can hold.

Its batches depend on the step alone, so that a run that goes on from a checkpoint must
end with the very bits of one that was never disturbed.
"""

import hashlib
import pathlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from flax_amp import AmpTrainState, checkpoint, init_scaler, make_train_step

_FEATURES, _CLASSES = 64, 10
_POISONED = 7  # every seventh batch is not finite: the scaler has something to tell
AROUND = 3  # how many more steps show that a state goes on


class Row(NamedTuple):
    """A fault, and what came of it.

    Attributes:
      fault: what was done.
      runs: how many times.
      outcome: what could be restored.
      told: what the user is told; empty if there is nothing to tell.
      good: whether nothing was lost, and whatever was restored went on bit for bit;
        `None` if it could not be tried.
    """

    fault: str
    runs: int
    outcome: str
    told: str
    good: bool | None


class _Net(nn.Module):
    """Dense, BatchNorm, dropout, dense."""

    width: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(self.width)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
        x = nn.Dropout(0.25, deterministic=False)(nn.relu(x))
        return nn.Dense(_CLASSES)(x)


def new_state(width: int) -> AmpTrainState:
    """Returns the state that every run begins with."""
    model = _Net(width)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = model.init(keys, jnp.ones((2, _FEATURES)))
    return AmpTrainState.create(
        apply_fn=model.apply,
        params=variables.pop("params"),
        variables=variables,
        rngs={"dropout": jax.random.key(2)},
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        precision="16-mixed",
        scaler=init_scaler(patience=3),
    )


def _loss(params: Any, batch: Any, *, state: Any, rngs: Any) -> Any:
    logits, updates = state.apply_fn(
        {"params": params, **state.variables},
        batch["x"],
        mutable=["batch_stats"],
        rngs=rngs,
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return loss.mean(), {"variables": updates}


_step = make_train_step(_loss, has_aux=True)


def _batch(number: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(number)
    x = generator.normal(size=(32, _FEATURES)).astype(np.float32)
    if number % _POISONED == _POISONED - 1:
        x[0, 0] = np.inf
    return {"x": x, "y": generator.integers(0, _CLASSES, 32).astype(np.int32)}


def train(
    state: AmpTrainState,
    until: int,
    after_step: Callable[[AmpTrainState], None] = lambda state: None,
) -> AmpTrainState:
    """Trains up to a step. The state that is passed in is donated."""
    for number in range(int(state.step), until):
        state, _ = _step(state, _batch(number))
        after_step(state)
    return state


def fingerprint(state: AmpTrainState) -> str:
    """Returns a digest of every bit of a state."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        digest.update(f"{path} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


class Reference:
    """The fingerprints of a run that nothing disturbed, by step."""

    def __init__(self, width: int, steps: int):
        self.width = width
        self.steps = steps
        state = new_state(width)
        # One target for all: another one's optimizer would be compiled anew.
        self.target = jax.eval_shape(lambda: state)
        self._of = {0: fingerprint(state)}

        def note(state: AmpTrainState) -> None:
            self._of[int(state.step)] = fingerprint(state)

        train(state, steps + AROUND, note)

    def __getitem__(self, step: int) -> str:
        return self._of[step]

    def is_on_disk(self, directory: pathlib.Path, step: int) -> bool:
        """Whether a step is the newest of a directory, and the run's, and intact."""
        with warnings.catch_warnings():
            warnings.simplefilter("error", checkpoint.CheckpointWarning)
            state = checkpoint.restore(directory, self.target)
        return int(state.step) == step and fingerprint(state) == self._of[step]

    def goes_on(self, state: AmpTrainState) -> bool:
        """Whether a state is one of the run's, and still is some steps later."""
        step = int(state.step)
        if fingerprint(state) != self._of[step]:
            return False
        later = train(jax.tree.map(jnp.copy, state), step + AROUND)
        return fingerprint(later) == self._of[step + AROUND]


def words(count: Iterable[int]) -> str:
    """Returns numbers for a table: "1, 2 and 5"."""
    *most, last = [str(number) for number in count] or ["none"]
    return f"{', '.join(most)} and {last}" if most else last
