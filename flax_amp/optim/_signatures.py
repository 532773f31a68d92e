"""What a factory says of itself: its name, its parameters and their types."""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def signature_of(factory: Any) -> inspect.Signature:
    """Returns the signature, with annotations as objects where they can be had."""
    signature = inspect.signature(factory)
    names = getattr(factory, "__globals__", {})

    def resolved(annotation: Any) -> Any:
        if not isinstance(annotation, str):
            return annotation
        try:
            return eval(annotation, names)
        except Exception:  # a name that is imported for type checkers only, say
            return signature.empty

    return signature.replace(
        parameters=[
            parameter.replace(annotation=resolved(parameter.annotation))
            for parameter in signature.parameters.values()
        ],
        return_annotation=resolved(signature.return_annotation),
    )


def as_declared(value: Any, parameter: inspect.Parameter, where: str) -> Any:
    """Returns an argument as its parameter is declared.

    `1` becomes `1.0` where a float is expected: a rate may be replaced by 0.5.

    Raises:
      TypeError: if a number is expected, or a schedule, and it can be neither.
    """
    kinds = _members(parameter.annotation)
    if not _suits(value, kinds) and value is not parameter.default:
        schedule = " or a schedule" if any(map(_is_function, kinds)) else ""
        raise TypeError(
            f"{where}: {parameter.name} is {value!r} ({type(value).__name__}); "
            f"expected a number{schedule}."
        )
    fractional = float in kinds and int not in kinds
    if not fractional and type(parameter.default) is not float:
        return value
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, jax.Array | np.ndarray) and jnp.issubdtype(
        value.dtype, jnp.integer
    ):
        return value.astype(float)
    return value


_NUMBERS = {bool, int, float, complex, np.bool_, np.number, np.ndarray, jax.Array}

# Some could be computed with all the same, or fail much later.
_NO_NUMBERS = (type(None), bool, complex, str, bytes, list, tuple, dict, set)


def _suits(value: Any, kinds: tuple[Any, ...]) -> bool:
    """Whether a value may be an argument of these types, if they are those of numbers.

    What is an `ArrayLike` may be anything that JAX computes with; a flag or a complex
    number is hardly meant by it.
    """
    rest = {*kinds} - _NUMBERS - {type(None)}
    a_number = float in kinds and all(map(_is_function, rest))
    loose = _NUMBERS if complex in kinds else set()
    meant = type(value) in {*kinds} - loose
    return not (a_number and isinstance(value, _NO_NUMBERS)) or meant


def _is_function(kind: Any) -> bool:
    return typing.get_origin(kind) is Callable


def _members(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", (annotation,))


def full_name(factory: Any) -> str:
    """Returns the name with which a user calls a function."""
    module = (getattr(factory, "__module__", None) or "").split(".")[0]
    name = name_of(factory)
    return f"{module}.{name}" if module == "optax" else name


def name_of(factory: Any) -> str:
    """Returns the name of a function, or of what else can be called."""
    if isinstance(factory, functools.partial):
        return name_of(factory.func)
    return getattr(factory, "__name__", type(factory).__name__)
