"""One word for the precision of a run: what it computes in, and its first scaler."""

import warnings
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from flax_amp._rewriter.rewritten import is_rewritten
from flax_amp._rewriter.transform import amp
from flax_amp._training.arguments import UserFn
from flax_amp._training.scaler import Scaler, init_scaler, no_scaler
from flax_amp.policy import (
    MatmulDType,
    PolicyEntries,
    long_word,
    read_precision,
)
from flax_amp.policy import Precision as Precision

_WORDS: tuple[Precision, ...] = get_args(Precision)


def check_precision(word: Any, name: str) -> Precision:
    """Returns the word that a state holds for a precision.

    Raises:
      ValueError: if it is no word for a precision. The message lists them all.
    """
    return long_word(word, name)


def compute_dtype_of(word: Precision, override: DTypeLike | None) -> DTypeLike:
    """Returns the dtype in which a step computes, unless it has one of its own."""
    return read_precision(word)[0] if override is None else override


def matmul_dtype_of(word: Precision, override: MatmulDType) -> MatmulDType:
    """Returns what a step runs matrix products in, unless it says so itself."""
    return read_precision(word)[1] if override is None else override


def first_scaler(word: Precision) -> Scaler:
    """Returns the scaler with which a run of a precision starts.

    Gradients in bfloat16 need no scale, because it has the range of float32.
    """
    is_float16 = compute_dtype_of(word, None) == jnp.float16
    return init_scaler() if is_float16 else no_scaler()


def amp_by_precision(
    fn: UserFn,
    caller: str,
    *,
    compute_dtype: DTypeLike | None,
    matmul_dtype: MatmulDType,
    amp_policy: PolicyEntries | None,
    recompute: bool = True,
) -> dict[Precision, Callable[[UserFn], UserFn]]:
    """Returns `amp` for each word, with these two dtypes unless they are `None`.

    Args:
      fn: the user's function. If it is `amp(...)` already, it is taken as it is.
      caller: the step, for messages.
      compute_dtype, matmul_dtype: as in the step.
      amp_policy, recompute: see `flax_amp.amp`.

    Raises:
      ValueError: if a function that is `amp(...)` already comes with an option.
    """
    if is_rewritten(fn):
        given = dict(
            compute_dtype=compute_dtype,
            matmul_dtype=matmul_dtype,
            amp_policy=amp_policy,
        )
        if names := [name for name, value in given.items() if value is not None]:
            raise ValueError(
                f"{caller}: {getattr(fn, '__name__', 'the function')} is already "
                f"rewritten by amp, and {', '.join(names)} is given, too; expected "
                "one of them. Pass the option to amp."
            )
        return dict.fromkeys(_WORDS, lambda fn: fn)
    # For all words at once, so that a wrong option fails where the step is made. An
    # `amp` costs little until it is called.
    return {
        word: amp(
            compute_dtype=compute_dtype_of(word, compute_dtype),
            matmul_dtype=matmul_dtype_of(word, matmul_dtype),
            amp_policy=amp_policy,
            recompute=recompute,
        )
        for word in _WORDS
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
