"""`amp`: mixed precision for any function; `amp_stop`: code that stays in float32."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flax_amp import _compat, _jaxprs, _source, _tree
from flax_amp._compat import Array, Arrays, Aval, DType, Jaxpr
from flax_amp._rewriter import bodies as bodies  # registers primitives with bodies
from flax_amp._rewriter.casts import to_float32
from flax_amp._rewriter.emit import Emitter, Record
from flax_amp._rewriter.fp8 import check_device
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._rewriter.origins import Origin
from flax_amp._rewriter.policy_warnings import warn_of_fp8, warn_of_policy
from flax_amp._rewriter.primitives import walk
from flax_amp._rewriter.roles import Chooser, Context
from flax_amp._rewriter.rule import Planner, Signature
from flax_amp._tree import PyTree
from flax_amp.policy import MatmulDType, Policy, PolicyEntries, Precision, read_options

F = TypeVar("F", bound=Callable[..., Any])


class AmpOptions(TypedDict, total=False):
    """The options of `amp`."""

    precision: Precision | None
    compute_dtype: DTypeLike | None
    amp_policy: PolicyEntries | None
    matmul_dtype: MatmulDType
    recompute: bool
    reduce_in_float32: bool


@overload
def amp(fun: F, **options: Unpack[AmpOptions]) -> F: ...
@overload
def amp(fun: None = None, **options: Unpack[AmpOptions]) -> Callable[[F], F]: ...
def amp(
    fun: Any = None,
    *,
    precision: Precision | None = None,
    compute_dtype: DTypeLike | None = None,
    amp_policy: PolicyEntries | None = None,
    matmul_dtype: MatmulDType = None,
    recompute: bool = True,
    reduce_in_float32: bool = False,
) -> Any:
    """Transforms a float32 function into a mixed-precision function.

    Between two matmuls everything is float32. Values that go to the next matmul are
    rounded to half precision (`docs/policies.md`). The rewriting reaches into `jit`,
    `scan`, `while_loop`, `cond`, `checkpoint`, `shard_map` and custom derivatives.
    Arguments and results keep their structure and dtypes, and so do gradients through
    the transformed function.

    Put `amp` inside `grad` (`jax.grad(amp(loss))`): parameters stay float32 and their
    gradients add up in float32.

    Args:
      fun: the function, or nothing to use `amp` as a decorator with arguments. Arrays
        among the arguments of `fun` are traced; everything else (strings, numbers,
        functions) is static. `nnx.Module` arguments are updated as `fun` updates them.
      precision: `"bf16-mixed"`, the default, `"16-mixed"`, `"32-true"` or
        `"fp8-mixed"`, or short `"bf16"`, `"fp16"`, `"fp32"`, `"fp8"`.
      compute_dtype: a dtype instead of a word: `jnp.bfloat16`; `jnp.float16`, which
        needs a scaled loss (see `flax_amp.dynamic_scale_value_and_grad`); or
        `jnp.float32` to call `fun` unchanged, unless `amp_policy` has another dtype or
        a function of your own.
      amp_policy: which primitive or scope runs in which precision: `{primitive or scope
        string: precision function or dtype}`. `None`: `flax_amp.default_amp_policy`,
        which you can extend (`flax_amp.default_amp_policy | {...}`). A scope is a
        `jax.named_scope` or the path of a Flax module, also as a glob
        (`"*/LayerNorm_*"`); the outermost scope that matches decides. A `PolicyWarning`
        tells of keys that match nothing.
      matmul_dtype: the dtype of matmuls. `None`: `compute_dtype`. `"fp8"` or
        `flax_amp.use_fp8(...)`: matmuls by weights run on 8-bit floats where fp8 saves
        time (`docs/fp8.md`).
      recompute: whether the backward pass computes the arithmetic between matmuls again
        from stored values. Stored are the results of matmuls, the values that later
        matmuls read, and sums. The bodies of your own `jax.checkpoint` keep their
        policy.
      reduce_in_float32: whether the matmul that gives the gradient of a float32 weight
        gives its float32 sum. By default the sum is rounded to half precision. In a
        sharded `jit`, the gradients then travel and add up over devices in float32,
        which takes at least twice the bytes (`docs/devices.md`).

    Returns:
      The transformed function.

    Raises:
      TypeError: if an argument has the wrong type, or both `precision` and
        `compute_dtype` are given.
      ValueError: if `precision` is none of these words. The transformed function raises
        a ValueError if the policy uses fp8 and the device has no matmuls in fp8.

    Example:
      >>> import jax, jax.numpy as jnp, flax_amp
      >>> def loss(w, x):
      ...     return jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> loss_amp = flax_amp.amp(loss)
      >>> value, grad = jax.value_and_grad(loss_amp)(jnp.ones((4, 2)), jnp.ones((3, 4)))
      >>> value.dtype, grad.dtype
      (dtype('float32'), dtype('float32'))
    """
    options = precision, compute_dtype, matmul_dtype, amp_policy
    dtype, entries = read_options("amp", *options)
    policy = Policy(entries)
    if not isinstance(recompute, bool):
        raise TypeError(f"recompute: got {recompute!r}; expected True or False.")
    if not isinstance(reduce_in_float32, bool):
        raise TypeError(
            f"reduce_in_float32: got {reduce_in_float32!r}; expected True or False."
        )
    # In float32 the function is not rewritten, because cotangents would add up in
    # another order: 184 of 256 elements of the gradient of a Sinkhorn loss differed.
    is_identity = dtype == jnp.float32 and not policy.may_leave_float32

    def transform(fun: Any) -> Any:
        # A class as `fun` means that a keyword is missing, as in `amp(jnp.float16)`.
        if not callable(fun) or isinstance(fun, type):
            raise TypeError(
                f"amp: got {getattr(fun, '__name__', type(fun).__name__)}; expected a "
                "function of float32 arrays, or no positional argument to use amp as a "
                "decorator with arguments, such as @amp(compute_dtype=jnp.bfloat16)."
            )
        run = fun
        if not is_identity:
            run = rewrite(
                fun, policy, dtype, recompute, reduce_in_float32=reduce_in_float32
            )

        @rewritten
        @functools.wraps(fun)
        def transformed(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        return transformed

    return transform if fun is None else transform(fun)


def rewrite(
    fun: Callable[..., Any],
    policy: Policy,
    compute_dtype: DType,
    recompute: bool = False,
    record: Record | None = None,
    observe: Callable[["TracedCall"], None] | None = None,
    reduce_in_float32: bool = False,
) -> Callable[..., Any]:
    """Returns a function that is traced and rewritten at each call, also in float32.

    `observe` sees the traced call before the rewriting.
    """

    # Nothing is kept from call to call, because shapes, and the arrays that modules
    # share, may change. Under `jit`, JAX calls `run` only once for equal signatures.
    def run(*args: Any, **kwargs: Any) -> Any:
        if compute_dtype != jnp.float32:
            check_device(policy.fp8_recipes)
        call = FunctionalCall(fun, args, kwargs, open_scopes=policy.names_scopes)
        traced = trace_call(call, policy, compute_dtype)
        if observe is not None:
            observe(traced)
        arrays = [x for x in call.inputs if _tree.is_array(x)]
        outs = traced.emit(arrays, recompute, record, reduce_in_float32)
        return call.update_modules(traced.rebuild(outs))

    return run


class TracedCall(NamedTuple):
    """One call of the user's function as a jaxpr."""

    closed: Jaxpr  # takes the arrays among the inputs of the call
    # Returns the result of the function, from its arrays and its static leaves.
    rebuild: Callable[[Arrays], PyTree]
    choose: Chooser
    names: Sequence[str]  # of the inputs, such as `params['w']`

    def emit(
        self,
        arrays: Arrays,
        recompute: bool = True,
        record: Record | None = None,
        reduce_in_float32: bool = False,
    ) -> Arrays:
        """Returns the arrays of the function's result, computed in mixed precision."""
        # Under its flags, JAX makes rules that work only while the flag is on.
        has_rules = _compat.makes_hi_primitives() and any(
            _jaxprs.is_of_flags(visit.eqn) for visit in walk(self.closed)
        )
        context = contextlib.nullcontext if has_rules else _compat.ordinary_primitives
        with context():
            return self._emit(arrays, recompute, record, reduce_in_float32)

    def _emit(
        self,
        arrays: Arrays,
        recompute: bool,
        record: Record | None,
        reduce_in_float32: bool,
    ) -> Arrays:
        jaxpr, _ = _compat.open_jaxpr(self.closed)
        # Each array among the arguments is a root of its own. A root is a single bit.
        are_arrays = [bool(getattr(v.aval, "shape", ())) for v in jaxpr.invars]
        roots = [is_array << i for i, is_array in enumerate(are_arrays)]
        origins = [Origin(is_argument=True, begins_at=x, reads=x) for x in roots]
        halves = (False,) * len(origins)
        signature = Signature.in_float32(Context(), len(jaxpr.outvars), origins, halves)
        half = self.choose.half
        planner = Planner(self.choose)
        is_half = half != jnp.float32
        recompute &= is_half  # in float32, recomputation saves nothing
        reduce_in_float32 &= is_half
        emitter = Emitter(planner, half, recompute, reduce_in_float32, record=record)
        outs = emitter.emit(self.closed, arrays, signature)
        if half != jnp.float32:
            warn_of_fp8(self.choose.policy, emitter.fp8)
        pairs = zip(outs, jaxpr.outvars, strict=True)
        return [_as_result(x, v.aval, half) for x, v in pairs]


def _as_result(x: Array, aval: Aval, half: DType) -> Array:
    """Returns an array in the dtype and weak type of the function's own result.

    Weak types matter to the caller: a weak float32 number times a bfloat16 array gives
    bfloat16, and a strong float32 number gives float32.
    """
    if not isinstance(x, jax.Array) and aval.dtype != jax.dtypes.float0:
        x = jnp.asarray(x, aval.dtype)  # a literal of the jaxpr
    if aval.dtype == jnp.float32:
        x = to_float32(x, half)
    return _tree.with_weak_type(x, getattr(aval, "weak_type", False))


def trace_call(
    call: FunctionalCall, policy: Policy, compute_dtype: DType
) -> TracedCall:
    """Traces a call, and warns of a policy without effect.

    Strings, functions and all further objects that are no arrays are not traced. The
    tools of `debug` pass shapes in the place of arrays.
    """
    inputs = call.inputs
    is_traced = [_tree.is_array_or_shape(x) for x in inputs]
    treedef: Any = None
    static: list[Any] = []  # the leaves of the result, `None` in place of arrays

    def of_arrays(*arrays: Array) -> Arrays:
        nonlocal treedef, static
        out = call.function(_tree.fill(arrays, is_traced, inputs))
        leaves, treedef = jax.tree.flatten(out)
        static = [None if _tree.is_array(x) else x for x in leaves]
        return [x for x in leaves if _tree.is_array(x)]

    def rebuild(arrays: Arrays) -> PyTree:
        left = iter(arrays)
        leaves = [next(left) if x is None else x for x in static]
        return jax.tree.unflatten(treedef, leaves)

    arrays = _tree.pick(inputs, is_traced)
    names = _source.name_arrays(call.fun, *call.arguments, arrays)
    with _compat.ordinary_primitives():
        closed = jax.make_jaxpr(_source.traced_as(of_arrays, call.fun, names))(*arrays)
    # The warnings are about the user's own program, before anything is planned.
    choose = Chooser(policy, compute_dtype)
    warn_of_policy(choose, closed, names)
    return TracedCall(closed, rebuild, choose, names)


@overload
def amp_stop(fun: F) -> F: ...
@overload
def amp_stop(fun: None = None) -> contextlib.AbstractContextManager[None]: ...
def amp_stop(fun: Any = None) -> Any:
    """Keeps code in its original precision, in the backward pass, too.

    Args:
      fun: a function to decorate, or nothing to get a context manager.

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
    scope = jax.named_scope("amp_stop")
    return scope if fun is None else scope(fun)


# --- functions that are rewritten already ---------------------------------------------

# The mark of a function that `amp` has rewritten. JAX's transforms copy attributes, so
# `jax.grad` of a marked function is marked, too.
_MARK = "_flax_amp_rewritten"


def rewritten(fun: F) -> F:
    """Marks a function that runs in mixed precision."""
    vars(fun)[_MARK] = True
    return fun


def is_rewritten(fun: Any) -> bool:
    """Whether a function runs in mixed precision already."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, _MARK, False)


def refuse_rewritten(caller: str, fun: Any) -> None:
    """Raises a TypeError if `fun` is marked; `caller` is the tool and the function."""
    if is_rewritten(fun):
        tool = caller.partition(":")[0]
        raise TypeError(
            f"{caller} is already rewritten by amp; expected the function before amp: "
            f"{tool}(loss), not {tool}(amp(loss)), its gradient or a train step."
        )
