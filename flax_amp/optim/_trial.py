"""Finding out which numbers a factory can be given as traced arrays."""

import collections
import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_amp import _tree
from flax_amp.optim._arguments import (
    ARRAY,
    BRANCH,
    EXACT,
    STATIC,
    PyTree,
    is_number,
    join,
    key_of,
    leaves_of,
    nested_leaves,
    pairs_of,
    part,
    same_leaf,
    shown,
    walk,
)
from flax_amp.optim._decisions import Decisions

_MOST_KNOWN = 64
_OF_INTEGERS = (EXACT, BRANCH)

# Warnings are switched off for the whole process, and back on again. Tracing may wait
# for another thread, and that for the lock: so it is given up after some seconds.
_LOCK = threading.RLock()
_PATIENCE = 10.0


class Trial(NamedTuple):
    """A factory to try.

    Attributes:
      factory: a function of its arguments by name.
      uses: functions of what it returns: what is done with it.
      values: the arguments.
      defaults: those that it has itself, for a second attempt.
    """

    factory: Callable[[dict[str, Any]], Any]
    uses: Sequence[Callable[[Any], Any]]
    values: dict[str, Any]
    defaults: dict[str, Any]


class KnownModes:
    """The modes of the arguments of one factory, found by trials or known from them."""

    def __init__(self) -> None:
        self._found: collections.OrderedDict[Any, list[Any]] = collections.OrderedDict()

    def find(
        self, trial: Trial, names: list[str]
    ) -> tuple[dict[str, str], tuple[bool, ...]]:
        """Returns a mode for each of the named arguments, and how branches decide.

        A factory may use a number in Python, to choose a branch or a shape, where a
        traced one is an error, or for the length of a loop, which then has no
        derivative. Nothing is computed: the factory is traced, on small parameters.
        """
        values = trial.values
        kinds = [walk(_kind, part(values[name], EXACT)[0]) for name in names]
        others = [key_of(part(value, EXACT)[1], _weak_key) for value in values.values()]
        key = (*names, key_of(kinds), *others)
        with _locked():
            tried = self._found.setdefault(key, [])
            self._found.move_to_end(key)
            if len(self._found) > _MOST_KNOWN:  # schedules made in a loop, say
                self._found.popitem(last=False)
            for kept, modes, decisions in tried:
                # The value of what is used in Python may decide about the rest.
                same = all(key_of(values[n]) == value for n, value in kept.items())
                if same and decisions_of(trial, modes) == decisions:
                    return modes, decisions
            with warnings.catch_warnings():
                # What a factory warns of, it says again when it is used.
                warnings.simplefilter("ignore")
                found = _modes_of(trial, names)
            if found is None:
                return _guess(values, names), ()
            static = [name for name in names if found[name] == STATIC]
            decisions = decisions_of(trial, found)
            kept = {name: key_of(values[name]) for name in static}
            tried.append((kept, found, decisions))
            return found, decisions


def decisions_of(trial: Trial, modes: dict[str, str]) -> tuple[bool, ...]:
    """Returns the answers that the branches of a factory depend on."""
    if BRANCH not in modes.values():
        return ()
    decisions = Decisions()
    _result(trial, lambda made: (), trial.values, modes, decisions)
    return tuple(decisions.given)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    has_it = _LOCK.acquire(timeout=_PATIENCE)
    try:
        yield
    finally:
        if has_it:
            _LOCK.release()


class _Same:
    """An object that is itself only, while it lives; the key of it keeps none alive."""

    def __init__(self, thing: Any):
        self._hash = id(thing)
        self._thing = weakref.ref(thing)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        thing = self._thing()
        return (
            thing is not None and isinstance(other, _Same) and thing is other._thing()
        )


def _weak_key(leaf: Any) -> Any:
    if isinstance(leaf, tuple):  # the functions of an optimizer
        return type(leaf), *map(_weak_key, leaf)
    if isinstance(leaf, _PLAIN) or _tree.is_array(leaf):
        return same_leaf(leaf)
    try:
        return _Same(leaf)  # a closure may hold much
    except TypeError:  # it cannot be referred to weakly
        return same_leaf(leaf)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, np.dtype)


def _kind(leaf: Any) -> Any:
    if not is_number(leaf):
        return jnp.shape(leaf) if hasattr(leaf, "shape") else type(leaf)
    return "float" if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else "int"


def _modes_of(trial: Trial, names: list[str]) -> dict[str, str] | None:
    """Returns the modes with which all uses give what they give without traced numbers.

    But for values: a state of another structure tells that a factory took another way.
    `None` if it cannot be tried.
    """
    static = dict.fromkeys(names, STATIC)
    for values in (trial.values, trial.values | trial.defaults):
        results = [(use, _result(trial, use, values, static)) for use in trial.uses]
        expected = [(use, result) for use, result in results if result]
        if not expected:
            continue  # a mask, say, that fits the true parameters only

        def works(
            modes: dict[str, str], values: Any = values, to: Any = expected
        ) -> bool:
            return all(_result(trial, use, values, modes) == r for use, r in to)

        if works(exact := dict.fromkeys(names, EXACT)):
            return exact
        modes = static
        for name in names:
            # As an array an integer would wrap.
            ways = (EXACT, ARRAY, BRANCH) if _all_floats(values[name]) else _OF_INTEGERS
            tried = (modes | {name: mode} for mode in ways)
            modes = next(filter(works, tried), modes)
        return modes
    return None


def _guess(values: dict[str, Any], names: list[str]) -> dict[str, str]:
    """Returns modes without a trial: what is counted is most often used in Python."""
    return {n: EXACT if _all_floats(values[n]) else STATIC for n in names}


def _all_floats(value: PyTree) -> bool:
    numbers = filter(is_number, jax.tree.leaves(value))
    return all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in numbers)


def _result(
    trial: Trial,
    use: Any,
    values: dict[str, Any],
    modes: dict[str, str],
    decisions: Decisions | None = None,
) -> Any:
    """Returns structure, shapes and dtypes of what a use gives; `None` if it fails."""
    numbers = {name: walk(_stand_in, values[name]) for name in modes}
    parts = {name: part(numbers[name], modes[name]) for name in modes}
    arrays = {n: (leaves_of(moves), pairs_of(moves)) for n, (moves, _) in parts.items()}
    asked = decisions or Decisions()

    def call(arrays: PyTree) -> Any:
        given = dict(values)
        for name, mode in modes.items():
            moves, pairs = arrays[name]
            known = dict(nested_leaves(numbers[name]))
            moves = shown(moves, pairs, mode, asked, known)
            given[name] = join(moves, parts[name][1])
        made = trial.factory(given)
        asked.guard()
        return use(made)

    structure: Any
    try:
        shapes, structure = jax.tree.flatten(jax.eval_shape(call, arrays))
    except Exception:  # whatever a factory raises that cannot go on
        return None
    return structure, [(shape.shape, shape.dtype) for shape in shapes]


def _stand_in(leaf: Any) -> Any:
    """Returns a number for a traced one, which has none to be tried as static."""
    if is_number(leaf) and isinstance(leaf, jax.core.Tracer):
        return 0.5 if jnp.issubdtype(leaf.dtype, jnp.floating) else 1
    return leaf
