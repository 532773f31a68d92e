"""One word for the precision of a run: its compute dtype and its first scaler."""

import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from flax_amp._rewriter.transform import amp
from flax_amp._training.arguments import UserFn
from flax_amp._training.scaler import Scaler, init_scaler, no_scaler

# The words that `AmpTrainState.create` and `make_nnx_train_step` take. The first three
# are those that a state holds; the others are short for them.
Precision = Literal[
    "bf16-mixed",
    "16-mixed",
    "32-true",
    "bf16",
    "bfloat16",
    "16",
    "fp16",
    "float16",
    "32",
    "float32",
]

# word -> the dtype in which steps compute, and what makes the first scaler. Gradients
# in bfloat16 need no scale, because it has the range of float32.
_MEANINGS: dict[Precision, tuple[DTypeLike, Callable[[], Scaler]]] = {
    "bf16-mixed": (jnp.bfloat16, no_scaler),
    "16-mixed": (jnp.float16, init_scaler),
    "32-true": (jnp.float32, no_scaler),
}
_ALIASES: dict[Precision, Precision] = {
    "bf16": "bf16-mixed",
    "bfloat16": "bf16-mixed",
    "16": "16-mixed",
    "fp16": "16-mixed",
    "float16": "16-mixed",
    "32": "32-true",
    "float32": "32-true",
}
_MEANINGS |= {alias: _MEANINGS[word] for alias, word in _ALIASES.items()}


def check_precision(word: Any, name: str) -> Precision:
    """Returns the word that a state holds for a precision.

    Raises:
      ValueError: if it is no word for a precision. The message lists them all.
    """
    if not isinstance(word, str) or word not in _MEANINGS:
        words = ", ".join(repr(x) for x in _MEANINGS if x not in _ALIASES)
        raise ValueError(
            f"{name} is {word!r}; expected one of {words}: bfloat16, float16 with a "
            f"loss scaler, or float32; {', '.join(map(repr, _ALIASES))} are short for "
            "them. Pass a dtype to the step as compute_dtype, and a scaler as scaler."
        )
    return _ALIASES.get(word, word)


def compute_dtype_of(word: Precision, override: DTypeLike | None) -> DTypeLike:
    """Returns the dtype in which a step computes, unless it has one of its own."""
    return _MEANINGS[word][0] if override is None else override


def first_scaler(word: Precision) -> Scaler:
    """Returns the scaler with which a run of a precision starts."""
    return _MEANINGS[word][1]()


def amp_by_precision(
    compute_dtype: DTypeLike | None, **options: Any
) -> dict[Precision, Callable[[UserFn], UserFn]]:
    """Returns `amp` for each word, all in `compute_dtype` unless that is `None`."""
    # For all words at once, so that a wrong option fails where the step is made. An
    # `amp` costs little until it is called.
    return {
        word: amp(compute_dtype=compute_dtype_of(word, compute_dtype), **options)
        for word in _MEANINGS
    }


class UnscaledWarning:
    """Warns once if a step computes in float16 without a scale.

    It reads the scaler on the device in the first call only: later, that would wait for
    the step before. Traced values tell nothing. `AmpTrainState.create` cannot warn,
    because a step may override the dtype.
    """

    def __init__(self, compute_dtype: DTypeLike | None) -> None:
        self._compute_dtype, self._done = compute_dtype, False

    def __call__(self, word: Precision, scaler: Scaler, *, stacklevel: int) -> None:
        highest = scaler["max_scaler"]
        if self._done or isinstance(highest, jax.core.Tracer):
            return
        self._done = True
        dtype = jnp.dtype(compute_dtype_of(word, self._compute_dtype))
        if dtype == jnp.float16 and np.max(jax.device_get(highest)) <= 1:
            warnings.warn(
                "train_step: the step computes in float16 with a scale of at most 1, "
                "as of no_scaler(): gradients below 6e-8 become zero and are lost. "
                "Expected a loss scaler: leave scaler out or pass "
                "flax_amp.init_scaler(). Or use precision='bf16-mixed' (or "
                "compute_dtype=jnp.bfloat16), which needs none.",
                stacklevel=stacklevel + 1,
            )
