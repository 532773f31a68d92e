"""A process that is started, heard, and killed; and what it says itself."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import absl.logging
import jax

_ROOT = pathlib.Path(__file__).parents[1]


class Process:
    """A process that trains, and what it says: a line of JSON for each thing."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        prefix: Sequence[str] = (),
        **environment: str,
    ):
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_COMPILATION_CACHE_DIR": tempfile.gettempdir() + "/flax_amp_faults",
                **environment,
            },
        )
        self._errors: list[str] = []
        # Read, or a process that says much would wait for ever.
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        self._errors += self._process.stderr.readlines()

    def hear(self) -> dict[str, Any]:
        """Returns the next thing that it says.

        Raises:
          RuntimeError: if it failed or ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._end()
            raise RuntimeError(f"the worker ended: {''.join(self._errors)[-2000:]}")
        heard: dict[str, Any] = json.loads(line)
        if "failed" in heard:
            self._end()
            raise RuntimeError(heard["failed"])
        return heard

    def hear_all(self) -> dict[str, Any]:
        """Returns all that it says until it is done, in one."""
        heard: dict[str, Any] = {}
        while "done" not in heard:
            heard |= self.hear()
        self._end()
        return heard

    def go_on(self) -> None:
        """Tells a worker that holds its directory to go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Kills it as `kill -9` does."""
        self._process.kill()
        self._end()

    def terminate(self) -> None:
        """Tells it to save and to end, as a machine does that is taken away."""
        self._process.terminate()

    def _end(self) -> None:
        self._process.wait()
        self._listener.join()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


def say(**facts: Any) -> None:
    """Tells something to the process that started this one."""
    print(json.dumps(facts), flush=True)


def work(task: Callable[[], None]) -> None:
    """Does what this process was started for, and says it if that fails."""
    absl.logging.set_verbosity("fatal")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        task()
    except Exception as error:
        say(failed=f"{type(error).__name__}: {error}")
        raise


def on_disk(directory: pathlib.Path) -> tuple[int, int]:
    """Returns the newest complete step, and the number of half-written ones."""
    names = [p.name for p in directory.iterdir()] if directory.exists() else []
    complete = [int(name) for name in names if name.isdecimal()]
    return max(complete, default=0), sum("tmp" in name for name in names)


@contextlib.contextmanager
def new_folder() -> Iterator[pathlib.Path]:
    """A folder that is there for a while."""
    with tempfile.TemporaryDirectory() as name:
        yield pathlib.Path(name)
