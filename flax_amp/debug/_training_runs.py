"""Whole training runs for `compare_training`: a run is trained, measured and resumed.

A run has twenty parts, or fewer parts if there are fewer steps. At the end of each part
the host waits for the device: then the losses are read, the time is taken, and from
time to time the state is saved.
"""

import collections
import contextlib
import dataclasses
import inspect
import itertools
import json
import math
import os
import re
import shutil
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from flax_amp import _tree
from flax_amp._checks import describe
from flax_amp._compat import Array
from flax_amp._training.nnx_step import make_nnx_train_step
from flax_amp._training.optimizer import AmpOptimizer
from flax_amp._training.scaler import first_scaler
from flax_amp._training.train_state import AmpTrainState
from flax_amp._training.train_step import make_train_step
from flax_amp.policy import Precision, long_word

# Of a run. The exact number does not matter: a curve needs some points, and the host
# waits for the device at the end of each part. A stored run has numbers for each of its
# parts, so runs that were stored with another number do not fit.
PARTS = 20
# The end of a run is the last tenth of its steps, and of its parts. The exact number
# does not matter: the measure of more steps has less noise, and counts earlier
# parameters.
_TAIL = 10
# Batches. The exact number does not matter: there is a limit because the batches stay
# in memory.
_MOST_IN_TAIL = 50
SAVE_EVERY_S = 60.0  # a save takes a second or less, so about 2 % of the time

Made = AmpTrainState | tuple[nnx.Module, nnx.Optimizer[Any]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arguments that all runs have in common."""

    loss_fn: Callable[..., Any]
    batches: Callable[[int], Iterable[Any]]
    steps: int
    evaluate: Callable[[Any], Any] | None
    # Called with the name of a run, and the number of steps since the call before.
    tick: Callable[[str, int], None]

    @property
    def parts(self) -> list[int]:
        """The number of steps of each part."""
        count = min(PARTS, self.steps)
        bounds = [self.steps * i // count for i in range(count + 1)]
        return [after - before for before, after in itertools.pairwise(bounds)]

    @property
    def tail(self) -> int:
        """How many batches at the end measure where a run ends."""
        return min(max(1, self.steps // _TAIL), _MOST_IN_TAIL)


@dataclasses.dataclass
class Run:
    """The measurements of a run so far: numbers of each part, and CRCs of the start."""

    start: int  # CRC-32 of the first parameters
    batch: int  # CRC-32 of the first batch
    curve: list[float] = dataclasses.field(default_factory=list)
    skipped: list[int] = dataclasses.field(default_factory=list)
    scales: list[float] = dataclasses.field(default_factory=list)
    # `None` for the first part in a process, whose time contains the first call of the
    # step.
    step_ms: list[float | None] = dataclasses.field(default_factory=list)
    temp_mb: float | None = None
    untrained: float | None = None  # the measure of `end` before training
    end: float = math.nan

    def cut(self, parts: int) -> None:
        """Keeps the first `parts` parts; a resumed run trains all later parts again."""
        for numbers in (self.curve, self.skipped, self.scales, self.step_ms):
            del numbers[parts:]


# --- states and models ---------------------------------------------------------------


class _Session(Protocol):
    """A state or a model with its optimizer, and the step that trains them."""

    # The state, or the pair of a model and its optimizer: `flax_amp.checkpoint` saves
    # and restores both kinds.
    trained: Any

    def begin(self, made: Any) -> None:
        """Begins a run with copies of the arrays in `made`, a result of `make`."""

    def step(self, batch: Any) -> dict[str, Any]: ...

    def lower(self, batch: Any) -> Any: ...

    def shown(self) -> Any:
        """Returns the argument for `evaluate`: the state, or a copy of the model."""

    def weights(self) -> Any:
        """Returns the arrays that the loss depends on."""

    def put(self, weights: Any) -> None:
        """Replaces the arrays of `weights()` by copies of the given arrays."""


class _StateSession:
    """An `AmpTrainState` that trains."""

    def __init__(self, made: AmpTrainState, step: Any):
        # Each call of `make` returns new functions, such as the functions of
        # `optax.adamw(...)`. Functions are static, so a step would be compiled again
        # for new functions. With the structure of the first call, the step is compiled
        # once.
        self._structure = jax.tree.structure(made)
        self._step = step
        self.trained: Any = None

    def begin(self, made: AmpTrainState) -> None:
        self.trained = None  # frees memory for the copies
        leaves = [_tree.own(leaf) for leaf in jax.tree.leaves(made)]
        self.trained = jax.tree.unflatten(self._structure, leaves)

    def step(self, batch: Any) -> dict[str, Any]:
        self.trained, metrics = self._step(self.trained, batch)
        return metrics  # type: ignore[no-any-return]

    def lower(self, batch: Any) -> Any:
        return self._step.lower(self.trained, batch)

    def shown(self) -> Any:
        return self.trained

    def weights(self) -> Any:
        return {"params": self.trained.params, "variables": self.trained.variables}

    def put(self, weights: Any) -> None:
        self.trained = self.trained.replace(**jax.tree.map(_tree.own, weights))


class _ObjectsSession:
    """A model of NNX that trains, with its optimizer."""

    def __init__(self, made: Any, step: Any):
        self._graphdef = nnx.graphdef(made)  # of the first call, as in `_StateSession`
        self._step = step
        self.trained: Any = None

    def begin(self, made: Any) -> None:
        self.trained = None
        arrays = jax.tree.map(_tree.own, nnx.state(made))
        self.trained = nnx.merge(self._graphdef, arrays)

    def step(self, batch: Any) -> dict[str, Any]:
        return self._step(*self.trained, batch)  # type: ignore[no-any-return]

    def lower(self, batch: Any) -> Any:
        return self._step.lower(*self.trained, batch)

    def shown(self) -> Any:
        # A copy, because `eval()` would change the model that trains.
        model = nnx.clone(self.trained[0])
        model.eval()
        return model

    def weights(self) -> Any:
        return nnx.state(self.trained[0])

    def put(self, weights: Any) -> None:
        nnx.update(self.trained[0], jax.tree.map(_tree.own, weights))


def check_made(made: Any, call: str) -> Any:
    """Returns `made`, a result of `make`, if that is a state or a pair of NNX."""
    if isinstance(made, AmpTrainState) or _is_nnx(made):
        return made
    raise TypeError(
        f"compare_training: {call} returned {describe(made)}; expected an "
        "AmpTrainState, or a pair (model, optimizer) of NNX."
    )


def _evaluated(evaluate: Callable[[Any], Any], shown: Any) -> float:
    """Returns the number that the user's `evaluate` gives a model or a state."""
    found = evaluate(shown)
    try:
        return float(found)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"compare_training: evaluate returned {describe(found)}; expected a "
            "number, such as a mean loss."
        ) from error


def _is_nnx(made: Any) -> bool:
    is_pair = isinstance(made, tuple) and len(made) == 2
    return is_pair and isinstance(made[0], nnx.Module)


def _in_precision(made: Any, word: Precision | None) -> Any:
    """Returns `made` in a precision, with the scaler for that precision.

    A state or an optimizer that is in this precision already keeps its scaler, which
    the user may have chosen.
    """
    if word is None:
        return made
    if isinstance(made, AmpTrainState):
        if made.precision == word:
            return made
        return made.replace(precision=word, scaler=first_scaler(word))
    if isinstance(made[1], AmpOptimizer) and made[1].precision != word:
        # The runs in all precisions begin with the same objects, so a copy is changed.
        made = nnx.clone(made)
        made[1].precision = word
        made[1].scaler = first_scaler(word)
    return made


def _first_arrays(made: Any) -> Any:
    """Returns the arrays that have to be equal at the start in all precisions."""
    if isinstance(made, AmpTrainState):
        return made.params, made.variables, made.rngs
    return nnx.state(made[0])


def _fingerprint(tree: Any) -> int:
    """Returns a CRC-32 of all arrays and numbers of a tree."""
    crc = 0
    for leaf in jax.tree.leaves(tree):
        if _tree.is_key(leaf):
            leaf = jax.random.key_data(leaf)
        if _tree.is_numeric(leaf):
            crc = zlib.crc32(np.asarray(leaf).tobytes(), crc)
    return crc


# --- the runs of one precision -------------------------------------------------------


class Trainer:
    """Trains the runs of one precision, whose step is compiled once.

    Args:
      plan: the arguments that all runs have in common.
      name: the name of the precision, as the user gave the name.
      options: `precision`, `make` and `loss_fn` of this precision, which take the place
        of the arguments of `compare_training`, and the options of `make_train_step` or
        `make_nnx_train_step`.
      store: the store of the runs, or `None`.
    """

    def __init__(
        self, plan: Plan, name: str, options: Mapping[str, Any], store: "Store | None"
    ):
        rest = dict(options)
        self.name = name
        self._plan = plan
        self._store = store
        self.make: Callable[[int], Any] | None = rest.pop("make", None)
        self._loss_fn = rest.pop("loss_fn", plan.loss_fn)
        word = rest.pop("precision", None)
        where = f"compare_training: precision of {name!r}"
        self._word = None if word is None else long_word(word, where)
        self._options = rest
        self._session: _Session | None = None
        self._temp_mb: float | None = None
        # A stored run is used if the name, the precision and the options are the same
        # now as when the run was stored.
        plain = {k: _plain(v) for k, v in options.items() if k != "precision"}
        self._asked = {"name": name, "precision": self._word, "options": plain}

    def run(self, seed: int, make: Callable[[], Any], reference: "Reference") -> Run:
        """Returns a run, which is trained unless the whole run is stored already.

        `make()` returns the state or the objects that a run with this seed begins with.
        The run trains copies.
        """
        run = None
        if self._store:
            run = self._store.read(self.name, seed, self._asked)
        if run is None or len(run.curve) < len(self._plan.parts):
            run = self._train(seed, make(), run, reference)
        else:
            self._tick(seed, self._plan.steps)
        if self._store:
            self._store.finish(self.name, seed, self._asked, run)
        return run

    def begin(self, made: Any) -> _Session:
        """Begins to train with copies of the arrays in `made`, a result of `make`."""
        made = _in_precision(made, self._word)
        if self._session is None:
            self._session = self._with_step(made)
        self._session.begin(made)
        return self._session

    def _with_step(self, made: Any) -> _Session:
        options = dict(self._options)
        if isinstance(made, AmpTrainState):
            return _StateSession(made, self._made_step(make_train_step, options))
        # An `nnx.Optimizer` that is no `AmpOptimizer` has no precision of its own.
        if not isinstance(made[1], AmpOptimizer):
            options["precision"] = self._word
        return _ObjectsSession(made, self._made_step(make_nnx_train_step, options))

    def _made_step(self, maker: Callable[..., Any], options: dict[str, Any]) -> Any:
        names = inspect.signature(maker).parameters
        if unknown := options.keys() - names:
            raise TypeError(
                f"compare_training: {self.name!r} has the options {sorted(unknown)}, "
                f"which {maker.__name__} does not take; expected options of the step, "
                "make, or loss_fn."
            )
        return maker(self._loss_fn, **options)

    def _batches(self, seed: int) -> Iterator[Any]:
        """Yields the batches of a run; raises a ValueError if there are too few."""
        steps = self._plan.steps
        count = 0
        for batch in itertools.islice(self._plan.batches(seed), steps):
            yield batch
            count += 1
        raise ValueError(
            f"compare_training: batches({seed}) ended after {count} batches; expected "
            f"{steps}, a batch for each step. Return an iterable that is begun anew by "
            "each call and repeats the data, or ask for fewer steps."
        )

    def _train(
        self, seed: int, made: Any, run: Run | None, reference: "Reference"
    ) -> Run:
        """Trains a run, or the remaining parts of a stored run."""
        session = self.begin(made)
        evaluate = self._plan.evaluate
        batches = self._batches(seed)
        first = next(batches)
        began = Run(_fingerprint(_first_arrays(made)), _fingerprint(first))
        if run is not None:
            check_equal(began, run, seed)
        run = run or began
        if self._temp_mb is None:
            # The calls of the step use this compiled step: nothing is compiled twice.
            memory = session.lower(first).compile().memory_analysis()
            self._temp_mb = None if memory is None else memory.temp_size_in_bytes / 1e6
        run.temp_mb = self._temp_mb
        is_reference = reference.trainer is self
        if evaluate and is_reference:
            run.untrained = _evaluated(evaluate, session.shown())
        tail: collections.deque[Any] = collections.deque(maxlen=self._plan.tail)
        with contextlib.ExitStack() as stack:
            manager: Any = None
            if self._store:
                manager = stack.enter_context(self._store.manager(self.name, seed))
                self._store.resume(manager, session, run, self._plan.parts)
            stream = _kept(itertools.chain([first], batches), tail)
            self._train_parts(session, seed, stream, run, manager)
        weights = session.weights()
        session.trained = None  # frees memory for the next run
        parts = max(1, len(run.curve) // _TAIL)
        if sum(run.skipped[-parts:]) == sum(self._plan.parts[-parts:]):
            # All steps of the last parts were skipped: the run trains no longer.
            run.end = math.inf
        elif evaluate:
            run.end = statistics.fmean(run.curve[-parts:])
        else:
            run.end = reference.loss(self.name, weights, tail)
            if is_reference:
                begun = self.begin(made).weights()
                run.untrained = reference.loss(self.name, begun, tail)
        return run

    def _train_parts(
        self,
        session: _Session,
        seed: int,
        batches: Iterator[Any],
        run: Run,
        manager: Any,
    ) -> None:
        """Trains the parts that a run lacks, and saves the state from time to time."""
        resumed = len(run.curve)
        saved = time.monotonic()
        for part, steps in enumerate(self._plan.parts):
            now = itertools.islice(batches, steps)
            if part < resumed:
                for _ in now:
                    self._tick(seed)
                continue
            if manager and part > resumed and time.monotonic() - saved >= SAVE_EVERY_S:
                self._save(session, seed, run, manager)
                saved = time.monotonic()
            self._train_part(session, seed, now, run)
            if part == resumed:
                run.step_ms[-1] = None

    def _tick(self, seed: int, steps: int = 1) -> None:
        self._plan.tick(f"{self.name}, seed {seed}", steps)

    def _train_part(
        self, session: _Session, seed: int, batches: Iterator[Any], run: Run
    ) -> None:
        evaluate = self._plan.evaluate
        metrics: list[dict[str, Any]] = []
        began = time.perf_counter()
        for batch in batches:
            of_step = session.step(batch)
            names = ("loss", "grads_finite", "scaler")
            metrics.append({name: of_step[name] for name in names})
            self._tick(seed)
        # This waits for the device, so that the time is right.
        metrics = jax.device_get(metrics)
        run.step_ms.append(1e3 * (time.perf_counter() - began) / len(metrics))
        if evaluate:
            run.curve.append(_evaluated(evaluate, session.shown()))
        else:
            run.curve.append(statistics.fmean(float(x["loss"]) for x in metrics))
        run.skipped.append(sum(not x["grads_finite"] for x in metrics))
        run.scales.append(float(metrics[-1]["scaler"]))

    def _save(self, session: _Session, seed: int, run: Run, manager: Any) -> None:
        from flax_amp import checkpoint

        assert self._store
        self._store.write(self.name, seed, self._asked, run)
        checkpoint.save(manager, session.trained, force=True)


class Reference:
    """Measures the loss of all trained models in the same way: with the reference step.

    The loss that a precision reports has the errors of that precision. A precision that
    rounds the terms of a cross entropy to the same number reports a loss of 0, and
    would look like the best precision.
    """

    def __init__(self, trainer: Trainer, make: Callable[[], Any]):
        self.trainer = trainer
        self._make = make

    def loss(self, name: str, weights: Any, batches: Iterable[Any]) -> float:
        """Returns the mean loss of a model over some batches."""
        made = self._make()
        losses = []
        for batch in batches:
            # The step of the reference is compiled already. Its loss is from before the
            # update, and the trained state is not used: each step begins with new
            # copies.
            session = self.trainer.begin(made)
            weights = _cast_up_as(session.weights(), weights)
            if _shapes(session.weights()) != _shapes(weights):
                raise ValueError(
                    f"compare_training: {name!r} trains other parameters than "
                    f"{self.trainer.name!r}, whose loss measures both; expected the "
                    "same shapes and names. Pass evaluate=, which is called with each "
                    "model."
                )
            session.put(weights)
            losses.append(session.step(batch)["loss"])
            session.trained = None
        return statistics.fmean(map(float, losses))


def _cast_up_as(wanted: Any, weights: Any) -> Any:
    """Casts bfloat16 weights to float32, except where `wanted` is in half precision."""
    if _shapes(wanted)[0] != _shapes(weights)[0]:
        return weights

    def cast(like: Array, x: Array) -> Array:
        if _tree.is_half(like):
            return x
        return _tree.float32_if_bfloat16(x)

    return jax.tree.map(cast, wanted, weights)


def _shapes(tree: Any) -> tuple[Any, Any]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _kept(batches: Iterator[Any], tail: collections.deque[Any]) -> Iterator[Any]:
    """Yields batches, and keeps the last batches in `tail`."""
    for batch in batches:
        tail.append(batch)
        yield batch


def check_equal(run: Run, other: Run, seed: int, *, starts: bool = True) -> None:
    """Raises a ValueError unless two runs have begun alike."""
    same_start = run.start == other.start or not starts
    for is_same, function, what in (
        (same_start, "make", "parameters"),
        (run.batch == other.batch, "batches", "first batch"),
    ):
        if not is_same:
            raise ValueError(
                f"compare_training: two calls of {function}({seed}) differ in the "
                f"{what}; expected the same. Make all that is random in {function} "
                "from the seed, and return new objects from each call."
            )


# --- on disk -------------------------------------------------------------------------


class Store:
    """A directory with a JSON file for each run, and a checkpoint of an unfinished run.

    The numbers of a part are written before the checkpoint at the end of the part. A
    kill between the two writes leaves too many numbers, which `resume` cuts.
    """

    def __init__(self, directory: str | os.PathLike[str], question: dict[str, Any]):
        self._folder = Path(directory)
        path = self._folder / "question.json"
        if path.exists():
            there = json.loads(path.read_text())
            if differ := [key for key in question if there.get(key) != question[key]]:
                seen = ", ".join(f"{key}={there.get(key)!r}" for key in differ)
                asked = ", ".join(f"{key}={question[key]!r}" for key in differ)
                raise ValueError(
                    f"compare_training: {directory} has runs with {seen}; expected "
                    f"{asked}. Use another directory."
                )
        self._folder.mkdir(parents=True, exist_ok=True)
        _write(path, question)

    def _path(self, name: str, seed: int) -> Path:
        return self._folder / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', name)}-{seed}"

    def _numbers(self, name: str, seed: int) -> Path:
        path = self._path(name, seed)
        return path.with_name(f"{path.name}.json")

    def read(self, name: str, seed: int, asked: dict[str, Any]) -> Run | None:
        """Returns the stored measurements of a run, or `None`."""
        path = self._numbers(name, seed)
        if not path.exists():
            return None
        stored = json.loads(path.read_text())
        if stored["asked"] != asked:
            raise ValueError(
                f"compare_training: {path} has a run of {stored['asked']}; expected "
                f"{asked}. Use another name or another directory."
            )
        return Run(**stored["run"])

    def write(self, name: str, seed: int, asked: dict[str, Any], run: Run) -> None:
        """Stores the measurements of a run so far."""
        path = self._numbers(name, seed)
        _write(path, {"asked": asked, "run": dataclasses.asdict(run)})

    def finish(self, name: str, seed: int, asked: dict[str, Any], run: Run) -> None:
        """Stores the measurements of a finished run, and removes its checkpoints."""
        self.write(name, seed, asked, run)
        shutil.rmtree(self._path(name, seed), ignore_errors=True)

    def manager(self, name: str, seed: int) -> Any:
        """Opens the manager of the checkpoints of a run."""
        # The import of Orbax takes as long as the import of JAX, and only a run with a
        # directory needs Orbax.
        from flax_amp import checkpoint

        return checkpoint.manager(self._path(name, seed), max_to_keep=1)

    def resume(
        self, manager: Any, session: _Session, run: Run, parts: list[int]
    ) -> None:
        """Continues with the newest checkpoint of a run, if a checkpoint exists."""
        from flax_amp import checkpoint

        # `make` may have restored a state that had trained before: the steps of the run
        # count from there.
        first = _step_of(session.trained)
        if manager.latest_step() is not None:
            session.trained = checkpoint.restore(manager, session.trained)
        ends = [0, *itertools.accumulate(parts)]
        run.cut(ends.index(_step_of(session.trained) - first))


def _step_of(trained: Any) -> int:
    if isinstance(trained, AmpTrainState):
        return int(np.asarray(trained.step))
    _, optimizer = trained
    return int(np.asarray(optimizer.step[...]))


def _plain(option: Any) -> bool | int | float | str | None:
    """Returns a number, a word or `None` unchanged, and the name of anything else."""
    if option is None or isinstance(option, bool | int | float | str):
        return option
    return name_of(option)


def name_of(function: Any) -> str:
    """Returns the name of a function; without a name, the name of the type."""
    return getattr(function, "__name__", type(function).__name__)


def _write(path: Path, content: Any) -> None:
    """Replaces a file at once, or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)
