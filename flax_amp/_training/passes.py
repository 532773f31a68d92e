"""A pass over a batch: from the loss to unscaled gradients, the same on all devices.

The loss is multiplied by the scale in float32, and its gradients are divided in float32
by the same scale, before `update_scaler` changes the scale. Then come the averages:
over micro-batches in a loop, over devices at once.

Parts of a batch have losses `L_i` and weights `w_i`, such as their numbers of tokens.
The loss of the batch is `sum(w_i * L_i) / sum(w_i)`, and its gradients are averaged in
the same way. A part of weight 0 has no tokens, and its loss is 0/0: a select leaves the
part out, because `0 * nan` is NaN. The weights multiply gradients, and not the loss
before the differentiation: a million tokens times a gradient of 1 overflow in float16.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from flax_amp import _tree
from flax_amp._training import Array, AxisName, PyTree, UserFn
from flax_amp._training.arguments import Options, axes_of
from flax_amp._training.loss import LossOutput, fold_in
from flax_amp._training.scaler import Scaler, scale_loss, unscale_grads


class PassResult(NamedTuple):
    """The result of a forward and backward pass over a batch or a micro-batch."""

    grads: PyTree  # unscaled, float32; `None` for parameters without a gradient
    overwrite: PyTree  # fp8 statistics that Flax passes on as gradients, mostly `None`
    output: LossOutput


def run_passes(
    options: Options,
    loss_fn: UserFn,
    inputs: tuple[PyTree, PyTree, PyTree],
    batch: PyTree,
    args: tuple[PyTree, ...],
    scaler: Scaler,
) -> PassResult:
    """Returns the gradients of a batch, over all micro-batches and devices.

    `inputs` are parameters, variables and keys.
    """
    axis_name = options.axis_name
    old_params, old_variables, rngs = inputs
    params, variables = mark_varying((old_params, old_variables), axis_name)
    if axis_name is not None:  # each device draws its own numbers
        device = jax.lax.axis_index(axis_name)
        rngs = fold_in(rngs, device)
        variables = jax.tree.map(lambda x: _fold_in_if_key(x, device), variables)

    def one_pass(
        params: PyTree, variables: PyTree, batch: PyTree, index: Any = None
    ) -> PassResult:
        keys = rngs if index is None else fold_in(rngs, index)

        def loss_of(params: PyTree) -> LossOutput:
            output: LossOutput = loss_fn(params, variables, batch, keys, *args)
            return output

        result = run_pass(loss_of, (params,), scaler, axis_name, _is_differentiated)
        # Sums over micro-batches and devices need more than half precision.
        loss = result.output.loss.astype(jnp.float32)
        result = result._replace(output=result.output._replace(loss=loss))
        return _without_writes_if_empty(result, params, variables)

    if options.accum_steps == 1:
        result = one_pass(params, variables, batch)
    else:
        # The carry of a scan must vary over the same axes as the gradients that the
        # body adds to the carry.
        floating, _ = _tree.partition(params, _is_differentiated)
        zeros = jax.tree.map(jnp.zeros_like, _split_overwrite(floating)[0])
        zeros = mark_varying(zeros, axis_name)
        start = zeros, params, variables
        result = _accumulate(one_pass, start, batch, options.accum_steps)
    result = average_over_devices(result, axis_name, old_params, old_variables)
    output = result.output
    if output.weight is not None:
        # A sum of weights that is not positive and finite gives no mean, so the step is
        # skipped.
        is_mean = (output.weight > 0) & (output.weight < jnp.inf)
        loss = jnp.where(is_mean, output.loss, jnp.nan)
        result = result._replace(output=output._replace(loss=loss))
    return result


def _is_differentiated(param: Any) -> bool:
    """Whether a loss is differentiated with respect to a parameter.

    `param` has the dtype in which the loss sees the parameter. A parameter that is
    still in half precision is a parameter that no step changes (`untrained.py`).
    """
    return _tree.is_inexact_array(param) and not _tree.is_half(param)


def _fold_in_if_key(leaf: Any, data: Array) -> Any:
    """Folds a number into the keys that NNX keeps among the variables."""
    if not _tree.is_key(leaf):
        return leaf
    folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(leaf.reshape(-1), data)
    return folded.reshape(leaf.shape)


# A micro-batch


def run_pass(
    fn: Callable[..., LossOutput],
    inputs: tuple[PyTree, ...],
    scaler: Scaler,
    axis_name: AxisName,
    is_wanted: Callable[[Any], bool] = _tree.is_inexact_array,
    **kwargs: Any,
) -> PassResult:
    """Differentiates a loss times the scale, and divides the gradients by the scale.

    `kwargs` are for `jax.value_and_grad`.
    """
    # Integers have no gradient, and JAX refuses to differentiate them.
    wanted, rest = _tree.partition(mark_varying(inputs, axis_name), is_wanted)

    def scaled(*wanted: PyTree) -> tuple[Array, LossOutput]:
        output = fn(*_tree.combine(wanted, rest))
        loss = mark_varying(jnp.asarray(output.loss), axis_name)
        return scale_loss(loss, scaler), output._replace(loss=loss)

    (_, output), grads = jax.value_and_grad(scaled, has_aux=True, **kwargs)(*wanted)
    grads, overwrite = _split_overwrite(grads)
    return PassResult(unscale_grads(grads, scaler), overwrite, output)


def _without_writes_if_empty(
    result: PassResult, params: PyTree, variables: PyTree
) -> PassResult:
    """Undoes the writes of an empty pass, which has weight 0.

    `_weigh` leaves out the numbers of such a pass.

    `params` and `variables` are the parameters and variables before the pass.
    """
    output = result.output
    if output.weight is None:
        return result
    counts = output.weight != 0

    def kept(new: Any, old: Any) -> Any:
        return None if new is None else jnp.where(counts, new, old)

    output = output._replace(
        new_params=_tree.map_or_none(kept, output.new_params, params),
        new_variables=_tree.map_or_none(kept, output.new_variables, variables),
    )
    # Of the statistics of all passes, the largest counts.
    overwrite = jax.tree.map(lambda x: jnp.where(counts, x, -jnp.inf), result.overwrite)
    return result._replace(overwrite=overwrite, output=output)


def _split_overwrite(grads: PyTree) -> tuple[PyTree, PyTree]:
    """Takes out Flax's fp8 statistics: unscaled values that replace parameters."""
    if not isinstance(grads, Mapping) or OVERWRITE_WITH_GRADIENT not in grads:
        return grads, None
    rest = {key: grads[key] for key in grads if key != OVERWRITE_WITH_GRADIENT}
    return rest, grads[OVERWRITE_WITH_GRADIENT]


def complete_grads(result: PassResult, params: PyTree) -> PyTree:
    """Returns gradients of all parameters, in their dtypes: zeros where none exists."""
    grads = result.grads
    if result.overwrite is not None:
        grads = {**grads, OVERWRITE_WITH_GRADIENT: result.overwrite}
    # For an optimizer, gradients are a tree like the parameters.
    _, rest = _tree.partition(params, _is_differentiated)
    grads = _tree.combine(grads, jax.tree.map(jnp.zeros_like, rest))
    return cast_like(grads, params)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Casts each floating leaf to the dtype of its counterpart in `like`."""

    def cast(leaf: Any, counterpart: Any) -> Any:
        if not _tree.is_inexact_array(leaf):
            return leaf
        return leaf.astype(jnp.result_type(counterpart))

    return _tree.map_or_none(cast, tree, like)


# All micro-batches


def _accumulate(
    one_pass: Callable[[PyTree, PyTree, PyTree, Array], PassResult],
    start: tuple[PyTree, PyTree, PyTree],
    batch: PyTree,
    accum_steps: int,
) -> PassResult:
    """Averages losses and gradients over micro-batches.

    A pass starts with the parameters and variables that the previous pass has written.
    `start` are zeros for the gradients, the parameters and the variables.
    """
    # The output of the last pass. Only the structure of `last` is used (`None` where
    # nothing changed): the arrays come from the scan.
    last: Any = None
    modules, arrays = take_out(batch)  # they hold no examples

    def body(carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        nonlocal last
        total, params, variables = carry
        index, rows = x
        result = one_pass(params, variables, put_back(modules, rows), index)
        last = output = result.output
        total = jax.tree.map(jnp.add, total, _weigh(result.grads, output.weight))
        # JAX makes constants of the parts of a carry that the body hands on: the
        # parameters that no loss writes are not copied.
        params = _tree.combine(output.new_params, params)
        variables = _tree.combine(output.new_variables, variables)
        of_pass = result.overwrite, output.loss, output.weight, output.aux
        return (total, params, variables), of_pass

    micro_batches = _split_batch(arrays, accum_steps)
    carry, of_passes = jax.lax.scan(
        body, start, (jnp.arange(accum_steps), micro_batches)
    )
    total, params, variables = carry
    overwrite, losses, weights, aux = of_passes
    weight = None if weights is None else weights.sum()
    count = accum_steps if weight is None else weight

    def mean(stacked: Array) -> Array:
        return _weigh(stacked, weights).sum() / count

    def reduced(stacked: Any) -> Any:
        if _has_reduce(stacked):
            return stacked.reduce()
        is_scalar = stacked.ndim == 1 and jnp.issubdtype(stacked.dtype, jnp.inexact)
        return mean(stacked) if is_scalar else stacked

    output = LossOutput(
        loss=mean(losses),
        weight=weight,
        new_params=_tree.partition_like(params, last.new_params),
        new_variables=_tree.partition_like(variables, last.new_variables),
        aux=jax.tree.map(reduced, aux, is_leaf=_has_reduce),
    )
    return PassResult(
        grads=jax.tree.map(lambda g: g / count, total),
        overwrite=jax.tree.map(lambda x: x.max(axis=0), overwrite),
        output=output,
    )


def _weigh(tree: PyTree, weight: Array | None) -> PyTree:
    """Multiplies each array by a weight; where the weight is 0, the result is 0."""
    if weight is None:
        return tree
    return jax.tree.map(lambda x: jnp.where(weight != 0, weight * x, 0), tree)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Placeholder:
    """Stands for a module. A placeholder is static, so transformations keep it."""


# Placeholders are in the list because an NNX step has put placeholders into the batch
# already.
_MODULES = nnx.Pytree, nnx.Variable, _Placeholder


def take_out(tree: PyTree) -> tuple[list[Any], PyTree]:
    """Returns the NNX objects in a tree, and the tree with a placeholder for each.

    NNX objects are modules and variables.
    """
    modules = _tree.nodes(tree, _MODULES)
    return modules, _tree.replace_nodes(tree, _MODULES, [_Placeholder()] * len(modules))


def put_back(modules: Iterable[Any], tree: PyTree) -> PyTree:
    """Returns a tree of `take_out` with the NNX objects in their places."""
    return _tree.replace_nodes(tree, _Placeholder, modules)


def _split_batch(batch: PyTree, accum_steps: int) -> PyTree:
    """Turns every leaf [n, ...] into [accum_steps, n / accum_steps, ...]."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    shapes = {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in leaves}
    sizes = {shape[:1] for shape in shapes.values()}
    if len(sizes) > 1 or any(not size or size[0] % accum_steps for size in sizes):
        seen = "; ".join(f"batch{path} has shape {s}" for path, s in shapes.items())
        raise ValueError(
            f"train_step: {seen}; expected one leading axis, the same for all and "
            f"divisible by {accum_steps=}. Pass an array that does not have one row "
            "for each example as a further argument: train_step(state, batch, weight)."
        )

    # A micro-batch is every accum_steps-th example, not the first n / accum_steps: when
    # the batch is sharded over devices, each micro-batch is then sharded over them too.
    def split(leaf: Array) -> Array:
        shape = (leaf.shape[0] // accum_steps, accum_steps, *leaf.shape[1:])
        return jnp.swapaxes(leaf.reshape(shape), 0, 1)

    return jax.tree.map(split, batch)


def _has_reduce(node: object) -> bool:
    """Whether `node` reduces itself, as the metrics of clu do."""
    return callable(getattr(node, "reduce", None))


# All devices


def mark_varying(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Marks arrays as device-varying, where `shard_map` keeps track of that.

    Marked parameters get a gradient for each device; JAX would otherwise sum them. A
    marked loss has the same derivative whether or not the user has reduced it already.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    axes = tuple(axis for axis in axes_of(axis_name) if axis in manual)

    def mark(leaf: Any) -> Any:
        # A key stays as it is: no average could make it equal on all devices again.
        if not axes or not _tree.is_array(leaf) or _tree.is_key(leaf):
            return leaf
        varying = jax.typeof(leaf).mat.varying
        missing = tuple(axis for axis in axes if axis not in varying)
        if not missing:
            return leaf
        return jax.lax.pcast(leaf, missing, to="varying")

    return jax.tree.map(mark, tree)


def average_over_devices(
    result: PassResult, axis_name: AxisName, params: PyTree, variables: PyTree
) -> PassResult:
    """Makes the result of this device the same on every device of the mapped axes.

    A device of weight 0 counts for nothing. An inf or a NaN of any device with another
    weight reaches all devices, so all devices decide alike. `params` and `variables`
    are the parameters and variables before the pass, the same on every device.
    """
    if axis_name is None:
        return result
    output = result.output
    weight = mark_varying(output.weight, axis_name)
    total = None if weight is None else jax.lax.psum(weight, axis_name)

    def mean(tree: PyTree) -> PyTree:
        tree = mark_varying(tree, axis_name)
        if total is None:
            return jax.lax.pmean(tree, axis_name)
        sums = jax.lax.psum(_weigh(tree, weight), axis_name)
        return jax.tree.map(lambda x: x / total, sums)

    def largest(leaf: Any) -> Any:
        return jax.lax.pmax(mark_varying(leaf, axis_name), axis_name)

    def largest_statistic(leaf: Array) -> Array:
        # A statistic is of all examples: an amax is the largest of the parts. A maximum
        # over devices loses a NaN on some platforms, but no inf.
        leaf = jnp.where(jnp.isfinite(leaf), leaf, jnp.inf)
        if weight is not None:
            leaf = jnp.where(weight == 0, -jnp.inf, leaf)
        return largest(leaf)

    def largest_count(leaf: Array) -> Array:
        if weight is not None and leaf.dtype != jnp.bool_:
            leaf = jnp.where(weight == 0, jnp.iinfo(leaf.dtype).min, leaf)
        return largest(leaf)

    def average_variable(new: Any, old: Array) -> Any:
        # Each device has folded its index into its keys: only the old key is the same
        # on all devices.
        if new is None or _tree.is_key(old):
            return None
        if not _tree.is_inexact_array(new):
            return largest_count(new)
        # The mean of equal numbers may round to another number. The mean of their
        # changes is exactly 0, so a variable that did not change keeps its bits.
        base = jnp.where(jnp.isfinite(old), old, 0)
        average = base + mean(new - base)
        return average.astype(old.dtype)  # a weight is float32

    def mean_of_scalar(leaf: Any) -> Any:
        if _tree.is_inexact_array(leaf) and not leaf.ndim:
            return mean(leaf)
        return leaf

    output = LossOutput(
        loss=mean(output.loss),
        weight=total,
        new_params=_tree.map_or_none(average_variable, output.new_params, params),
        new_variables=_tree.map_or_none(
            average_variable, output.new_variables, variables
        ),
        aux=jax.tree.map(mean_of_scalar, output.aux, is_leaf=_has_reduce),
    )
    overwrite = jax.tree.map(largest_statistic, result.overwrite)
    return PassResult(mean(result.grads), overwrite, output)
