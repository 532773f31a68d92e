"""Pytree optimizers: every optimizer of optax as an object that holds its state.

The module has the functions of optax and `optax.contrib`, with their signatures. An
argument is a leaf if and only if the argument is an array. A number given as
`learning_rate` becomes an array. Every further argument is static, as in optax. See the
README of this folder.
"""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import optax
import optax.contrib

from flax_amp.optim._optimizer import Optimizer as Optimizer
from flax_amp.optim._optimizer import Schedule as Schedule
from flax_amp.optim._skip_spikes import skip_spikes as skip_spikes
from flax_amp.optim._small_state import small_state as small_state

_KINDS = {
    optax.GradientTransformation: Optimizer,
    optax.GradientTransformationExtraArgs: Optimizer,
    optax.Schedule: Schedule,
}


def wrap(factory: Callable[..., Any]) -> Callable[..., Optimizer]:
    """Makes a pytree optimizer from a function that returns an optax optimizer.

    Returns a function with the same signature. The factory is called at each use.

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
      >>> float(schedule(halving)(start=0.1, every=100)(100))
      0.05...
    """
    return _make_constructor(factory, Schedule)


def _make_constructor(factory: Any, kind: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        return kind(factory, *args, **kwargs)

    vars(make)["wrapped_factory"] = factory
    return make


def _find(name: str) -> tuple[Any, Any]:
    """Returns the object of a name in optax, and `Optimizer`, `Schedule` or `None`."""
    found = vars(optax).get(name, vars(optax.contrib).get(name))
    if found is optax.MultiSteps:
        return found, Optimizer
    is_function = inspect.isfunction(found) or isinstance(found, functools.partial)
    if not is_function or name.startswith("_"):
        return found, None
    declared = inspect.signature(found).return_annotation
    if declared is inspect.Signature.empty:
        returns = (inspect.getdoc(found) or "").partition("Returns:")[2]
        if "GradientTransformation" in returns:
            return found, Optimizer
        return found, None
    return found, _KINDS.get(declared)


# Not in `globals()`, where doctest would run the examples of optax.
@functools.cache
def _named(name: str) -> Any:
    make = _make_constructor(*_find(name))
    make.__module__ = __name__
    make.__name__ = name
    make.__qualname__ = name
    return make


def __dir__() -> list[str]:
    names = {x for x in {*vars(optax), *vars(optax.contrib)} if _find(x)[1]}
    own = {"Optimizer", "Schedule", "schedule", "skip_spikes", "small_state", "wrap"}
    return sorted(own | names)


# The names of the installed optax are found when they are used. Type checkers know the
# names of optax 0.2.8, so that a misspelled name is an error.
if TYPE_CHECKING:
    from flax_amp.optim._names import *  # noqa: F403
else:

    def __getattr__(name: str) -> Callable[..., Optimizer]:
        if _find(name)[1] is None:
            raise AttributeError(
                f"flax_amp.optim has no {name!r}: optax exports no optimizer or "
                "schedule of this name. Expected a name in dir(optim), or use "
                "optim.wrap."
            )
        return _named(name)
