"""A call of a function of optax as a pytree: arrays are leaves, all else is static."""

import contextlib
import copy
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from flax_amp import _tree
from flax_amp._compat import weakly_typed

PyTree = Any

_FILTERS = threading.RLock()  # the filters of `warnings` are those of all threads


class Static(dict[str, PyTree]):
    """Arguments by name, with `None` for each array: the metadata of a pytree."""

    @functools.cached_property
    def _key(self) -> Any:
        leaves, structure = jax.tree.flatten(dict(self))
        hashed = [x if isinstance(x, Hashable) else id(x) for x in leaves]
        return structure, *zip(map(type, leaves), hashed, strict=True)  # 1 is not 1.0

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __ne__(self, other: object) -> bool:  # that of dict takes 1 for 1.0
        return not self == other


class FactoryCall:
    """The base of optimizers and schedules: a factory with its arguments."""

    factory: ClassVar[Callable[..., Any]]
    _signature: ClassVar[inspect.Signature]
    # What holds arrays, by name, and the rest. They are kept apart because JAX puts
    # objects of any kind where a leaf was.
    _arrays: dict[str, PyTree]
    _static: Static

    def __init__(self, /, *args: Any, **kwargs: Any):
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            known = ", ".join(self._signature.parameters)
            message = f"{type(self).__name__}: {error}; expected the arguments {known}."
            raise TypeError(message) from None
        bound.apply_defaults()
        empty = self._new({}, Static(dict.fromkeys(bound.arguments)))
        vars(self).update(vars(empty._with(bound.arguments)))
        # Called with what was given: optax refuses it, or warns of it, here and once.
        with self._explaining():
            self.checked(self._called(bound.arguments))

    @classmethod
    def _new(cls, arrays: dict[str, PyTree], static: Static) -> Self:
        made = object.__new__(cls)
        vars(made).update(_arrays=arrays, _static=static)
        return made

    def _with(self, changes: Mapping[str, Any]) -> Self:
        """Returns a copy with other arguments and states."""
        arrays, static = dict(self._arrays), Static(self._static)
        for name, value in changes.items():
            if name not in static:  # a state
                arrays[name] = value
                continue
            value = _in_place_of(getattr(self, name), value)
            value = _rate(value, type(self)) if name == "learning_rate" else value
            arrays[name], static[name] = _tree.partition(value, _tree.is_array)
            if not jax.tree.leaves(arrays[name]):
                del arrays[name]
        # In the order of the arguments: it is a part of the structure.
        order = [n for n in dict.fromkeys([*static, *arrays]) if n in arrays]
        return self._new({name: arrays[name] for name in order}, static)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__} is frozen; expected a copy: replace({name}=...)."
        )

    def __getattr__(self, name: str) -> Any:
        # Only what is no attribute comes here; a copy in the making has none at all.
        static, arrays = (vars(self).get(n, {}) for n in ("_static", "_arrays"))
        if name in static and name in arrays:
            return _tree.combine(arrays[name], static[name])
        if name not in static and name not in arrays:
            known = ", ".join({**static, **arrays})
            raise AttributeError(f"{type(self).__name__} has no {name}; it has {known}")
        return arrays[name] if name in arrays else static[name]

    def _arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._static}

    def __repr__(self) -> str:
        shown = (f"{name}={value!s}" for name, value in self._arguments().items())
        return f"{type(self).__name__}({', '.join(shown)})"

    # What optax makes of it

    @classmethod
    def _called(cls, values: Mapping[str, Any]) -> Any:
        given: Any = jax.tree.map(_as_argument, dict(values), is_leaf=is_call)
        call = inspect.BoundArguments(cls._signature, given)
        return cls.factory(*call.args, **call.kwargs)

    def made(self) -> Any:
        """Returns what optax takes in the place of this."""
        with self._explaining(), _FILTERS, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were shown when it was made first
            return self.checked(self._called(self._arguments()))

    @classmethod
    def checked(cls, made: Any) -> Any:
        """Returns what a factory made, or raises a TypeError."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Says which arguments are arrays where a Python number is needed."""
        try:
            yield
        except (
            jax.errors.ConcretizationTypeError,
            jax.errors.TracerArrayConversionError,
            jax.errors.TracerIntegerConversionError,
        ) as error:
            arrays = ", ".join(name for name in self._arrays if name in self._static)
            raise TypeError(
                f"{type(self).__name__}: optax needs a Python number, for a branch or "
                f"a shape, and got an array. Arrays are: {arrays or 'its inputs'}. "
                "Expected a Python number, which is static. A learning_rate is one "
                "only if optim.wrap is given a function that calls it otherwise."
            ) from error

    # As a pytree, as a copy, and as a dict of arrays

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_pytree_with_keys(cls, cls._flatten, cls._unflatten)
        serialization.register_serialization_state(cls, _to_state, _from_state)

    def _flatten(self) -> tuple[list[tuple[Any, PyTree]], tuple[Any, ...]]:
        keys = map(jax.tree_util.GetAttrKey, self._arrays)
        children = list(zip(keys, self._arrays.values(), strict=True))
        return children, (tuple(self._arrays), self._static)

    @classmethod
    def _unflatten(cls, metadata: tuple[Any, ...], children: Any) -> Self:
        names, static = metadata
        return cls._new(dict(zip(names, children, strict=True)), static)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Arrays only: copies of functions would make another structure.
        return jax.tree.map(lambda leaf: copy.deepcopy(leaf, memo), self)


def _to_state(call: FactoryCall) -> dict[str, Any]:
    parts = {name: part for name, part in call._arrays.items() if part is not None}
    return {name: serialization.to_state_dict(part) for name, part in parts.items()}


def _from_state(call: FactoryCall, state: Any) -> Any:
    """Returns a call with the arrays of its own state dict, or of that of optax."""
    own = _to_state(call)
    if own.keys() != _keys(state) == _keys(own.get("opt_state", {})):
        state = {"opt_state": state}
    if _keys(state) not in (own.keys(), own.keys() & {"opt_state"}):
        found = ", ".join(_keys(state) or ())
        raise ValueError(
            f"{type(call).__name__}: the state has {found or 'nothing'}; "
            f"expected {', '.join(own) or 'nothing'}, or the state of the same "
            "optimizer of optax. Make the target with the arguments that were saved, "
            "and call tx = tx.init(params) first."
        )
    read = {
        name: serialization.from_state_dict(call._arrays[name], value, name=name)
        for name, value in state.items()
    }
    return call._new(call._arrays | read, call._static)


def _keys(state: Any) -> Any:
    """Returns the names in a state dict; `None` if it is a leaf, as it may be."""
    return state.keys() if isinstance(state, Mapping) else None


# Leaves


def is_call(node: Any) -> bool:
    """Whether a node of a tree is an optimizer or a schedule of this package."""
    return isinstance(node, FactoryCall)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a real number: of Python, or an array of any shape."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError(
            "flax_amp.optim: the optimizer holds shapes without values; expected "
            "arrays. Restore a checkpoint into it, or make it without jax.eval_shape."
        )
    if _tree.is_array(leaf):
        return jnp.issubdtype(leaf.dtype, jnp.integer) or _is_float(leaf)
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def _rate(value: Any, kind: type) -> Any:
    """Returns a learning rate, as an array if it is a number: runs change it."""
    if isinstance(value, bool | str | complex):
        raise TypeError(
            f"{kind.__name__}: learning_rate is {value!r}; expected a number, an array "
            "or a schedule."
        )
    if not is_number(value) or (_tree.is_array(value) and _is_float(value)):
        return value
    dtype = jax.dtypes.canonicalize_dtype(float)
    # An array of NumPy starts no backend.
    return value.astype(dtype) if _tree.is_array(value) else np.array(value, dtype)


def _as_argument(leaf: Any) -> Any:
    """Returns an argument as the factory gets it.

    A scalar of the default float dtype promotes like the Python number that it stands
    for: updates keep their dtypes.
    """
    if is_call(leaf):
        return leaf.made()
    if not _tree.is_array(leaf) or leaf.shape:
        return leaf
    if not isinstance(leaf, jax.Array):
        return leaf.item()
    is_default = leaf.dtype == jax.dtypes.canonicalize_dtype(float)
    return weakly_typed(leaf) if is_default else leaf


def _in_place_of(old: PyTree, new: PyTree) -> PyTree:
    """Returns an argument with arrays for its numbers where the old one has arrays."""
    structure: Any = jax.tree.structure(new)
    fits = structure == jax.tree.structure(old)
    return jax.tree.map(_like, old, new) if fits else jax.tree.map(_tree.own, new)


def _like(old: Any, new: Any) -> Any:
    """Returns a number as an array like the one that it replaces, and in its place.

    Only a float in the place of an integer has another dtype.
    """
    if not (is_number(old) and _tree.is_array(old) and is_number(new)):
        return _tree.own(new)
    space: Any = jnp if isinstance(new, jax.Array) or isinstance(old, jax.Array) else np
    fits = _is_float(old) or not _is_float(new)
    array = space.array(new, old.dtype if fits else None)
    if array.ndim < old.ndim:  # one number for all runs of a sweep
        array = space.broadcast_to(array, old.shape)
    placed = getattr(old, "committed", False) and not isinstance(new, jax.core.Tracer)
    return jax.device_put(array, old.sharding) if placed else array
