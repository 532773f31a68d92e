"""`AmpTrainState`: Flax's `TrainState` with the scaler and all other state of a run."""

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import core, nnx, struct
from flax.training import train_state
from jax.typing import DTypeLike

from flax_amp import _tree
from flax_amp._checks import check_type
from flax_amp._training import Array, PyTree
from flax_amp._training.arguments import check_params, check_selection
from flax_amp._training.optimizer import (
    collect_hyperparams,
    replace_hyperparams,
    skipping,
    store_in_half,
)
from flax_amp._training.scaler import Scaler, first_scaler
from flax_amp._training.untrained import params_of_loss, unchanged_flags
from flax_amp.optim._extra_args import taking_any
from flax_amp.optim._optimizer import check_optimizer
from flax_amp.policy import Precision, long_word

# The class of a state, often a subclass of the user's: functions keep this class.
StateT = TypeVar("StateT", bound="AmpTrainState")


class AmpTrainState(train_state.TrainState):
    """A train state for mixed precision, for Linen and for NNX models.

    To add fields, make a subclass, as of `TrainState`. A skipped step does not change
    the fields of a subclass. For fields that are not listed here, see `create`.

    Attributes:
      step: int32[], the number of steps, skipped ones included.
      params: the float32 master weights, or bfloat16 with `param_dtype`. Parameters
        that no step changes may be in half precision, too. For NNX a nested dict of
        arrays.
      opt_state: an `optax.ApplyIfFiniteState`, which also has the fields of the state
        of the optimizer inside: `opt_state.hyperparams`, `opt_state.inner_states`.
      variables: the collections of a Linen model beside `params`; for NNX, the state
        that does not train, such as random streams and, with `wrt`, frozen parameters.
      graphdef: the structure of the NNX model; `None` for Linen.
      precision: the long word, such as "bf16-mixed", which the steps follow. The word
        is static and no part of a checkpoint: a run that is resumed may change the
        word.
    """

    # These fields have no defaults, so that the fields of a subclass need none either.
    params: PyTree  # which TrainState declares as a FrozenDict
    scaler: Scaler
    variables: PyTree
    rngs: PyTree
    graphdef: nnx.GraphDef[Any] | None = struct.field(pytree_node=False)
    precision: Precision = struct.field(pytree_node=False)

    @classmethod
    def create(  # type: ignore[override]  # TrainState requires the first two
        cls,
        *,
        apply_fn: Callable[..., Any] | None = None,
        params: PyTree = None,
        tx: Any,
        model: nnx.Module | None = None,
        wrt: nnx.filterlib.Filter = nnx.Param,
        variables: Mapping[str, PyTree] | None = None,
        rngs: Mapping[str, Array] | None = None,
        precision: Precision = "bf16-mixed",
        param_dtype: DTypeLike = jnp.float32,
        scaler: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Makes the state of a new run, also under `jax.eval_shape` and `jax.jit`.

        With `out_shardings` of `jit`, the state is sharded from the start.

        Args:
          apply_fn: usually `model.apply` of a Linen model.
          params: the parameters of the model, float32. Parameters that no step changes,
            because of `optax.set_to_zero` in an `optax.multi_transform`, may be
            bfloat16 or float16 (`flax_amp.half_params`). The loss reads such parameters
            without a cast and is not differentiated with respect to them: their
            gradient is zeros.
          tx: an optimizer of optax or of `flax_amp.optim`. The optimizer is wrapped, so
            that updates that are not finite are skipped, unless the optimizer is an
            `optax.apply_if_finite` already. An optimizer of `flax_amp.optim` becomes a
            part of the state. If the `init` of the optimizer was called, the run
            continues from the state that the optimizer has.
          model: an `nnx.Module`, instead of `params` and `variables`. The model is
            copied; `merge_model` returns the trained model.
          wrt: which variables of `model` train, as a filter of NNX: `nnx.LoRAParam`,
            or a function of path and variable. The remaining variables of the model go
            into `variables`, in their own dtype.
          variables: the collections of a Linen model beside `params`, such as
            `{"batch_stats": ...}`.
          rngs: PRNG keys by the name of their stream, `{"dropout": key}`.
          precision: the precision of the steps, and the default of `scaler`.
            "bf16-mixed" and "32-true": bfloat16 or float32, unscaled. "16-mixed":
            float16 and `flax_amp.init_scaler()`. "fp8-mixed": bfloat16 with matmuls on
            8-bit floats where fp8 pays (`docs/fp8.md`). Or short, as "bf16".
          param_dtype: the dtype in which to store the parameters: float32, or bfloat16
            for parameters with two or more dimensions. Such parameters are updated in
            float32 and rounded as `flax_amp.optim.small_state` says. The loss sees them
            in float32.
          scaler: a loss scaler instead of the default of `precision`.
          **kwargs: the fields of a subclass.

        Raises:
          TypeError, ValueError: if an argument is of no kind listed above.

        Example:
          >>> import optax
          >>> params = {"w": jnp.ones(3)}
          >>> AmpTrainState.create(params=params, tx=optax.adamw(3e-4)).precision
          'bf16-mixed'
        """
        name = f"{cls.__name__}.create"
        check_optimizer(tx, name)
        precision = long_word(precision, f"{name}: precision")
        check_type(rngs, Mapping | None, f"{name}: rngs", "a dict: {'dropout': key}.")
        graphdef = None
        if model is not None:
            check_type(model, nnx.Module, f"{name}: model", "an nnx.Module.")
            if params is not None or variables is not None:
                raise TypeError(
                    f"{name}: got model together with params or variables; expected "
                    "model alone, which holds both. Drop params and variables."
                )
            graphdef, params, variables = split_model(model, wrt).values()
            check_selection(params, wrt, name)
        else:
            if wrt is not nnx.Param:
                raise TypeError(f"{name}: got {wrt=} without model; expected both.")
            expected = "a dict of arrays, or else an nnx.Module as model."
            check_type(params, Mapping | list | tuple, f"{name}: params", expected)
        if jnp.dtype(param_dtype) not in (jnp.float32, jnp.bfloat16):
            raise ValueError(
                f"{name}: {param_dtype=}; expected float32 or bfloat16: in float16, "
                "weights below 6e-8 are 0. precision= sets the dtype to compute in."
            )
        is_half = jnp.dtype(param_dtype) == jnp.bfloat16
        if is_half:
            params, tx = store_in_half(params, tx)
        initializer, updater = skipping(tx, params)
        state = super().create(
            apply_fn=apply_fn,
            params=jax.tree.map(_tree.strong_copy, params),
            tx=initializer,
            scaler=first_scaler(precision, scaler, f"{name}: scaler"),
            variables=core.unfreeze(dict(variables or {})),
            rngs={stream: _typed_key(key) for stream, key in (rngs or {}).items()},
            graphdef=graphdef,
            precision=precision,
            **kwargs,
        )
        # With strong types, a step is traced once. All leaves are copied, because the
        # `init` of an optimizer may return the parameters: no buffer is donated twice.
        state = jax.tree.map(_tree.strong_copy, state).replace(
            step=jnp.zeros((), jnp.int32), tx=updater
        )
        check_params(state.params, name, unchanged_flags(state), may_be_half=is_half)
        return state

    def apply_gradients(
        self,
        *,
        grads: PyTree,
        finite: bool | None = None,
        extra_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Returns the state after one update; see `flax.training.train_state`.

        Gradients that are not finite do not change the parameters. With `finite=True`
        nothing is checked: the training step passes this flag, because the step selects
        by itself.

        `extra_args`, such as `{"value": loss}`, are further arguments of the optimizer.
        The gradients are added to the extra arguments as `grad`. The optimizer gets the
        arguments that its `update` takes.
        """
        tx = self.tx
        given: dict[str, Any] = {}
        if finite is not None:
            given["finite"] = finite

        def update(grads: PyTree, *state_and_params: PyTree) -> tuple[PyTree, PyTree]:
            extra: dict[str, Any] = {}
            if extra_args is not None:
                extra = {"grad": grads, **extra_args}
            takes_any: Any = taking_any(tx)
            out: tuple[PyTree, PyTree] = takes_any.update(
                grads, *state_and_params, **given, **extra
            )
            return out

        now = self.replace(tx=optax.GradientTransformationExtraArgs(tx.init, update))
        new = train_state.TrainState.apply_gradients(now, grads=grads, **kwargs)
        return new.replace(tx=self.tx)

    @property
    def hyperparams(self) -> dict[str, Array]:
        """The hyper-parameters of `flax_amp.optim` and `optax.inject_hyperparams`.

        The names of several optimizers begin with the label of `optax.multi_transform`,
        `a/b1`, or with a number.
        """
        return collect_hyperparams(self.opt_state)

    def replace_hyperparams(self, **changes: Any) -> Self:
        """Returns a state with new values of `hyperparams`, without compiling again.

        Example:
          >>> from flax_amp import optim
          >>> params = {"w": jnp.ones(3)}
          >>> state = AmpTrainState.create(params=params, tx=optim.adamw(3e-4))
          >>> state = state.replace_hyperparams(learning_rate=0.5)
          >>> float(state.hyperparams["learning_rate"])
          0.5
        """
        caller = "AmpTrainState.replace_hyperparams"
        opt_state = replace_hyperparams(self.opt_state, changes, caller)
        return self.replace(opt_state=opt_state)

    def merge_model(self) -> nnx.Module:
        """Returns a copy of the NNX model with the current parameters and variables.

        Training does not change the copy. Parameters that are trained in bfloat16 are
        float32 in the copy.
        """
        made = "a state made with create(model=...). Use state.apply_fn(...) instead."
        graphdef: Any = self.graphdef
        check_type(graphdef, nnx.GraphDef, "merge_model: the graphdef", made)
        params = params_of_loss(self.params, unchanged_flags(self))
        return nnx.merge(
            graphdef, *jax.tree.map(_tree.strong_copy, (params, self.variables))
        )


def _typed_key(key: Array) -> Array:
    """Returns a key with its type, which a key of `jax.random.PRNGKey` lacks."""
    return key if _tree.is_key(key) else jax.random.wrap_key_data(key)


def split_model(model: nnx.Module, wrt: nnx.filterlib.Filter) -> dict[str, Any]:
    """Returns `graphdef`, `params` and `variables` of a module, the last two as dicts.

    An `nnx.State` would hold Variable objects, which a merge outside of `jit` shares
    and changes. With dicts, the paths on disk are the same as for a Linen model.
    """
    graphdef, *states = nnx.split(model, wrt, ...)
    params, variables = map(nnx.to_pure_dict, states)
    return dict(graphdef=graphdef, params=params, variables=variables)


def bare_state(cls: type[StateT], **given: Any) -> StateT:
    """Returns a state for a single call. Fields that are not given are empty."""
    fields: dict[str, Any] = dict.fromkeys(("apply_fn", "tx", "opt_state"))
    fields |= dict(step=0, scaler={}, rngs={}, graphdef=None, precision="bf16-mixed")
    return cls(**fields | given)
