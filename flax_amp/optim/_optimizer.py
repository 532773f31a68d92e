"""`Optimizer` and `Schedule`, the two kinds of calls in `flax_amp.optim`."""

from collections import Counter
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flax_amp import _tree
from flax_amp.optim._call import FactoryCall, is_call, is_number

PyTree = Any

# What states of optax call the count that they give to schedules.
_COUNTS = ("count", "step_count", "step")

# States of what does not update the optimizer inside at every step.
_GATES = (
    optax.ApplyIfFiniteState,
    optax.ConditionallyMaskState,
    optax.ConditionallyTransformState,
    optax.MultiStepsState,
)
INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


class Schedule(FactoryCall):
    """A schedule as a pytree: a function of the count of updates.

    A schedule of optax is a function, which is no array, and so a static argument. The
    arrays in this one are leaves.

    Example:
      >>> from flax_amp import optim
      >>> schedule = optim.cosine_decay_schedule(init_value=0.1, decay_steps=100)
      >>> float(schedule.replace(init_value=0.2)(0))
      0.2...
    """

    def __call__(self, count: Any) -> jax.Array:
        """Returns the value at a count of updates, float32[]."""
        with self._explaining():
            return _tree.strong_copy(self.build()(count))


class Optimizer(FactoryCall):
    """An optimizer of optax with its hyper-parameters and its state, as one pytree.

    Make one with a function of `flax_amp.optim`, such as `adamw`, or with `wrap`.

    Example:
      >>> from flax_amp import optim
      >>> params = {"w": jnp.ones(3)}
      >>> tx = optim.adamw(learning_rate=0.1, weight_decay=1e-4).init(params)
      >>> updates, tx = tx.update({"w": jnp.ones(3)}, params)
      >>> tx = tx.replace(learning_rate=0.05)
      >>> float(tx.learning_rate)
      0.05...
    """

    def __init__(self, factory: Any, /, *args: Any, **kwargs: Any):
        super().__init__(factory, *args, **kwargs)
        for leaf in jax.tree.leaves(self._arguments(), is_leaf=is_call):
            if isinstance(leaf, Optimizer) and leaf.opt_state is not None:
                raise ValueError(
                    f"{self._name}: {leaf._name}, an argument, has a "
                    "state; expected an optimizer before init. Call init on the outer "
                    "one, which holds the state of all."
                )
        self._arrays["opt_state"] = None

    @property
    def opt_state(self) -> PyTree:
        """The state of optax, in optax's own structure; `None` before `init`."""
        return self._arrays["opt_state"]

    def build(self) -> optax.GradientTransformationExtraArgs:
        """Calls the factory: returns the optimizer of optax."""
        built = super().build()
        if isinstance(built, Optimizer):  # by a factory that uses this module
            return built.build()
        if not isinstance(built, optax.GradientTransformation):  # as optax.MultiSteps
            built = optax.GradientTransformation(built.init, built.update)
        return optax.with_extra_args_support(built)

    def init(self, params: PyTree) -> Self:
        """Returns the optimizer with the state of a new run for these parameters."""
        with self._explaining():
            state = self.build().init(params)
        # Arrays of its own: donating it must delete no array of the user.
        return jax.tree.map(_tree.strong_copy, self._with({"opt_state": state}))

    def update(
        self, grads: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Self]:
        """Returns the updates, and the optimizer after them.

        Args:
          grads: the gradients, shaped as the parameters.
          params: the parameters, for the optimizers that need them.
          **extra_args: what else an optimizer of optax asks for, such as `value`.

        Raises:
          RuntimeError: before `init`.
          TypeError: if it is called as an optimizer of optax, with its state, or if
            that needs a Python number where there is an array.
        """
        if self.opt_state is None:
            raise RuntimeError(
                f"{self._name}.update: it has no state; expected an optimizer "
                "after init. Call tx = tx.init(params) first. Inside of optax.chain "
                "and the like, pass tx.to_optax()."
            )
        trees = params, self.opt_state, grads
        of_params, of_state, of_grads = map(_structure, trees)
        if of_params == of_state != of_grads or "state" in extra_args:
            raise TypeError(
                f"{self._name}.update: got grads and a state; expected "
                "tx.update(grads, params). Where optax calls it, pass tx.to_optax()."
            )
        with self._explaining():
            tx = self.build()
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
        # The pytree is the state only on demand: what `inject_hyperparams` around it
        # computed would else be ignored without a word.
        if in_state:
            return optax.GradientTransformationExtraArgs(self.init, update_state)
        return self.build()

    def replace(self, **changes: Any) -> Self:
        """Also takes `opt_state`. See `FactoryCall.replace`."""
        if _tree.nodes(self, nnx.Variable):  # as in `nnx.Optimizer`
            return _with_values(self, pure(self).replace(**changes))
        if self.opt_state is not None and changes.get("opt_state", self) is None:
            return self._with({"opt_state": None}).replace(**changes)
        return super().replace(**changes)

    def _check_change(self, name: str, old: Any, new: Any) -> None:
        if self.opt_state is None:
            return
        if name == "opt_state":
            fits = _structure(old) == _structure(new)
        elif _tree.nodes(self.opt_state, INJECTED):  # which keeps its own copy
            fits = False
        elif is_number(old) and is_number(new):
            runs = max(0, jnp.ndim(old) - jnp.ndim(new))  # of a sweep, stacked
            fits = jnp.shape(new) == jnp.shape(old)[runs:]
        else:
            fits = type(old) is type(new) or (callable(old) and callable(new))
        if not fits:
            raise ValueError(
                f"{self._name}.replace: the state of the optimizer may not fit another "
                f"{name}; expected a number in the place of one, an array of the same "
                "shape, the state of the same optimizer, or a new state: "
                "tx.replace(opt_state=None, ...).init(params)."
            )

    @property
    def hyperparams(self) -> dict[str, jax.Array]:
        """The values of this step by name, those of the optimizers inside included.

        Schedules give the value that the last update used, before the first that of a
        count of 0; they are left out where the state does not tell their counts. Names
        that occur twice are preceded by the path to their optimizer. What
        `optax.inject_hyperparams` keeps in the state stands for arguments of its name.
        """
        whole = pure(self)
        found, count = whole._numbers(), _count(whole.opt_state)
        ends = Counter(path.rpartition("/")[2] for path in found)
        values = dict[str, Any]()
        for path, value in found.items():
            if is_call(found.get(path.rpartition("/")[0])):  # inside of a schedule
                continue
            end = path.rpartition("/")[2]
            name = end if ends[end] == 1 else path
            if not callable(value):
                values[name] = value
            elif count is not None:
                values[name] = value(count)
        for node in _tree.nodes(whole.opt_state, INJECTED):
            values |= node.hyperparams
        # Copies, because the state may be donated.
        return {name: _tree.strong_copy(value) for name, value in values.items()}

    def __repr__(self) -> str:
        return super(Optimizer, pure(self)).__repr__()


def update_state(
    grads: PyTree, state: Optimizer, params: PyTree = None, **extra_args: Any
) -> tuple[PyTree, Optimizer]:
    """Updates a pytree optimizer that is the state of one of optax."""
    return state.update(grads, params, **extra_args)


def pure(tree: PyTree) -> PyTree:
    """Returns a tree with arrays for variables, which `nnx.Optimizer` makes of them."""
    return nnx.as_pure(tree) if _tree.nodes(tree, nnx.Variable) else tree


def _with_values(old: Optimizer, new: Optimizer) -> Any:
    """Returns `new` with the variables of `old` in the places of its arrays."""
    variables = jax.tree.leaves(old, is_leaf=lambda x: isinstance(x, nnx.Variable))
    arrays, structure = jax.tree.flatten(new)
    if len(arrays) != len(variables):
        raise ValueError(
            f"{old._name}.replace: an array in the place of a static "
            "argument, or the reverse, is no variable of this nnx.Optimizer; expected "
            "arrays for arrays only. Make the nnx.Optimizer anew."
        )
    values = [
        x.replace(array) if isinstance(x, nnx.Variable) else array
        for x, array in zip(variables, arrays, strict=True)
    ]
    return jax.tree.unflatten(structure, values)


def _count(opt_state: PyTree) -> Any:
    """Returns the count that the last update gave to schedules, at first 0.

    `None` if the state has no count, or some optimizers inside do not update at every
    step.
    """
    # It is read from the state. A record of what a schedule is called with could not
    # leave the `cond` of `MultiSteps`, and checkpoints of optax have none.
    if opt_state is None:
        return jnp.zeros((), jnp.int32)
    # Behind a gate around all of it, every count waits alike. Without one, all counts
    # are equal, so that the first stands for those of all schedules.
    inside = tuple(opt_state) if isinstance(opt_state, _GATES) else opt_state
    if _tree.nodes(inside, _GATES):
        return None
    counts = [node.count for node in _tree.nodes(inside, optax.ScaleByScheduleState)]
    named = jax.tree_util.tree_leaves_with_path(inside)
    ends = [(jax.tree_util.keystr(path[-1:], simple=True), x) for path, x in named]
    counts += [x for wanted in _COUNTS for name, x in ends if name == wanted]
    return jnp.maximum(counts[0] - 1, 0) if counts else None


def _structure(tree: PyTree) -> Any:  # mypy does not know the type
    return jax.tree.structure(tree)


def _strong(leaf: Any) -> Any:
    """Returns an array without a weak type, with which a step would be traced again."""
    if getattr(leaf, "weak_type", False):
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf
