"""`AmpTrainState`: Flax's `TrainState` with the scaler and all other state of a run.

A checkpoint of the state is complete: a run that is resumed from it is bit-identical to
an uninterrupted one. From the start every leaf is a strongly typed `jax.Array`, so a
step is traced once. No leaf shares its memory with the user's arrays or with another
leaf, so donating the state deletes no other array.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx, struct
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state
from jax.typing import DTypeLike

from flax_amp import _tree
from flax_amp._training import serialize
from flax_amp._training.arguments import (
    Array,
    PyTree,
    Rngs,
    check_collections,
    check_model,
    check_params,
    check_selection,
    check_streams,
    param_dtype_is_half,
)
from flax_amp._training.optimizer import (
    collect_hyperparams,
    replace_hyperparams,
    resume_opt_state,
    store_in_half,
    wrap_optimizer,
)
from flax_amp._training.precision import Precision, check_precision, first_scaler
from flax_amp._training.scaler import Scaler, validate_scaler

Filter = nnx.filterlib.Filter
# The user's subclass of the state, which functions return as they got it.
StateT = TypeVar("StateT", bound="AmpTrainState")


class _StateClass:
    """Gives subclasses a checked `replace`, and state dicts with keys as arrays."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Only now: Flax has just given the class its own ones.
        cls.replace = _replace  # type: ignore[attr-defined]
        serialize.register(cls)


def _replace(state: Any, **updates: Any) -> Any:
    """Returns a new object with new values for some fields."""
    _check_fields(
        type(state),
        updates,
        "replace",
        "for hyper-parameters of flax_amp.optim use replace_hyperparams",
    )
    if "precision" in updates:
        name = f"{type(state).__name__}.replace: precision"
        updates["precision"] = check_precision(updates["precision"], name)
    return dataclasses.replace(state, **updates)


def _check_fields(cls: Any, given: Mapping[str, Any], method: str, hint: str) -> None:
    """Raises a TypeError that lists every name that is not a field of a class."""
    fields = [field.name for field in dataclasses.fields(cls)]
    if unknown := sorted(set(given) - set(fields)):
        raise TypeError(
            f"{cls.__name__}.{method}: unknown fields {unknown}; expected some of "
            f"{fields}. Declare new fields in a subclass; {hint}."
        )


class AmpTrainState(_StateClass, train_state.TrainState):
    """A train state for mixed precision, for Linen and for NNX models.

    To add fields, subclass it, as you would `TrainState`. A skipped step leaves them as
    they were.

    Attributes:
      step: int32[], the number of steps, skipped ones included.
      apply_fn: usually `model.apply` (Linen); `None` for NNX.
      params: the float32 master weights, or bfloat16 with `param_dtype`; for NNX a
        nested dict of plain arrays.
      tx: the optimizer, inside an `apply_if_finite` of flax_amp.
      opt_state: the state of `tx`, an `optax.ApplyIfFiniteState`.
      scaler: the loss scaler, a dict as from `flax_amp.init_scaler`.
      variables: every other collection. Linen: `{"batch_stats": ...}`. NNX: the state
        that does not train, such as batch statistics, random streams and, with `wrt`,
        frozen parameters.
      rngs: typed PRNG keys by the name of their stream.
      graphdef: the structure of the NNX model; `None` for Linen.
      precision: "bf16-mixed", "16-mixed", "32-true" or "fp8-mixed", which the steps
        follow. It is static, and no part of a checkpoint: a run that is resumed may
        change it.

    Example:
      >>> import flax.linen as nn
      >>> import optax
      >>> model = nn.Dense(2)
      >>> params = model.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
      >>> state = AmpTrainState.create(
      ...     apply_fn=model.apply, params=params, tx=optax.adamw(3e-4)
      ... )
      >>> state.precision
      'bf16-mixed'
    """

    # These fields have no defaults, so that the fields of a subclass need none either.
    params: PyTree  # which TrainState declares as a FrozenDict
    scaler: Scaler
    variables: PyTree
    rngs: Rngs
    graphdef: nnx.GraphDef[Any] | None = struct.field(pytree_node=False)
    # Training and evaluation follow the word without being told, and a compiled step
    # knows its dtype. A checkpoint has no static fields.
    precision: Precision = struct.field(pytree_node=False)

    @classmethod
    def create(  # type: ignore[override]  # TrainState requires the first two
        cls,
        *,
        apply_fn: Callable[..., Any] | None = None,
        params: PyTree = None,
        tx: Any,
        model: nnx.Module | None = None,
        wrt: Filter = nnx.Param,
        variables: Mapping[str, PyTree] | None = None,
        rngs: Mapping[str, Array] | None = None,
        precision: Precision = "bf16-mixed",
        param_dtype: DTypeLike = jnp.float32,
        scaler: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Makes the state of a new run.

        It works under `jax.eval_shape` and under `jax.jit`. With `out_shardings`, the
        state is sharded from the start.

        Args:
          apply_fn: usually `model.apply` of a Linen model.
          params: its parameters, float32.
          tx: an optimizer of optax or of `flax_amp.optim`. It is wrapped in
            `apply_if_finite`, which skips updates that are not finite, however many,
            unless it is an `optax.apply_if_finite` already. An optimizer of
            `flax_amp.optim` becomes a part of the state. If its `init` was called, it
            continues from the state that it has.
          model: an `nnx.Module`, instead of `params` and `variables`. It is copied;
            `merge_model` returns the trained model.
          wrt: which variables of `model` train, as a filter of NNX: `nnx.LoRAParam`,
            or a function of path and variable. The others go into `variables`.
          variables: the other collections of a Linen model, `{"batch_stats": ...}`.
          rngs: PRNG keys by the name of their stream, `{"dropout": key}`.
          precision: what the steps compute in, and the scaler that they start with.
            "bf16-mixed", the default, and "32-true": bfloat16 or float32, and
            `flax_amp.no_scaler()`, which scales nothing. "16-mixed": float16 and
            `flax_amp.init_scaler()`. "fp8-mixed": as "bf16-mixed", with matrix products
            on 8-bit floats where it pays, on devices that have them (`docs/fp8.md`).
            "bf16", "fp32", "fp16" and "fp8" are short for them. The `compute_dtype` and
            the `matmul_dtype` of a step override it.
          param_dtype: in what to store the parameters: float32, or bfloat16 for those
            with two or more dimensions. They are updated in float32, and rounded as
            `flax_amp.optim.small_state` says. The loss sees them in float32.
          scaler: another loss scaler than that of `precision`.
          **kwargs: the fields of a subclass.

        Returns:
          A state at step 0.

        Raises:
          TypeError: if both `params` and `model` are missing, if `params`, `rngs`,
            `variables` or `scaler` is not a dict, if a leaf is neither an array nor a
            number, if `wrt` comes without `model`, or if a field is unknown.
          ValueError: if a parameter is not float32 (integers are allowed), if `wrt`
            selects nothing, if `tx` accumulates around `apply_if_finite`, if
            `precision` is another word, if `param_dtype` is neither float32 nor
            bfloat16, or if a value of `scaler` is out of its range.
        """
        precision = check_precision(precision, "AmpTrainState.create: precision")
        _check_fields(
            cls,
            kwargs,
            "create",
            "pass collections such as batch_stats as variables={'batch_stats': ...}, "
            "keys as rngs, and the loss scale as scaler",
        )
        if made := sorted({"step", "opt_state", "graphdef"} & kwargs.keys()):
            raise TypeError(
                f"{cls.__name__}.create: got {made}, which it makes itself; expected "
                "an NNX model as model=..., and a step or an optimizer's state by "
                "create(...).replace(...). Leave them out."
            )
        # Either an NNX model, or the parameters and the collections of a Linen model.
        graphdef = None
        if model is not None:
            check_model(model, params, variables)
            graphdef, params, collections = split_model(model, wrt)
            check_selection(params, wrt, "AmpTrainState.create")
        else:
            if wrt is not nnx.Param:
                raise TypeError(
                    f"AmpTrainState.create: got {wrt=} without model; expected it for "
                    "an nnx.Module. To train a part of params, pass "
                    "tx=optax.multi_transform(...)."
                )
            collections = check_collections(params, variables)
        may_be_half = param_dtype_is_half(param_dtype)
        check_params(params, "AmpTrainState.create", may_be_half=may_be_half)
        if may_be_half:
            params, tx = store_in_half(params, tx)
        # The first makes the state, the second updates it.
        making, updating = wrap_optimizer(tx, params)
        state = super().create(
            apply_fn=apply_fn,
            params=jax.tree.map(_tree.strong_copy, params),
            tx=making,
            scaler=validate_scaler(
                first_scaler(precision) if scaler is None else scaler,
                "AmpTrainState.create: scaler",
                wait=True,
            ),
            variables=collections,
            rngs=check_streams(rngs),
            graphdef=graphdef,
            precision=precision,
            **kwargs,
        )
        state = state.replace(
            tx=updating, opt_state=resume_opt_state(state.opt_state, tx)
        )
        # The `init` of an optimizer may return the parameters themselves. All leaves
        # are copied again, because one buffer must not be donated twice.
        return jax.tree.map(_tree.strong_copy, state).replace(
            step=jnp.zeros((), jnp.int32)
        )

    def apply_gradients(self, *, grads: PyTree, **kwargs: Any) -> Self:
        """Returns the state after one update; see `flax.training.train_state`.

        Gradients that are not finite change neither parameters nor fp8 statistics.
        """
        new = super().apply_gradients(grads=grads, **kwargs)
        if not (isinstance(grads, Mapping) and OVERWRITE_WITH_GRADIENT in grads):
            return new
        name, finite = OVERWRITE_WITH_GRADIENT, _tree.all_finite(grads)
        statistics = _tree.select(finite, new.params[name], self.params[name])
        return new.replace(params={**new.params, name: statistics})

    @property
    def hyperparams(self) -> dict[str, Array]:
        """The hyper-parameters of this step by name.

        They are those of `flax_amp.optim` and of `optax.inject_hyperparams`. Where
        several optimizers hold some, their numbers precede the names: `0/b1`.

        Example:
          >>> import optax
          >>> from flax_amp import optim
          >>> tx = optim.adamw(optax.linear_schedule(0.1, 0.0, 10))
          >>> state = AmpTrainState.create(params={"w": jnp.ones(3)}, tx=tx)
          >>> float(state.hyperparams["learning_rate"])
          0.1...
        """
        return collect_hyperparams(self.opt_state)

    def replace_hyperparams(self, **changes: Any) -> Self:
        """Returns a state with new values of hyper-parameters, without compiling again.

        Args:
          **changes: new values, by the names of `hyperparams`.

        Raises:
          TypeError: if a name is unknown, or if `tx` is not of `flax_amp.optim`.

        Example:
          >>> from flax_amp import optim
          >>> params = {"w": jnp.ones(3)}
          >>> state = AmpTrainState.create(params=params, tx=optim.adamw(3e-4))
          >>> state = state.replace_hyperparams(learning_rate=1e-4)
        """
        caller = "AmpTrainState.replace_hyperparams"
        opt_state = replace_hyperparams(self.opt_state, changes, caller)
        return self.replace(opt_state=opt_state)

    def merge_model(self) -> nnx.Module:
        """Returns a copy of the NNX model as it is now; training does not change it.

        Raises:
          TypeError: if the state was made from a Linen model.

        Example:
          >>> import optax
          >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
          >>> state = AmpTrainState.create(model=model, tx=optax.sgd(0.1))
          >>> state.merge_model()(jnp.ones((1, 3))).shape
          (1, 2)
        """
        if self.graphdef is None:
            raise TypeError(
                "merge_model: the state was made from apply_fn and params; expected "
                "one made with create(model=...). Use state.apply_fn(...) instead."
            )
        params, variables = jax.tree.map(
            lambda x: _tree.strong_copy(_tree.float32_if_bfloat16(x)),
            (self.params, self.variables),
        )
        return nnx.merge(self.graphdef, params, variables)


def split_model(
    model: nnx.Module, wrt: Filter
) -> tuple[nnx.GraphDef[Any], PyTree, PyTree]:
    """Returns `(graphdef, params, variables)` of a module, the last two as plain dicts.

    `nnx.merge` puts them together again. An `nnx.State` would hold Variable objects,
    which a merge outside of `jit` shares and changes. With nested dicts of arrays,
    optax and Orbax see arrays only, and the paths on disk are those of a Linen model
    (`l1/kernel`, not `l1/kernel/value`).
    """
    graphdef, *states = nnx.split(model, wrt, ...)
    params, variables = map(nnx.to_pure_dict, states)
    return graphdef, params, variables


def variables_of(model: nnx.Module, params: PyTree) -> PyTree:
    """Returns the state of a module except its parameters, as `split_model` does."""
    # By path, not by type: `wrt` may have selected any kind of variable.
    trained = set(nnx.traversals.flatten_mapping(params))
    rest = nnx.state(model, lambda path, _: path not in trained)
    return nnx.to_pure_dict(rest)
