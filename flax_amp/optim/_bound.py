"""A factory with its arguments, as a pytree.

Numbers and arrays among the arguments are leaves, under their own names; everything
else is structure. Optimizers and schedules of `flax_amp.optim` are such pytrees.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import numpy as np
import optax
from flax import serialization

from flax_amp import _tree
from flax_amp.optim._arguments import (
    BRANCH,
    EXACT,
    STATIC,
    Fixed,
    PyTree,
    any_of,
    fitted,
    is_known,
    is_number,
    is_python,
    join,
    leaves_of,
    may_move,
    nested_leaves,
    pairs_of,
    part,
    put,
    shown,
    taken,
)
from flax_amp.optim._decisions import Decisions
from flax_amp.optim._signatures import as_declared, full_name
from flax_amp.optim._state_dict import from_state, to_state
from flax_amp.optim._trial import KnownModes, Trial, decisions_of

_REMAINDERS = "remainders"


class Bound:
    """The base of optimizers and schedules: see `flax_amp.optim`.

    Attributes:
      remainders: float32[number of floats, 2], each float and what it leaves out of the
        Python float that it was given as; `None` without any.
    """

    factory: ClassVar[Callable[..., Any]]
    static_args: ClassVar[frozenset[str]]
    _parameters: ClassVar[Mapping[str, inspect.Parameter]]
    _states: ClassVar[tuple[str, ...]] = ()  # fields beside the arguments
    _known_modes: ClassVar[KnownModes]

    # What holds leaves, by name (moving arguments, remainders, states), and the rest.
    # Apart, so that any object may stand where a leaf was, as JAX needs it.
    _parts: dict[str, PyTree]
    _fixed: Fixed
    remainders: Any

    def __init__(self, /, *args: Any, **kwargs: Any):
        states = {name: kwargs.pop(name, None) for name in self._states}
        by_field = _REMAINDERS in kwargs  # as `dataclasses.replace` calls it
        remainders = kwargs.pop(_REMAINDERS, None)
        values = kwargs if by_field else self._bind(args, kwargs)
        values = {
            name: as_declared(values[name], parameter, type(self).__name__)
            for name, parameter in self._parameters.items()
        }
        modes, decisions = self._modes(values)
        moving, fixed = {}, {}
        places: dict[tuple[str, ...], int] = {}
        pairs: list[Any] = []
        for name, value in values.items():
            mode = modes.get(name, EXACT)
            moves, fixed[name] = part(value, mode)
            if any_of(moves):
                moving[name] = leaves_of(moves)
            for path, pair in pairs_of(moves).items():
                places[name, *path] = len(pairs)
                pairs.append(pair)
        self._check(fixed, moving)
        parts = moving | {_REMAINDERS: np.stack(pairs) if pairs else None} | states
        if np.shape(remainders)[-2:-1] == (len(pairs),):
            _keep_remainders(parts, places, places, remainders, values)
        self._set(parts, Fixed(fixed, modes, places, decisions))

    def _set(self, parts: dict[str, PyTree], fixed: Fixed) -> None:
        # Frozen: only here are attributes written.
        vars(self).update(_parts=parts, _fixed=fixed)

    @classmethod
    def _new(cls, parts: dict[str, PyTree], fixed: Fixed) -> Self:
        made = object.__new__(cls)
        made._set(parts, fixed)
        return made

    @classmethod
    def _bind(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns all arguments by name."""
        signature = inspect.Signature(list(cls._parameters.values()))
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{cls.__name__}: {error}; expected the arguments of "
                f"{full_name(cls.factory)}: {', '.join(cls._parameters)}."
            ) from None
        bound.apply_defaults()
        return bound.arguments

    @classmethod
    def _modes(
        cls, values: Mapping[str, Any]
    ) -> tuple[dict[str, str], tuple[bool, ...]]:
        """Returns how the numbers of each argument are given to the factory."""
        named = [name for name, value in values.items() if may_move(value)]
        names = [name for name in named if name not in cls.static_args]
        modes = dict.fromkeys(named, STATIC)
        if not names:
            return modes, ()
        defaults = {
            name: parameter.default
            for name, parameter in cls._parameters.items()
            if name not in named and parameter.default is not parameter.empty
        }
        found, decisions = cls._known_modes.find(cls._trial(values, defaults), names)
        return modes | found, decisions

    @classmethod
    def _trial(cls, values: Mapping[str, Any], defaults: dict[str, Any]) -> Trial:
        return Trial(cls._call_factory, cls._uses(), dict(values), defaults)

    @classmethod
    def _check(cls, fixed: PyTree, moving: PyTree) -> None:
        for name, value in moving.items():
            for _, leaf in nested_leaves(value):
                if isinstance(leaf, Bound) and any(
                    getattr(leaf, state) is not None for state in leaf._states
                ):
                    raise ValueError(
                        f"{cls.__name__}: {name} holds an optimizer with a state of "
                        f"its own ({type(leaf).__name__}); expected one before init. "
                        "The outer one holds the state of all: call init on it only."
                    )
        for name, value in fixed.items():
            for leaf in jax.tree.leaves(value):
                if isinstance(leaf, jax.core.Tracer):
                    raise TypeError(
                        f"{cls.__name__}: {name} is traced ({leaf.aval}); expected a "
                        f"number, which {full_name(cls.factory)} uses in Python. "
                        "Give it outside of jit, vmap and grad, or compute the same "
                        "without a branch on it: optim.wrap and optim.schedule take "
                        "a function of yours."
                    )

    @classmethod
    def _uses(cls) -> Sequence[Callable[[Any], Any]]:
        """Returns what is done with what the factory makes, for a trial."""
        raise NotImplementedError

    @classmethod
    def _call_factory(cls, values: Mapping[str, Any]) -> Any:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, parameter in cls._parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                args += values[name]
            elif parameter.kind is parameter.VAR_KEYWORD:
                kwargs |= values[name]
            elif parameter.kind is parameter.KEYWORD_ONLY:
                kwargs[name] = values[name]
            else:
                args.append(values[name])
        return cls.factory(*args, **kwargs)

    def _build(self) -> tuple[Any, Callable[[PyTree], PyTree]]:
        """Calls the factory with the arguments as they are now.

        Returns:
          What it makes, and what guards the results of that, see `Decisions`.
        """
        values, pairs = dict(self._fixed.values), self._pairs()
        modes, moving = self._fixed.modes, self._moving()
        # Some traced, some known: all of them answer, as when all are traced.
        deciding = [self._parts[n] for n in moving if modes.get(n) == BRANCH]
        asked = not all(map(is_known, jax.tree.leaves(deciding)))
        decisions = Decisions(self._fixed.decisions) if asked else None
        for name in moving:
            mode = modes.get(name, EXACT)
            moves = shown(self._parts[name], pairs[name], mode, decisions)
            values[name] = join(moves, values[name])
        made = self._call_factory(values)
        return made, (lambda tree: tree) if decisions is None else decisions.guard()

    def _pairs(self) -> dict[str, dict[tuple[str, ...], Any]]:
        """Returns the pairs in the remainders, by argument and path."""
        pairs: dict[str, Any] = {name: {} for name in self._fixed.values}
        for (name, *path), place in self._fixed.places.items():
            pairs[name][tuple(path)] = taken(self.remainders, place)
        return pairs

    # Arguments as attributes

    def __getattr__(self, name: str) -> Any:
        # Only what is no attribute comes here; a copy in the making has none at all.
        if "_parts" not in vars(self):
            raise AttributeError(name)
        fixed, parts = self._fixed.values, self._parts
        if name not in fixed and name not in parts:
            known = ", ".join([*fixed, *self._states])
            raise AttributeError(
                f"{type(self).__name__} has no {name}; it has {known}."
            )
        if name not in fixed:
            return parts[name]
        return join(parts[name], fixed[name]) if name in parts else fixed[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._fixed.values, *self._states})

    def _check_values(self, use: str) -> None:
        """Raises a TypeError if there are no values, but shapes or specifications."""
        own = [self.remainders, *(self._parts[name] for name in self._moving())]
        for leaf in jax.tree.leaves(own):
            if not _tree.is_array(leaf):
                kind = type(leaf).__name__
                raise TypeError(
                    f"{type(self).__name__}.{use}: it holds {kind}; expected arrays. "
                    "Restore a checkpoint into it first, or make it without "
                    "jax.eval_shape."
                )

    def _moving(self) -> list[str]:
        """Returns the names of the arguments that hold leaves."""
        return [name for name in self._parts if name in self._fixed.values]

    def _arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fixed.values}

    def _replace_own(self, changes: Mapping[str, Any]) -> Self:
        """Returns a copy with other values of arguments and states."""
        parts, fixed = dict(self._parts), self._fixed
        others = {}
        for name, value in changes.items():
            if name in self._states or (name in parts and _is_stand_in(parts[name])):
                parts[name] = value
                continue
            fits = None
            if name in parts:
                mode = fixed.modes.get(name, EXACT)
                fits = fitted(value, parts[name], fixed.values[name], mode)
            if fits is None:
                others[name] = value
                continue
            parts[name], pairs = fits
            for path, pair in pairs.items():
                if (place := fixed.places.get((name, *path))) is not None:
                    parts[_REMAINDERS] = put(parts[_REMAINDERS], place, pair)
        same = self._new(parts, fixed)
        if others:
            return self._rebuilt(same, others)
        asked = any(fixed.modes.get(name) == BRANCH for name in changes)
        return same._decided() if asked else same

    def _decided(self) -> Self:
        """Returns a copy that branches by its numbers, if these are known."""
        values, pairs, fixed = self._arguments(), self._pairs(), self._fixed
        for name in [name for name, mode in fixed.modes.items() if mode == BRANCH]:
            numbers = shown(self._parts[name], pairs[name], EXACT)
            if not all(map(is_python, jax.tree.leaves(numbers))):
                return self  # traced, or of several runs: the guard tells
            values[name] = join(numbers, fixed.values[name])
        decisions = decisions_of(self._trial(values, {}), fixed.modes)
        other = Fixed(fixed.values, fixed.modes, fixed.places, decisions)
        return self._new(self._parts, other)

    def _rebuilt(self, same: Self, others: Mapping[str, Any]) -> Self:
        """Returns a copy with arguments that change the structure."""
        values = {**same._arguments(), **others}
        made = type(self)(**values, remainders=None)
        parts, places = dict(made._parts), made._fixed.places
        _keep_remainders(parts, places, self._fixed.places, same.remainders, values)
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(self._parts)):
            parts = jax.tree.map(_tree.own, parts)
        states = {name: same._parts[name] for name in self._states}
        return self._new(parts | states, made._fixed)

    # As a pytree

    def _flatten(self) -> tuple[list[PyTree], tuple[Any, ...]]:
        return list(self._parts.values()), (tuple(self._parts), self._fixed)

    def _flatten_with_keys(self) -> tuple[list[tuple[Any, PyTree]], tuple[Any, ...]]:
        children, metadata = self._flatten()
        keys = map(jax.tree_util.GetAttrKey, metadata[0])
        return list(zip(keys, children, strict=True)), metadata

    @classmethod
    def _unflatten(cls, metadata: tuple[Any, ...], children: Any) -> Self:
        names, fixed = metadata
        return cls._new(dict(zip(names, children, strict=True)), fixed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A factory that is copied would have another class.
        return self._new(copy.deepcopy(self._parts, memo), self._fixed)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "factory" not in vars(cls):
            return
        cls._known_modes = KnownModes()
        jax.tree_util.register_pytree_with_keys(
            cls, cls._flatten_with_keys, cls._unflatten, cls._flatten
        )
        serialization.register_serialization_state(cls, to_state, from_state)

    def __repr__(self) -> str:
        shown = [f"{name}={_shown(value)}" for name, value in self._arguments().items()]
        for name in self._states:
            leaves = len(jax.tree.leaves(getattr(self, name)))
            shown += [f"{name}=<{leaves} leaves>"] if leaves else []
        return f"{type(self).__name__}({', '.join(shown)})"


def fields_of(parameters: Mapping[str, inspect.Parameter], states: Any) -> list[Any]:
    """Returns the fields of the dataclass for a factory."""
    named = [(p.name, Any) for p in parameters.values()]
    more = [(name, Any, dataclasses.field(kw_only=True)) for name in states]
    kept = (_REMAINDERS, Any, dataclasses.field(kw_only=True, repr=False))
    return [*named, *more, kept]


def _keep_remainders(
    parts: dict[str, PyTree],
    places: Mapping[tuple[str, ...], int],
    old_places: Mapping[tuple[str, ...], int],
    remainders: Any,
    values: Mapping[str, PyTree],
) -> None:
    """Takes over the remainders of what is an array already."""
    for (name, *path), place in places.items():
        value = dict(nested_leaves(values[name]))[tuple(path)]
        old_place = old_places.get((name, *path))
        if _tree.is_array(value) and old_place is not None:
            pair = remainders[..., old_place, :]
            parts[_REMAINDERS] = put(parts[_REMAINDERS], place, pair)


def _is_stand_in(old: PyTree) -> bool:
    """Whether there is something else where an array was, as in a tree of axes."""
    leaves = jax.tree.leaves(old)
    return old is None or (leaves[0] is old and not _tree.is_array(old))


def _shown(value: Any) -> str:
    if is_number(value) and not isinstance(value, jax.core.Tracer):
        return (
            str(float(f"{value:.6g}")) if _tree.is_inexact_array(value) else str(value)
        )
    if _tree.is_array(value):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, optax.GradientTransformation):
        return "GradientTransformation(...)"
    return getattr(value, "__qualname__", None) or repr(value)
