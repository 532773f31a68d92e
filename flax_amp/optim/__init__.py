"""Pytree optimizers: every optimizer of optax as one object that holds its state.

    tx = optim.adamw(learning_rate=3e-4).init(params)
    updates, tx = tx.update(grads, params)
    params = optax.apply_updates(params, updates)

The functions are those of optax and `optax.contrib`, with their signatures. An argument
is a leaf if and only if it is an array. A number given as `learning_rate` becomes one;
everything else is static, as it is in optax. See the README of this folder.
"""

import contextlib
import functools
import inspect
import operator
import sys
from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib

from flax_amp.optim._call import FactoryCall, Static
from flax_amp.optim._optimizer import Optimizer as Optimizer
from flax_amp.optim._optimizer import Schedule as Schedule

_KINDS = {
    optax.GradientTransformation: Optimizer,
    optax.GradientTransformationExtraArgs: Optimizer,
    optax.Schedule: Schedule,
}
_CLASSES: dict[Any, Any] = {}


def wrap(factory: Callable[..., Any]) -> type[Optimizer]:
    """Makes a pytree optimizer from a function that returns an optax optimizer.

    Args:
      factory: the function, which is called at each use, with arrays for the arguments
        that are arrays and with everything else as it was given.

    Returns:
      A class with the signature of the function, the same one for the same function.

    Raises:
      TypeError: if `factory` is not callable, or an argument has a reserved name.

    Example:
      >>> def clipped_sgd(learning_rate, max_norm=1.0):
      ...     clip = optax.clip_by_global_norm(max_norm)
      ...     return optax.chain(clip, optax.sgd(learning_rate))
      >>> tx = wrap(clipped_sgd)(0.1)
      >>> tx.replace(max_norm=0.5)
      clipped_sgd(learning_rate=0.1, max_norm=0.5)
    """
    return _class_of(factory, Optimizer)


def schedule(factory: Callable[..., Any]) -> type[Schedule]:
    """Makes a pytree schedule from a function that returns a schedule; see `wrap`.

    Example:
      >>> def halving(start, every):
      ...     return lambda count: start * 0.5 ** (count // every)
      >>> from flax_amp import optim
      >>> tx = optim.sgd(schedule(halving)(start=0.1, every=100))
      >>> float(tx.hyperparams["learning_rate"])
      0.1...
    """
    return _class_of(factory, Schedule)


def _class_of(factory: Any, base: Any) -> Any:
    if not callable(factory) or isinstance(factory, FactoryCall):
        raise TypeError(
            f"flax_amp.optim: the factory is a {type(factory).__name__}; expected a "
            "function, such as optax.adam. Call what wrap returns with the arguments."
        )
    if (factory, base) not in _CLASSES:
        # Threads that ask at once get one class.
        _CLASSES.setdefault((factory, base), _made_class(factory, base))
    return _CLASSES[factory, base]


def _made_class(factory: Any, base: Any) -> Any:
    signature = inspect.signature(factory)
    if taken := [name for name in signature.parameters if hasattr(base, name)]:
        raise TypeError(
            f"flax_amp.optim: the factory has arguments named {', '.join(taken)}, as "
            f"{base.__name__} names something else; expected other names. Write a "
            "function around it that renames them."
        )
    name = getattr(factory, "__name__", type(factory).__name__)
    names = [name, *vars(optax)]  # some have two names, some an object without one
    public = next((n for n in names if _public(n) is factory), None)
    attributes = dict(
        factory=staticmethod(factory),
        _signature=signature,
        __signature__=signature,
        __module__=__name__ if public else getattr(factory, "__module__", __name__),
        __qualname__=public or getattr(factory, "__qualname__", name),
        __doc__=inspect.getdoc(factory),
        __reduce__=_reduce,
    )
    return type(public or name, (base,), attributes)


def _reduce(call: FactoryCall) -> Any:
    """Pickles a call by the name of its class, or by its factory if it has no name.

    Defaults stay out: some are functions without a name.
    """
    kind: Any = type(call)
    found, defaults = None, _defaults(kind)
    with contextlib.suppress(AttributeError, KeyError):
        found = operator.attrgetter(kind.__qualname__)(sys.modules[kind.__module__])
    named = (kind, None) if found is kind else (kind.factory, kind.__base__)
    states = {n: x for n, x in call._arrays.items() if n not in defaults}
    values = call._arguments() | states
    given = {n: x for n, x in values.items() if not _same(x, defaults.get(n, call))}
    return _restored, (*named, given)


def _restored(kind: Any, base: Any, given: dict[str, Any]) -> Any:
    kind = _class_of(kind, base) if base else kind
    empty = kind._new({}, Static(dict.fromkeys(_defaults(kind))))
    return empty._with(_defaults(kind) | given)


def _defaults(kind: Any) -> dict[str, Any]:
    return {n: p.default for n, p in kind._signature.parameters.items()}


def _same(one: Any, other: Any) -> bool:
    """Whether two trees have the same objects as leaves."""
    flat: Any = map(jax.tree.flatten, (one, other))
    (left, shape), (right, like) = flat
    return bool(shape == like) and all(map(operator.is_, left, right))


def _public(name: str) -> Any:
    """Returns what optax or optax.contrib exports under a name, or `None`."""
    private = name.startswith("_")
    return None if private else vars(optax).get(name, vars(optax.contrib).get(name))


@functools.cache
def _kind_of(name: str) -> Any:
    """Returns the base class for a function of optax, by what that returns."""
    found = _public(name)
    if not inspect.isfunction(found) and not isinstance(found, functools.partial):
        return Optimizer if found is optax.MultiSteps else None
    declared = inspect.signature(found).return_annotation
    if declared is inspect.Signature.empty:
        returns = (inspect.getdoc(found) or "").partition("Returns:")[2]
        return Optimizer if "GradientTransformation" in returns else None
    return _KINDS.get(declared)


def __getattr__(name: str) -> Any:
    if _kind_of(name) is None:
        raise AttributeError(
            f"flax_amp.optim has no {name!r}: optax exports no optimizer or schedule "
            "of this name. Expected one of dir(optim), or use optim.wrap."
        )
    return _class_of(_public(name), _kind_of(name))


def __dir__() -> list[str]:
    names = filter(_kind_of, {*vars(optax), *vars(optax.contrib)})
    return sorted(["Optimizer", "Schedule", "schedule", "wrap", *names])
