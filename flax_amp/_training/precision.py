"""One word for the precision of a run: what it computes in, and its first scaler."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp._rewriter.rewritten import is_rewritten
from flax_amp._rewriter.transform import amp
from flax_amp._training.arguments import UserFn
from flax_amp._training.scaler import Scaler, init_scaler, no_scaler
from flax_amp.policy import (
    Policy,
    PolicyEntries,
    long_word,
    read_precision,
)
from flax_amp.policy import Precision as Precision


def check_precision(word: Any, name: str) -> Precision:
    """Returns the long form of a word for a precision, or raises a ValueError."""
    return long_word(word, name)


def needs_scale(word: Precision) -> bool:
    """Whether gradients need a loss scale; bfloat16 has the range of float32."""
    return read_precision(word)[0] == jnp.float16


def first_scaler(word: Precision) -> Scaler:
    """Returns the scaler with which a run of a precision starts."""
    return init_scaler() if needs_scale(word) else no_scaler()


def check_amp_options(
    fn: Any, caller: str, word: Precision | None, amp_policy: PolicyEntries | None
) -> Precision | None:
    """Returns the long form of a word that a step got, after checking its options.

    Raises:
      ValueError: if it is no word, or if a function that is `amp(...)` already comes
        with an option.
    """
    Policy(amp_policy)  # a wrong one fails where the step is made
    given = dict(precision=word, amp_policy=amp_policy)
    names = [name for name, value in given.items() if value is not None]
    if names and is_rewritten(fn):
        raise ValueError(
            f"{caller}: {getattr(fn, '__name__', 'the function')} is amp(...) already, "
            f"and {', '.join(names)} is given, too; expected one of them. Pass the "
            "option to amp."
        )
    return None if word is None else check_precision(word, f"{caller}: precision")


def lowered(
    pure: UserFn,
    fn: UserFn,
    word: Precision,
    amp_policy: PolicyEntries | None,
    recompute: bool = True,
) -> UserFn:
    """Returns `amp(pure)`; if the user's `fn` inside is `amp(...)` already, `pure`.

    Without a backward pass, `recompute=False` leaves no trace of one in the program.
    """
    if is_rewritten(fn):
        return pure
    rewritten: UserFn = amp(
        pure, precision=word, amp_policy=amp_policy, recompute=recompute
    )
    return rewritten


def warn_if_unscaled(word: Any, scaler: Any, stacklevel: int) -> None:
    """Warns of a run in float16 whose scale is at most 1 and never moves.

    It waits for the scaler on the device. Traced values tell nothing.
    """
    factor = scaler.get("adjust_factor")
    if isinstance(factor, jax.core.Tracer | None) or not needs_scale(word):
        return
    if np.all((np.asarray(scaler["scaler"]) <= 1) & (np.asarray(factor) == 1)):
        warnings.warn(
            "train_step: the step is in float16 with a scale of at most 1, as of "
            "no_scaler(): gradients below 6e-8 become zero. Expected a loss scaler. "
            "Make the state, or the AmpOptimizer, with precision='16-mixed', or pass "
            "scaler=flax_amp.init_scaler().",
            stacklevel=stacklevel,
        )
