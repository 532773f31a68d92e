"""One process of the run: it goes on from the newest checkpoint until it is stopped.

Usage: python -m benchmarks.soak.worker DIRECTORY RECORD SETTINGS

It writes a line of JSON for each restore, step and save into RECORD, as soon as there
is one, and says on its standard output what it saves. With `"saves": false` in SETTINGS
it records what it would save, and saves nothing.
"""

import contextlib
import json
import pathlib
import resource
import signal
import sys
import threading
import warnings
from collections import Counter
from typing import Any, TextIO

import jax
import numpy as np

from benchmarks.faults.training import fingerprint
from benchmarks.process import say, work
from benchmarks.soak import stream
from benchmarks.soak.training import Training, observe, plain_gradients
from flax_amp import AmpTrainState, checkpoint

_COMPILED = "/jax/core/compile/backend_compile_duration"
_EVERY = 10  # steps from one look at the plain gradients to the next


class Worker:
    """A process of the run."""

    def __init__(
        self, directory: str, record: TextIO, settings: dict[str, Any]
    ) -> None:
        self._directory, self._record, self._settings = directory, record, settings
        self._saved: int | None = None
        self._compiled: Counter[str] = Counter()
        self._told_to_stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self._told_to_stop.set())
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def run(self) -> None:
        seed, until = self._settings["seed"], self._settings["until"]
        training = Training(
            seed, self._settings["precision"], self._settings["horizon"]
        )
        state = self._resume(training.first_state)
        with checkpoint.manager(self._directory) as manager:
            while int(state.step) < until and not self._told_to_stop.is_set():
                state = self._step(training, state)
                if int(state.step) % self._settings["save_every"] == 0:
                    self._save(manager, state)
            self._save(manager, state)
        self._write(ended="told" if self._told_to_stop.is_set() else "done")
        say(done=int(state.step))

    def _resume(self, state: AmpTrainState) -> AmpTrainState:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", checkpoint.CheckpointWarning)
            with contextlib.suppress(FileNotFoundError):  # the first process
                state = checkpoint.restore(self._directory, state)
        self._write(
            **self._settings,
            devices=len(jax.devices()),
            restored=int(state.step),
            fingerprint=fingerprint(state.replace(scaler={})),
            warnings=[str(warning.message) for warning in said],
        )
        say(restored=int(state.step))
        return state

    def _step(self, training: Training, state: AmpTrainState) -> AmpTrainState:
        number = int(state.step)
        batch = training.put(stream.batch(self._settings["seed"], number))
        plain = plain_gradients(state, batch) if number % _EVERY == 0 else None
        state, metrics = training.step(state, batch)
        found = jax.device_get((metrics, observe(state), plain))
        metrics, seen, plain = jax.tree.map(lambda x: x.tolist(), found)
        self._write(n=number, metrics=metrics, plain=plain, **seen)
        return state

    def _save(self, manager: Any, state: AmpTrainState) -> None:
        step = int(state.step)
        if step == self._saved:
            return
        self._saved = step
        manager.wait_until_finished()  # of a save that goes on, arrays are alive
        self._write(
            saved=step,
            fingerprint=fingerprint(state.replace(scaler={})),
            replicas_equal=_replicas_equal(state),
            compiled=dict(self._compiled),
            megabytes=_megabytes(),
            arrays=len(jax.live_arrays()),
        )
        say(saving=step)
        if self._settings["saves"]:
            checkpoint.save(manager, state)

    def _hear(self, event: str, duration_secs: float, **more: Any) -> None:
        if event == _COMPILED:
            self._compiled[str(more.get("fun_name"))] += 1

    def _write(self, **facts: Any) -> None:
        self._record.write(json.dumps(facts) + "\n")


def _replicas_equal(state: AmpTrainState) -> bool:
    """Returns whether all devices hold the same bits."""

    def equal(leaf: Any) -> bool:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        copies = {np.asarray(s.data).tobytes() for s in leaf.addressable_shards}
        return len(copies) == 1

    return all(map(equal, jax.tree.leaves(state)))


def _megabytes() -> float:
    """Returns the memory of this process that is resident now."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main(directory: str, record: str, settings: str) -> None:
    # A line is written when it ends, so that a kill loses none.
    with open(record, "w", buffering=1) as lines:
        work(lambda: Worker(directory, lines, json.loads(settings)).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
