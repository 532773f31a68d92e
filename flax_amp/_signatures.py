"""What a factory says of itself: its name, its parameters and their types."""

import functools
import inspect
from typing import Any


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


def as_declared(value: Any, parameter: inspect.Parameter) -> Any:
    """Returns `1` as `1.0` where a float is expected: a rate may be replaced by 0.5."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    declared = parameter.annotation
    fractional = type(parameter.default) is float or float in _members(declared)
    return (
        float(value)
        if whole and fractional and int not in _members(declared)
        else value
    )


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
