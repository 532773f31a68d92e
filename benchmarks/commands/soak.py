"""`soak`: a long run in float16 that is killed, fed bad batches, and damaged on disk.

Every step and every restart is compared with what must hold; see `soak/history.py`.
"""

import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from benchmarks.request import Request
from benchmarks.show import made_by, markdown_table, write_page
from benchmarks.soak.history import CHECKS, History

_ROOT = pathlib.Path(__file__).parents[2]
_SAVE_EVERY = {"full": 50, "tiny": 10}
_LONGEST = {"full": 120, "tiny": 4}  # saves of one process


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: pathlib.Path) -> None:
    path.write_bytes(b"")


def flip(path: pathlib.Path, at: float = 0.5) -> None:
    """Flips a bit, at so much of the length of a file."""
    content = bytearray(path.read_bytes())
    if content:
        content[int(at * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[pathlib.Path], None]] = {
    "truncated": truncate,
    "emptied": empty,
    "flipped": flip,
    "deleted": pathlib.Path.unlink,
}


def run(asked: Request, steps: int, seed: int) -> None:
    """Writes soak.md into the folder of results.

    Args:
      asked: size and folder of the request.
      steps: the length of the run.
      seed: of the batches, the kills and the damage.

    Raises:
      SystemExit: if a check fails.
    """
    chance, history = random.Random(seed), History(seed)
    with tempfile.TemporaryDirectory() as name:
        folder, number = pathlib.Path(name), 0
        (folder / "steps").mkdir()
        while len(history.rows) < steps:
            damaged = bool(number) and _damage(folder / "steps", chance, history)
            newest, record = max(complete(folder)), folder / f"{number}.jsonl"
            longest = _LONGEST[asked.size] if chance.random() < 0.15 else 6
            saves = chance.randint(1, longest)
            _process(folder, record, [seed, steps, _SAVE_EVERY[asked.size]], saves)
            history.add(record, newest, damaged)
            told = dict(history.problems) or "no problem"
            print(f"{number}: step {len(history.rows)}, {told}", flush=True)
            number += 1
    write_page(asked.folder / "soak.md", page(history))
    if history.problems:
        sys.exit(f"failed: {dict(history.problems)}")


def complete(folder: pathlib.Path) -> list[int]:
    """Returns the steps that are complete, and 0."""
    names = [path.name for path in (folder / "steps").iterdir()]
    return [0, *(int(name) for name in names if name.isdecimal())]


def _damage(steps: pathlib.Path, chance: random.Random, history: History) -> bool:
    """Damages a file of the newest step, sometimes and if there is one before it."""
    newest = sorted(complete(steps.parent))
    if len(newest) < 3 or chance.random() < 0.7:
        return False
    files = sorted(p for p in (steps / str(newest[-1])).rglob("*") if p.is_file())
    kind = chance.choice([*DAMAGE])
    DAMAGE[kind](chance.choice(files))
    history.counts[f"files {kind}"] += 1
    return True


def _process(
    folder: pathlib.Path, record: pathlib.Path, settings: list[int], saves: int
) -> None:
    """Runs a process until it is killed, in a save or between two, or is done."""
    command = [sys.executable, "-m", "benchmarks.soak.worker"]
    command += [str(folder / "steps"), str(record), *map(str, settings)]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}
    cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    chance = random.Random(record.name)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=_ROOT, env={**os.environ, **cache}
    ) as process:
        assert process.stdout is not None
        interval = 0.2
        for _ in range(saves):
            before = time.perf_counter()
            if not process.stdout.readline():
                break  # it is done, or failed
            interval = time.perf_counter() - before
        if process.poll() is None:
            in_a_save = chance.random() < 0.4
            time.sleep(chance.uniform(0, 0.2 if in_a_save else min(interval, 5.0)))
            process.kill()
    if process.returncode not in (0, -9):
        sys.exit(f"a process of the run failed: {process.returncode}")


def page(history: History) -> str:
    """Returns the page in Markdown."""
    rows = [
        [
            name,
            text,
            f"{len(history.problems[name])} problems"
            if history.problems.get(name)
            else "holds",
            str(history.counts[f"checked: {text}"]),
        ]
        for name, text in CHECKS.items()
    ]
    counts = [
        [what, str(count)]
        for what, count in sorted(history.counts.items())
        if not what.startswith("checked")
    ]
    scales = [row["scale"] for row in history.rows]
    slopes = ", ".join(f"{x:.2f}" for x in history.slopes) or "too few saves to tell"
    return f"""# Soak

{made_by()}.

A small network (dense layers, BatchNorm, LayerNorm, dropout, adamw with clipping)
trains {len(history.rows)} steps in float16 through the public API, in processes that
are killed (`SIGKILL`) at any time and within a save. A file of the newest checkpoint is
damaged before some restarts. One batch in a hundred holds a NaN, an infinity or 1e30;
in bursts the losses are weighted so much that gradients overflow. The scale was between
{min(scales, default=0):g} and {max(scales, default=0):g}.

{markdown_table(["check", "what must hold", "verdict", "times"], rows, words=3)}

MB that a process grew with each save, of those with many saves: {slopes}.

{markdown_table(["what", "times"], counts, words=1)}
"""
