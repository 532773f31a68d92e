"""What every test gets: the CPU with eight fake devices, and strict JAX.

The environment is set before JAX is imported, so this file imports it last. Tests
that start processes of their own hand `os.environ` on and get the same machine.
"""

import collections
import gc
import os
import time
import zlib
from importlib.metadata import version

# Compiling takes most of the time here, and no program runs for long: so LLVM does not
# optimize, in one thread. Flags that an XLA does not know end the process.
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    "--xla_backend_optimization_level": "0",
    "--xla_cpu_parallel_codegen_split_count": "1",
}
if version("jaxlib").startswith("0.10."):
    _FLAGS["--xla_cpu_use_fusion_emitters"] = "false"  # three times as fast
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [
        _given,
        *(f"{flag}={value}" for flag, value in _FLAGS.items() if flag not in _given),
    ]
)
os.environ["JAX_PLATFORMS"] = "cpu"

import absl.logging  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# Lowering writes the stack beside each equation, a tenth of the time here. One line of
# the stack is enough for the tests.
jax.config.update("jax_traceback_in_locations_limit", 1)
absl.logging.set_verbosity("error")  # one save is 59 lines of Orbax's log otherwise


def pytest_addoption(parser):
    parser.addoption(
        "--quarter",
        type=int,
        choices=range(4),
        help="run only this quarter of the cases of each test, and at least one case; "
        "`.ci/run` runs one quarter on each of two versions of JAX",
    )


@pytest.hookimpl(trylast=True)  # runs after pytest has left out tests by `-m`
def pytest_collection_modifyitems(config, items):
    """Leaves out three quarters of the cases of each test if `--quarter` is given.

    Cases are chosen by a checksum of their names. Every fourth case in order would have
    the same value of the parameter that varies fastest.
    """
    quarter = config.getoption("--quarter")
    if quarter is None:
        return
    tests = collections.defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    chosen = set()
    for cases in tests.values():
        sums = {case: zlib.crc32(case.nodeid.encode()) for case in cases}
        of_quarter = {case for case in cases if sums[case] % 4 == quarter}
        chosen |= of_quarter or {min(cases, key=sums.get)}
    left_out = [item for item in items if item not in chosen]
    items[:] = [item for item in items if item in chosen]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish():
    """Keeps the garbage collector away from the libraries, and lets it run less."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture
def rng() -> np.random.Generator:
    """A NumPy generator, the same in every test."""
    return np.random.default_rng(0)


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    """The eight fake devices in a line, on the axis `data`."""
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture
def count_traces():
    """`fn, traces = count_traces(fn)`: `traces()` is how often JAX has traced it."""

    def wrap(fn):
        calls = []

        def counted(*args, **kwargs):
            calls.append(None)
            return fn(*args, **kwargs)

        return counted, lambda: len(calls)

    return wrap


@pytest.fixture
def settle():
    """Waits until TensorStore's pending reads fail, so that they fail in this test.

    Reads that are still pending find their event loop closed, and end soon after in the
    threads of TensorStore, whatever Python does.
    """
    yield
    time.sleep(0.2)
    gc.collect()


@pytest.fixture(scope="session")
def image():
    """A trained state of Flax's ImageNet example, which `migrate` reads."""
    from _foreign import trained

    return trained()
