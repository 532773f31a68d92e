"""Extra arguments, which an optimizer reads beside gradients, state and parameters."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import optax

T = TypeVar("T")


def taken_by(update: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the extra arguments that the `update` of an optimizer declares."""
    try:
        parameters = inspect.signature(update).parameters.values()
    except (TypeError, ValueError):  # a function without a signature
        return {}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return dict(given)
    return {p.name: given[p.name] for p in parameters if p.name in given}


def without_refused(call: Callable[..., T], given: Mapping[str, Any]) -> T:
    """Calls a function with extra arguments, and again without a refused argument.

    A chain declares any argument, and hands each argument to optimizers that may take
    none: `optax.contrib.sam` is a `GradientTransformationExtraArgs`, and its `update`
    has no keywords. Only the error of the call tells the refused argument.
    """
    left = dict(given)
    while True:
        try:
            return call(**left)
        except TypeError as error:
            refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if refused is None or refused[1] not in left:
                raise
            del left[refused[1]]


def taking_any(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that takes any extra argument, and ignores unknown names.

    `optax.with_extra_args_support` does the same for a `GradientTransformation`, if its
    type is right about the extra arguments. `optax.MultiSteps`, which is no
    `GradientTransformation`, also gets its arguments here.
    """

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
        def call(**extra: Any) -> Any:
            return tx.update(updates, state, params, **extra)

        return without_refused(call, taken_by(tx.update, given))

    return optax.GradientTransformationExtraArgs(tx.init, update)
