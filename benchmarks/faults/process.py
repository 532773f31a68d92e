"""A process that is started, heard, and killed."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

_ROOT = pathlib.Path(__file__).parents[2]


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
