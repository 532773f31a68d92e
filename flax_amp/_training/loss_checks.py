"""Looks at the traced loss of a step, before `amp` rewrites the loss.

The weight of a loss must have no derivative. A loss that is divided by a total of its
examples should have a weight. And a parameter that the loss hands on unchanged is not
written.
"""

import warnings
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal
from jax.tree_util import keystr, tree_leaves_with_path

from flax_amp import _compat, _tree
from flax_amp._compat import Jaxpr
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._rewriter.primitives import bodies
from flax_amp._rewriter.transform import TracedCall, trace_call
from flax_amp._training import PyTree, UserFn
from flax_amp._training.arguments import Options
from flax_amp._training.dependence import (
    CALLS,
    CONSTANT,
    EXAMPLE,
    PARAMETER,
    Analysis,
    Dependence,
    OnParameters,
    takes_operands,
)
from flax_amp._training.loss import LossOutput, in_precision, pure_loss
from flax_amp._training.train_state import AmpTrainState
from flax_amp.policy import Policy


def observed_loss(options: Options, state: AmpTrainState) -> UserFn:
    """Returns the loss of a step in its precision; see `pure_loss`."""
    observer = _Observer(options)
    pure = pure_loss(options, state)
    run = in_precision(pure, options, state, observe=observer.check)

    def loss_fn(*inputs: PyTree) -> LossOutput:
        output = run(*inputs)
        if output.weight is not None and not observer.has_looked:
            # A float32 loss without an average was called without a trace, so that
            # `observer` has not seen the loss yet.
            call = FunctionalCall(pure, inputs, {})
            observer.check(trace_call(call, Policy({}), jnp.dtype(jnp.float32)))
        return observer.without_unchanged(output)

    return loss_fn


class _Observer:
    """Looks at the traced loss of one step."""

    def __init__(self, options: Options):
        self._options = options
        self.has_looked = False
        self._has_warned = False
        # The output of the loss, with the number of each result in place of its array.
        self._numbered: Any = None
        # The numbers of the parameters and variables that the loss returns unchanged.
        self._unchanged: set[int] = set()

    def check(self, traced: TracedCall) -> None:
        """Checks the weight of a traced loss, or warns that the weight is missing."""
        self.has_looked = True
        jaxpr, _ = _compat.open_jaxpr(traced.closed)
        # Beside the result of the loss are the changes of its modules, of which a pure
        # loss has none.
        numbered, _ = traced.rebuild(range(len(jaxpr.outvars)))
        self._numbered = numbered
        self._unchanged = _unchanged(traced, numbered)
        same_on = self._options.axes if self._options.accum_steps == 1 else ()
        inputs = [_dependence_of(name) for name in traced.names]
        found = Analysis(same_on).results(traced.closed, inputs)
        if numbered.weight is not None:
            self._check_weight(found[numbered.weight])
        elif self._options.averages:
            self._warn_of_quotient(found[numbered.loss])

    def without_unchanged(self, output: LossOutput) -> LossOutput:
        """Returns an output with `None` for arrays that the loss returns unchanged."""
        if not self._unchanged:
            return output

        def changed(number: Any, x: Any) -> Any:
            return None if number in self._unchanged else x

        numbered = self._numbered
        return output._replace(
            new_params=_tree.map_or_none(
                changed, numbered.new_params, output.new_params
            ),
            new_variables=_tree.map_or_none(
                changed, numbered.new_variables, output.new_variables
            ),
        )

    def _check_weight(self, weight: Dependence) -> None:
        if weight.on_parameters is not OnParameters.BY_DERIVATIVE:
            return
        raise ValueError(
            f"{self._options.loss_name} returned an aux['weight'] that depends on the "
            "parameters; expected the number of tokens or of examples of the loss, "
            "whose derivative is zero: gradients are averaged with weights that are "
            "taken as constants. Compute the weight from the batch, return "
            "jax.lax.stop_gradient(weight), or give a metric another name."
        )

    def _warn_of_quotient(self, loss: Dependence) -> None:
        if loss.division is None or self._has_warned:
            return
        self._has_warned = True
        parts = f"accum_steps={self._options.accum_steps}"
        if self._options.accum_steps == 1:
            parts = f"axis_name={self._options.axis_name!r}"
        where = f" at {loss.division}" if loss.division.file else ""
        warnings.warn_explicit(
            f"{self._options.loss_name} is divided{where} by a total of "
            "its examples, such as a number of tokens, which differs from part to part "
            f"of a batch. With {parts}, the step averages the losses of the parts as "
            "if each part counted the same, which is not the loss of the whole batch. "
            'Return the total as the weight of the loss, (loss, {"weight": total}), '
            "with has_aux=True: the average is then the loss of the whole batch. If "
            'each part is to count the same, return {"weight": 1.0}.',
            UserWarning,
            *loss.division,
        )


def _dependence_of(name: str) -> Dependence:
    """Returns the dependence of an input of the pure loss, by its name."""
    argument = name.partition("[")[0].partition(".")[0]
    return {"params": PARAMETER, "batch": EXAMPLE}.get(argument, CONSTANT)


def _unchanged(traced: TracedCall, numbered: Any) -> set[int]:
    """Returns the results that are parameters or variables as the loss got them.

    If a parameter goes through a call, such as `nnx.remat`, the loss returns a new
    tracer for the same parameter. So the results of the jaxpr are compared with the
    inputs of the jaxpr, and not tracers with tracers.
    """
    input_numbers = _input_numbers(traced.closed)
    written = ("params", numbered.new_params), ("variables", numbered.new_variables)
    found = set[int]()
    for name, tree in written:
        for path, number in tree_leaves_with_path(tree):
            origin = input_numbers[number]
            if origin is not None and traced.names[origin] == f"{name}{keystr(path)}":
                found.add(number)
    return found


def _input_numbers(closed: Jaxpr) -> list[int | None]:
    """Returns the numbers of the inputs that the results of a jaxpr are.

    The number is `None` for a result that is not an input.
    """
    jaxpr, _ = _compat.open_jaxpr(closed)
    known: dict[Any, int] = {v: i for i, v in enumerate(jaxpr.invars)}

    def input_number(atom: Any) -> int | None:
        return None if isinstance(atom, Literal) else known.get(atom)

    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in CALLS or not takes_operands(eqn):
            continue
        for v, number in zip(eqn.outvars, _input_numbers(bodies(eqn)[0]), strict=True):
            if number is None:
                continue
            outer_number = input_number(eqn.invars[number])
            if outer_number is not None:
                known[v] = outer_number
    return [input_number(v) for v in jaxpr.outvars]
