"""Checkpoints: a manager, saving, and a restore that names the paths that do not fit.

The state itself saves and restores with plain Orbax calls. This package adds the code
that people otherwise write around those calls: `manager` opens Orbax's manager with
defaults for training, `save` writes in the background, `restore` verifies the files
before reading and falls back to the newest intact step with a warning, `migrate` reads
the checkpoints of foreign programs, and `verify` lists the steps of a directory.
README.md in this folder says more.
"""

from flax_amp.checkpoint._damage import CheckpointSaveError as CheckpointSaveError
from flax_amp.checkpoint._damage import CheckpointWarning as CheckpointWarning
from flax_amp.checkpoint._damage import CorruptCheckpointError as CorruptCheckpointError
from flax_amp.checkpoint._manager import manager as manager
from flax_amp.checkpoint._migrate import migrate as migrate
from flax_amp.checkpoint._report import StepReport as StepReport
from flax_amp.checkpoint._report import verify as verify
from flax_amp.checkpoint._state import restore as restore
from flax_amp.checkpoint._state import save as save
