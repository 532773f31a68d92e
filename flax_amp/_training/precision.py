"""One word for the precision of a run: what it computes in, and its first scaler."""

import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from flax_amp._rewriter.transform import amp
from flax_amp._training.arguments import UserFn
from flax_amp._training.scaler import Scaler, init_scaler, no_scaler
from flax_amp.policy import MatmulDType

# The words that `AmpTrainState.create` and `make_nnx_train_step` take. The first four
# are those that a state holds; the others are short for them.
Precision = Literal[
    "bf16-mixed",
    "16-mixed",
    "32-true",
    "fp8-mixed",
    "bf16",
    "bfloat16",
    "16",
    "fp16",
    "float16",
    "32",
    "float32",
    "fp8",
]


class _Meaning(NamedTuple):
    """What a word stands for.

    Attributes:
      compute_dtype: the dtype in which steps compute.
      first_scaler: makes the scaler with which a run starts. Gradients in bfloat16 need
        no scale, because it has the range of float32.
      matmul_dtype: see `flax_amp.amp`.
    """

    compute_dtype: DTypeLike
    first_scaler: Callable[[], Scaler] = no_scaler
    matmul_dtype: MatmulDType = None


_MEANINGS: dict[Precision, _Meaning] = {
    "bf16-mixed": _Meaning(jnp.bfloat16),
    "16-mixed": _Meaning(jnp.float16, init_scaler),
    "32-true": _Meaning(jnp.float32),
    "fp8-mixed": _Meaning(jnp.bfloat16, matmul_dtype="fp8"),
}
_ALIASES: dict[Precision, Precision] = {
    "bf16": "bf16-mixed",
    "bfloat16": "bf16-mixed",
    "16": "16-mixed",
    "fp16": "16-mixed",
    "float16": "16-mixed",
    "32": "32-true",
    "float32": "32-true",
    "fp8": "fp8-mixed",
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
            "loss scaler, float32, or bfloat16 with matrix products in fp8; "
            f"{', '.join(map(repr, _ALIASES))} are short for them. Pass a dtype to the "
            "step as compute_dtype, and a scaler as scaler."
        )
    return _ALIASES.get(word, word)


def compute_dtype_of(word: Precision, override: DTypeLike | None) -> DTypeLike:
    """Returns the dtype in which a step computes, unless it has one of its own."""
    return _MEANINGS[word].compute_dtype if override is None else override


def first_scaler(word: Precision) -> Scaler:
    """Returns the scaler with which a run of a precision starts."""
    return _MEANINGS[word].first_scaler()


def matmul_dtype_of(word: Precision, override: MatmulDType) -> MatmulDType:
    """Returns what a step runs matrix products in, unless it says so itself."""
    return _MEANINGS[word].matmul_dtype if override is None else override


def amp_by_precision(
    compute_dtype: DTypeLike | None, matmul_dtype: MatmulDType, **options: Any
) -> dict[Precision, Callable[[UserFn], UserFn]]:
    """Returns `amp` for each word, with these two dtypes unless they are `None`."""
    # For all words at once, so that a wrong option fails where the step is made. An
    # `amp` costs little until it is called.
    return {
        word: amp(
            compute_dtype=compute_dtype_of(word, compute_dtype),
            matmul_dtype=matmul_dtype_of(word, matmul_dtype),
            **options,
        )
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
