"""`Optimizer` and `Schedule`, the two kinds of calls in `flax_amp.optim`."""

from collections import Counter
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from flax_amp import _tree
from flax_amp.optim._call import FactoryCall
from flax_amp.optim._extra_args import taking_any
from flax_amp.optim._spike_rule import SpikeState

PyTree = Any

# The names that states of optax have for the count that schedules get.
_COUNTS = ("count", "step_count", "step")
INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
# The states of optimizers that do not update the optimizer inside at every step.
_CONDITIONAL_STATES = (
    optax.ApplyIfFiniteState,
    optax.ConditionallyMaskState,
    optax.ConditionallyTransformState,
    optax.MultiStepsState,
    SpikeState,
)


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
        return _tree.strong_copy(self.build()(count))


class Optimizer(FactoryCall):
    """An optimizer of optax with its hyper-parameters and its state, as a pytree.

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
        check_optimizer(built, self._name)
        return taking_any(built)

    def init(self, params: PyTree) -> Self:
        """Returns the optimizer with the state of a new run for these parameters."""
        state = self.build().init(params)
        # Arrays of its own: donating it must delete no array of the user.
        return jax.tree.map(_tree.strong_copy, self._with({"opt_state": state}))

    def update(
        self, grads: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Self]:
        """Returns the updates, and the optimizer after them.

        Some optimizers need the parameters, or extra arguments such as `value`.
        """
        if self.opt_state is None:
            raise RuntimeError(
                f"{self._name}.update: the optimizer has no state; call tx = "
                "tx.init(params) first. Inside of optax.chain and the like, pass "
                "tx.to_optax()."
            )
        tx = self.build()
        updates, state = tx.update(grads, self.opt_state, params, **extra_args)
        return updates, self._with({"opt_state": jax.tree.map(_strong, state)})

    def to_optax(
        self, *, in_state: bool = False
    ) -> optax.GradientTransformationExtraArgs:
        """Returns the optimizer of optax, with the hyper-parameters as they are now.

        With `in_state`, the pytree is the state: `opt_state.replace(learning_rate=...)`
        of an `nnx.Optimizer` changes its run, and `optax.inject_hyperparams` does not.

        Example:
          >>> from flax_amp import optim
          >>> tx = optax.chain(optax.clip(1.0), optim.adam(1e-3).to_optax())
        """
        if in_state:
            return optax.GradientTransformationExtraArgs(self.init, update_state)
        return self.build()

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with changed arguments, or another `opt_state`."""
        if variables := _tree.nodes(self, nnx.Variable):  # in an `nnx.Optimizer`
            arrays, structure = jax.tree.flatten(pure(self).replace(**changes))
            both = zip(variables, arrays, strict=True)
            return jax.tree.unflatten(structure, [x.replace(y) for x, y in both])
        return super().replace(**changes)

    @property
    def hyperparams(self) -> dict[str, jax.Array]:
        """The values of this step by name, also of the optimizers inside.

        A schedule gives the value that the last update used, and before the first
        update the value at a count of 0. Schedules are left out where the state does
        not tell their counts. A name that occurs twice is preceded by the path to its
        optimizer.
        """
        whole = pure(self)
        found = whole._numbers()
        count = _count(whole.opt_state)
        # Without the numbers inside of a schedule, whose value is listed.
        found = {p: x for p, x in found.items() if p.rpartition("/")[0] not in found}
        ends = Counter(path.rpartition("/")[2] for path in found)
        values = dict[str, Any]()
        for path, value in found.items():
            if callable(value):
                if count is None:
                    continue
                value = value(count)
            name = path.rpartition("/")[2]
            if ends[name] > 1:
                name = path
            values[name] = value
        for node in _tree.nodes(whole.opt_state, INJECTED):
            values |= node.hyperparams
        # Copies, because the state may be donated.
        return {name: _tree.strong_copy(value) for name, value in values.items()}

    def __repr__(self) -> str:
        return super(Optimizer, pure(self)).__repr__()


def check_optimizer(tx: Any, caller: str) -> None:
    """Raises a TypeError unless this is an optimizer, of optax or of this package."""
    parts = (getattr(tx, name, None) for name in ("init", "update"))
    if isinstance(tx, type) or not all(map(callable, parts)):
        kind = getattr(tx, "__name__", type(tx).__name__)
        raise TypeError(
            f"{caller}: got {kind!r}; expected an optimizer, with init and update. If "
            f"{kind} is a function that makes an optimizer, call the function: "
            "optax.adam(1e-3)."
        )


def update_state(
    grads: PyTree, state: Optimizer, params: PyTree = None, **extra_args: Any
) -> tuple[PyTree, Optimizer]:
    """Updates a pytree optimizer that is the state of an optax optimizer."""
    return state.update(grads, params, **extra_args)


def pure(tree: PyTree) -> PyTree:
    """Returns a tree with the arrays of the variables that `nnx.Optimizer` makes."""
    return nnx.as_pure(tree) if _tree.nodes(tree, nnx.Variable) else tree


def _count(opt_state: PyTree) -> Any:
    """Returns the count that the last update gave to schedules, at first 0.

    The result is `None` if the state has no count, or if some optimizers inside do not
    update at every step.
    """
    # The count is read from the state. A record of the counts that schedules are called
    # with could not leave the `cond` of `MultiSteps`, and checkpoints of optax have no
    # such record.
    if opt_state is None:
        return jnp.zeros((), jnp.int32)
    # Inside of a conditional state around the whole optimizer, every count waits alike.
    # Without conditional states, all counts are equal, so that the first count stands
    # for the counts of all schedules.
    inside = opt_state
    if isinstance(opt_state, _CONDITIONAL_STATES):
        inside = tuple(opt_state)
    if _tree.nodes(inside, _CONDITIONAL_STATES):
        return None
    counts = [node.count for node in _tree.nodes(inside, optax.ScaleByScheduleState)]
    named = jax.tree_util.tree_leaves_with_path(inside)
    ends = [(jax.tree_util.keystr(path[-1:], simple=True), x) for path, x in named]
    counts += [x for wanted in _COUNTS for name, x in ends if name == wanted]
    return jnp.maximum(counts[0] - 1, 0) if counts else None


def _strong(leaf: Any) -> Any:
    """Returns an array without a weak type, with which a step would be traced again."""
    if getattr(leaf, "weak_type", False):
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf
