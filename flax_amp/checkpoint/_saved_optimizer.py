"""Optimizers that were wrapped, or unwrapped, since their state was saved.

`AmpTrainState` puts its optimizer inside `optax.apply_if_finite`; others put theirs
inside `optax.MultiSteps`, or take it out again; those of `flax_amp.optim` hold the
state of optax. Each wrapper has a name in the path of everything inside of it, which a
plain restore then does not find.
"""

from collections.abc import Iterable
from typing import NamedTuple

from flax_amp.checkpoint._layout import Path

_ROOT: Path = ("opt_state",)
_PYTREE = "flax_amp.optim"  # beside the state of optax it has hyper-parameters

# Wrapper -> the fields that tell it, the field of the state inside. The order counts:
# the last has no field of its own.
_WRAPPERS = {
    "apply_if_finite": (
        {"notfinite_count", "last_finite", "total_notfinite"},
        "inner_state",
    ),
    _PYTREE: ({"opt_state"}, "opt_state"),
    "MultiSteps": ({"mini_step", "gradient_step"}, "inner_opt_state"),
    "masked": (set[str](), "inner_state"),
}


class _Wrapped(NamedTuple):
    """An optimizer state: its wrappers by name, and where the state inside begins."""

    prefixes: dict[str, Path]
    inside: Path


class Alignment(NamedTuple):
    """How a saved optimizer state corresponds to that of a target.

    Attributes:
      paths: for every path under `opt_state` on disk, that of the target; `None` if it
        belongs to a wrapper that the target does not have.
      fresh: the paths of the target that belong to a wrapper that was not saved.
      kept: the paths of the target's hyper-parameters that were not saved.
      lost: the saved hyper-parameters that the target does not have, by name.
      added: where in the target the wrappers stand that were not saved.
      removed: where on disk the wrappers stand that the target does not have.
    """

    paths: dict[Path, Path | None]
    fresh: set[Path]
    kept: set[Path]
    lost: list[str]
    added: dict[str, Path]
    removed: dict[str, Path]


def align(paths: Iterable[Path], wanted: Iterable[Path]) -> Alignment:
    """Compares the wrappers of two optimizer states."""
    paths = [path for path in paths if path[:1] == _ROOT]
    wanted = [path for path in wanted if path[:1] == _ROOT]
    saved, target = _unwrap(paths), _unwrap(wanted)
    added = _without(target.prefixes, saved.prefixes)

    there, here = _hyperparams(paths, saved), _hyperparams(wanted, target)
    both = here & there  # the hyper-parameters that both have

    def place(path: Path) -> Path | None:
        owner = _owner(path, saved)
        if owner is None:
            return target.inside + path[len(saved.inside) :]
        if owner not in target.prefixes:
            return None
        if owner == _PYTREE and path[len(saved.prefixes[owner]) :] not in both:
            return None
        return target.prefixes[owner] + path[len(saved.prefixes[owner]) :]

    return Alignment(
        paths={path: place(path) for path in paths},
        fresh={path for path in wanted if _owner(path, target) in {*added} - {_PYTREE}},
        kept={
            path
            for path in wanted
            if _owner(path, target) == _PYTREE
            and path[len(target.prefixes[_PYTREE]) :] not in both
        },
        lost=sorted(map("/".join, there - here)) if _PYTREE in target.prefixes else [],
        added=added,
        removed=_without(saved.prefixes, target.prefixes),
    )


def _unwrap(paths: list[Path]) -> _Wrapped:
    prefixes: dict[str, Path] = {}
    inside = _ROOT
    while True:
        depth = len(inside)
        keys = {path[depth] for path in paths if path[:depth] == inside != path}
        for name, (own, field) in _WRAPPERS.items():
            fits = own <= keys if own else keys == {field}
            if fits and name not in prefixes:
                prefixes[name] = inside
                inside = (*inside, field)
                break
        else:
            return _Wrapped(prefixes, inside)


def _owner(path: Path, state: _Wrapped) -> str | None:
    """Returns the wrapper that a path belongs to; `None` if it is inside of all."""
    if path[: len(state.inside)] == state.inside:
        return None
    around = [n for n, at in state.prefixes.items() if path[: len(at)] == at]
    return around[-1]


def _hyperparams(paths: list[Path], state: _Wrapped) -> set[Path]:
    """Returns the paths of hyper-parameters, from their optimizer on."""
    depth = len(state.prefixes.get(_PYTREE, ()))
    return {path[depth:] for path in paths if _owner(path, state) == _PYTREE}


def _without(left: dict[str, Path], right: dict[str, Path]) -> dict[str, Path]:
    return {name: prefix for name, prefix in left.items() if name not in right}
