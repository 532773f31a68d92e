"""The reader of HLO text behind `benchmarks/`, on written and on compiled modules."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from benchmarks import hlo
from benchmarks.commands.compiled import compile_for
from benchmarks.hlo_text import parse

pytestmark = pytest.mark.once

HERE = pathlib.Path(__file__).parent
# A loop as a TPU prints it: the trip count only in the condition, layouts with tiles,
# a dot as a convolution, a residual stacked in place, an asynchronous copy.
TPU = (HERE / "tpu.hlo").read_text()
# As a GPU prints it: a known trip count, an asynchronous fusion and collective, cuBLAS.
GPU = (HERE / "gpu.hlo").read_text()


def test_figures_of_a_tpu():
    """A loop of 5 turns, the count only in its condition; arrays padded to tiles."""
    x, w, y, scalar = 64 * 128 * 4, 128 * 128 * 2, 64 * 128 * 2, 128 * 4
    dot = x + w + y
    stack = y + y + scalar  # reads the slice, writes it in place
    counter, convert = 3 * scalar, 5 * (y + 2 * y)
    assert hlo.figures(TPU) == {
        "estimated_mcycles": pytest.approx((5 * (1000 + 500) + 2500) / 1e6),
        "gb_accessed": (2 * x + 5 * (dot + stack + counter) + convert) / 1e9,
        "converts": 6,
        "kernels": 1 + 5 * 3 + 1,  # the copy; in the loop two fusions and an addition
        "fp8_matmuls": 0,
    }


def test_unknown_cycles_make_no_time():
    """As of what a TPU7x's sparse core runs."""
    text = TPU.replace('cycles":"500"', 'cycles":"9223372036854775807"')
    assert hlo.figures(text)["estimated_mcycles"] is None


def test_figures_of_a_gpu():
    """A known count of 3; what is asynchronous counts once."""
    gemm = 2 * 64 * 32 * 2 + 64 * 64 * 2 + 1024
    cast, reduce, gather = 256 * 4 + 256 * 2, 2 * 256 * 2, 256 * 4 + 512 * 4
    assert hlo.figures(GPU) == {
        "estimated_mcycles": None,
        "gb_accessed": 3 * (gemm + cast + reduce + gather) / 1e9,
        "converts": 3,
        "kernels": 3 * 4,  # cuBLAS, a fusion and two collectives
        "fp8_matmuls": 0,
    }


def test_matmuls_in_fp8_of_a_gpu():
    """A matmul of 64 x 32 x 64 in each of three turns; a gather of scalars."""
    text = GPU.replace("bf16[64,32]", "f8e4m3fn[64,32]")
    text = text.replace("bf16[32,64]", "f8e5m2[32,64]").replace("f32[256]", "f32[]")
    moved = 64 * 32 * 2 + 64 * 64 * 2 + 1024, 4 + 256 * 2, 2 * 256 * 2, 4 + 512 * 4
    roofline = pytest.approx(3e3 * sum(moved) / 4.8e12)
    assert hlo.figures(text)["fp8_matmuls"] == 3 and hlo.roofline_ms(text) == roofline


def test_what_cannot_be_counted_is_an_error():
    known = ', backend_config={"known_trip_count":{"n":"3"}}'
    for text, message in {
        GPU.replace(known, ""): "how often the loop w runs",
        TPU.replace("constant(5)", "parameter(1)"): "how often the loop loop runs",
        "HloModule empty": "no ENTRY",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse(text)


def ones(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_bytes_agree_with_cost_analysis_where_nothing_loops():
    def convolution(x, k):
        return jax.lax.conv_general_dilated(x, k, (2, 2), "SAME")

    for function, *args in (
        (lambda a, b: jnp.tanh(a @ b), ones(64, 128), ones(128, 32)),
        (convolution, ones(2, 3, 16, 16), ones(8, 3, 3, 3)),
    ):
        here = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
        executable = compile_for(function, args, here)
        expected = executable.cost_analysis()["bytes accessed"] / 1e9
        figures = hlo.measure(executable)
        assert figures["gb_accessed"] == pytest.approx(expected, rel=0.05), args
        assert figures["peak_mb"] > 0 and figures["estimated_mcycles"] is None
