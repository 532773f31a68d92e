"""Finding out which numbers a factory can be given as traced arrays."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_amp._arguments import (
    ARRAY,
    EXACT,
    STATIC,
    PyTree,
    given,
    is_number,
    join,
    leaves_of,
    part,
    walk,
)


class Trial(NamedTuple):
    """A factory to try.

    Attributes:
      uses: functions of its arguments by name: what is done with what it returns.
      values: the arguments.
      defaults: those that it has itself, for a second attempt.
    """

    uses: Sequence[Callable[[dict[str, Any]], Any]]
    values: dict[str, Any]
    defaults: dict[str, Any]


def modes_of(trial: Trial, names: list[str]) -> dict[str, str]:
    """Returns a mode for each of the named arguments.

    A factory may use a number in Python, to choose a branch or a shape, where a traced
    one is an error, or for the length of a loop, which then has no derivative. Nothing
    is computed: the factory is traced, on small parameters.
    """
    with warnings.catch_warnings():
        # What a factory warns of, it says again when it is used.
        warnings.simplefilter("ignore")
        return _find_modes(trial, names)


def _find_modes(trial: Trial, names: list[str]) -> dict[str, str]:
    static = dict.fromkeys(names, STATIC)
    for values in (trial.values, trial.values | trial.defaults):
        attempt = trial._replace(values=values)
        results = {use: _result(attempt, static, use) for use in trial.uses}
        expected = {use: result for use, result in results.items() if result}
        if not expected:
            continue  # a mask, say, that fits the true parameters only
        works = functools.partial(_gives, attempt, expected)
        if works(exact := dict.fromkeys(names, EXACT)):
            return exact
        modes = static
        for name in names:
            tried = (modes | {name: mode} for mode in (EXACT, ARRAY))
            modes = next(filter(works, tried), modes)
        return modes
    # Not to be tried: what is counted is most often used in Python.
    return {n: EXACT if _all_floats(trial.values[n]) else STATIC for n in names}


def _gives(trial: Trial, expected: dict[Any, Any], modes: dict[str, str]) -> bool:
    """Whether all uses give what they give without traced numbers, but for values.

    A state of another structure tells that a factory took another way.
    """
    return all(_result(trial, modes, use) == result for use, result in expected.items())


def _all_floats(value: PyTree) -> bool:
    numbers = filter(is_number, jax.tree.leaves(leaves_of(value)[0]))
    return all(jnp.issubdtype(number.dtype, jnp.floating) for number in numbers)


def _result(trial: Trial, modes: dict[str, str], use: Any) -> Any:
    """Returns structure, shapes and dtypes of what a use gives; `None` if it fails."""
    parts = {
        name: part(walk(_stand_in, trial.values[name]), modes[name]) for name in modes
    }
    leaves = {name: leaves_of(moving) for name, (moving, _) in parts.items()}

    def call(leaves: PyTree) -> Any:
        values = dict(trial.values)
        for name, mode in modes.items():
            high, low = leaves[name]
            shown = walk(lambda x, rest, mode=mode: given(x, rest, mode), high, low)
            values[name] = join(shown, parts[name][1])
        return use(values)

    structure: Any
    try:
        shapes, structure = jax.tree.flatten(jax.eval_shape(call, leaves))
    except Exception:  # whatever a factory raises that cannot go on
        return None
    return structure, [(shape.shape, shape.dtype) for shape in shapes]


def _stand_in(leaf: Any) -> Any:
    """Returns a number for a traced one, which has none to be tried as static."""
    if is_number(leaf) and isinstance(leaf, jax.core.Tracer):
        return 0.5 if jnp.issubdtype(leaf.dtype, jnp.floating) else 1
    return leaf
