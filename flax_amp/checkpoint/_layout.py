"""What a tree looks like on disk, and how two of them differ.

A layout is a flat dict: the path that Orbax gives a leaf -> its shape and dtype.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from flax_amp import _tree
from flax_amp._training.train_state import AmpTrainState

PyTree = Any
Path = tuple[str, ...]


class Leaf(NamedTuple):
    """The shape and dtype of an array on disk; of a typed key, those of its data."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


Layout = dict[Path, Leaf]


def layout_of(tree: PyTree) -> Layout:
    """Describes the leaves of a tree of arrays, shapes or Orbax's own metadata."""
    return {path: leaf_of(leaf) for path, leaf in ocp.tree.to_flat_dict(tree).items()}


def leaf_of(leaf: Any) -> Leaf:
    """Describes one leaf; Orbax saves strings as well, which have neither."""
    if not hasattr(leaf, "dtype"):
        return Leaf((), "str")
    if _tree.is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return Leaf(tuple(leaf.shape), np.dtype(leaf.dtype).name)


def check_state(state: Any, name: str) -> None:
    """Raises a TypeError if a state is no `AmpTrainState`."""
    if not isinstance(state, AmpTrainState):
        raise TypeError(
            f"{name} is a {type(state).__name__}; expected an AmpTrainState. Make it "
            "with AmpTrainState.create, as for a new run."
        )


def kind_of(value: Any) -> str:
    """Says what a value is, for people: `float32[3]`, `a str`."""
    if getattr(value, "is_deleted", bool)():
        return "deleted, its memory was donated"
    return (
        str(leaf_of(value)) if hasattr(value, "dtype") else f"a {type(value).__name__}"
    )


def name_of(path: Iterable[str]) -> str:
    """Returns a path for people."""
    return "/".join(path)


def differences(
    on_disk: Layout, wanted: Layout, called: Mapping[Path, Path] | None = None
) -> list[str]:
    """Returns a line for every path that differs, with both sides.

    Args:
      on_disk: what was saved, under the paths of the target.
      wanted: what the target has.
      called: the paths that arrays really have on disk, where those are others.
    """
    lines = []
    for path in sorted(wanted | on_disk):
        disk, there = on_disk.get(path), wanted.get(path)
        if disk == there:
            continue
        left = "not on disk" if disk is None else f"{disk} on disk"
        if called and path in called:
            left += f" as {name_of(called[path])}"
        right = "not in the target" if there is None else f"{there} in the target"
        lines.append(f"{name_of(path)}: {left}, {right}")
    return lines
