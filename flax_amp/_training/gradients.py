"""From the user's loss to unscaled gradients, over micro-batches and devices."""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from flax_amp import _tree
from flax_amp._rewriter.transform import amp
from flax_amp._training import scaled_grad
from flax_amp._training.accumulate import (
    AxisName,
    Result,
    accumulate,
    bound_axis,
    synchronize,
    vary,
)
from flax_amp._training.loss import KEYWORDS, RESERVED, declared, pure_loss
from flax_amp._training.scaler import Scaler, checked_scaler
from flax_amp._training.train_state import AmpTrainState
from flax_amp.policy import Policy, PolicyEntries

PyTree = Any


class Options(NamedTuple):
    """What `make_train_step` was asked for, checked."""

    loss_fn: Callable[..., Any]
    has_aux: bool
    lower: Callable[[Callable[..., Any]], Callable[..., Any]]
    redo_on_nan: int
    accum_steps: int
    axis_name: AxisName
    where: str  # for messages
    names: bool  # NNX modules open scopes: the policy asks for some


def make_options(
    loss_fn: Any,
    where: str,
    *,
    has_aux: bool,
    redo_on_nan: Any,
    accum_steps: Any,
    axis_name: AxisName,
    amp_policy: PolicyEntries | None,
    keywords: tuple[str, ...] = KEYWORDS,
    **lowering: Any,
) -> Options:
    """Checks the arguments of `where`; `lowering` are those of `flax_amp.amp`.

    `keywords` are those that the loss may declare.
    """
    if type(accum_steps) is not int or accum_steps < 1:
        raise ValueError(
            f"{where}: {accum_steps=}; expected an integer of at least 1, the "
            "number of micro-batches."
        )
    return Options(
        loss_fn=check_function(loss_fn, f"{where}: loss_fn", keywords),
        has_aux=has_aux,
        lower=amp(amp_policy=amp_policy, **lowering),
        redo_on_nan=scaled_grad.check_retries(redo_on_nan, where),
        accum_steps=accum_steps,
        axis_name=axis_name,
        where=where,
        names=Policy(amp_policy).names_scopes,
    )


def gradients(
    options: Options, state: AmpTrainState, batch: PyTree
) -> tuple[Scaler, jax.Array, Result]:
    """Differentiates the loss, again with lower scales if asked to.

    Returns:
      The new scaler, whether everything is finite, and the result.
    """

    def attempt(scale: Scaler) -> scaled_grad.Attempt:
        result = _compute(options, state, scale, batch)
        return scaled_grad.Attempt(
            forward_finite=scaled_grad.forward_is_finite(
                result.loss, result.variables, state.variables
            ),
            # fp8 statistics count as gradients: those of cotangents depend on the
            # scale.
            grads_finite=_tree.all_finite((result.grads, result.overwrite)),
            outputs=result,
        )

    scaler = checked_scaler(state.scaler)
    return scaled_grad.retry_until_finite(attempt, scaler, options.redo_on_nan)


def metrics_of(
    options: Options,
    scaler: Scaler,
    finite: jax.Array,
    result: Result,
    **more: Any,
) -> dict[str, Any]:
    """Returns what a step reports: its own metrics, and those of `aux` beside them."""
    own = more | dict(
        loss=result.loss,
        grads_finite=finite,
        scaler=scaler["scaler"],
        grad_norm=optax.tree.norm(result.grads),
    )
    if taken := sorted(set(result.aux) & {*own, *RESERVED}):
        raise ValueError(
            f"{options.where}: the loss returned aux with the reserved names {taken}; "
            f"expected others than {sorted({*own, *RESERVED})}, which the step reports "
            "itself. Rename them."
        )
    return own | result.aux


def all_gradients(result: Result, params: PyTree) -> PyTree:
    """Returns a gradient for every parameter, in its dtype: zeros for integers."""
    grads = result.grads
    if result.overwrite is not None:
        grads = {**grads, OVERWRITE_WITH_GRADIENT: result.overwrite}
    _, rest = _tree.partition(params, _tree.is_inexact_array)
    grads = _tree.combine(grads, jax.tree.map(jnp.zeros_like, rest))
    return scaled_grad.cast_like(grads, params)


@contextlib.contextmanager
def explaining_update(where: str) -> Iterator[None]:
    """Names arguments that an optimizer's update requires and a step does not pass."""
    try:
        yield
    except TypeError as error:
        asked = re.search(r"missing \d+ required keyword-only argument.*", str(error))
        if not asked:
            raise
        names = ", ".join(re.findall(r"'(\w+)'", asked[0]))
        raise TypeError(
            f"{where}: the optimizer's update asks for {names} too, as optax.lbfgs and "
            "reduce_on_plateau do; expected one that needs gradients, its state and "
            "the parameters only, such as optax.adamw. Call this one in a loop of your "
            "own, with jax.value_and_grad(flax_amp.amp(loss_fn))."
        ) from error


def fold_in(rngs: dict[str, jax.Array], data: Any) -> dict[str, jax.Array]:
    """Folds a number into every key."""
    return {name: jax.random.fold_in(key, data) for name, key in rngs.items()}


def _fold_key(leaf: Any, data: jax.Array) -> Any:
    """Folds a number into the keys that NNX keeps among the variables."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(leaf.reshape(-1), data)
    return folded.reshape(leaf.shape)


def check_function(
    fn: Any, name: str, keywords: tuple[str, ...] = KEYWORDS
) -> Callable[..., Any]:
    """Returns `fn`, or raises a TypeError if it cannot be called as the steps do."""
    wanted = "a function of (params, batch), or of (model, batch) for NNX"
    if not callable(fn):
        raise TypeError(f"{name} is a {type(fn).__name__}; expected {wanted}.")
    try:
        # As it is called, whatever function it wraps.
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # some builtins have none
        return fn
    try:
        signature.bind(None, None, **{key: None for key in declared(fn, keywords)})
    except TypeError as error:
        allowed = f", with the keywords {' and '.join(keywords)} if it declares them"
        raise TypeError(
            f"{name} has the signature {signature} ({error}); expected {wanted}"
            f"{allowed if keywords else ''}. Put further arguments into the batch, or "
            "bind them with functools.partial."
        ) from None
    return fn


def _compute(
    options: Options, state: AmpTrainState, scale: Scaler, batch: PyTree
) -> Result:
    """Returns the gradients of one batch, over all micro-batches and devices."""
    axis = options.axis_name
    device = bound_axis(axis, options.where)
    # Gradients of device-varying parameters are not summed over devices by JAX itself,
    # whether or not `shard_map` checks varying axes; the mean below is then right.
    params, variables = vary((state.params, state.variables), axis)
    rngs = fold_in(state.rngs, state.step)
    if device is not None:
        rngs = fold_in(rngs, device)
        variables = jax.tree.map(lambda x: _fold_key(x, device), variables)
    loss_fn = pure_loss(
        options.loss_fn,
        options.has_aux,
        state,
        where=options.where,
        names=options.names,
    )
    lowered = options.lower(loss_fn)

    def one_pass(variables: PyTree, batch: PyTree, index: Any = None) -> Result:
        streams = rngs if index is None else fold_in(rngs, index)
        return _differentiate(
            lowered, scale, params, variables, batch, streams, options.axis_name
        )

    if options.accum_steps == 1:
        result = one_pass(variables, batch)
    else:
        floating, _ = _tree.partition(state.params, _tree.is_inexact_array)
        zeros = jax.tree.map(jnp.zeros_like, _split_overwrite(floating)[0])
        zeros = vary(zeros, axis)
        result = accumulate(one_pass, zeros, variables, batch, options.accum_steps)
    return result if axis is None else synchronize(result, axis, state.variables)


def _differentiate(
    loss_fn: Callable[..., Any],
    scale: Scaler,
    params: PyTree,
    variables: PyTree,
    batch: PyTree,
    rngs: PyTree,
    axis_name: AxisName,
) -> Result:
    floating, rest = _tree.partition(params, _tree.is_inexact_array)

    def scaled(floating: PyTree) -> Any:
        params = _tree.combine(floating, rest)
        loss, new_variables, aux = loss_fn(params, variables, batch, rngs)
        loss = vary(jnp.asarray(loss), axis_name)
        return scaled_grad.scale_loss(loss, scale), (loss, new_variables, aux)

    (_, (loss, variables, aux)), grads = jax.value_and_grad(scaled, has_aux=True)(
        floating
    )
    grads, overwrite = _split_overwrite(grads)
    grads = scaled_grad.unscale_grads(grads, scale)
    return Result(grads, overwrite, loss.astype(jnp.float32), variables, aux)


def _split_overwrite(grads: PyTree) -> tuple[PyTree, PyTree]:
    """Takes out Flax's fp8 statistics: values that replace parameters, unscaled."""
    if not isinstance(grads, Mapping) or OVERWRITE_WITH_GRADIENT not in grads:
        return grads, None
    rest = {key: grads[key] for key in grads if key != OVERWRITE_WITH_GRADIENT}
    return rest, grads[OVERWRITE_WITH_GRADIENT]
