"""`faults`: what becomes of checkpoints that are killed, damaged, or cannot be written.

Every fault is done for real. Whatever comes back must be a state of the undisturbed
run, bit for bit, and still be one after further steps; whatever was complete must not
be lost.
"""

import contextlib
import os
import sys
from collections.abc import Iterator

import absl.logging

from benchmarks.faults import files, processes
from benchmarks.faults.training import Reference, Row
from benchmarks.request import Request
from benchmarks.show import made_by, markdown_table, write_page

_WIDTH = {"full": 4096, "tiny": 64}
_VERDICTS = {True: "yes", False: "NO", None: "–"}
_HEADER = ["fault", "times", "what restores", "what is said", "bit for bit"]


def run(asked: Request, kills: int) -> None:
    """Writes faults.md into the folder of results.

    Args:
      asked: size and folder of the request.
      kills: how many processes to kill.

    Raises:
      SystemExit: if something was lost.
    """
    reference = Reference(_WIDTH[asked.size], steps=12 + 4 * kills)
    rows = []
    with quiet():
        for row in every_row(reference, kills):
            rows.append(row)
            print(
                f"{_VERDICTS[row.good]:5}{row.fault} ({row.runs}): {row.outcome}",
                flush=True,
            )
    table = [
        [
            row.fault,
            str(row.runs),
            row.outcome,
            f"`{shortened(row.told)}`" if row.told else "",
            _VERDICTS[row.good],
        ]
        for row in rows
    ]
    text = f"""# Faults

{made_by()}.
Each fault is done for real to a run that saves every step. "bit for bit": whatever was
restored is a state of the undisturbed run, and so it is after further steps; nothing
that was complete was lost.

{markdown_table(_HEADER, table, words=5)}
"""
    write_page(asked.folder / "faults.md", text)
    if bad := [row.fault for row in rows if row.good is False]:
        sys.exit(f"lost or changed: {', '.join(bad)}")


def every_row(reference: Reference, kills: int) -> Iterator[Row]:
    """Does every fault."""
    yield from processes.kills(reference, kills)
    yield from processes.disks(reference)
    yield from processes.two_writers(reference)
    yield from files.every_file(reference)
    yield from files.whole_steps(reference)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops what Orbax and the threads of TensorStore log of each fault, at length."""
    absl.logging.set_verbosity("fatal")
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def shortened(text: str) -> str:
    """Returns a message short enough for a table."""
    text = text.replace("|", "\\|").replace("`", "'")
    return text if len(text) <= 260 else f"{text[:170]} ... {text[-85:]}"
