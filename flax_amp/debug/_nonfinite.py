"""`find_nonfinite`: which equation made an inf or a NaN, why, and what to do."""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from flax_amp import _tree
from flax_amp._compat import Array, Jaxpr
from flax_amp._rewriter.nnx_bridge import FunctionalCall
from flax_amp._rewriter.transform import amp
from flax_amp._training.precision import Precision, compute_dtype_of
from flax_amp._training.train_state import AmpTrainState
from flax_amp.debug._call import FlatLoss, Target, read_target, with_scopes
from flax_amp.debug._nonfinite_model import (
    MAX_EXAMPLES,
    BadInput,
    Finding,
    NonfiniteReport,
    Verdict,
    examples_text,
)
from flax_amp.debug._nonfinite_run import Cause, Runner, Value, bad_elements, kinds_in
from flax_amp.policy import (
    Policy,
    PolicyEntries,
    check_compute_dtype,
    default_amp_policy,
)

_UPDATES = "updated variables"
_MAX_POLICIES = 3  # the most policies that are tried


@dataclasses.dataclass(frozen=True)
class _Options:
    """The checked arguments."""

    compute_dtype: Any
    amp_policy: PolicyEntries | None
    reduce_dtype: DTypeLike | None
    scale: float
    scaler: dict[str, float]  # of the state, if there is one
    try_policies: bool


def find_nonfinite(
    fun: Any,
    *step: Any,
    compute_dtype: DTypeLike | None = None,
    amp_policy: PolicyEntries | None = None,
    reduce_dtype: DTypeLike | None = None,
    scale: float | None = None,
    try_policies: bool = True,
) -> Any:
    """Finds the equation that made the inf or the NaN in a loss or its gradient.

    There are two ways to call it: `find_nonfinite(fun)(*args)`, where `fun` is the
    function before `amp`, which returns a loss or `(loss, aux)`, and
    `find_nonfinite(state, loss_fn, batch)` for the state and the loss of
    `make_train_step`. The gradient is that with respect to the first argument.

    The program that `amp` emits runs once, outside of `jit`, one equation after the
    other, each in its own dtype. An inf or a NaN counts only if it reaches the loss, a
    gradient or an updated variable, so masks of `-inf` are no false alarm. Further runs
    tell precision from mathematics, and try a policy that mends it.

    Sharp edges:
      XLA may compute fused code with more range than its dtypes have. Then a compiled
      step can be finite where this run is not. Callbacks and `jax.debug.print` run
      again. The whole batch runs in one pass, also if the step splits it.

    Args:
      fun: a float32 function, or an `AmpTrainState`.
      *step: the loss function and a batch, if `fun` is a state.
      compute_dtype: see `flax_amp.amp`; by default that of the state's precision, or
        float16.
      amp_policy: see `flax_amp.amp`.
      reduce_dtype: see `flax_amp.amp`.
      scale: what the loss is multiplied by; by default the scale of the state, or 1.
      try_policies: whether to look for a policy that mends a lack of precision. Each
        policy takes one more run, of at most 4.

    Returns:
      A `NonfiniteReport`, or a function that returns one. Print it.

    Raises:
      TypeError: if an argument is of a wrong kind, or abstract.
      ValueError: if the scale is not a positive number.

    Example:
      >>> import jax, jax.numpy as jnp, flax_amp
      >>> def loss(w, x):
      ...     with jax.named_scope("head"):
      ...         return jnp.mean(jnp.log(x @ w))
      >>> found = flax_amp.find_nonfinite(loss)(jnp.eye(2), jnp.array([[1.0, 0.0]]))
      >>> found.verdict, found.finding.path, found.finding.text
      ('mathematics', 'head', 'log(0) = -inf')
    """
    is_state = isinstance(fun, AmpTrainState)
    word: Precision = fun.precision if is_state else "16-mixed"
    scaler = (
        {key: float(np.max(x)) for key, x in fun.scaler.items()} if is_state else {}
    )
    if scale is None:
        scale = scaler.get("scaler", 1.0)
    if not 0 < scale < float("inf"):
        raise ValueError(
            f"find_nonfinite: scale is {scale}; expected a positive, finite number: "
            "the loss is multiplied by it. Leave it out for that of the state, or 1."
        )
    options = _Options(
        check_compute_dtype(compute_dtype_of(word, compute_dtype)),
        amp_policy,
        reduce_dtype,
        float(scale),
        scaler,
        try_policies,
    )
    names_scopes = Policy(amp_policy).names_scopes
    target = read_target("find_nonfinite", fun, step)

    def found(*args: Any, **kwargs: Any) -> NonfiniteReport:
        _check_concrete((args, kwargs), target.name)

        def use(call: FunctionalCall) -> NonfiniteReport:
            loss = FlatLoss.of(call, f"find_nonfinite: {target.name}")
            return _Search(target, options, loss).report()

        with jax.debug_nans(False), jax.debug_infs(False):
            report, is_named = with_scopes(
                use, target, args, kwargs, "find_nonfinite", needs_scopes=names_scopes
            )
        note = "modules have no names: the code needs equal modules"
        if is_named:
            return report
        return dataclasses.replace(report, notes=(*report.notes, note))

    return found if target.args is None else found(*target.args)


def _check_concrete(args: Any, name: str) -> None:
    for leaf in jax.tree.leaves(args):
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
            raise TypeError(
                f"find_nonfinite: {name} got a {type(leaf).__name__} among its "
                "arguments; expected arrays with values, outside of jax.jit: each "
                "equation is run to see what it makes."
            )


class _Program(NamedTuple):
    """A traced program: a function of the scale and the arrays.

    Attributes:
      closed: its jaxpr. The loss is the first result, then come the updated variables,
        then the gradients.
      names: what each result is called.
      for_loss: whether the forward pass makes it.
      compiled: what its runs have compiled.
    """

    closed: Jaxpr
    names: list[str]
    for_loss: list[bool]
    compiled: dict[Any, Any]


class _Run(NamedTuple):
    """What a run gave: the causes of each result that is not finite, by its name."""

    causes: dict[str, list[Cause]]
    forward: bool  # whether the loss and the variables are finite

    @property
    def finite(self) -> bool:
        return not self.causes

    @property
    def cause(self) -> Cause:
        """The first cause that reaches the loss, or else the variables or gradients."""
        for name in ("loss", _UPDATES):
            if name in self.causes:
                return _earliest(self.causes[name])
        return _earliest([c for causes in self.causes.values() for c in causes])


def _earliest(causes: list[Cause]) -> Cause:
    return min(causes, key=lambda cause: cause.root.order)


@dataclasses.dataclass
class _Search:
    """Finds the cause of one inf or NaN."""

    target: Target
    options: _Options
    loss: FlatLoss

    def __post_init__(self) -> None:
        self._is_batch = self._find_batch()
        self._batch_size = self._find_batch_size()
        trained = _tree.pick(self.loss.arrays, self.loss.trained)
        self._not_examples = frozenset(x.shape for x in trained)

    def _find_batch(self) -> list[bool]:
        """Returns which arrays may hold examples."""
        if self.target.args is None:
            return [not trained for trained in self.loss.trained]
        return [path.split("/")[0] == "batch" for path in self.loss.paths]

    def _find_batch_size(self) -> int | None:
        """Returns the leading size on which most of the arguments agree, if any do."""
        sizes: dict[str, Counter[int]] = {}
        found = zip(self.loss.paths, self.loss.arrays, self._is_batch, strict=True)
        for path, x, chosen in found:
            if chosen and x.ndim:
                sizes.setdefault(path.split("/")[0], Counter())[x.shape[0]] += 1
        votes: Counter[int] = Counter()
        for counts in sizes.values():
            size, count = counts.most_common(1)[0]
            votes[size] += 2 * count > counts.total()
        (first, count), (_, next_count) = [*votes.most_common(2), (0, 0), (0, 0)][:2]
        return first if count > next_count else None

    # --- runs ------------------------------------------------------------------------

    def trace(self, compute_dtype: Any, policy: PolicyEntries | None) -> _Program:
        """Traces the loss and its gradient in a precision."""
        flat, mask = self.loss, self.loss.trained
        is_own = compute_dtype == self.options.compute_dtype
        # Recomputation and shared layers change no number.
        rewritten = amp(
            flat.with_updates,
            compute_dtype=compute_dtype,
            amp_policy=policy,
            recompute="never",
            reduce_dtype=self.options.reduce_dtype if is_own else None,
            merge_layers=False,
        )
        count = 0

        def program(scale: Array, *arrays: Array) -> Any:
            def scaled(trained: list[Array]) -> Any:
                nonlocal count
                loss, updates = rewritten(_tree.fill(trained, mask, arrays))
                count = len(updates)
                return _widen(loss) * scale, (loss, updates)

            trained = _tree.pick(arrays, mask)
            (_, (loss, updates)), grads = jax.value_and_grad(scaled, has_aux=True)(
                trained
            )
            return loss, updates, [_widen(g) / scale for g in grads]

        closed = jax.make_jaxpr(program)(jnp.float32(1), *flat.arrays)
        wrt = [f"gradient of {path}" for path in _tree.pick(flat.paths, mask)]
        names = ["loss", *([_UPDATES] * count), *wrt]
        for_loss = [True] * (1 + count) + [False] * len(wrt)
        return _Program(closed, names, for_loss, {})

    def run(self, program: _Program, scale: float) -> _Run:
        """Runs a program with a scale."""
        values = self._start(program, scale, True)
        causes: dict[str, list[Cause]] = {}
        for name, value in zip(program.names, values, strict=True):
            if value.marks:
                causes.setdefault(name, []).extend(value.marks.values())
        forward = {"loss", _UPDATES}.isdisjoint(causes)
        return _Run(causes, forward)

    def _start(self, program: _Program, scale: float, looks: bool) -> list[Value]:
        runner = Runner(program.compiled, looks, self._batch_size, self._not_examples)
        arrays = [jnp.float32(scale), *self.loss.arrays]
        return runner.start(program.closed, arrays, program.for_loss)

    def is_finite(self, program: _Program, scale: float) -> bool:
        """Whether all results of a program are finite; it looks for no cause."""
        values = self._start(program, scale, False)
        return not any(kinds_in(value.array) for value in values)

    def _is_mended(self, policy: PolicyEntries | None, dtype: Any) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.is_finite(self.trace(dtype, policy), self.options.scale)

    # --- the verdict -----------------------------------------------------------------

    def report(self) -> NonfiniteReport:
        """Runs the loss until the cause is known."""
        options = self.options
        program = self.trace(options.compute_dtype, options.amp_policy)
        run = self.run(program, options.scale)
        if run.finite:
            return self._make("nothing", _NOTHING)
        inputs = self._inputs(run.cause)
        known: dict[str, Any] = dict(
            finding=run.cause.root.finding,
            led_to=None if run.cause.root is run.cause else run.cause.finding,
            inputs=tuple(inputs),
            reached=tuple(run.causes),
        )
        if any(map(self._is_fault, inputs)):
            return self._make("inputs", _advice_for_inputs(inputs), **known)
        if run.forward and options.scale > 1 and self.is_finite(program, 1.0):
            return self._make("scale", self._advice_for_scale(program), **known)
        if options.compute_dtype != jnp.float32:
            wide = self.trace(jnp.float32, None)
            if self.is_finite(wide, options.scale):
                return self._precision(known)
            other = self.run(wide, options.scale).cause.root.finding
            if other and known["finding"] and other.source != known["finding"].source:
                known["in_float32"] = other
        return self._make("mathematics", _advice_for_mathematics(known), **known)

    def _make(self, verdict: Verdict, advice: str, **known: Any) -> NonfiniteReport:
        return NonfiniteReport(
            name=self.target.name,
            compute_dtype=self.options.compute_dtype.name,
            scale=self.options.scale,
            verdict=verdict,
            advice=advice,
            **known,
        )

    def _inputs(self, cause: Cause) -> list[BadInput]:
        """Describes the arguments that have led to a cause."""
        found = []
        for number in sorted(cause.root.arguments):
            i = number - 1  # the scale is the first
            bad, kind = bad_elements(self.loss.arrays[i])
            where = np.argwhere(bad)
            examples: tuple[int, ...] = ()
            if self._is_batch[i] and bad.ndim and bad.shape[0] == self._batch_size:
                rows = np.unique(where[:, 0])
                examples = tuple(map(int, rows[:MAX_EXAMPLES]))
            first = tuple(map(int, where[0]))
            item = BadInput(self.loss.paths[i], kind, len(where), first, examples)
            found.append(item)
        return found

    def _is_fault(self, item: BadInput) -> bool:
        """Whether an argument should not hold what it does; masks hold `-inf`."""
        is_batch = self._is_batch[self.loss.paths.index(item.path)]
        return not is_batch or item.kind != "-inf"

    def _advice_for_scale(self, program: _Program) -> str:
        """Tells at which lower scale the gradients are finite."""
        scaler, scale = self.options.scaler, self.options.scale
        factor = scaler.get("adjust_factor", 2.0)

        def is_finite(steps: int) -> bool:
            lower = scale / factor**steps
            return lower <= 1 or self.is_finite(program, lower)

        low, high = 0, 1
        while not is_finite(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_finite(middle) else (middle, high)
        text = _SCALE.format(scale=max(scale / factor**high, 1.0))
        if not scaler:
            return text
        if scale / factor**high < scaler["min_scaler"]:
            return text + _LOWEST.format(**scaler)
        return text + _SEARCH.format(skips=f"{high} step{'s' * (high > 1)}")

    def _precision(self, known: dict[str, Any]) -> NonfiniteReport:
        finding: Finding | None = known["finding"]
        policies = _keys_for(finding) if self.options.try_policies else []
        given = self.options.amp_policy
        name = "flax_amp.default_amp_policy" if given is None else "your_policy"
        base = default_amp_policy if given is None else given
        for key in policies:
            if self._is_mended({**base, key: jnp.float32}, self.options.compute_dtype):
                advice = _POLICY.format(base=name, key=key)
                return self._make(
                    "precision", advice, policy=((key, "float32"),), **known
                )
        wider = ""
        has_range = self.options.compute_dtype == jnp.bfloat16
        if (
            self.options.try_policies
            and not has_range
            and self._is_mended(self.options.amp_policy, jnp.bfloat16)
        ):
            wider = _BFLOAT16
        return self._make("precision", _NO_POLICY + wider, **known)


def _widen(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _keys_for(finding: Finding | None) -> list[str]:
    """Returns the keys of a policy that keep an equation in float32, inner first."""
    if finding is None or not finding.path:
        return []
    parts = finding.path.split("/")
    keys = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return keys[:_MAX_POLICIES]


_NOTHING = "The loss, its gradients and the updated variables are finite."
_SCALE = "Only the scale is too large: with {scale:g} the gradients are finite."
_SEARCH = " Nothing is to be done: the scaler skips {skips} to get there."
_LOWEST = (
    " The scaler stops at {min_scaler:g}: lower its min_scaler, as in "
    "flax_amp.init_scaler(min_scaler=...)."
)
_POLICY = (
    "In float32 it is finite. This policy was tried and mends it:\n"
    '  amp_policy={base} | {{"{key}": jnp.float32}}'
)
_NO_POLICY = (
    "In float32 it is finite. Keep this code in float32 with flax_amp.amp_stop, or "
    "lower its inputs (a norm before it, a clip, a smaller learning rate)."
)
_BFLOAT16 = " With precision='bf16-mixed' it is finite, too: that was tried."


def _advice_for_inputs(inputs: Sequence[BadInput]) -> str:
    item = inputs[0]
    if item.examples:
        return f"Correct or drop {examples_text(item.examples)}: no precision helps."
    if item.path.startswith("batch"):
        return "Correct the batch: no precision helps."
    return (
        f"{item.path} was not finite before this step: restore an earlier checkpoint, "
        "and look for what wrote it."
    )


_REMEDIES = {
    "log": "keep its operand away from 0, as in jnp.log(jnp.maximum(x, 1e-6))",
    "div": "keep the divisor away from 0, as in x / jnp.maximum(y, 1e-6)",
    "rsqrt": "add an epsilon to its operand",
    "sqrt": "keep its operand above 0",
    "exp": "subtract the maximum first, or clip its operand",
    "gather": "look for an index out of range: such a gather fills in NaN",
    "constant": "look at where the program puts it in",
}
_DERIVATIVE = (
    "the derivative of this line has a pole there, as that of a sqrt or a norm at 0. "
    "Add an epsilon inside. A derivative that a jnp.where drops is computed all the "
    "same: choose its operand, too, as in jnp.where(ok, f(jnp.where(ok, x, 1.0)), 0.0)."
)


def _advice_for_mathematics(known: dict[str, Any]) -> str:
    finding: Finding | None = known[
        "in_float32" if "in_float32" in known else "finding"
    ]
    text = "It is not finite in float32 either, so no policy helps"
    if finding is None:
        return f"{text}: look at the arguments."
    if finding.backward:
        return f"{text}: {_DERIVATIVE}"
    remedy = _REMEDIES.get(finding.primitive, "look at its operands")
    return f"{text}: {remedy}."
