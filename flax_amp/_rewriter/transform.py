"""`amp`: mixed precision for any function; `amp_stop`: code that stays in float32."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flax_amp import _compat, _tree
from flax_amp._compat import Array, Arrays, Aval, DType, Jaxpr
from flax_amp._rewriter.bodies import RULES
from flax_amp._rewriter.casts import up
from flax_amp._rewriter.emit import Emitter, Record
from flax_amp._rewriter.fp8 import check_device
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._rewriter.plan import Ask, Outs, Planner
from flax_amp._rewriter.policy_warnings import (
    HalfParameterCheck,
    warn_of_fp8,
    warn_of_policy,
)
from flax_amp._rewriter.rewritten import refuse_if_asked, rewritten
from flax_amp._rewriter.roles import Chooser, Context
from flax_amp._tree import PyTree
from flax_amp.policy import (
    MatmulDType,
    Policy,
    PolicyEntries,
    Precision,
    check_compute_dtype,
    read_precision,
    with_matmul_dtype,
)

F = TypeVar("F", bound=Callable[..., Any])


@overload
def amp(
    fun: F,
    *,
    precision: Precision | None = ...,
    compute_dtype: DTypeLike | None = ...,
    amp_policy: PolicyEntries | None = ...,
    matmul_dtype: MatmulDType = ...,
    recompute: bool = ...,
) -> F: ...
@overload
def amp(
    fun: None = None,
    *,
    precision: Precision | None = ...,
    compute_dtype: DTypeLike | None = ...,
    amp_policy: PolicyEntries | None = ...,
    matmul_dtype: MatmulDType = ...,
    recompute: bool = ...,
) -> Callable[[F], F]: ...
def amp(
    fun: Any = None,
    *,
    precision: Precision | None = None,
    compute_dtype: DTypeLike | None = None,
    amp_policy: PolicyEntries | None = None,
    matmul_dtype: MatmulDType = None,
    recompute: bool = True,
) -> Any:
    """Transforms a float32 function into one that computes in mixed precision.

    Between two matmuls everything is float32; what is carried to the next one is half.
    Matmuls and convolutions read half precision, add up in float32, and give half
    precision. The arithmetic between them computes in float32, and what it leaves for
    another matmul is rounded once (`docs/policies.md`). The rewriting reaches into
    `jit`, `scan`, `while_loop`, `cond`, `checkpoint`, `shard_map` and custom
    derivatives. Arguments and results keep their structure and dtypes, and so do
    gradients through the transformed function.

    Put `amp` inside `grad` (`jax.grad(amp(loss))`): parameters stay float32 and their
    gradients add up in float32.

    Args:
      fun: the function, or nothing to use `amp` as a decorator with arguments. Arrays
        among its arguments are traced; everything else (strings, numbers, functions)
        is static. `nnx.Module` arguments are updated as `fun` updates them.
      precision: `"bf16-mixed"`, the default, `"16-mixed"`, `"32-true"` or
        `"fp8-mixed"`, or short `"bf16"`, `"fp16"`, `"fp32"`, `"fp8"`.
      compute_dtype: the same as a dtype: `jnp.bfloat16`; `jnp.float16`, which needs a
        scaled loss (see `flax_amp.dynamic_scale_value_and_grad`); or `jnp.float32` to
        change nothing: `fun` is then called as it is, unless an entry of `amp_policy`
        is another dtype or a function of your own.
      amp_policy: which primitive or scope runs in which precision: `{primitive or scope
        string: precision function or dtype}`, usually `flax_amp.default_amp_policy |
        {...}`. `None`: `flax_amp.default_amp_policy`. A scope is a `jax.named_scope` or
        the path of a Flax module, also as a glob (`"*/LayerNorm_*"`); the outermost one
        that matches decides. `"*/embed"` means all methods of a module,
        `"*/embed.attend"` one. A `PolicyWarning` tells of keys that match nothing.
      matmul_dtype: what matmuls run in. `None`: `compute_dtype`. `"fp8"`, or
        `flax_amp.use_fp8(...)` with options: those by weights run on 8-bit floats where
        it pays (`docs/fp8.md`), on devices that have such matmuls.
      recompute: whether the backward pass computes the arithmetic between matmuls again
        from what is stored: results of matmuls, what other matmuls read, and sums.
        Gradients are the same, up to roundings. The bodies of your own
        `jax.checkpoint` keep their policy.

    Returns:
      The transformed function.

    Raises:
      TypeError: if `compute_dtype`, `matmul_dtype`, an entry of `amp_policy` or
        `recompute` has the wrong type, or both `precision` and `compute_dtype` are
        given; when called, if a precision function does not take or return what it
        should.
      ValueError: if `precision` is no word for one; when called, if the device has no
        matmuls in fp8.

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
    dtype, matmuls = _read_dtypes(precision, compute_dtype, matmul_dtype)
    policy = Policy(with_matmul_dtype(amp_policy, matmuls))
    if not isinstance(recompute, bool):
        raise TypeError(f"recompute: got {recompute!r}; expected True or False.")
    if fun is None:
        return functools.partial(
            amp,
            precision=precision,
            compute_dtype=compute_dtype,
            amp_policy=amp_policy,
            matmul_dtype=matmul_dtype,
            recompute=recompute,
        )

    # `amp(jnp.float16)` is a keyword forgotten, and a dtype is callable.
    is_dtype = any(fun is dtype for dtype in (jnp.float16, jnp.bfloat16, jnp.float32))
    if not callable(fun) or is_dtype:
        raise TypeError(
            f"amp: got {fun if is_dtype else type(fun).__name__}; expected a function "
            "of float32 arrays, or no positional argument to use amp as a decorator "
            "with arguments, such as @amp(compute_dtype=jnp.bfloat16)."
        )

    if dtype == jnp.float32 and not policy.may_leave_float32:

        @rewritten
        @functools.wraps(fun)
        def unchanged(*args: Any, **kwargs: Any) -> Any:
            refuse_if_asked()
            return fun(*args, **kwargs)

        return unchanged
    # In float32 there is nothing to save.
    return rewrite(fun, policy, dtype, recompute and dtype != jnp.float32)


def _read_dtypes(
    precision: Any, compute_dtype: Any, matmul_dtype: MatmulDType
) -> tuple[DType, MatmulDType]:
    """Returns the compute dtype, and what matmuls run in."""
    if precision is not None and compute_dtype is not None:
        raise TypeError(
            f"amp: got both precision={precision!r} and compute_dtype="
            f"{compute_dtype!r}; expected one of them."
        )
    if precision is not None or isinstance(compute_dtype, str):
        # The words of one are understood by the other, as far as they are no dtype.
        word = compute_dtype if precision is None else precision
        try:
            compute_dtype, matmuls = read_precision(word)
        except ValueError:
            if precision is not None:
                raise
            matmuls = None
        matmul_dtype = matmuls if matmul_dtype is None else matmul_dtype
    dtype = jnp.bfloat16 if compute_dtype is None else compute_dtype
    return check_compute_dtype(dtype), matmul_dtype


def rewrite(
    fun: Callable[..., Any],
    policy: Policy,
    compute_dtype: DType,
    recompute: bool = False,
    record: Record | None = None,
) -> Callable[..., Any]:
    """Returns a function that is traced and rewritten at each call, in float32 too."""
    check_parameters = HalfParameterCheck()

    # Nothing is kept from call to call: shapes, and what modules share, may be others.
    # Under `jit`, JAX calls this once for all calls of one kind.
    @rewritten
    @functools.wraps(fun)
    def transformed(*args: Any, **kwargs: Any) -> Any:
        refuse_if_asked()
        if compute_dtype != jnp.float32:
            check_device(policy.fp8_recipes)
        call = FunctionalCall(fun, args, kwargs, open_scopes=policy.names_scopes)
        check_parameters(call)
        traced = trace_call(call, policy, compute_dtype)
        arrays = [x for x in call.inputs if _tree.is_array(x)]
        outs = traced.emit(arrays, recompute, record)
        return call.finish(traced.rebuild(outs))

    return transformed


class TracedCall(NamedTuple):
    """One call of the user's function as a jaxpr.

    Attributes:
      closed: the jaxpr; its inputs are the arrays among the inputs of the call.
      rebuild: puts the arrays of the result back among its other leaves.
      policy: the policy.
      compute_dtype: the dtype of matmuls.
    """

    closed: Jaxpr
    rebuild: Callable[[Arrays], PyTree]
    policy: Policy
    compute_dtype: DType

    def emit(
        self, arrays: Arrays, recompute: bool = True, record: Record | None = None
    ) -> Arrays:
        """Returns the arrays of the function's result, computed in mixed precision.

        Args:
          arrays: the arrays among the inputs of the call.
          recompute: whether the backward pass computes regions again.
          record: is told of each equation.
        """
        jaxpr, _ = _compat.open_jaxpr(self.closed)
        inputs, results = len(jaxpr.invars), len(jaxpr.outvars)
        none = (False,) * results
        ask = Ask(
            context=Context(),
            outs=Outs(none, none),
            weights=(True,) * inputs,
            computed=(False,) * inputs,
        )
        chooser = Chooser(self.policy, self.compute_dtype)
        emitter = Emitter(
            Planner(chooser), self.compute_dtype, RULES, recompute, record=record
        )
        outs = emitter.emit(self.closed, arrays, ask)
        if self.compute_dtype != jnp.float32:
            in_fp8 = emitter.fp8.pop("", 0)
            warn_of_fp8(self.policy, emitter.fp8, in_fp8)
        return [
            _as_result(x, v.aval, self.compute_dtype)
            for x, v in zip(outs, jaxpr.outvars, strict=True)
        ]


def _as_result(x: Array, aval: Aval, half: DType) -> Array:
    """Returns an array of the type that the function's own result has.

    A weak float32 number times bfloat16 is bfloat16, a strong one gives float32.
    """
    if not isinstance(x, jax.Array) and aval.dtype != jax.dtypes.float0:
        x = jnp.asarray(x, aval.dtype)  # a number of the jaxpr
    if aval.dtype == jnp.float32:
        x = up(x, half)
    return _compat.with_weak_type(x, getattr(aval, "weak_type", False))


def trace_call(
    call: FunctionalCall, policy: Policy, compute_dtype: DType
) -> TracedCall:
    """Traces a call, and warns of a policy without effect."""
    closed, rebuild = _trace(call)
    # Judged is what the user wrote, before anything is planned.
    warn_of_policy(policy, closed, compute_dtype, call)
    return TracedCall(closed, rebuild, policy, compute_dtype)


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
