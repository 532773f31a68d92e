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


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]


# What becomes of the bytes of a file, which is not empty
_DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "flipped": _flipped,
    "deleted": lambda content: None,
}


def run(asked: Request, steps: int, seed: int) -> None:
    """Writes soak.md into the folder of results; exits with 1 if a check fails."""
    chance, history, number = random.Random(seed), History(seed), 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "steps").mkdir()
        while len(history.rows) < steps:
            damaged = bool(number) and _damage(folder, chance, history)
            newest, record = max(_complete(folder)), folder / f"{number}.jsonl"
            longest = _LONGEST[asked.size] if chance.random() < 0.15 else 6
            settings = [seed, steps, _SAVE_EVERY[asked.size]]
            _process(folder, record, settings, chance.randint(1, longest))
            history.add(record, newest, damaged)
            told = dict(history.problems) or "no problem"
            print(f"{number}: step {len(history.rows)}, {told}", flush=True)
            number += 1
    write_page(asked.folder / "soak.md", _page(history))
    if history.problems:
        sys.exit(f"failed: {dict(history.problems)}")


def _complete(folder: pathlib.Path) -> list[int]:
    """Returns the steps that are complete, and 0."""
    names = [path.name for path in (folder / "steps").iterdir()]
    return sorted([0, *(int(name) for name in names if name.isdecimal())])


def _damage(folder: pathlib.Path, chance: random.Random, history: History) -> bool:
    """Damages a file of the newest step, sometimes and if there is one before it."""
    steps = _complete(folder)
    if len(steps) < 3 or chance.random() < 0.7:
        return False
    found = (folder / "steps" / str(steps[-1])).rglob("*")
    files = sorted(path for path in found if path.is_file() and path.stat().st_size)
    kind, file = chance.choice([*_DAMAGE]), chance.choice(files)
    content = _DAMAGE[kind](file.read_bytes())
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
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


def _page(history: History) -> str:
    rows = []
    for name, text in CHECKS.items():
        found = len(history.problems[name]) if name in history.problems else 0
        verdict = f"{found} problems" if found else "holds"
        rows.append([name, text, verdict, str(history.checked[name])])
    counts = [[what, str(count)] for what, count in sorted(history.counts.items())]
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
