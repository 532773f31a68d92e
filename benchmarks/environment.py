"""What a figure was measured with: versions, the machine, the command."""

import datetime
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
import shlex
import sys

import flax_amp

_PACKAGES = (
    "jax jaxlib flax optax numpy libtpu jax-cuda12-plugin jax-cuda12-pjrt "
    "jax-cuda13-plugin jax-cuda13-pjrt jmp mixed-precision-for-JAX jaxamp "
    "equinox".split()
)


def versions() -> dict[str, str]:
    """Returns the versions of Python and of each package that is installed.

    Of flax_amp also a digest of its sources: it tells one state of a checkout from
    another, with or without git.
    """
    found = {"python": platform.python_version(), "flax_amp": _own_version()}
    installed = {package: version(package) for package in _PACKAGES}
    return found | {package: text for package, text in installed.items() if text}


def version(package: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def this_run() -> dict[str, object]:
    """Returns what a stored figure says about the run that measured it."""
    now = datetime.datetime.now(datetime.UTC)
    return {
        "command": command_line(),
        "date": now.isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
    }


def machine() -> str:
    """Returns the kind and number of the processors of this machine."""
    cpus = pathlib.Path("/proc/cpuinfo")
    text = cpus.read_text() if cpus.exists() else ""
    found = re.search(r"model name\s*: (.*)", text)
    return f"{os.cpu_count()} x {found[1] if found else platform.machine()}"


def command_line() -> str:
    """Returns the command as it was typed; of an absolute path, only the last part."""
    typed = [pathlib.Path(x).name if x[:1] == "/" else x for x in sys.orig_argv[1:]]
    return shlex.join(["python", *typed])


def _own_version() -> str:
    digest = hashlib.sha256()
    folder = pathlib.Path(flax_amp.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return f"{flax_amp.__version__} (sources {digest.hexdigest()[:8]})"
