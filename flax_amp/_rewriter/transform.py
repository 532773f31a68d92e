"""`amp`: mixed precision for any function; `amp_stop`: code that stays in float32."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flax_amp import _compat, _tree
from flax_amp._compat import Array, Arrays, Aval, DType, Jaxpr
from flax_amp._rewriter.captures import with_captured_outputs
from flax_amp._rewriter.emit import Emitter
from flax_amp._rewriter.fp8_rule import check_device
from flax_amp._rewriter.interpreters import add_sparse_rules
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._rewriter.paint import Painter
from flax_amp._rewriter.plan import ARGUMENT, LEAF, Need, Plan, Values, like
from flax_amp._rewriter.policy_warnings import (
    HalfParameterCheck,
    warn_of_fp8,
    warn_of_policy,
    warn_of_precision,
)
from flax_amp._rewriter.recompute.regions import Recompute, check_recompute
from flax_amp._rewriter.rewritten import refuse_if_asked, rewritten
from flax_amp._rewriter.rules import RULES
from flax_amp._tree import PyTree
from flax_amp.policy import (
    MatmulDType,
    Policy,
    PolicyEntries,
    check_compute_dtype,
    with_matmul_dtype,
)

F = TypeVar("F", bound=Callable[..., Any])


@overload
def amp(
    fun: F,
    *,
    compute_dtype: DTypeLike = ...,
    matmul_dtype: MatmulDType = ...,
    amp_policy: PolicyEntries | None = ...,
    recompute: Recompute = ...,
    reduce_dtype: DTypeLike | None = ...,
    merge_layers: bool = ...,
) -> F: ...
@overload
def amp(
    fun: None = None,
    *,
    compute_dtype: DTypeLike = ...,
    matmul_dtype: MatmulDType = ...,
    amp_policy: PolicyEntries | None = ...,
    recompute: Recompute = ...,
    reduce_dtype: DTypeLike | None = ...,
    merge_layers: bool = ...,
) -> Callable[[F], F]: ...
def amp(
    fun: Any = None,
    *,
    compute_dtype: DTypeLike = jnp.bfloat16,
    matmul_dtype: MatmulDType = None,
    amp_policy: PolicyEntries | None = None,
    recompute: Recompute = "auto",
    reduce_dtype: DTypeLike | None = None,
    merge_layers: bool = True,
) -> Any:
    """Transforms a float32 function into one that computes in mixed precision.

    Matrix products and convolutions run in `compute_dtype`. All other arithmetic runs
    in float32, and its result is rounded where it is kept on its way to a product
    (`docs/policies.md`). The rewriting reaches into `jit`, `scan`, `while_loop`,
    `cond`, `checkpoint`, `shard_map` and custom derivatives. Arguments and results keep
    their structure and dtypes, and so do gradients through the transformed function.

    Put `amp` inside `grad` (`jax.grad(amp(loss))`): parameters stay float32 and their
    gradients add up in float32.

    Args:
      fun: the function, or nothing to use `amp` as a decorator with arguments. Arrays
        among its arguments are traced; everything else (strings, numbers, functions)
        is static. `nnx.Module` arguments are updated as `fun` updates them.
      compute_dtype: `jnp.bfloat16`; `jnp.float16`, which needs a scaled loss (see
        `flax_amp.dynamic_scale_value_and_grad`); or `jnp.float32` to change nothing:
        `fun` is then called as it is, unless an entry of `amp_policy` is another dtype
        or a function of your own.
      matmul_dtype: what matrix products run in. `None`: `compute_dtype`. `"fp8"`, or
        `flax_amp.use_fp8(...)` with options: those by weights run on 8-bit floats where
        it pays (`docs/fp8.md`), on devices that have such products.
      amp_policy: which primitive or scope runs in which precision: `{primitive or scope
        string: precision function or dtype}`, usually `flax_amp.default_amp_policy |
        {...}`. `None`: `flax_amp.default_amp_policy`. A scope is a `jax.named_scope` or
        the path of a Flax module, also as a glob (`"*/LayerNorm_*"`); the outermost one
        that matches decides. `"*/embed"` means all methods of a module,
        `"*/embed.attend"` one. A `PolicyWarning` tells of keys that match nothing.
      recompute: what the backward pass computes again from low-precision values
        instead of storing it in float32. That can be elementwise arithmetic, norms and
        softmaxes, never matrix products, convolutions, long sums or random numbers.
        Gradients are the same, up to roundings. `"auto"`, the default: all of that
        inside loops; elsewhere what fuses into its reader, on GPUs, and on TPUs in
        equal layers that are merged (`merge_layers`). `"always"`: all of that
        everywhere, for the least memory. `"never"`: nothing. The bodies of your own
        `jax.checkpoint` keep their policy.
      reduce_dtype: the dtype in which a sharded `jit` adds up the gradients of weights
        over devices. `None`: `compute_dtype`, as with hand-set dtypes. `jnp.float32`:
        the gradients leave their matrix product in float32, for twice the traffic, one
        rounding less, and no forward-mode derivatives. Nor are the gradients of tables
        of embeddings rounded.
      merge_layers: whether equal layers of an unrolled network become calls of one
        function, which JAX then differentiates and lowers only once. With `False` each
        layer stays by itself, which takes longer to trace.

    Returns:
      The transformed function.

    Raises:
      TypeError: if `compute_dtype`, `matmul_dtype`, an entry of `amp_policy` or
        `merge_layers` has the wrong type; when called, if a precision function does not
        take or return what it should.
      ValueError: if `recompute` is none of its three values, or `reduce_dtype` neither
        float32 nor the compute dtype; when called, if the device has no products in
        fp8.

    Example:
      >>> import jax, jax.numpy as jnp, flax_amp
      >>> def loss(w, x):
      ...     return jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> loss_amp = flax_amp.amp(loss)
      >>> value, grad = jax.value_and_grad(loss_amp)(jnp.ones((4, 2)), jnp.ones((3, 4)))
      >>> value.dtype, grad.dtype
      (dtype('float32'), dtype('float32'))

    References:
      Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740),
      2017.
    """
    compute_dtype = check_compute_dtype(compute_dtype)
    policy = Policy(with_matmul_dtype(amp_policy, matmul_dtype))
    recompute = check_recompute(recompute)
    if compute_dtype == jnp.float32:  # there is nothing to save
        recompute = "never"
    wide_gradients = is_wide(reduce_dtype, compute_dtype)
    if not isinstance(merge_layers, bool):
        raise TypeError(f"merge_layers: got {merge_layers!r}; expected True or False.")
    if fun is None:
        return functools.partial(
            amp,
            compute_dtype=compute_dtype,
            matmul_dtype=matmul_dtype,
            amp_policy=amp_policy,
            recompute=recompute,
            reduce_dtype=reduce_dtype,
            merge_layers=merge_layers,
        )

    # `amp(jnp.float16)` is a keyword forgotten, and a dtype is callable.
    is_dtype = any(fun is dtype for dtype in (jnp.float16, jnp.bfloat16, jnp.float32))
    if not callable(fun) or is_dtype:
        raise TypeError(
            f"amp: got {fun if is_dtype else type(fun).__name__}; expected a function "
            "of float32 arrays, or no positional argument to use amp as a decorator "
            "with arguments, such as @amp(compute_dtype=jnp.bfloat16)."
        )

    if compute_dtype == jnp.float32 and not policy.may_leave_float32:

        @rewritten
        @functools.wraps(fun)
        def unchanged(*args: Any, **kwargs: Any) -> Any:
            refuse_if_asked()
            return fun(*args, **kwargs)

        return unchanged
    return rewrite(fun, policy, compute_dtype, recompute, wide_gradients, merge_layers)


def rewrite(
    fun: Callable[..., Any],
    policy: Policy,
    compute_dtype: DType,
    recompute: Recompute = "never",
    wide_gradients: bool = False,
    merge_layers: bool = False,
) -> Callable[..., Any]:
    """Returns a function that is traced and rewritten at each call, in float32 too.

    By default, nothing is computed again and each layer stays by itself.
    """

    check_parameters = HalfParameterCheck()

    # Nothing is kept from call to call: shapes, and what modules share, may be others.
    # Under `jit`, JAX calls this once for all calls of one kind.
    @rewritten
    @functools.wraps(fun)
    def transformed(*args: Any, **kwargs: Any) -> Any:
        refuse_if_asked()
        if compute_dtype != jnp.float32:
            check_device(policy.fp8_recipes)
        add_sparse_rules()
        call = FunctionalCall(fun, args, kwargs, open_scopes=policy.names_scopes)
        check_parameters(call)
        planned = plan_call(call, policy, compute_dtype)
        arrays = [x for x in call.inputs if _tree.is_array(x)]
        outs = planned.emit(arrays, recompute, wide_gradients, merge_layers)
        return call.finish(planned.rebuild(outs))

    return transformed


class PlannedCall(NamedTuple):
    """The plan of one call of the user's function.

    Attributes:
      plan: the plan; its inputs are the arrays among the inputs of the call. Its last
        results may be others than those of the function (`captures.py`).
      painter: the painter that made it.
      outs: the values of the function's results as the caller gets them.
      rebuild: puts the arrays of the result back among its other leaves.
    """

    plan: Plan
    painter: Painter
    outs: Values
    rebuild: Callable[[Arrays], PyTree]

    def emit(
        self,
        arrays: Arrays,
        recompute: Recompute,
        wide_gradients: bool,
        merge_layers: bool,
    ) -> Arrays:
        """Evaluates the plan; returns the arrays of the function's result."""
        emitter = Emitter(self.painter, recompute, wide_gradients, merge_layers)
        # What leaves the program is float32 anyway: the number before its rounding.
        outs = emitter.emit(self.plan, arrays, unrounded=True)
        # Behind them come the values that rules close over (`captures.py`).
        outs = emitter.cast_to_plan(outs[: len(self.outs)], self.outs)
        avals = [v.aval for v in self.plan.jaxpr.outvars[: len(outs)]]
        return list(map(_as_result, outs, avals))


def _as_result(x: Array, aval: Aval) -> Array:
    """Returns an array of the type that the function's own result has.

    A weak float32 number times bfloat16 is bfloat16, a strong one gives float32.
    """
    if not isinstance(x, jax.Array) and aval.dtype != jax.dtypes.float0:
        x = jnp.asarray(x, aval.dtype)  # a number of the jaxpr
    return _compat.with_weak_type(x, getattr(aval, "weak_type", False))


def plan_call(
    call: FunctionalCall, policy: Policy, compute_dtype: DType
) -> PlannedCall:
    """Traces and plans a call, and warns of a policy without effect."""
    closed, rebuild = _trace(call)
    jaxpr, _ = _compat.open_jaxpr(closed)
    # Judged is what the user wrote, before anything is planned.
    warn_of_policy(policy, closed, compute_dtype, call.array_paths)
    traced, exports = with_captured_outputs(closed)
    painter = Painter(policy, compute_dtype, RULES, emits_all=bool(exports))
    # The painter takes the flag away from what is read otherwise.
    argument = ARGUMENT._replace(read_once=compute_dtype != jnp.float32)
    ins = like([v.aval for v in jaxpr.invars], argument)
    # Who gets a result is a reader that leads to no product here. So are the rules that
    # close over a value (`exports`).
    needs = (Need.READ_IN_FLOAT32 | Need.UNROUNDED,) * (
        len(jaxpr.outvars) + len(exports)
    )
    plan = dataclasses.replace(painter.plan(traced, ins, needs), exports=exports)
    if compute_dtype != jnp.float32:
        warn_of_precision(plan)
        warn_of_fp8(policy, plan)
    outs = like([v.aval for v in jaxpr.outvars], LEAF)
    return PlannedCall(plan, painter, outs, rebuild)


def is_wide(reduce_dtype: DTypeLike | None, compute_dtype: DType) -> bool:
    """Whether gradients are to be wider than the compute dtype."""
    if reduce_dtype is None:
        return False
    try:
        dtype = jnp.dtype(reduce_dtype)
    except TypeError:
        raise TypeError(
            f"reduce_dtype: got {reduce_dtype!r}; expected a dtype: jnp.float32, or "
            "None for the compute dtype."
        ) from None
    if dtype == compute_dtype:  # as they are by default
        return False
    if dtype != jnp.float32:
        raise ValueError(
            f"reduce_dtype: got {dtype.name}; expected float32, or "
            f"None or {compute_dtype.name} for the compute dtype."
        )
    return True


def _trace(call: FunctionalCall) -> tuple[Jaxpr, Callable[[Arrays], PyTree]]:
    """Traces a call; its inputs that are no arrays are static.

    Returns:
      The closed jaxpr of its arrays, and a function that puts the arrays of its result
      back among the other leaves.
    """
    inputs = call.inputs
    is_traced = [_tree.is_array(x) for x in inputs]
    treedef: Any = None
    is_result: list[bool] = []
    static: list[Any] = []

    def pure(*arrays: Array) -> Arrays:
        # Strings, functions and all else that is no array passes by the trace.
        nonlocal treedef, is_result, static
        out = call.function(_tree.fill(arrays, is_traced, inputs))
        leaves, treedef = jax.tree.flatten(out)
        is_result = [_tree.is_array(x) for x in leaves]
        static = [None if _tree.is_array(x) else x for x in leaves]
        return _tree.pick(leaves, is_result)

    named = _compat.traced_as(pure, call.fun, call.array_names())
    closed = jax.make_jaxpr(named)(*_tree.pick(inputs, is_traced))
    return closed, lambda arrays: jax.tree.unflatten(
        treedef, _tree.fill(arrays, is_result, static)
    )


@overload
def amp_stop(fun: F) -> F: ...
@overload
def amp_stop(fun: None = None) -> contextlib.AbstractContextManager[None]: ...
def amp_stop(fun: Any = None) -> Any:
    """Keeps code in its original precision, its backward pass included.

    Args:
      fun: a function to decorate, or nothing to get a context manager.

    Returns:
      The decorated function, or a context manager.

    Example:
      >>> import flax_amp, jax.numpy as jnp
      >>> @flax_amp.amp_stop
      ... def exact(w, x):
      ...     return w @ x
      >>> def f(w, x):
      ...     y = w @ x                    # low precision
      ...     with flax_amp.amp_stop():
      ...         return exact(w, y) + w @ y   # float32
      >>> flax_amp.amp(f)(jnp.eye(2), jnp.ones(2))
      Array([2., 2.], dtype=float32)
    """
    if fun is None:
        return jax.named_scope("amp_stop")
    if not callable(fun):
        raise TypeError(
            f"amp_stop: got {type(fun).__name__}; expected a function to decorate, or "
            "no argument for a context manager (`with flax_amp.amp_stop(): ...`)."
        )

    # A new scope for each call: one scope object cannot be entered twice.
    @functools.wraps(fun)
    def stopped(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope("amp_stop"):
            return fun(*args, **kwargs)

    return stopped
