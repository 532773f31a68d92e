"""What a factory says of itself: its name, its parameters and their types."""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def signature_of(factory: Any) -> inspect.Signature:
    """Returns the signature, with annotations as objects where they can be had."""
    signature = inspect.signature(factory)
    names = getattr(factory, "__globals__", {})

    def declared(parameter: inspect.Parameter) -> Any:
        if not isinstance(parameter.annotation, str):
            return parameter.annotation
        try:
            return eval(parameter.annotation, names)
        except Exception:  # a name that is imported for type checkers only, say
            return parameter.empty

    return signature.replace(
        parameters=[
            parameter.replace(annotation=declared(parameter))
            for parameter in signature.parameters.values()
        ]
    )


def as_declared(value: Any, parameter: inspect.Parameter, where: str) -> Any:
    """Returns an argument as its parameter is declared.

    `1` becomes `1.0` where a float is expected: a rate may be replaced by 0.5.

    Raises:
      TypeError: if a number is expected, or a schedule, and it can be neither.
    """
    kinds = _members(parameter.annotation)
    if isinstance(value, _NO_NUMBERS) and _is_number(kinds, type(value)):
        schedule = " or a schedule" if any(map(_is_function, kinds)) else ""
        raise TypeError(
            f"{where}: {parameter.name} is {value!r} ({type(value).__name__}); "
            f"expected a number{schedule}."
        )
    whole = isinstance(value, int) and not isinstance(value, bool)
    fractional = float in kinds or type(parameter.default) is float
    return float(value) if whole and fractional and int not in kinds else value


_NUMBERS = {bool, int, float, complex, np.bool_, np.number, np.ndarray, jax.Array}

# Some could be computed with all the same, or fail much later.
_NO_NUMBERS = (bool, complex, str, bytes, list, tuple, dict, set)


def _is_number(kinds: tuple[Any, ...], given: type) -> bool:
    """Whether a parameter of these types is a number, and not of the given type."""
    rest = {*kinds} - _NUMBERS - {type(None)}
    # What is an `ArrayLike` may be anything that JAX computes with, a bool as well.
    meant = given in kinds and complex not in kinds
    return float in kinds and all(map(_is_function, rest)) and not meant


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
