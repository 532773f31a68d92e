"""Optimizers as pytrees; `flax_amp.optim` makes their classes."""

import collections
import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_amp import _tree
from flax_amp.optim._arguments import is_real, map_nested, nested_leaves
from flax_amp.optim._bound import Bound
from flax_amp.optim._injected import carried_over, inject, injected
from flax_amp.optim._schedule import Schedule, check_names
from flax_amp.optim._transformation import (
    as_transformation,
    explaining,
    first_update,
    settled,
)
from flax_amp.optim._values import gives_a_float, last_counts, value_at
from flax_amp.optim._variables import as_variables, pure

PyTree = Any


# To try things on; of NumPy, which starts no backend.
_SMALL = {"matrix": np.ones((4, 4), np.float32), "vector": np.ones(4, np.float32)}


class Optimizer(Bound):
    """An optimizer of optax that holds its hyper-parameters and its state.

    Make one with a function of this module, such as `adamw`, or with `wrap`.

    Attributes:
      opt_state: the state of optax, in optax's own structure; `None` before `init`.
      remainders: see `flax_amp._exact`.

    Example:
      >>> from flax_amp import optim
      >>> params = {"w": jnp.ones(3)}
      >>> tx = optim.adamw(learning_rate=0.1, weight_decay=1e-4).init(params)
      >>> updates, tx = tx.update({"w": jnp.ones(3)}, params)
      >>> tx = tx.replace(learning_rate=0.05)
      >>> float(tx.learning_rate)
      0.05...
    """

    _states = ("opt_state",)
    opt_state: PyTree

    def init(self, params: PyTree) -> Self:
        """Returns the optimizer with the state of a new run.

        Args:
          params: the parameters to train.
        """
        with explaining(f"{type(self).__name__}.init"):
            state = self.as_argument().init(params)
        # From here on all leaves are arrays of JAX: one kind, one compilation.
        # Arrays of their own: donating the optimizer must delete no array of the user.
        mine = jax.tree.map(_tree.own, self._replace_own({"opt_state": None}))
        return mine._replace_own({"opt_state": jax.tree.map(_as_jax, settled(state))})

    def update(
        self,
        grads: PyTree,
        params: PyTree | None = None,
        *as_optax: Any,
        **extra_args: Any,
    ) -> tuple[PyTree, Self]:
        """Returns the updates, and the optimizer after them.

        Args:
          grads: the gradients, shaped as the parameters.
          params: the parameters, for the optimizers that need them.
          *as_optax: none; `update(grads, state, params)` is that of optax's pair.
          **extra_args: what else an optimizer of optax asks for, such as `value`.

        Returns:
          `(updates, tx)`; `optax.apply_updates(params, updates)` applies them.

        Raises:
          RuntimeError: before `init`.
          TypeError: if optax uses a traced hyper-parameter in Python, or if it is
            called as a transformation of optax.
        """
        name = type(self).__name__
        if as_optax or "state" in extra_args or self._is_state(params, grads):
            raise TypeError(
                f"{name}.update: got grads and a state; expected "
                "tx.update(grads, params). Where a transformation of optax is called, "
                "pass tx.to_optax()."
            )
        if self.opt_state is None:
            raise RuntimeError(
                f"{name}.update: it has no state yet; expected an optimizer after "
                "init. Call tx = tx.init(params) first."
            )
        with explaining(f"{name}.update"):
            updates, state = self.as_argument().update(
                grads, self.opt_state, params, **extra_args
            )
        return settled(updates), self._replace_own({"opt_state": settled(state)})

    def _is_state(self, params: PyTree, grads: PyTree) -> bool:
        structures: Any = map(jax.tree.structure, (self.opt_state, params, grads))
        mine, given, like = structures
        return given == mine != like and mine.num_nodes > 1

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with other hyper-parameters.

        A number in place of a number changes no structure: nothing is compiled again.

        Args:
          **changes: values by the name of an argument, or by a name of `hyperparams`,
            which reaches the optimizers inside; also `opt_state`.

        Raises:
          TypeError: if there is no such name, or a value is of a wrong type.
          ValueError: if the state would have another structure.
        """
        self._check_values("replace")
        pure_self = pure(self)
        if pure_self is not self:
            where = f"{type(self).__name__}.replace"
            return as_variables(self, pure_self.replace(**changes), where)
        own = {*self._fixed.values, *self._states}
        entries, copies = self._entries()
        inner: dict[str, tuple[str, ...]] = {}
        for name, path, _ in entries:
            inner |= {name: path, "/".join(path): path}
        check_names(self, changes, [*own, *inner, *copies])
        new = self._replace_own({n: v for n, v in changes.items() if n in own})
        for name in [n for n in changes if n in inner and n not in own]:
            new = new._replace_at(inner[name], changes[name])
        if self.opt_state is None or new.opt_state is None:
            return new
        if "opt_state" in changes:
            self._check_structure(new.opt_state)
            return new
        state = self.opt_state
        paths = {n: inner.get(n, (n,)) for n in changes if n in own or n in inner}
        if paths:
            state = self._state_for(new, paths, changes)
        rest = {copies[n]: v for n, v in changes.items() if n not in paths}
        return new._replace_own({"opt_state": inject(state, rest)})

    def _check_structure(self, opt_state: PyTree) -> None:
        """Raises a ValueError if it is not the state of this optimizer."""
        now: Any
        now, new = map(jax.tree.structure, (self.opt_state, opt_state))
        if now != new:
            raise ValueError(
                f"{type(self).__name__}.replace: opt_state has the structure {new}; "
                f"expected that of the present one, {now}, or None to begin anew."
            )

    def _state_for(
        self,
        new: "Optimizer",
        paths: Mapping[str, tuple[str, ...]],
        changes: Mapping[str, Any],
    ) -> PyTree:
        """Returns the state as other arguments need it.

        Raises:
          ValueError: if they need one of another structure.
        """
        copies = injected(self.opt_state)
        if new._fixed == self._fixed and not copies:
            return self.opt_state
        try:
            before, after = _small_state(self), _small_state(new)
        except Exception as error:  # the small parameters do not suit a mask, say
            if not any(self._copies(path) for path in paths.values()):
                return self.opt_state
            if copies.keys() >= paths.keys():  # by the names of the arguments
                return inject(self.opt_state, {n: changes[n] for n in paths})
            raise ValueError(
                f"{type(self).__name__}.replace: optax.inject_hyperparams keeps copies "
                f"in the state, and which of them are of {', '.join(paths)} cannot be "
                f"found out; expected some of {', '.join(copies)}."
            ) from error
        if _kinds(before) != _kinds(after):
            raise ValueError(
                f"{type(self).__name__}.replace: with another {', '.join(paths)} the "
                "state has another structure; expected a change before init. Begin "
                "anew: tx.replace(..., opt_state=None).init(params)."
            )
        if not copies:
            return self.opt_state
        # The same value once more must count, too, where a copy was changed.
        with contextlib.suppress(Exception):
            probe = new
            for path in paths.values():
                value = _at(new, path)
                probe = probe._replace_at(path, 2 * value + 1)
            before = _small_state(probe)
        return carried_over(self.opt_state, before, after)

    def _copies(self, path: tuple[str, ...]) -> bool:
        """Whether the optimizer that has an argument may copy it into its state."""
        owner, *_ = [tx for tx in _along(self, path) if isinstance(tx, Optimizer)][::-1]
        try:
            return bool(injected(_small_state(owner)))
        except Exception:
            return True

    def _replace_at(self, path: tuple[str, ...], value: Any) -> Self:
        argument, *keys = path

        def replaced(at: tuple[str, ...], leaf: Any) -> Any:
            if at != tuple(keys[: len(at)]):
                return leaf
            rest = tuple(keys[len(at) :])
            return leaf._replace_at(rest, value) if rest else value

        return self._replace_own(
            {argument: map_nested(replaced, getattr(self, argument))}
        )

    @property
    def hyperparams(self) -> dict[str, jax.Array]:
        """The values of this step by name, those of the optimizers inside included.

        Schedules give the value that the last update used, before the first that of a
        count of 0. Names that occur twice are preceded by the path to their optimizer.
        Left out are numbers that the factory needs in Python, and schedules for which
        the state has no count, or several that may differ.

        Raises:
          TypeError: if it holds shapes only.
        """
        self._check_values("hyperparams")
        pure_self = pure(self)
        named, copies = pure_self._entries()
        entries = [(name, entry) for name, _, entry in named]
        counts = iter(
            last_counts(pure_self.opt_state, sum(callable(e) for _, e in entries))
        )
        values = {
            name: value_at(entry, next(counts) if callable(entry) else None)
            for name, entry in entries
        }
        held = injected(pure_self.opt_state)
        values |= {name: jnp.array(held[copy]) for name, copy in copies.items()}
        return {name: value for name, value in values.items() if value is not None}

    def to_optax(self) -> optax.GradientTransformationExtraArgs:
        """Returns an optax transformation whose state is this optimizer.

        For `TrainState.create`, `nnx.Optimizer` and the combinators of optax. Its
        `init` begins anew, whatever state the optimizer has.
        `AmpTrainState.create` takes the optimizer itself.

        Example:
          >>> from flax_amp import optim
          >>> tx = optax.chain(optax.clip(1.0), optim.adam(1e-3).to_optax())
        """
        return optax.GradientTransformationExtraArgs(self.init, update_as_optax)

    def as_argument(self) -> optax.GradientTransformationExtraArgs:
        """Returns the optimizer of optax, as for the factory of one around it."""
        made, guarded = self._build()
        tx = as_transformation(made)

        def update(*args: Any, **kwargs: Any) -> tuple[PyTree, PyTree]:
            updates, state = tx.update(*args, **kwargs)
            return guarded(updates), state

        return optax.GradientTransformationExtraArgs(tx.init, update)

    @classmethod
    def _uses(cls) -> Sequence[Callable[[Any], Any]]:
        params = _SMALL

        def update(made: Any, grads: PyTree = params) -> Any:
            return settled(first_update(as_transformation(made), grads, params))

        def derivative(made: Any) -> Any:
            _, pull_back = jax.vjp(lambda grads: update(made, grads)[0], params)
            return pull_back(params)

        return [update, derivative]

    def _entries(self) -> tuple[list[tuple[str, tuple[str, ...], Any]], dict[str, str]]:
        """Returns what has a name.

        Returns:
          `(name, path, value)` of every number and schedule; and the names of the
          copies in the state, as `injected` has them, by those that tell them from the
          others. The copy of an argument of the same name stands for it.
        """
        found = list(self._walk())
        copies = injected(self.opt_state)
        several = any(isinstance(x, Optimizer) for x in _inner(self))
        counts = collections.Counter(name for _, name, _ in found)
        if several:
            counts.update(copies)
        entries = [
            (name if counts[name] == 1 else "/".join(path), path, value)
            for path, name, value in found
        ]
        named = {
            copy if counts[copy] == 1 or not several else f"injected/{copy}": copy
            for copy in copies
        }
        return entries, named

    def _walk(self) -> Iterator[tuple[tuple[str, ...], str, Any]]:
        for argument, value in self._arguments().items():
            for keys, leaf in nested_leaves(value):
                path = (argument, *keys)
                number = argument in self._parts and is_real(leaf)
                if isinstance(leaf, Optimizer):
                    for inner, name, entry in leaf._walk():
                        yield (*path, *inner), name, entry
                elif number or self._is_schedule(argument, leaf):
                    yield path, "/".join(path), leaf

    def _is_schedule(self, argument: str, value: Any) -> bool:
        if not callable(value) or isinstance(value, Schedule):
            return isinstance(value, Schedule)
        declared = self._parameters[argument].annotation
        if declared is inspect.Parameter.empty:
            return gives_a_float(value)
        return declared == optax.Schedule or float in getattr(declared, "__args__", ())

    def __repr__(self) -> str:
        return super(Optimizer, pure(self)).__repr__()

    # No sequence interface

    def _no_sequence(self, used: str) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: an optimizer is no sequence and cannot be {used}; "
            "expected tx.init(params), tx.update(grads, params), tx.opt_state, or a "
            "hyper-parameter by its name. tx.to_optax() gives the pair (init, update)."
        )

    def __getitem__(self, key: Any) -> NoReturn:
        self._no_sequence("indexed")

    def __iter__(self) -> NoReturn:
        self._no_sequence("iterated over or unpacked")

    def __len__(self) -> int:
        self._no_sequence("measured with len")

    def __contains__(self, item: Any) -> bool:
        self._no_sequence("searched")

    def __bool__(self) -> bool:
        return True


def _inner(bound: Bound) -> list[Any]:
    return [x for v in bound._arguments().values() for _, x in nested_leaves(v)]


def _along(bound: Any, path: tuple[str, ...]) -> Iterator[Any]:
    """Yields an optimizer, those inside of it on a path, and what is at its end."""
    yield bound
    if not path:
        return
    argument, *keys = path
    for at, leaf in nested_leaves(getattr(bound, argument)):
        if at == tuple(keys[: len(at)]):
            rest = tuple(keys[len(at) :])
            yield from _along(leaf, rest) if rest else [leaf]


def _at(bound: Any, path: tuple[str, ...]) -> Any:
    return list(_along(bound, path))[-1]


def _small_state(tx: Optimizer) -> PyTree:
    return settled(tx.as_argument().init(_SMALL))


def _kinds(tree: PyTree) -> Any:
    structure: Any
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def _as_jax(leaf: Any) -> Any:
    return jnp.array(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


def update_as_optax(
    grads: PyTree, state: Optimizer, params: PyTree = None, **extra_args: Any
) -> tuple[PyTree, Optimizer]:
    """Updates an optimizer that is the state of a transformation of optax."""
    return state.update(grads, params, **extra_args)
