"""Pytree optimizers: every optimizer of optax as one object that holds its state.

    tx = optim.adamw(learning_rate=3e-4).init(params)
    updates, tx = tx.update(grads, params)
    params = optax.apply_updates(params, updates)

An optimizer is a frozen dataclass and a pytree: its hyper-parameters and its state are
leaves. So it goes through `jit`, `vmap`, `grad` and `scan` as an argument, a
hyper-parameter is replaced without compiling again, and the value of a schedule can be
read. Names are those of optax and `optax.contrib`, made from their signatures: `adamw`,
`muon`, `chain`, `clip_by_global_norm`, `warmup_cosine_decay_schedule`.

Trajectories are those of plain optax, bit for bit wherever its arithmetic on numbers is
+, -, * and /: see `flax_amp._exact`.
"""

import dataclasses
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import optax
import optax.contrib

from flax_amp.optim._arguments import Fixed
from flax_amp.optim._bound import Bound, fields_of
from flax_amp.optim._optimizer import Optimizer as Optimizer
from flax_amp.optim._schedule import Schedule as Schedule
from flax_amp.optim._signatures import name_of, signature_of

# Two threads that name an optimizer at once must get one class.
_LOCK = threading.RLock()

_KINDS = (optax.GradientTransformation, optax.GradientTransformationExtraArgs)


def wrap(
    factory: Callable[..., Any], *, static_args: str | Iterable[str] = ()
) -> type[Optimizer]:
    """Makes a pytree optimizer from a function that returns an optax optimizer.

    Args:
      factory: returns an `optax.GradientTransformation`. Its arguments become the
        fields: numbers and arrays are leaves, pytree optimizers among them are its
        children, everything else is fixed. A branch that it takes by a number is
        taken once and again when the number is replaced; where a traced number turns
        out to need another one, updates are NaN. A number that it uses for a shape
        is found by a trial and stays fixed; one that it asks `isinstance(x, float)`
        of is not found, and a traced one is none. An int is an integer array;
        annotate it as `float` if it may become one.
      static_args: names of numbers to keep fixed all the same.

    Returns:
      A class, the same one for the same factory.

    Raises:
      TypeError: if `factory` is not callable, or names an argument as this module
        names something else.

    Example:
      >>> def clipped_sgd(learning_rate, max_norm=1.0):
      ...     clip = optax.clip_by_global_norm(max_norm)
      ...     return optax.chain(clip, optax.sgd(learning_rate))
      >>> tx = wrap(clipped_sgd)(0.1)
      >>> tx.replace(max_norm=0.5)
      clipped_sgd(learning_rate=0.1, max_norm=0.5)
    """
    return _class_for(factory, static_args, Optimizer)


def schedule(
    factory: Callable[..., Any], *, static_args: str | Iterable[str] = ()
) -> type[Schedule]:
    """Makes a pytree schedule from a function that returns a schedule; see `wrap`.

    Example:
      >>> def halving(start, every):
      ...     return lambda count: start * 0.5 ** (count // every)
      >>> from flax_amp import optim
      >>> tx = optim.sgd(schedule(halving)(start=0.1, every=100))
      >>> float(tx.hyperparams["learning_rate"])
      0.1...
    """
    return _class_for(factory, static_args, Schedule)


def _class_for(factory: Any, static_args: str | Iterable[str], base: Any) -> Any:
    names = (static_args,) if isinstance(static_args, str) else static_args
    try:
        hash(factory)
    except TypeError:
        raise TypeError(
            f"optim: a {type(factory).__name__} has no hash, by which its class is "
            "found again; expected a function. Write one that calls it."
        ) from None
    return _class_of(factory, frozenset(names), base)


def _class_of(factory: Any, static_args: frozenset[str], base: Any) -> Any:
    """Makes a class once; a lambda written in a loop makes one each time."""
    with _LOCK:
        return _made_class(factory, static_args, base)


@functools.cache
def _made_class(factory: Any, static_args: frozenset[str], base: Any) -> Any:
    where = "wrap" if base is Optimizer else "schedule"
    if not callable(factory) or isinstance(factory, Bound):
        raise TypeError(
            f"optim.{where}: the factory is a {type(factory).__name__}; expected a "
            "function, such as optax.adam. Call what it returns with the arguments."
        )
    parameters = dict(signature_of(factory).parameters)
    if taken := [name for name in parameters if name in _attributes(base)]:
        raise TypeError(
            f"optim.{where}: {name_of(factory)} has arguments named "
            f"{', '.join(taken)}, which a pytree optimizer has itself; expected other "
            "names. Write a function around it that renames them."
        )
    if unknown := sorted(static_args - parameters.keys()):
        raise TypeError(
            f"optim.{where}: static_args names {', '.join(unknown)}; expected "
            f"arguments of {name_of(factory)}: {', '.join(parameters)}."
        )
    public = _public_name(factory)
    own = public is not None and not static_args
    name = public or name_of(factory)
    made = dataclasses.make_dataclass(
        name,
        fields_of(parameters, base._states),
        bases=(base,),
        namespace=dict(
            factory=staticmethod(factory),
            static_args=static_args,
            _parameters=parameters,
            __qualname__=name if own else getattr(factory, "__qualname__", name),
            __doc__=_documentation(factory, base),
            __signature__=inspect.Signature(list(parameters.values())),
            __reduce__=_reduce,
        ),
        frozen=True,
        init=False,
        eq=False,
        repr=False,
    )
    # Set by itself: from Python 3.12 on `make_dataclass` writes its caller's name.
    made.__module__ = __name__ if own else getattr(factory, "__module__", __name__)
    return made


def _reduce(bound: Bound) -> Any:
    """Pickles by factory; defaults stay out, which may be functions without a name."""
    fixed = bound._fixed
    given = {n: v for n, v in fixed.values.items() if v is not _default(bound, n)}
    rest = (fixed.modes, fixed.places, fixed.decisions)
    return _restored, (
        _maker(type(bound)),
        bound._parts,
        list(fixed.values),
        given,
        rest,
    )


def _maker(kind: type[Bound]) -> tuple[Any, ...]:
    """Returns what finds a class again: its own name if it has one, as if decorated."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is kind:
        return (kind,)
    # Of optax by name: a partial object would come back as another.
    base = Optimizer if issubclass(kind, Optimizer) else Schedule
    return _public_name(kind.factory) or kind.factory, kind.static_args, base


def _restored(maker: Any, parts: Any, names: Any, given: Any, rest: Any) -> Any:
    kind = maker[0]
    if len(maker) > 1:
        factory = _public(kind) if isinstance(kind, str) else kind
        kind = _class_of(factory, *maker[1:])
    values = {n: given[n] if n in given else _default(kind, n) for n in names}
    return kind._new(parts, Fixed(values, *rest))


def _default(kind: Any, name: str) -> Any:
    return kind._parameters[name].default


def _documentation(factory: Any, base: type[Bound]) -> str:
    text = (inspect.getdoc(factory) or "").strip()
    kind = "optimizer" if base is Optimizer else "schedule"
    return f"A pytree {kind}, see `flax_amp.optim.{base.__name__}`.\n\n{text}".strip()


# Names


def _attributes(base: type[Bound]) -> set[str]:
    return {*dir(base), *base.__annotations__, *Bound.__annotations__}


def _returns(function: Any, kinds: tuple[Any, ...], word: str) -> bool:
    """Whether a public function of optax returns one of some types, or says so."""
    while isinstance(function, functools.partial):  # as nadamw is
        function = function.func
    if not inspect.isfunction(function):
        return False
    declared = signature_of(function).return_annotation
    if declared is not inspect.Signature.empty:
        return declared in kinds
    text = (inspect.getdoc(function) or "").partition("Returns:")[2]
    return word.lower() in text.lower().replace(" ", "")


def _public(name: str) -> Any:
    """Returns what optax exports under a name, or optax.contrib; `None` if nothing."""
    if name.startswith("_"):
        return None
    found = vars(optax).get(name)
    # optax keeps deprecated functions under names that begin with an underscore.
    if found is None or getattr(found, "__name__", name).startswith("_"):
        found = vars(optax.contrib).get(name)
    return found


def _public_name(factory: Any) -> str | None:
    """Returns the name under which optax exports a function."""
    names = [name_of(factory)]
    if isinstance(factory, functools.partial):
        names = [name for name, value in vars(optax).items() if value is factory]
    return next((name for name in names if _public(name) is factory), None)


@functools.cache
def _kind_of(name: str) -> type[Bound] | None:
    found = _public(name)
    if found is None:
        return None
    if found is optax.MultiSteps or _returns(found, _KINDS, "GradientTransformation"):
        return Optimizer
    return Schedule if _returns(found, (optax.Schedule,), "schedulefn") else None


def __getattr__(name: str) -> Any:
    kind: Any = _kind_of(name)
    if kind is None:
        found = _public(name)
        known = "neither optax nor optax.contrib exports"
        known = known if found is None else "optax has one, but it is not known as"
        raise AttributeError(
            f"flax_amp.optim has no {name!r}: {known} an optimizer or a schedule of "
            "this name. Make one with optim.wrap, of a function that returns one."
        )
    return _class_of(_public(name), frozenset(), kind)


def __dir__() -> list[str]:
    names = {*vars(optax), *vars(optax.contrib)}
    own = ["Optimizer", "Schedule", "schedule", "wrap"]
    return sorted([*own, *filter(_kind_of, names)])
