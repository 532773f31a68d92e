"""`Optimizer` and `Schedule`; `flax_amp.optim` makes their classes."""

import collections
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flax_amp import _tree
from flax_amp.optim._call import FactoryCall, is_call, is_number

PyTree = Any
Path = tuple[str, ...]

# What states of optax call the count that they give to schedules.
_COUNTS = ("count", "step_count", "step")

# States of what does not update the optimizer inside at every step.
_GATES = (
    optax.ApplyIfFiniteState,
    optax.ConditionallyMaskState,
    optax.ConditionallyTransformState,
    optax.MultiStepsState,
)
_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


class Schedule(FactoryCall):
    """A schedule as a pytree: a function of the count of updates.

    Example:
      >>> from flax_amp import optim
      >>> schedule = optim.cosine_decay_schedule(init_value=0.1, decay_steps=100)
      >>> float(schedule.replace(init_value=0.2)(0))
      0.2...
    """

    def __call__(self, count: Any) -> jax.Array:
        """Returns the value at a count of updates, float32[]."""
        with self._explaining():
            return _tree.strong_copy(self.made()(count))

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with other arguments, by name."""
        _check_names(self, changes, self._static)
        return self._with(changes)

    @classmethod
    def checked(cls, made: Any) -> Any:
        """Returns a function; raises a TypeError if it is none."""
        if not callable(made):
            raise TypeError(
                f"{cls.__name__}: the factory returned a {type(made).__name__}; "
                "expected a function of the count, as of optax.linear_schedule(...)."
            )
        return made


class Optimizer(FactoryCall):
    """An optimizer of optax with its hyper-parameters and its state, as one pytree.

    Make one with a function of `flax_amp.optim`, such as `adamw`, or with `wrap`.

    Attributes:
      opt_state: the state of optax, in optax's own structure; `None` before `init`.

    Example:
      >>> from flax_amp import optim
      >>> params = {"w": jnp.ones(3)}
      >>> tx = optim.adamw(learning_rate=0.1, weight_decay=1e-4).init(params)
      >>> updates, tx = tx.update({"w": jnp.ones(3)}, params)
      >>> tx = tx.replace(learning_rate=0.05)
      >>> float(tx.learning_rate)
      0.05...
    """

    opt_state: PyTree

    def __init__(self, /, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for leaf in jax.tree.leaves(self._arguments(), is_leaf=is_call):
            if isinstance(leaf, Optimizer) and leaf.opt_state is not None:
                raise ValueError(
                    f"{type(self).__name__}: {type(leaf).__name__}, an argument, has a "
                    "state; expected an optimizer before init. Call init on the outer "
                    "one, which holds the state of all."
                )
        self._arrays["opt_state"] = None

    @classmethod
    def checked(cls, made: Any) -> optax.GradientTransformationExtraArgs:
        """Returns a transformation; raises a TypeError if it is none."""
        if not (hasattr(made, "init") and hasattr(made, "update")):
            raise TypeError(
                f"{cls.__name__}: the factory returned a {type(made).__name__}; "
                "expected an optax.GradientTransformation, as of optax.chain(...)."
            )
        if not isinstance(made, optax.GradientTransformation):  # as optax.MultiSteps
            made = optax.GradientTransformation(made.init, made.update)
        return optax.with_extra_args_support(made)

    def init(self, params: PyTree) -> Self:
        """Returns the optimizer with the state of a new run for these parameters."""
        with self._explaining():
            state = self.made().init(params)
        # Arrays of its own: donating it must delete no array of the user.
        return jax.tree.map(_tree.strong_copy, self._with({"opt_state": state}))

    def update(
        self, grads: PyTree, params: PyTree = None, *as_optax: Any, **extra_args: Any
    ) -> tuple[PyTree, Self]:
        """Returns the updates, and the optimizer after them.

        Args:
          grads: the gradients, shaped as the parameters.
          params: the parameters, for the optimizers that need them.
          *as_optax: none; `update(grads, state, params)` is how optax is called.
          **extra_args: what else an optimizer of optax asks for, such as `value`.

        Raises:
          RuntimeError: before `init`.
          TypeError: if it is called as an optimizer of optax, or if that needs a Python
            number where there is an array.
        """
        if self.opt_state is None:
            raise RuntimeError(
                f"{type(self).__name__}.update: it has no state; expected an optimizer "
                "after init. Call tx = tx.init(params) first."
            )
        trees = params, self.opt_state, grads
        of_params, of_state, of_grads = map(_structure, trees)
        is_state = isinstance(params, Optimizer) or of_params == of_state != of_grads
        if as_optax or "state" in extra_args or is_state:
            raise TypeError(
                f"{type(self).__name__}.update: got grads and a state; expected "
                "tx.update(grads, params). Where optax calls it, pass tx.to_optax()."
            )
        with self._explaining():
            tx = self.made()
            updates, state = tx.update(grads, self.opt_state, params, **extra_args)
        return updates, self._with({"opt_state": jax.tree.map(_strong, state)})

    def to_optax(
        self, *, in_state: bool = False
    ) -> optax.GradientTransformationExtraArgs:
        """Returns the optimizer of optax, with the hyper-parameters as they are now.

        Args:
          in_state: let the pytree be the state: `opt_state.replace(learning_rate=...)`
            of an `nnx.Optimizer` then changes its run. What is around it, such as
            `optax.inject_hyperparams`, cannot change hyper-parameters in a state.

        Example:
          >>> from flax_amp import optim
          >>> tx = optax.chain(optax.clip(1.0), optim.adam(1e-3).to_optax())
        """
        if in_state:
            return optax.GradientTransformationExtraArgs(self.init, update_state)
        return self.made()

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with other hyper-parameters.

        A number in the place of an array stays an array: nothing is compiled again.

        Args:
          **changes: values by the name of an argument, or by a name of `hyperparams`,
            which reaches the optimizers inside; also `opt_state`.

        Raises:
          TypeError: if there is no such name, or it holds shapes only.
          ValueError: if the state might have another structure.
        """
        if _tree.nodes(self, nnx.Variable):  # as in `nnx.Optimizer`
            new = pure(self).replace(**changes)
            return jax.tree.map(_as_variable, self, new, is_leaf=_is_variable)
        places: dict[str, tuple[Path, Any]] = {}
        for name, path, value in self._entries():
            places |= {"/".join(path): (path, value), name: (path, value)}
        # A name of this optimizer comes before the same one inside.
        for name in (*self._static, "opt_state"):
            places[name] = (name,), getattr(self, name)
        _check_names(self, changes, places)
        resets = "opt_state" in changes and changes["opt_state"] is None
        new = self
        for name, value in changes.items():
            path, old = places[name]
            if self.opt_state is not None and not resets:
                self._check_change(name, old, value)
            new = new._with_at(path, value)
        return new

    def _check_change(self, name: str, old: Any, new: Any) -> None:
        """Raises a ValueError if the present state may not fit a new argument."""
        problem = ""
        if name == "opt_state":
            was, now = _structure(old), _structure(new)
            if was != now:
                raise ValueError(
                    f"{type(self).__name__}.replace: opt_state has the structure "
                    f"{now}; expected the state of this optimizer, {was}. Take the "
                    "state of the same optimizer, or begin anew with tx.init(params)."
                )
        elif _tree.nodes(self.opt_state, _INJECTED):
            problem = "optax.inject_hyperparams keeps its own copy in the state"
        elif _kind(old) != _kind(new):
            problem = f"{_kind(new)} in the place of {_kind(old)} changes the state"
        if not problem:
            return
        raise ValueError(
            f"{type(self).__name__}.replace: {name}: {problem}; expected a change "
            f"before init: tx.replace({name}=..., opt_state=None).init(params)."
        )

    def _with_at(self, path: Path, value: Any) -> Self:
        """Returns a copy with another value at a path."""

        def changed(keys: Any, leaf: Any) -> Any:
            here = _names(keys)
            if here != path[1 : len(here) + 1]:
                return leaf
            inside = path[len(here) + 1 :]
            return leaf._with_at(inside, value) if inside else value

        argument = getattr(self, path[0])
        if len(path) > 1:
            value = jax.tree_util.tree_map_with_path(changed, argument, is_leaf=is_call)
        return self._with({path[0]: value})

    @property
    def hyperparams(self) -> dict[str, jax.Array]:
        """The values of this step by name, those of the optimizers inside included.

        Schedules give the value that the last update used, before the first that of a
        count of 0; they are left out where the state does not tell their counts. Names
        that occur twice are preceded by the path to their optimizer. What
        `optax.inject_hyperparams` keeps in the state stands for arguments of its name.
        """
        whole = pure(self)
        entries = whole._entries()
        counts = _counts(whole.opt_state, sum(callable(x) for _, _, x in entries))
        values: dict[str, Any] = {}
        for name, _, value in entries:
            if callable(value):
                count = next(counts)
                if count is not None:
                    values[name] = value(count)
            else:
                values[name] = value
        for node in _tree.nodes(whole.opt_state, _INJECTED):
            values |= node.hyperparams
        # Copies, because the state may be donated.
        return {name: _tree.strong_copy(value) for name, value in values.items()}

    def _entries(self) -> list[tuple[str, Path, Any]]:
        """Returns `(name, path, value)` of every number and schedule.

        A name that occurs twice is the path.
        """
        found = list(self._walk())
        count = collections.Counter(name for name, _, _ in found)
        return [
            (n if count[n] == 1 else "/".join(p), p, value) for n, p, value in found
        ]

    def _walk(self) -> Iterator[tuple[str, Path, Any]]:
        for argument, tree in self._arguments().items():
            for keys, leaf in jax.tree_util.tree_leaves_with_path(
                tree, is_leaf=is_call
            ):
                path = (argument, *_names(keys))
                if isinstance(leaf, Optimizer):
                    for name, inside, value in leaf._walk():
                        yield name, (*path, *inside), value
                elif is_number(leaf) or _is_schedule(argument, leaf):
                    yield "/".join(path), path, leaf

    def __repr__(self) -> str:
        return super(Optimizer, pure(self)).__repr__()

    def _no_sequence(self, *used: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: an optimizer is no sequence, to be indexed, "
            "unpacked, searched or measured; expected tx.init(params), "
            "tx.update(grads, params), tx.opt_state or an argument by its name. "
            "tx.to_optax() is the pair (init, update)."
        )

    __getitem__ = __iter__ = __len__ = __contains__ = _no_sequence

    def __bool__(self) -> bool:
        return True  # and not by its length


def update_state(
    grads: PyTree, state: Optimizer, params: PyTree = None, **extra_args: Any
) -> tuple[PyTree, Optimizer]:
    """Updates a pytree optimizer that is the state of one of optax."""
    return state.update(grads, params, **extra_args)


def pure(tree: PyTree) -> PyTree:
    """Returns a tree with arrays for variables, which `nnx.Optimizer` makes of them."""
    return nnx.as_pure(tree) if _tree.nodes(tree, nnx.Variable) else tree


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _as_variable(old: Any, new: Any) -> Any:
    return old.replace(new) if _is_variable(old) else new


def _check_names(call: Any, changes: Mapping[str, Any], known: Any) -> None:
    """Raises a TypeError if there is a name that is not known."""
    if unknown := sorted(changes.keys() - {*known}):
        ends = tuple(f"/{name}" for name in unknown)
        expected = [name for name in known if name.endswith(ends)] or known
        raise TypeError(
            f"{type(call).__name__}.replace: no {', '.join(unknown)}; expected some of "
            f"{', '.join(expected)}."
        )


def _counts(opt_state: PyTree, schedules: int) -> Iterator[Any]:
    """Yields the count that the last update gave to each schedule, at first 0.

    Where the state has a count for each schedule, they are in the order of the
    schedules; otherwise all schedules are taken to count alike. `None` if the state has
    no count, or some that may differ.
    """
    counts = [node.count for node in _tree.nodes(opt_state, optax.ScaleByScheduleState)]
    if opt_state is None:
        counts = [jnp.zeros((), jnp.int32)] * schedules
    elif len(counts) != schedules:
        counts = [_common_count(opt_state)] * schedules
    return (None if count is None else jnp.maximum(count - 1, 0) for count in counts)


def _common_count(opt_state: PyTree) -> Any:
    """Returns the first count in a state; `None` if there is none, or others differ."""
    # Behind a gate around all of it, every count waits alike.
    inside = tuple(opt_state) if isinstance(opt_state, _GATES) else opt_state
    if _tree.nodes(inside, _GATES):
        return None
    counts = [node.count for node in _tree.nodes(inside, optax.ScaleByScheduleState)]
    named = jax.tree_util.tree_leaves_with_path(inside)
    ends = [(_names(path)[-1:], leaf) for path, leaf in named]
    counts += [x for wanted in _COUNTS for name, x in ends if name == (wanted,)]
    return counts[0] if counts else None


def _is_schedule(argument: str, value: Any) -> bool:
    """Whether a function gives one float for one count."""
    if not callable(value) or isinstance(value, type):  # a dtype converts the count
        return False
    if is_call(value) or argument == "learning_rate":
        return True
    try:
        value = jax.eval_shape(value, jax.ShapeDtypeStruct((), jnp.int32))
        return value.shape == () and jnp.issubdtype(value.dtype, jnp.floating)
    except Exception:  # whatever a function raises for what it does not expect
        return False


def _names(keys: Any) -> Path:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def _structure(tree: PyTree) -> Any:  # mypy does not know the type
    return jax.tree.structure(tree)


def _kind(value: Any) -> str:
    """Returns what an argument is, as far as the structure of a state depends on it."""
    if is_number(value):
        return "a number"
    return "a function" if callable(value) else f"a {type(value).__name__}"


def _strong(leaf: Any) -> Any:
    """Returns an array without a weak type, with which a step would be traced again."""
    if getattr(leaf, "weak_type", False):
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf
