"""The ways to call a tool, listed in `explain`, and the call as pure functions."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike
from rich.console import Console

from flax_amp import _tree
from flax_amp._compat import Array, DType
from flax_amp._rewriter.fp8 import check_device
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._rewriter.transform import (
    AmpOptions,
    TracedCall,
    refuse_rewritten,
    trace_call,
)
from flax_amp._training.loss import check_loss, declared_keywords, fold_in
from flax_amp._training.optimizer import AmpOptimizer
from flax_amp._training.step_call import check_not_deleted
from flax_amp._training.train_state import AmpTrainState
from flax_amp._training.untrained import params_of_loss, unchanged_flags
from flax_amp.policy import (
    MatmulDType,
    Policy,
    PolicyEntries,
    Precision,
    default_amp_policy,
    read_options,
)

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Loss = Callable[..., Any]
Trained = AmpTrainState | tuple[nnx.Module, nnx.Optimizer[Any]]


class ToolOptions(AmpOptions, total=False):
    """The options of the tools; all tools take the options of `flax_amp.amp`, too."""

    backward: bool  # of `explain`
    parameters: bool  # of `explain`
    scale: float | None  # of `find_nonfinite` and `compare_precision`
    remedies: int  # of `compare_precision`
    steps: int  # of `measure`


# The classes with a precision and a scaler. An optimizer of another class may use the
# same names for attributes of its own.
_HOLDERS = AmpTrainState | AmpOptimizer


class Tool(Protocol[R_co]):
    """A tool, which can be called in each of the ways."""

    @overload
    def __call__(
        self, fun: Trained, /, *step: Any, **options: Unpack[ToolOptions]
    ) -> R_co: ...
    @overload
    def __call__(
        self, fun: Loss, /, **options: Unpack[ToolOptions]
    ) -> Callable[..., R_co]: ...


def tool(ask: Callable[..., R], *, runs: bool = True) -> Tool[R]:
    """Makes a tool from a function of the user's call, and of the tool's own options.

    With `runs=False`, the tool does not run the program, and arguments may be shapes.
    """
    own = set(inspect.signature(ask).parameters)

    @functools.wraps(ask)
    def call(fun: Any, /, *step: Any, **options: Any) -> Any:
        of_tool = {name: options.pop(name) for name in own & options.keys()}
        request = Request.read(ask.__name__, fun, step, **options)
        use = functools.partial(_use, request, functools.partial(ask, **of_tool), runs)
        if request.args is None:
            return use
        return use(*request.args)

    made: Any = call
    # The tool takes a function or a state, and `ask` takes a `Call`: the signature of
    # `ask` would be wrong for the tool.
    del made.__wrapped__
    made.__annotations__ = {}
    return made


def _use(
    request: "Request", ask: Callable[..., R], runs: bool, /, *args: Any, **kwargs: Any
) -> R:
    """Uses a tool on a call of the user's function."""
    check_not_deleted(request.where, "args", (*args, kwargs))
    if not runs:
        return ask(Call(request, args, kwargs))
    kinds = jax.ShapeDtypeStruct | jax.core.Tracer
    if any(isinstance(x, kinds) for x in jax.tree.leaves((args, kwargs))):
        raise TypeError(
            f"{request.where}: expected arrays with values, outside of jax.jit: the "
            "program is run. flax_amp.explain takes shapes."
        )
    with Console(stderr=True).status(f"{request.where} ..."):
        return ask(Call(request, args, kwargs))


@dataclasses.dataclass(frozen=True)
class Request:
    """The function, the arguments and the options that a tool is asked about."""

    where: str  # the tool and the function, for messages
    name: str  # of the function
    fun: Loss  # the user's function of its arguments
    args: tuple[Any, ...] | None = None  # of `fun`; `None` until the user passes them
    holder: Any = None  # the state or the optimizer, with the precision and the scaler
    wrt: Any = nnx.Param  # selects the trained variables of a module
    dtype: DType = jnp.dtype(jnp.bfloat16)
    entries: PolicyEntries = dataclasses.field(default_factory=dict)
    recompute: bool = True
    reduce_in_float32: bool = False
    has_own_policy: bool = False  # whether the user gave a policy
    step: tuple[Any, ...] = ()  # the loss function, the batch and further arguments

    @classmethod
    def read(
        cls,
        caller: str,
        fun: Any,
        step: Sequence[Any],
        precision: Precision | None = None,
        compute_dtype: DTypeLike | None = None,
        matmul_dtype: MatmulDType = None,
        amp_policy: PolicyEntries | None = None,
        recompute: bool = True,
        reduce_in_float32: bool = False,
    ) -> "Request":
        """Checks the arguments of a tool."""
        loss_fn, *given = _loss_and_rest(caller, fun, step)
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        refuse_rewritten(f"{caller}: {name}", loss_fn)
        fields: dict[str, Any] = {"fun": fun}
        if given:
            check_not_deleted(caller, "state", fun)
            fields = _loss_of_step(fun, loss_fn, *given)
        holder = fields.get("holder")
        word = holder.precision if isinstance(holder, _HOLDERS) else "bf16-mixed"
        entries: Any = default_amp_policy if amp_policy is None else amp_policy
        options = precision, compute_dtype, matmul_dtype, entries
        dtype, entries = read_options(caller, *options, default=word)
        Policy(entries)  # raises an error for a wrong entry
        return cls(
            f"{caller}: {name}",
            name,
            **fields,
            dtype=dtype,
            entries=entries,
            recompute=recompute,
            reduce_in_float32=reduce_in_float32,
            has_own_policy=amp_policy is not None,
            step=tuple(step),
        )

    def scale(self, given: Any) -> float:
        """Returns the factor of the loss: as given, or the scale of a scaler, or 1.

        A stack of states has several scales, of which the largest is returned.
        """
        if given is None:
            if not isinstance(self.holder, _HOLDERS):
                return 1.0
            given = self.holder.scaler["scaler"][...]
        if not 0 < np.max(given) < math.inf:
            raise ValueError(
                f"{self.where}: scale is {given!r}; expected a positive factor of the "
                "loss, or nothing for the scale of the state."
            )
        return float(np.max(given))


def _loss_and_rest(caller: str, fun: Any, step: Sequence[Any]) -> Sequence[Any]:
    """Returns the loss function, and the arguments of a step that follow, if any.

    A state, or a pair of a model and an optimizer, comes with a loss function and a
    batch. A function comes alone.
    """
    is_pair = isinstance(fun, tuple) and len(fun) == 2
    is_pair = is_pair and isinstance(fun[0], nnx.Module)
    is_trained = is_pair or isinstance(fun, AmpTrainState)
    found = step if is_trained and step else (fun, *step)
    if not callable(found[0]) or (len(found) > 1) != is_trained:
        got = ", ".join(type(x).__name__ for x in (fun, *step))
        raise TypeError(
            f"{caller}: got {got}; expected {caller}(loss_fn)(*args), "
            f"{caller}(state, loss_fn, batch, *args) with an AmpTrainState, or "
            f"{caller}((model, optimizer), loss_fn, batch, *args)."
        )
    return found


def _loss_of_step(
    trained: Any, loss_fn: Loss, batch: Any, *args: Any
) -> dict[str, Any]:
    """Returns the loss of a step, and its arguments, as fields of `Request`.

    The batch is the last argument, as in most functions, because a report names the
    examples of the last argument.
    """
    if isinstance(trained, AmpTrainState):
        state: Any = trained
        holder: Any = trained
        graphdef = state.graphdef
        is_nnx = graphdef is not None
        # The loss of a step sees bfloat16 parameters that train in float32.
        first = params_of_loss(state.params, unchanged_flags(state))
        wrt: Any = None
        if is_nnx:
            wrt = nnx.filterlib.PathIn(*flatten_dict(first))
            first = nnx.merge(graphdef, first, state.variables)
    else:
        first, holder = trained
        state = None
        wrt = getattr(holder, "wrt", nnx.Param)
        is_nnx = True

    # A report calls arrays by the names of these arguments.
    def call(params: Any, state: Any, args: Any, batch: Any) -> Any:
        if state is None:
            return loss_fn(params, batch, *args)
        if not is_nnx:
            state = state.replace(params=params)
        offered = {"state": state, "rngs": fold_in(state.rngs, state.step)}
        keywords = {name: offered[name] for name in declared_keywords(loss_fn)}
        return loss_fn(params, batch, *args, **keywords)

    given = first, state, args, batch
    return dict(fun=call, args=given, holder=holder, wrt=wrt)


# --- calls as functions of arrays ----------------------------------------------------


class Call(FunctionalCall):
    """A call of the user's function, in which nothing is rewritten by `amp`."""

    arrays: list[Array]  # the arrays among the inputs
    places: list[int]  # the places of the arrays among the inputs
    paths: list[str]  # the path of each array: `batch/image`, `params/Dense_0/kernel`

    def __init__(self, request: Request, args: Any, kwargs: Any):
        super().__init__(
            request.fun, args, kwargs, open_scopes=True, caller=request.where
        )
        self.request = request
        self._numbers = range(len(self.inputs))  # stand in for the inputs
        self._is_array = [_tree.is_array_or_shape(x) for x in self.inputs]
        self.arrays = _tree.pick(self.inputs, self._is_array)
        self.places = _tree.pick(self._numbers, self._is_array)
        self.paths = self._paths()

    def loss(self, arrays: Sequence[Array]) -> tuple[Array, list[Array], list[Array]]:
        """Returns the loss, the updated variables, and all further arrays."""
        inputs = _tree.fill(arrays, self._is_array, self.inputs)
        out, updated = self.function(inputs)
        has_aux = isinstance(out, tuple) and len(out) == 2
        loss, aux = out if has_aux else (out, None)
        check_loss(loss, self._caller)
        # A loss of `make_train_step` returns the new variables of a Linen model in
        # `aux`.
        aux = dict(aux) if isinstance(aux, Mapping) else {"aux": aux}
        updates = aux.pop("variables", None)
        found = (jax.tree.leaves(tree) for tree in ((updates, updated), aux))
        updates, others = (list(filter(_tree.is_array, leaves)) for leaves in found)
        return jnp.asarray(loss), updates, others

    def trace_loss(self) -> TracedCall:
        """Returns the loss as a function of the arrays, traced once for all runs."""
        policy = Policy(self.request.entries)
        dtype = self.request.dtype
        if dtype != jnp.float32:
            check_device(policy.fp8_recipes)
        of_arrays = FunctionalCall(self.loss, (self.arrays,), {})
        return trace_call(of_arrays, policy, dtype)

    def _paths(self) -> list[str]:
        args, kwargs = self.rebuild_arguments(self._numbers, nnx.to_pure_dict)
        named = inspect.signature(self.fun).bind(*args, **kwargs).arguments
        paths = {
            index: jax.tree_util.keystr(path, simple=True, separator="/")
            for path, index in jax.tree_util.tree_leaves_with_path(dict(named))
        }
        every = [paths.get(i, "") for i in self._numbers]
        return _tree.pick(every, self._is_array)

    def gradients(self, loss: Loss) -> Callable[[Any, Sequence[Array]], Any]:
        """Returns a function that differentiates the first result of a loss.

        The returned function takes the scale of the loss, and the arrays. Its results
        are all results of the loss, and the gradients without the scale.
        """
        mask = self.trained()

        def run(scale: Any, arrays: Sequence[Array]) -> Any:
            def scaled(chosen: list[Array]) -> Any:
                out = loss(_tree.fill(chosen, mask, arrays))
                return _tree.widen(out[0]) * scale, out

            found, out = jax.grad(scaled, has_aux=True)(_tree.pick(arrays, mask))
            return out, [_tree.widen(g) / scale for g in found]

        return run

    def trained(self) -> list[bool]:
        """Returns which arrays are trained.

        The trained arrays are the floats of the first argument. Of a module, only the
        variables that `wrt` selects are trained. Of a state, arrays in half precision
        are not trained, because no step changes them.
        """

        def params(state: nnx.State) -> Any:
            return nnx.to_pure_dict(nnx.filter_state(state, self.request.wrt))

        args, _ = self.rebuild_arguments(self._numbers, params)
        first = set(jax.tree.leaves(args[:1]))
        pairs = zip(self.places, self.arrays, strict=True)
        found = [n in first and jnp.issubdtype(x.dtype, jnp.inexact) for n, x in pairs]
        if isinstance(self.request.holder, AmpTrainState):
            of_step = (not _tree.is_half(x) for x in self.arrays)
            found = [
                is_float and trains
                for is_float, trains in zip(found, of_step, strict=True)
            ]
        if not any(found):
            raise TypeError(
                f"{self._caller}: the first argument has no float arrays; expected the "
                "parameters, or a module, to differentiate with respect to."
            )
        return found
