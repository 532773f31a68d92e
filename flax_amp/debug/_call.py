"""The ways to call the tools of this room: with a function, or with what is trained.

Each tool is called as `tool(fun)(*args)`, or as `tool(state, loss_fn, batch, *args)`
with the state and the loss of `make_train_step`, and what its step takes, or as
`tool((model, optimizer), loss_fn, batch, *args)` for `make_nnx_train_step`. The other
ways become the first one here.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from rich.console import Console

from flax_amp import _tree
from flax_amp._compat import Array, DType
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._rewriter.nnx_scopes import SCOPES_NOTE
from flax_amp._rewriter.rewritten import only_before_amp, refuse_rewritten
from flax_amp._training.arguments import check_function
from flax_amp._training.loss import call_user_fn, check_loss, fold_in
from flax_amp._training.precision import compute_dtype_of, matmul_dtype_of
from flax_amp._training.step_call import check_not_deleted
from flax_amp._training.train_state import AmpTrainState, variables_of
from flax_amp.policy import (
    MatmulDType,
    Policy,
    PolicyEntries,
    Precision,
    check_compute_dtype,
    default_amp_policy,
    long_word,
    with_matmul_dtype,
)

# The attribute of a step's function that is the same one without scopes of its own.
_WITHOUT_SCOPES = "_flax_amp_without_scopes"
_NO_NAMES = "modules have no names: the code needs equal modules"


# What a tool is asked about.
Asked = Callable[..., Any] | AmpTrainState | tuple[nnx.Module, Any]


class Target(NamedTuple):
    """A function and, if they are known already, its arguments."""

    name: str
    fun: Callable[..., Any]
    args: tuple[Any, ...] | None = None


def read_target(caller: str, fun: Any, step: Sequence[Any]) -> Target:
    """Returns what the user asks a tool about.

    Raises:
      TypeError: if it is none of the ways, or a function that `amp` has rewritten.
      RuntimeError: if a step has deleted the state.
    """
    is_state, is_pair = isinstance(fun, AmpTrainState), _is_pair(fun)
    if not (is_state or is_pair):
        if step or not callable(fun):
            raise TypeError(
                f"{caller}: got {', '.join(type(x).__name__ for x in (fun, *step))}; "
                f"expected {caller}(fun)(*args), or {caller}(state, loss_fn, batch, "
                "*args) with an AmpTrainState or a pair (model, optimizer)."
            )
        name = getattr(fun, "__name__", type(fun).__name__)
        refuse_rewritten(f"{caller}: {name}", fun)
        return Target(name, fun)
    what = "state" if is_state else "(model, optimizer)"
    if len(step) < 2:
        raise TypeError(
            f"{caller}: got a {what} and {len(step)} more arguments; expected "
            f"{caller}({what}, loss_fn, batch, *args)."
        )
    loss_fn, batch, *rest = step
    name = getattr(loss_fn, "__name__", "loss_fn")
    refuse_rewritten(f"{caller}: {name}", loss_fn)
    check_function(loss_fn, f"{caller}: loss_fn")
    if is_pair:
        return Target(name, _of_model(loss_fn), (fun[0], tuple(rest), batch))
    check_not_deleted(caller, "state", fun)
    # As the loss of a step sees them.
    params = jax.tree.map(_tree.float32_if_bfloat16, fun.params)
    return Target(name, _of_step(loss_fn), (params, fun, tuple(rest), batch))


def _is_pair(fun: Any) -> bool:
    """Whether it is a model of NNX with its optimizer."""
    return isinstance(fun, tuple) and len(fun) == 2 and isinstance(fun[0], nnx.Module)


def read_scaler(fun: Any) -> dict[str, float]:
    """Returns the numbers of the scaler of a state or an optimizer, if it has one.

    Of a stack of states they are the largest of each.
    """
    holder = fun[1] if _is_pair(fun) else fun
    scaler = getattr(holder, "scaler", None) if not callable(fun) else None
    scaler = scaler[...] if isinstance(scaler, nnx.Variable) else scaler
    if not isinstance(scaler, Mapping):
        return {}
    return {key: float(np.max(x)) for key, x in scaler.items()}


def read_scale(caller: str, fun: Any, scale: Any) -> float:
    """Returns the factor of the loss: as given, or that of a state, or 1.

    Raises:
      TypeError: if it is no number.
      ValueError: if it is not a positive, finite one.
    """
    if scale is None:
        check_concrete(caller, getattr(fun, "scaler", None))
        scale = read_scaler(fun).get("scaler", 1.0)
    check_concrete(caller, scale)
    if isinstance(scale, bool | str):
        raise TypeError(f"{caller}: {scale=}; expected a positive number.")
    scale = float(np.max(scale))
    if not 0 < scale < math.inf:
        raise ValueError(
            f"{caller}: scale is {scale}; expected a positive number, such as 2.0**15: "
            "the loss is multiplied by it. Leave it out for that of the state, or 1."
        )
    return scale


def check_concrete(caller: str, tree: Any) -> None:
    """Raises a TypeError if a tool that runs a program gets arrays without values."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
            raise TypeError(
                f"{caller} got a {type(leaf).__name__} among its arguments; expected "
                "arrays with values, outside of jax.jit: the program is run. "
                "flax_amp.explain takes shapes, and runs nothing."
            )


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool and what it is asked about."""

    caller: str
    target: Target
    dtype: DType  # the compute dtype
    entries: PolicyEntries  # of the policy
    recompute: bool
    has_own_policy: bool  # whether the user gave one

    @classmethod
    def read(
        cls,
        caller: str,
        fun: Any,
        step: Sequence[Any],
        precision: Precision | None,
        compute_dtype: DTypeLike | None,
        matmul_dtype: MatmulDType,
        amp_policy: PolicyEntries | None,
        recompute: bool = False,
    ) -> "Tool":
        """Checks the arguments of a tool.

        What is not given is that of the state or the optimizer, or bfloat16.
        """
        holder = fun[1] if _is_pair(fun) else fun
        word = precision or getattr(holder, "precision", None)
        word = long_word(word if isinstance(word, str) else "bf16-mixed")
        dtype = check_compute_dtype(compute_dtype_of(word, compute_dtype))
        if not isinstance(recompute, bool):
            raise TypeError(f"{caller}: {recompute=}; expected True or False.")
        given = default_amp_policy if amp_policy is None else amp_policy
        entries: Any = with_matmul_dtype(given, matmul_dtype_of(word, matmul_dtype))
        Policy(entries)  # checks it
        recompute = recompute and dtype != jnp.float32
        target = read_target(caller, fun, step)
        return cls(caller, target, dtype, entries, recompute, amp_policy is not None)

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.target.name

    @property
    def where(self) -> str:
        """The tool and the function, for messages."""
        return f"{self.caller}: {self.name}"

    def on_target(self, call: Callable[..., Any]) -> Any:
        """Returns a function of the user's arguments, or its result if all is known."""
        return call if self.target.args is None else call(*self.target.args)

    def working(self) -> Any:
        """Returns a context in which a terminal shows that the tool is at work."""
        return Console(stderr=True).status(f"{self.where} ...")

    def run(self, use: Callable[["UsersCall"], Any], args: Any, kwargs: Any) -> Any:
        """Calls `use` with the user's call, in which each NNX module opens a scope.

        Some code needs modules that equal each other, which their names prevent. It
        runs without names, unless the policy has keys for them, and a note says so.
        """

        def call(open_scopes: bool) -> Any:
            fun = self.target.fun
            if not open_scopes:
                fun = getattr(fun, _WITHOUT_SCOPES, fun)
            return use(
                UsersCall(fun, args, kwargs, open_scopes=open_scopes, caller=self.where)
            )

        try:
            return call(True)
        except Exception as error:
            is_of_names = SCOPES_NOTE in getattr(error, "__notes__", ())
            if Policy(self.entries).names_scopes or not is_of_names:
                raise
            found = call(False)
            return dataclasses.replace(found, notes=(_NO_NAMES, *found.notes))


# --- the loss of a step as a function ------------------------------------------------


class _StepAux(NamedTuple):
    """What the loss of a step returns beside the loss, and the updated variables."""

    aux: Any
    updates: Any


def _without_signature(fun: Callable[..., Any], loss_fn: Any) -> Any:
    """Names a function as the user's loss, which has other arguments."""
    made: Any = functools.wraps(loss_fn)(fun)
    del made.__wrapped__
    return made


def _of_model(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loss of a step of NNX. The batch comes last: see `_of_step`."""

    def pure(model: Any, args: Any, batch: Any) -> Any:
        return loss_fn(model, batch, *args)

    return _without_signature(pure, loss_fn)


def _of_step(loss_fn: Callable[..., Any], open_scopes: bool = True) -> Any:
    """Returns the loss of a step as a function of its parameters, and what it takes.

    The batch comes last, as in most functions: its examples are those of a report.
    """

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

    made = _without_signature(pure, loss_fn)
    if open_scopes:
        setattr(made, _WITHOUT_SCOPES, _of_step(loss_fn, open_scopes=False))
    return made


def _split(out: Any) -> tuple[Any, Any]:
    """Returns the loss and all else that a user's function returns."""
    return out if isinstance(out, tuple) and len(out) == 2 else (out, None)


# --- calls as functions of arrays ----------------------------------------------------


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

    def trained(self) -> list[bool]:
        """Returns which of its arrays are trained.

        They are the floats of the first argument; of a module, those in an `nnx.Param`.
        """

        def params(state: nnx.State) -> Any:
            return nnx.to_pure_dict(nnx.filter_state(state, nnx.Param))

        args, _ = self.rebuild_arguments(list(range(len(self.inputs))), params)
        first = set(jax.tree.leaves(args[:1]))
        return [
            i in first and _tree.is_inexact_array(x)
            for i, x in enumerate(self.inputs)
            if _tree.is_array(x)
        ]

    def paths(self) -> list[str]:
        """Returns the path of each array, by the names of the arguments."""
        indices = list(range(len(self.inputs)))
        args, kwargs = self.rebuild_arguments(indices, nnx.to_pure_dict)
        try:
            names = list(inspect.signature(self.fun).parameters)[: len(args)]
        except (TypeError, ValueError):  # some builtins have no signature
            names = []
        names += [*map(str, range(len(names), len(args))), *kwargs]
        paths: dict[int, str] = {}
        for name, value in zip(names, (*args, *kwargs.values()), strict=True):
            for path, index in jax.tree_util.tree_leaves_with_path(value):
                own = jax.tree_util.keystr(path, simple=True, separator="/")
                if isinstance(index, int):
                    paths.setdefault(index, f"{name}/{own}".rstrip("/"))
        return [paths[i] for i, x in enumerate(self.inputs) if _tree.is_array(x)]


def on_arrays(
    fun: Callable[..., Any], args: Any, kwargs: Any, caller: str
) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """Returns a call as a function of a list of its arrays, and the list.

    They may be abstract: inside of a trace of that function, `fun` gets tracers.
    """
    call = FunctionalCall(fun, args, kwargs, caller=caller)
    is_traced = [
        _tree.is_array(x) or isinstance(x, jax.ShapeDtypeStruct) for x in call.inputs
    ]

    def run(arrays: list[Any]) -> Any:
        return call.function(_tree.fill(arrays, is_traced, call.inputs))

    return run, _tree.pick(call.inputs, is_traced)


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
        trained = call.trained()
        if not any(trained):
            raise TypeError(
                f"{name}: the first argument has no float arrays; expected the "
                "parameters, or a module, to differentiate with respect to."
            )
        return cls(name, call.arrays, call.paths(), trained, call)

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
