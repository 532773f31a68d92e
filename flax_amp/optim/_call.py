"""A call of a function of optax as a pytree: arrays are leaves, the rest is static."""

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from flax_amp import _tree

PyTree = Any


class Static(dict[str, PyTree]):
    """The static parts of the arguments by name, with `None` for each array.

    A `Static` is hashable, as the metadata of a pytree has to be.
    """

    @functools.cached_property
    def _key(self) -> Any:
        leaves, structure = jax.tree.flatten(dict(self))
        hashed = [x if isinstance(x, Hashable) else id(x) for x in leaves]
        # With their types, because 1 and 1.0 compile differently.
        return structure, *zip(map(type, leaves), hashed, strict=True)

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __ne__(self, other: object) -> bool:  # `dict.__ne__` takes 1 for 1.0.
        return not self == other


class FactoryCall:
    """The base of optimizers and schedules: a factory with its arguments."""

    # `_arrays` holds the arrays of the arguments, and the states, by name; `_static`
    # holds the rest of the arguments. They are apart because JAX may put any object in
    # the place of a leaf.
    _factory: Callable[..., Any]
    _arrays: dict[str, PyTree]
    _static: Static

    def __init__(self, factory: Callable[..., Any], /, *args: Any, **kwargs: Any):
        if isinstance(factory, functools.partial):  # as optax.nadamw
            args = (*factory.args, *args)
            kwargs = factory.keywords | kwargs
            factory = factory.func
        signature = inspect.signature(factory)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= arguments.pop(parameter.name)
        empty = self._new(factory, {}, Static(dict.fromkeys(arguments)))
        vars(self).update(vars(empty._with(arguments)))
        # optax refuses bad arguments, and warns, here, where the user can see the call.
        self.build()

    @classmethod
    def _new(cls, factory: Any, arrays: dict[str, PyTree], static: Static) -> Self:
        made = object.__new__(cls)
        vars(made).update(_factory=factory, _arrays=arrays, _static=static)
        return made

    def _with(self, changes: Mapping[str, Any]) -> Self:
        """Returns a copy with changed arguments and states."""
        arrays = dict(self._arrays)
        static = Static(self._static)
        for name, value in changes.items():
            if name not in static:  # a state
                arrays[name] = value
                continue
            value = _match_arrays(self._arguments()[name], value)
            if name == "learning_rate":
                value = _rate(value)
            arrays[name], static[name] = _tree.partition(value, _tree.is_array)
            if not jax.tree.leaves(arrays[name]):
                del arrays[name]
        # In the order of the arguments: the order is a part of the structure.
        order = [n for n in dict.fromkeys([*static, *arrays]) if n in arrays]
        return self._new(self._factory, {name: arrays[name] for name in order}, static)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{self._name} is frozen; expected replace({name}=...).")

    def __getattr__(self, name: str) -> Any:
        # Python calls this for names without an attribute. An object in the making has
        # no attributes at all: a look-up of `_static` would come here again.
        if name in FactoryCall.__annotations__ or name not in self._static:
            raise AttributeError(f"a {type(self).__name__} has no {name!r}", name=name)
        return self._arguments()[name]

    @property
    def _name(self) -> str:
        return getattr(self._factory, "__name__", type(self._factory).__name__)

    def _arguments(self) -> dict[str, Any]:
        return {
            name: _tree.combine(self._arrays.get(name), static)
            for name, static in self._static.items()
        }

    def __repr__(self) -> str:
        shown = (f"{name}={value!s}" for name, value in self._arguments().items())
        return f"{self._name}({', '.join(shown)})"

    def build(self) -> Any:
        """Calls the factory: returns the optax optimizer or schedule."""
        given: Any = jax.tree.map(_as_argument, self._arguments(), is_leaf=is_call)
        signature = inspect.signature(self._factory)
        declared = {n: x for n, x in given.items() if n in signature.parameters}
        var_keywords = {n: x for n, x in given.items() if n not in declared}
        call = inspect.BoundArguments(signature, declared)  # type: ignore[arg-type]
        return self._factory(*call.args, **call.kwargs, **var_keywords)

    # The arguments by name, with the arguments of the calls inside

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with changed arguments.

        A number in the place of an array becomes an array: nothing is compiled again.
        The state is not changed.

        Args:
          **changes: values by the name of an argument, or by the end of the path of an
            argument inside, if only a single path ends so: `init_value`,
            `learning_rate/init_value`.
        """
        new = self
        own_names = {*self._static, *self._arrays}
        inside = self._numbers()
        for name, value in changes.items():
            # A name of this call comes before the same name inside.
            is_own = name in own_names
            found = [x for x in inside if f"/{x}".endswith(f"/{name}")]
            if not is_own and len(found) != 1:
                raise TypeError(
                    f"{self._name}.replace: {len(found)} arguments are {name}; "
                    f"expected one of {', '.join(found or [*own_names, *inside])}."
                )
            path = name if is_own else found[0]
            if path in inside and not (is_number(value) or callable(value)):
                raise TypeError(
                    f"{self._name}.replace: {name}={value!r}; expected a number or a "
                    f"schedule in the place of {inside[path]!r}."
                )
            if is_own:
                new = new._with({name: value})
            else:
                new = new._with(new._changed_at(path, value))
        return new

    def _numbers(self, prefix: str = "") -> dict[str, Any]:
        """Returns every number and schedule by path, such as `args/1/learning_rate`."""
        found: dict[str, Any] = {}
        leaves = jax.tree_util.tree_leaves_with_path(self._arguments(), is_leaf=is_call)
        for keys, leaf in leaves:
            path = prefix + _path(keys)
            # Not every function is a schedule: `jnp.tanh` also takes a number. A plain
            # function is a schedule only under the name `learning_rate`.
            is_rate = callable(leaf) and path.rpartition("/")[2] == "learning_rate"
            if is_rate or (is_call(leaf) and callable(leaf)) or is_number(leaf):
                found[path] = leaf
            if is_call(leaf):
                found |= leaf._numbers(f"{path}/")
        return found

    def _changed_at(self, path: str, value: Any) -> dict[str, Any]:
        """Returns the argument in which a path lies, with another value there."""

        def at(keys: Any, leaf: Any) -> Any:
            rest = path.removeprefix(_path(keys))
            if is_call(leaf) and rest.startswith("/"):
                return leaf._with(leaf._changed_at(rest[1:], value))
            return leaf if rest else value

        arguments = jax.tree_util.tree_map_with_path(
            at, self._arguments(), is_leaf=is_call
        )
        name = path.partition("/")[0]
        return {name: arguments[name]}

    # The factory is metadata of two types of pytrees. With a class for each factory, no
    # class would ever be freed, because JAX holds its types of pytrees.
    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        # `_flatten`, without keys, takes half the time at each call of a step.
        jax.tree_util.register_pytree_with_keys(
            cls, cls._flatten_with_keys, cls._unflatten, cls._flatten
        )
        serialization.register_serialization_state(cls, _to_state, _from_state)

    def _flatten(self) -> tuple[Any, tuple[Any, ...]]:
        metadata = self._factory, tuple(self._arrays), self._static
        return tuple(self._arrays.values()), metadata

    def _flatten_with_keys(self) -> tuple[Any, tuple[Any, ...]]:
        children, metadata = self._flatten()
        keys = map(jax.tree_util.GetAttrKey, self._arrays)
        return tuple(zip(keys, children, strict=True)), metadata

    @classmethod
    def _unflatten(cls, metadata: tuple[Any, ...], children: Any) -> Self:
        factory, names, static = metadata
        return cls._new(factory, dict(zip(names, children, strict=True)), static)


def _parts(call: FactoryCall) -> dict[str, PyTree]:
    return {name: part for name, part in call._arrays.items() if part is not None}


def _to_state(call: FactoryCall) -> dict[str, Any]:
    return serialization.to_state_dict(_parts(call))


def _from_state(call: FactoryCall, state: Any) -> Any:
    read = serialization.from_state_dict(_parts(call), state)
    return call._new(call._factory, call._arrays | read, call._static)


# Leaves


def _path(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def is_call(node: Any) -> bool:
    """Whether a node of a tree is an optimizer or a schedule of this package."""
    return isinstance(node, FactoryCall)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a real number: of Python, or an array of any shape."""
    if _tree.is_array(leaf):
        return jnp.issubdtype(leaf.dtype, jnp.integer) or _is_float(leaf)
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def _rate(value: Any) -> Any:
    """Returns a learning rate; a number becomes an array, as runs change the rate."""
    if not is_number(value) or (_tree.is_array(value) and _is_float(value)):
        return value
    # An array of NumPy starts no backend.
    return _as_array_like(np.zeros((), jax.dtypes.canonicalize_dtype(float)), value)


def _as_argument(leaf: Any) -> Any:
    """Returns an argument in the form that the factory gets.

    A scalar of the default float dtype promotes like the Python number in whose place
    the scalar stands, so that updates have the same dtypes as in optax.
    """
    if is_call(leaf):
        return leaf.build()
    if not _tree.is_array(leaf) or leaf.shape:
        return leaf
    if not isinstance(leaf, jax.Array):
        return leaf.item()
    is_default = leaf.dtype == jax.dtypes.canonicalize_dtype(float)
    return _tree.with_weak_type(leaf, True) if is_default else leaf


def _match_arrays(old: PyTree, new: PyTree) -> PyTree:
    """Returns an argument with arrays for its numbers where `old` has arrays."""
    structure: Any = jax.tree.structure(new)
    if structure != jax.tree.structure(old):
        return jax.tree.map(_tree.own, new)
    return jax.tree.map(_as_array_like, old, new)


def _as_array_like(old: Any, new: Any) -> Any:
    """Returns a number as an array with the dtype, shape and sharding of `old`."""
    if not (is_number(old) and _tree.is_array(old) and is_number(new)):
        return _tree.own(new)
    is_jax = any(isinstance(x, jax.Array) for x in (old, new))
    space: Any = jnp if is_jax else np
    fits = _is_float(old) or not _is_float(new)
    array = space.array(new, old.dtype if fits else None)
    if array.ndim < old.ndim:  # a single number for all runs of a sweep
        array = space.broadcast_to(array, old.shape)
    if any(isinstance(x, jax.core.Tracer) for x in (old, array)):
        return array  # A traced value lies on no device.
    placed = getattr(old, "committed", False)
    return jax.device_put(array, old.sharding) if placed else array
