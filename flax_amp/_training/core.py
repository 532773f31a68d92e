"""One training step: from a loss, gradients and a scaler to the selected new state.

It reads from top to bottom. The order of a step is fixed here, because every other
order is wrong somewhere. `passes.py` scales the loss in float32, differentiates,
unscales by the scale that was used, and averages over micro-batches and devices. This
module then decides, once for all devices, whether everything is finite. Only then does
the step clip and update, which is what `tx` does. A step that is not finite changes
nothing but `step`, the scaler and the counters of skipped steps. One select between the
old and the new state does that, so every other leaf keeps its bits. The scale falls
only if the loss is finite and the gradients are not. No scale would mend a bad batch or
an overflow of the activations.

What is trained is an adapter: a train state in `train_step.py`, a model and its
optimizer in `nnx_step.py`.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from flax_amp import _tree
from flax_amp._compat import evaluate
from flax_amp._training.arguments import (
    Array,
    Batch,
    Metrics,
    Options,
    PyTree,
    check_type,
    differences,
)
from flax_amp._training.loss import check_returned
from flax_amp._training.optimizer import OWN_STATE
from flax_amp._training.passes import PassResult, complete_grads, run_passes
from flax_amp._training.scaler import Scaler, update_scaler, validate_scaler
from flax_amp._training.train_state import AmpTrainState


class Update(NamedTuple):
    """What an optimizer makes of a step, before it is decided whether it is applied.

    Attributes:
      before: everything that the step changes, as it was.
      after: the same with the update.
      subject: the state or the model before the update, for `metrics_fn`.
      grads: the gradients, as the optimizer got them.
      params: the parameters before the update, and after it.
    """

    before: PyTree
    after: PyTree
    subject: Any
    grads: PyTree
    params: tuple[PyTree, PyTree]


class Decision(NamedTuple):
    """Whether a step is applied.

    Attributes:
      finite: bool[], whether loss, gradients and updated variables are finite.
      applied: bool[], whether the step is applied: `finite` and, with `check_update`,
        the update finite too.
      selected: `Update.after` if it is applied, or `Update.before`, bit for bit.
      scaler: what `update_scaler` made of `finite`.
    """

    finite: Array
    applied: Array
    selected: PyTree
    scaler: Scaler

    def select_scaler(self, old: Scaler) -> Scaler:
        """Returns the scaler after the step.

        It stays as it is if only the update was not finite, which no other scale mends.
        """
        # The old scaler may also hold counts of skipped steps.
        old = {key: old[key] for key in self.scaler}
        advances = self.applied | ~self.finite
        return _tree.select(advances, self.scaler, old)


class Adapter(Protocol):
    """What a step trains: how it is updated, and what a step leaves, applied or not."""

    @property
    def reserved_names(self) -> Collection[str]:
        """The names that the metrics of the user must not have."""

    def update(self, grads: PyTree, variables: PyTree, scaler: Scaler) -> Update:
        """Applies gradients and updated variables, finite or not."""

    def finish(
        self, update: Update, decision: Decision
    ) -> tuple[Any, Scaler, dict[str, PyTree]]:
        """Returns the result of the step, its scaler, and further metrics.

        The counters of steps and of skipped steps advance even if the step is skipped.
        The one of NNX also writes what was selected into the model and the optimizer.
        """


def run_step(
    options: Options,
    state: AmpTrainState,
    batch: Batch,
    args: tuple[PyTree, ...],
    adapter: Adapter,
) -> tuple[Any, Metrics]:
    """Returns the result of one step, and its metrics.

    `state` is what the loss is called with, `args` are its further arguments.
    """

    # Parameters that are stored in bfloat16 are float32 for the loss. XLA drops a cast
    # to float32 that is followed by one back, so products read what is stored.
    state = state.replace(params=jax.tree.map(_tree.float32_if_bfloat16, state.params))

    def run(scaler: Scaler) -> tuple[PassResult, PyTree]:
        return run_passes(options, state, scaler, batch, args), state.variables

    # Complete, strongly typed, and without the counts of `make_nnx_train_step`.
    scaler = validate_scaler(state.scaler)
    scaler, finite, result = run_with_retries(run, scaler, options.redo_on_nan)
    grads = complete_grads(result, state.params)
    variables = _tree.combine(result.variables, state.variables)
    update = adapter.update(grads, variables, scaler)
    measured = _measure(options, update)
    applied, selected = _select(options, finite, update)
    decision = Decision(finite, applied, selected, scaler)
    out, scaler, more = adapter.finish(update, decision)
    own = more | dict(
        loss=result.loss,
        grads_finite=applied,  # the public name is older than `check_update`
        scaler=scaler["scaler"],
        grad_norm=optax.tree.norm(result.grads),
    )
    return out, _merge_metrics(
        options, own, measured, result.aux, adapter.reserved_names
    )


# The decision about the gradients


def run_with_retries(
    run: Callable[[Scaler], tuple[PassResult, PyTree]], scaler: Scaler, retries: int
) -> tuple[Scaler, Array, PassResult]:
    """Runs one pass, and repeats it as long as lowering the scale may help.

    Args:
      run: runs one pass with a scaler; returns its result, and the variables before it.
      scaler: the scaler of the first pass.
      retries: the number of times that the pass may be repeated.

    Returns:
      `(new_scaler, finite, result)` of the last pass.
    """

    def one_pass(scaler: Scaler) -> tuple[Scaler, Array, tuple[Array, Array, PyTree]]:
        result, variables = run(scaler)
        forward_finite = _tree.all_finite(result.loss)
        forward_finite &= _tree.stays_finite(result.variables, variables)
        # The fp8 statistics of cotangents depend on the scale, as gradients do.
        backward_finite = _tree.all_finite((result.grads, result.overwrite))
        new_scaler = update_scaler(scaler, backward_finite, loss_finite=forward_finite)
        # The scale also stays where it is at its lower limit.
        overflowed = forward_finite & ~backward_finite
        lowered = overflowed & (new_scaler["scaler"] < scaler["scaler"])
        return new_scaler, lowered, (forward_finite, backward_finite, result)

    if retries > 0:
        scaler, last = _repeat(one_pass, scaler, retries)
    else:
        scaler, _, last = one_pass(scaler)
    forward_finite, backward_finite, result = last
    return scaler, forward_finite & backward_finite, result


def _repeat(
    one_pass: Callable[[Scaler], tuple[Scaler, Array, PyTree]],
    scaler: Scaler,
    retries: int,
) -> tuple[Scaler, PyTree]:
    """Returns the scaler and the result of the last pass; see `run_with_retries`.

    The first pass stands before the loop, because its results give the carry its types,
    and under `shard_map` its varying axes. The loss is traced once for both: to bind
    the equations of its jaxpr again takes a small part of the time of a trace.
    """
    static: PyTree = None

    def arrays_of(scaler: Scaler) -> tuple[Scaler, Array, PyTree]:
        nonlocal static
        scaler, lowered, last = one_pass(scaler)
        # A loop can carry arrays only. The other leaves are the same in every pass.
        arrays, static = _tree.partition(last, _tree.is_array)
        return scaler, lowered, arrays

    closed, shapes = jax.make_jaxpr(arrays_of, return_shape=True)(scaler)

    def attempt(scaler: Scaler) -> tuple[Scaler, Array, PyTree]:
        found = evaluate(closed, jax.tree.leaves(scaler))
        # A constant result, such as the gradient of `lambda x: x`, comes back as a
        # number.
        return jax.tree.map(
            lambda x, like: x if _tree.is_array(x) else jnp.asarray(x, like.dtype),
            jax.tree.unflatten(jax.tree.structure(shapes), found),
            shapes,
        )

    def should_retry(carry: tuple[Scaler, Array, PyTree, Array]) -> Array:
        _, lowered, _, retried = carry
        return lowered & (retried < retries)

    def retry(carry: tuple[Scaler, Array, PyTree, Array]) -> Any:
        scaler, _, _, retried = carry
        return *attempt(scaler), retried + 1

    first = *attempt(scaler), jnp.int32(0)
    scaler, _, arrays, _ = jax.lax.while_loop(should_retry, retry, first)
    return scaler, _tree.combine(arrays, static)


# The decision about the update


def _select(options: Options, finite: Array, update: Update) -> tuple[Array, PyTree]:
    """Returns whether an update is applied, and the state after it or the one before.

    An optimizer can make an inf or a NaN of finite gradients: `adam(eps=0)` divides
    zeros, and squares of 1e20 overflow. What it would store is checked, unless the user
    has switched that off. The decision then has to wait for the whole update, which XLA
    computes twice: on a v5e, a 3 x 4096 MLP takes 1.22 times as long and 1.35 times the
    kernels, a small ViT 1.02 times as long and 1.50 times the kernels.

    Rejected: keeping the old value of each single element that is not finite. It is
    free, but the moments of an optimizer would no longer fit each other: after one
    gradient of 1e20, the second moment of Adam stayed small beside its first, and the
    next update was 3e16.

    Raises:
      ValueError: if the update changed structure or shapes. The update itself need not
        fail there: a state that was made for other parameters may broadcast.
    """
    old, new = update.before, update.after
    if changed := differences(old, new, jnp.shape):
        raise ValueError(
            f"{options.caller}: the update changed {'; '.join(changed)}; expected the "
            f"same leaves and shapes as before. {OWN_STATE}"
        )
    if options.check_update:
        # A field of a subclass may become an inf on purpose, such as a best loss that
        # is reset.
        pair = [
            (x.params, x.opt_state) if isinstance(x, AmpTrainState) else x
            for x in (new, old)
        ]
        finite = finite & _tree.stays_finite(*pair)
    # A select, not a `lax.cond` around the update: one rule holds for every leaf, keys
    # and -0.0 included, and XLA cannot fuse across a branch or update in place (178 MB
    # of temporary memory for an MLP on a v5e, 975 MB with the branch).
    return finite, _tree.select(finite, new, old)


# Metrics


def _measure(options: Options, update: Update) -> Metrics:
    """Returns what the user's `metrics_fn` makes of one update."""
    if options.metrics_fn is None:
        return {}
    old, new = update.params
    updates = jax.tree.map(
        lambda x, y: _tree.float32_if_bfloat16(x) - _tree.float32_if_bfloat16(y),
        new,
        old,
    )
    name = f"{options.caller}: metrics_fn"
    found = options.metrics_fn(update.subject, update.grads, updates)
    expected = "a dict of metrics by name."
    check_type(found, Mapping, f"{name}: its result", expected)
    if wrong := [key for key in found if not isinstance(key, str)]:
        raise TypeError(
            f"{name} returned the names {wrong}; expected strings. Write them out, "
            "e.g. {'layer_0': ...}."
        )
    check_returned(found, "metrics", name)
    return dict(found)


def _merge_metrics(
    options: Options,
    own: Metrics,
    measured: Metrics,
    aux: Metrics,
    reserved_names: Collection[str],
) -> Metrics:
    """Returns the metrics of a step: its own ones, `measured`, and those of `aux`.

    An entry of `aux` with the name of another metric becomes `aux/<name>`. So a loss
    that returns itself in `aux`, as Flax's examples do, needs no change: `loss` stays
    the step's. `reserved_names`, those of the state's fields, must not be in `aux`: a
    user who means to change a field by `aux` would not notice that it stays as it was.
    """
    if taken := sorted(measured.keys() & own.keys()):
        raise ValueError(
            f"{options.caller}: metrics_fn returned {taken}, which the step reports "
            "itself; expected other names. Rename them."
        )
    own = own | measured
    if taken := sorted(aux.keys() & set(reserved_names)):
        raise ValueError(
            f"{options.caller}: the loss returned aux with {taken}, fields of its "
            "state; expected other names. Rename them. A field of a subclass changes "
            "in its apply_gradients, or by state.replace after the step."
        )
    names = own.keys() | aux.keys()
    if taken := sorted(k for k in own.keys() & aux.keys() if f"aux/{k}" in names):
        raise ValueError(
            f"{options.caller}: the loss returned aux with {taken}, names of other "
            "metrics, and 'aux/<name>', which it would be called instead, is taken as "
            "well; expected other names. Rename them."
        )
    return own | {f"aux/{key}" if key in own else key: x for key, x in aux.items()}
