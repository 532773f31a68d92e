"""The state dict of a train state, for `flax.serialization`: keys as their data.

A typed PRNG key is no array that `to_bytes` can write. Its state dict is the array of
its data, and the target says of which implementation that is.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from flax_amp import _tree


@dataclasses.dataclass(frozen=True)
class _Key:
    """Wraps a PRNG key, for which `flax.serialization` has the functions below."""

    key: Any


def _to_data(boxed: _Key) -> jax.Array:
    return jax.random.key_data(boxed.key)


def _to_key(boxed: _Key, data: Any) -> jax.Array:
    # The data of threefry keys and of rbg keys are uint32 of two and of four numbers.
    # They are compared, because another generator would draw other numbers in silence.
    impl = _tree.key_impl(boxed.key)
    expected = jax.eval_shape(jax.random.key_data, boxed.key)
    if (np.shape(data), jnp.result_type(data)) != (expected.shape, expected.dtype):
        raise ValueError(
            f"from_state_dict: {serialization.current_path()} is "
            f"{jnp.result_type(data)}{list(np.shape(data))}; expected the data of a "
            f"key of {impl!r}, {expected.dtype}{list(expected.shape)}. Make the "
            "target with keys of the implementation that was saved."
        )
    return jax.random.wrap_key_data(jnp.asarray(data), impl=impl)


serialization.register_serialization_state(_Key, _to_data, _to_key)


def register(cls: type) -> None:
    """Gives a dataclass of Flax state dicts in which keys are their data."""
    # Flax has registered the class already, with functions that leave keys as they are.
    serialization.register_serialization_state(
        cls, _to_state_dict, _from_state_dict, override=True
    )


def _fields(state: Any) -> dict[str, Any]:
    """Returns the fields of a state that are not static, with wrapped keys."""
    # Flax finds the functions for a node by its type. A key is an array by its type, so
    # it gets one of its own.
    boxed = jax.tree.map(lambda x: _Key(x) if _tree.is_key(x) else x, state)
    return {
        field.name: getattr(boxed, field.name)
        for field in dataclasses.fields(state)
        if field.metadata.get("pytree_node", True)
    }


def _to_state_dict(state: Any) -> dict[str, Any]:
    return {
        name: serialization.to_state_dict(value)
        for name, value in _fields(state).items()
    }


def _from_state_dict(state: Any, saved: Mapping[str, Any]) -> Any:
    fields = _fields(state)
    if fields.keys() != saved.keys():
        raise ValueError(
            f"from_state_dict: the state dict lacks {sorted(fields.keys() - saved)} "
            f"and has {sorted(saved.keys() - fields)} beside the fields of "
            f"{type(state).__name__}; expected the same fields. "
            "Restore into a state of the class that was saved."
        )
    return state.replace(
        **{
            name: serialization.from_state_dict(value, saved[name], name=name)
            for name, value in fields.items()
        }
    )
