"""Extra arguments: what an optimizer reads beside gradients, state and parameters."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optax


def taken_by(update: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those extra arguments that the `update` of an optimizer takes."""
    try:
        parameters = inspect.signature(update).parameters.values()
    except (TypeError, ValueError):  # a function without a signature
        return {}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return dict(given)
    return {p.name: given[p.name] for p in parameters if p.name in given}


def taking_any(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that takes any extra argument, and ignores those unknown.

    `optax.with_extra_args_support` does it for a `GradientTransformation`. This also
    takes `optax.MultiSteps`, which is none, and hands extra arguments on.
    """
    if isinstance(tx, optax.GradientTransformationExtraArgs):
        return tx

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
        return tx.update(updates, state, params, **taken_by(tx.update, given))

    return optax.GradientTransformationExtraArgs(tx.init, update)
