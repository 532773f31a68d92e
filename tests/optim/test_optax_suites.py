"""optax's own tests, with pytree optimizers in the place of optax's.

Here are those that end soon. All of them, which takes half an hour:

    PYTHONPATH=.:tests/optim python -m pytest -p optax_stand_ins -c /dev/null \\
        --pyargs optax.contrib._common_test optax._src.alias_test \\
        optax.transforms._conditionality_test optax.transforms._accumulation_test
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "suite, only",
    [
        ("optax.transforms._conditionality_test", ""),
        ("optax.transforms._accumulation_test", ""),
        ("optax.contrib._common_test", "inject"),
        ("optax._src.alias_test", "inject"),
    ],
)
def test_suite(suite, only):
    try:
        importlib.import_module(suite)
    except ImportError as error:
        pytest.skip(f"the installed optax has no {suite} that can run: {error}")
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    options = ["-p", "optax_stand_ins", "-p", "no:cacheprovider", "-c", os.devnull]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", only, "--pyargs", suite],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
    assert "failed" not in ran.stdout and " passed" in ran.stdout
