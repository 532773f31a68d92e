"""Optimizers as dicts of `flax.serialization`, and those of plain optax for them."""

from collections.abc import Mapping
from typing import Any

from flax import serialization


def to_state(bound: Any) -> dict[str, Any]:
    """Returns the leaves of an optimizer or schedule by name."""
    parts = dict(bound._parts)
    if bound.remainders is None:
        del parts["remainders"]
    return {name: serialization.to_state_dict(part) for name, part in parts.items()}


def from_state(bound: Any, state: Mapping[str, Any]) -> Any:
    """Returns an optimizer or schedule with the leaves of a state dict.

    Raises:
      ValueError: if the dict does not fit.
    """
    parts = bound._parts
    own = state.keys() <= parts.keys() and state.keys() >= set(bound._states)
    for name in bound._states:
        saved = serialization.to_state_dict(parts[name])
        if not own and isinstance(saved, dict) and saved.keys() == state.keys():
            state = {name: state}  # of optax alone, which has no hyper-parameters
    if lost := [name for name in bound._states if name not in state]:
        raise ValueError(
            f"{type(bound).__name__}: the state has no {', '.join(lost)}, but "
            f"{', '.join(state) or 'nothing'}; expected what "
            "flax.serialization.to_state_dict gives of this optimizer, or of the state "
            "of the same optimizer of optax."
        )
    empty = [name for name in bound._states if parts[name] is None]
    if missing := [name for name in empty if state[name] is not None]:
        raise ValueError(
            f"{type(bound).__name__}: the target has no {', '.join(missing)}; expected "
            "one to read into. Call tx = tx.init(params) first."
        )
    # Remainders that are not of their numbers are as good as none.
    lost = [n for n in to_state(bound) if n not in state and n != "remainders"]
    if lost and state.keys() != set(bound._states):
        raise ValueError(
            f"{type(bound).__name__}: the state has no {', '.join(lost)}; expected "
            "all leaves of the target, or the state of optax alone."
        )
    if unknown := sorted(state.keys() - parts.keys()):
        raise ValueError(
            f"{type(bound).__name__}: the state has {', '.join(unknown)}; expected "
            f"some of {', '.join(parts)}. Make the target with the arguments that it "
            "was saved with."
        )
    read = {
        name: serialization.from_state_dict(parts[name], value, name=name)
        for name, value in state.items()
    }
    return bound._new(parts | read, bound._fixed)
