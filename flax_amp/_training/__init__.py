"""The loss scaler, the train state and the train steps; the types that they share."""

from collections.abc import Callable, Hashable
from typing import Any

import jax

from flax_amp import _tree

Array = jax.Array
PyTree = _tree.PyTree
# The metrics of a step, by name: arrays, or the entries of the `aux` of a loss.
Metrics = dict[str, Any]
# A function of the user's: `fn(params, batch)` or `fn(model, batch)`.
UserFn = Callable[..., Any]
# The name of a mapped axis, several of them, or `None` for none.
AxisName = Hashable | tuple[Hashable, ...] | None
