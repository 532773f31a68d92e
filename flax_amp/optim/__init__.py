"""Pytree optimizers: every optimizer of optax as one object that holds its state.

    tx = optim.adamw(learning_rate=3e-4).init(params)
    updates, tx = tx.update(grads, params)
    params = optax.apply_updates(params, updates)

The functions are those of optax and `optax.contrib`, with their signatures. An argument
is a leaf if and only if it is an array. A number given as `learning_rate` becomes one;
everything else is static, as it is in optax. `small_state` stores the moments of any
optimizer, and the parameters, in bfloat16. See the README of this folder.
"""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import optax
import optax.contrib

from flax_amp.optim._optimizer import Optimizer as Optimizer
from flax_amp.optim._optimizer import Schedule as Schedule
from flax_amp.optim._small_state import small_state as small_state

_KINDS = {
    optax.GradientTransformation: Optimizer,
    optax.GradientTransformationExtraArgs: Optimizer,
    optax.Schedule: Schedule,
}


def wrap(factory: Callable[..., Any]) -> Callable[..., Optimizer]:
    """Makes a pytree optimizer from a function that returns an optax optimizer.

    Args:
      factory: the function, which is called at each use, with arrays for the arguments
        that are arrays and with everything else as it was given.

    Returns:
      A function with the same signature.

    Example:
      >>> def clipped_sgd(learning_rate, max_norm=1.0):
      ...     clip = optax.clip_by_global_norm(max_norm)
      ...     return optax.chain(clip, optax.sgd(learning_rate))
      >>> tx = wrap(clipped_sgd)(0.1)
      >>> tx.replace(max_norm=0.5)
      clipped_sgd(learning_rate=0.1, max_norm=0.5)
    """
    return _make_constructor(factory, Optimizer)


def schedule(factory: Callable[..., Any]) -> Callable[..., Schedule]:
    """Makes a pytree schedule from a function that returns a schedule; see `wrap`.

    Example:
      >>> def halving(start, every):
      ...     return lambda count: start * 0.5 ** (count // every)
      >>> from flax_amp import optim
      >>> tx = optim.sgd(schedule(halving)(start=0.1, every=100))
      >>> float(tx.hyperparams["learning_rate"])
      0.1...
    """
    return _make_constructor(factory, Schedule)


def _make_constructor(factory: Any, kind: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        return kind(factory, *args, **kwargs)

    vars(make)["wrapped_factory"] = factory
    return make


def _kind_of(name: str) -> Any:
    """Returns the class that is made of a function of optax, if one is."""
    found = vars(optax).get(name, vars(optax.contrib).get(name))
    if not inspect.isfunction(found) and not isinstance(found, functools.partial):
        return Optimizer if found is optax.MultiSteps else None
    declared = inspect.signature(found).return_annotation
    if declared is inspect.Signature.empty:
        returns = (inspect.getdoc(found) or "").partition("Returns:")[2]
        return Optimizer if "GradientTransformation" in returns else None
    return None if name.startswith("_") else _KINDS.get(declared)


# Not kept in `globals()`, where doctest would run the examples of optax.
@functools.cache
def _named(name: str) -> Any:
    found = vars(optax).get(name, vars(optax.contrib).get(name))
    make = _make_constructor(found, _kind_of(name))
    make.__module__, make.__name__, make.__qualname__ = __name__, name, name
    return make


def __dir__() -> list[str]:
    names = filter(_kind_of, {*vars(optax), *vars(optax.contrib)})
    return sorted(["Optimizer", "Schedule", "schedule", "small_state", "wrap", *names])


# The names of the installed optax are found when they are used. Type checkers know
# those of optax 0.2.8, so that a misspelled one is an error.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Optimizer]:
        if _kind_of(name) is None:
            raise AttributeError(
                f"flax_amp.optim has no {name!r}: optax exports no optimizer or "
                "schedule of this name. Expected one of dir(optim), or use optim.wrap."
            )
        return _named(name)

else:
    from flax_amp.optim._names import *  # noqa: F403
