"""What `find_nonfinite` tells about one array, or about one element of it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp import _tree
from flax_amp._compat import Array
from flax_amp._jaxpr.traits import Trait, has
from flax_amp.debug._nonfinite_model import Operand


@jax.jit
def _is_finite(x: Array) -> Array:
    return jnp.isfinite(x).all()


def is_finite(x: Array) -> bool:
    """Whether an array holds neither inf nor NaN."""
    if not _tree.is_inexact_array(x):
        return True
    if isinstance(x, jax.Array) and next(iter(x.devices())).platform != "cpu":
        return bool(_is_finite(x))
    return bool(np.isfinite(np.asarray(x)).all())


def kinds(x: Array) -> str:
    """Returns which of inf, -inf and NaN an array holds."""
    x = np.asarray(x)
    parts = [x.real, x.imag] if np.iscomplexobj(x) else [x]
    tests: dict[str, Callable[[Any], Any]] = {
        "inf": lambda x: x == np.inf,
        "-inf": lambda x: x == -np.inf,
        "NaN": np.isnan,
    }
    found = [name for name, test in tests.items() if any(test(p).any() for p in parts)]
    return " and ".join(found)


def operand(x: Array, lead: int) -> Operand:
    """Returns what is known of an array, without its leading axes."""
    largest = None
    if _tree.is_inexact_array(x):
        host = np.abs(np.asarray(x))
        finite = host[np.isfinite(host)]
        largest = float(finite.max()) if finite.size else None
    return Operand(str(x.dtype), tuple(x.shape[lead:]), largest)


def as_text(name: str, arrays: Sequence[Array], x: Array, fresh: Any) -> str:
    """Returns what an elementwise operation did first, such as `log(0) = -inf`."""
    if not has(name, Trait.ELEMENTWISE):
        return ""
    # As Python numbers, because a bfloat16 has no format.
    *numbers, made = (
        np.broadcast_to(a, x.shape)[fresh][0].item() for a in (*arrays, x)
    )
    return f"{name}({', '.join(f'{n:.6g}' for n in numbers)}) = {made:.6g}"
