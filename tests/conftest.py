"""What every test gets: the CPU with eight fake devices, strict JAX, fixed seeds.

The environment is set before JAX is imported, so this file imports it last. Tests
that start processes of their own hand `os.environ` on and get the same machine.
"""

import gc
import os
import random
import time

_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import absl.logging  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
absl.logging.set_verbosity("error")  # one save is 59 lines of Orbax's log otherwise


@pytest.fixture(autouse=True)
def _fixed_seeds():
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def key() -> jax.Array:
    """A typed PRNG key, the same in every test."""
    return jax.random.key(0)


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
    """Lets what the test left behind fail here, and not in another test.

    Reads that TensorStore still has under way find their event loop closed; they end
    in its threads soon after, whatever Python does.
    """
    yield
    time.sleep(0.2)
    gc.collect()


@pytest.fixture
def no_leaks():
    """Fails the test when a tracer outlives its trace; slow, so not for every test."""
    with jax.checking_leaks():
        yield
