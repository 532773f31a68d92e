"""The two ways to call the tools of this room: with a function, or with a state.

Each tool is called as `tool(fun)(*args)`, or as `tool(state, loss_fn, batch, *args)`
with the state and the loss of `make_train_step`, and what its step takes. The second
way becomes the first one here.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from flax_amp import _tree
from flax_amp._compat import Array, DType
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._rewriter.nnx_scopes import SCOPES_NOTE
from flax_amp._rewriter.rewritten import only_before_amp, refuse_rewritten
from flax_amp._training.arguments import check_function
from flax_amp._training.loss import call_user_fn, check_loss, fold_in
from flax_amp._training.precision import compute_dtype_of, matmul_dtype_of
from flax_amp._training.train_state import AmpTrainState, variables_of
from flax_amp.policy import (
    MatmulDType,
    PolicyEntries,
    check_compute_dtype,
    with_matmul_dtype,
)

T = TypeVar("T")

# The attribute of a step's function that is the same one without scopes of its own.
_WITHOUT_SCOPES = "_flax_amp_without_scopes"


class Target(NamedTuple):
    """A function and, if they are known already, its arguments."""

    name: str
    fun: Callable[..., Any]
    args: tuple[Any, ...] | None = None


def read_target(caller: str, fun: Any, step: Sequence[Any]) -> Target:
    """Returns what the user asks a tool about.

    Args:
      caller: the name of the tool, for messages.
      fun: a function, or a state.
      step: the loss function, the batch and further arguments of the step, if `fun` is
        a state.

    Raises:
      TypeError: if it is neither of the two ways, or a function that `amp` has
        rewritten.
    """
    if isinstance(fun, AmpTrainState):
        if len(step) < 2:
            raise TypeError(
                f"{caller}: got a state and {len(step)} more arguments; expected "
                f"{caller}(state, loss_fn, batch, *args)."
            )
        loss_fn, batch, *rest = step
        name = getattr(loss_fn, "__name__", "loss_fn")
        refuse_rewritten(f"{caller}: {name}", loss_fn)
        check_function(loss_fn, f"{caller}: loss_fn")
        params = jax.tree.map(
            _tree.float32_if_bfloat16, fun.params
        )  # as the loss of a step sees them
        return Target(name, _of_step(loss_fn), (params, fun, tuple(rest), batch))
    if step or not callable(fun):
        raise TypeError(
            f"{caller}: got {', '.join(type(x).__name__ for x in (fun, *step))}; "
            f"expected {caller}(fun)(*args), or {caller}(state, loss_fn, batch, "
            "*args) with an AmpTrainState."
        )
    name = getattr(fun, "__name__", type(fun).__name__)
    refuse_rewritten(f"{caller}: {name}", fun)
    return Target(name, fun)


def read_compute_dtype(fun: Any, compute_dtype: DTypeLike | None) -> DType:
    """Returns the compute dtype: as given, or that of a state, or bfloat16."""
    word = fun.precision if isinstance(fun, AmpTrainState) else "bf16-mixed"
    return check_compute_dtype(compute_dtype_of(word, compute_dtype))


def read_policy(
    fun: Any, amp_policy: PolicyEntries | None, matmul_dtype: MatmulDType
) -> PolicyEntries | None:
    """Returns the policy, with products in fp8 if that or a state asks for them."""
    if isinstance(fun, AmpTrainState):
        matmul_dtype = matmul_dtype_of(fun.precision, matmul_dtype)
    return with_matmul_dtype(amp_policy, matmul_dtype)


def read_scale(caller: str, fun: Any, scale: Any) -> float:
    """Returns the factor of the loss: as given, or that of a state, or 1.

    Raises:
      TypeError: if it is no number.
      ValueError: if it is not a positive, finite one.
    """
    if scale is None:
        scale = fun.scaler["scaler"] if isinstance(fun, AmpTrainState) else 1.0
    check_concrete(caller, scale)
    if isinstance(scale, bool | str):
        raise TypeError(f"{caller}: {scale=}; expected a positive number.")
    scale = float(np.max(scale))  # a stack of states has one for each
    if not 0 < scale < math.inf:
        raise ValueError(
            f"{caller}: scale is {scale}; expected a positive number, such as 2.0**15: "
            "the loss is multiplied by it. Leave it out for that of the state, or 1."
        )
    return scale


def _of_step(loss_fn: Callable[..., Any], open_scopes: bool = True) -> Any:
    """Returns the loss of a step as a function of its parameters, and what it takes.

    The batch comes last, as in most functions: its examples are those of a report.
    """

    @functools.wraps(loss_fn)
    def pure(params: Any, state: AmpTrainState, args: Any, batch: Any) -> Any:
        rngs = fold_in(state.rngs, state.step)
        now = state.replace(params=params)
        target, out = call_user_fn(
            loss_fn, now, batch, rngs, args, open_scopes=open_scopes
        )
        loss, aux = _split(out)
        # Updated variables are a part of the result of a step.
        if state.graphdef is not None:
            return loss, _StepAux(aux, variables_of(target, params))
        updates: Any = {}
        if isinstance(aux, Mapping):
            aux = dict(aux)
            updates = aux.pop("variables", {})
        return loss, _StepAux(aux, updates)

    made: Any = pure
    del made.__wrapped__  # its arguments are its own
    if open_scopes:
        setattr(made, _WITHOUT_SCOPES, _of_step(loss_fn, open_scopes=False))
    return made


class _StepAux(NamedTuple):
    """What the loss of a step returns beside the loss, and the updated variables."""

    aux: Any
    updates: Any


def _split(out: Any) -> tuple[Any, Any]:
    """Returns the loss and all else that a user's function returns."""
    return out if isinstance(out, tuple) and len(out) == 2 else (out, None)


class UsersCall(FunctionalCall):
    """A call of a function in which nothing is rewritten by `amp`.

    Attributes:
      arrays: the arrays among its inputs.
    """

    @property
    def arrays(self) -> list[Array]:
        return list(filter(_tree.is_array, self.inputs))

    def on(self, arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns its results for other arrays, and what it has updated."""
        is_array = [_tree.is_array(x) for x in self.inputs]
        return self.function(_tree.fill(list(arrays), is_array, self.inputs))

    def function(self, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        with only_before_amp(self._caller):
            return super().function(inputs)


def on_arrays(
    fun: Callable[..., Any], args: Any, kwargs: Any, caller: str
) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """Returns a call as a function of a list of its arrays, and the list.

    They may be abstract: inside of a trace of that function, `fun` gets tracers, which
    are arrays like all others.
    """
    call = FunctionalCall(fun, args, kwargs, caller=caller)
    is_traced = [
        _tree.is_array(x) or isinstance(x, jax.ShapeDtypeStruct) for x in call.inputs
    ]

    def run(arrays: list[Any]) -> Any:
        return call.function(_tree.fill(arrays, is_traced, call.inputs))

    return run, _tree.pick(call.inputs, is_traced)


def check_concrete(caller: str, tree: Any) -> None:
    """Raises a TypeError if a tool that runs a program is given arrays without values.

    `caller` is the tool, with the function that it is asked about.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
            raise TypeError(
                f"{caller} got a {type(leaf).__name__} among its arguments; expected "
                "arrays with values, outside of jax.jit: the program is run. "
                "flax_amp.explain takes shapes, and runs nothing."
            )


def with_scopes(
    use: Callable[[UsersCall], T],
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    caller: str,
    *,
    needs_scopes: bool = False,
) -> tuple[T, tuple[str, ...]]:
    """Calls `use` with the user's call, in which each NNX module opens a scope.

    Returns:
      Its result, and a note if modules have no names. Some code needs modules that
      equal each other, which the names prevent. It runs without them, unless
      `needs_scopes`.
    """
    where = f"{caller}: {target.name}"

    def call(open_scopes: bool) -> T:
        fun = target.fun
        if not open_scopes:
            fun = getattr(fun, _WITHOUT_SCOPES, fun)
        return use(UsersCall(fun, args, kwargs, open_scopes=open_scopes, caller=where))

    try:
        return call(True), ()
    except Exception as error:
        if needs_scopes or SCOPES_NOTE not in getattr(error, "__notes__", ()):
            raise
        return call(False), ("modules have no names: the code needs equal modules",)


def trained_inputs(call: FunctionalCall) -> list[bool]:
    """Returns which arrays among the inputs are trained.

    They are the floats of the first argument; of a module, those in an `nnx.Param`.
    """
    indices = list(range(len(call.inputs)))
    args, _ = call.rebuild_arguments(
        indices, lambda state: nnx.to_pure_dict(nnx.filter_state(state, nnx.Param))
    )
    first = set(jax.tree.leaves(args[:1]))
    return [
        i in first and _tree.is_inexact_array(x)
        for i, x in enumerate(call.inputs)
        if _tree.is_array(x)
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class FlatLoss:
    """A user's loss as a function of a flat list of arrays.

    Attributes:
      name: the name of the function, with that of the tool, for messages.
      arrays: the arrays among its arguments.
      paths: where each stands, such as `batch/image` or `params/Dense_0/kernel`.
      trained: which of them a gradient is asked for.
    """

    name: str
    arrays: list[Array]
    paths: list[str]
    trained: list[bool]
    _call: UsersCall

    @classmethod
    def of(cls, call: UsersCall, name: str) -> "FlatLoss":
        """Returns the loss of a call.

        Raises:
          TypeError: if nothing in the first argument is trained.
        """
        trained = trained_inputs(call)
        if not any(trained):
            raise TypeError(
                f"{name}: the first argument has no float arrays; expected the "
                "parameters, or a module, to differentiate with respect to."
            )
        return cls(name, call.arrays, _argument_paths(call), trained, call)

    def __call__(
        self, arrays: Sequence[Array]
    ) -> tuple[Array, list[Array], list[Array]]:
        """Returns the loss, the updated variables, and the arrays of all else.

        Raises:
          TypeError: if the loss is not a scalar float.
        """
        out, updated = self._call.on(arrays)
        loss, aux = _split(out)
        check_loss(loss, self.name)
        aux = aux if isinstance(aux, _StepAux) else _StepAux(aux, ())
        updates, others = (
            list(filter(_tree.is_array, jax.tree.leaves(tree)))
            for tree in ((aux.updates, updated), aux.aux)
        )
        return jnp.asarray(loss), updates, others


def _argument_paths(call: FunctionalCall) -> list[str]:
    """Returns the path of each array among the arguments, by the names of these."""
    indices = list(range(len(call.inputs)))
    args, kwargs = call.rebuild_arguments(indices, nnx.to_pure_dict)
    try:
        names = list(inspect.signature(call.fun).parameters)[: len(args)]
    except (TypeError, ValueError):  # some builtins have no signature
        names = []
    names += [str(i) for i in range(len(names), len(args))]
    values = [*args, *kwargs.values()]
    names += kwargs
    paths: dict[int, str] = {}
    for name, value in zip(names, values, strict=True):
        for path, index in jax.tree_util.tree_leaves_with_path(value):
            own = jax.tree_util.keystr(path, simple=True, separator="/")
            if isinstance(index, int):
                paths.setdefault(index, f"{name}/{own}".rstrip("/"))
    return [paths[i] for i, x in enumerate(call.inputs) if _tree.is_array(x)]
