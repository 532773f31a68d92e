"""The reader of HLO text behind `benchmarks/`, on written and on compiled modules."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import fp8, hlo
from benchmarks.commands.compiled import compile_for
from benchmarks.hlo_text import parse

pytestmark = pytest.mark.once

# A loop as a TPU prints it: the trip count only in the condition, layouts with tiles,
# a dot as a convolution, a residual stacked in place, an asynchronous copy.
TPU = """
HloModule jit_step, is_scheduled=true, num_partitions=4

%fused_dot (a: f32[64,128], b: bf16[128,32]) -> bf16[64,32] {
  %a = f32[64,128]{1,0:T(8,128)} parameter(0)
  %narrow = bf16[64,128]{1,0:T(8,128)(2,1)} convert(%a)
  %b = bf16[128,32]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %dot = bf16[64,32]{1,0:T(8,128)(2,1)} convolution(%narrow, %b), dim_labels=bf_io->bf, metadata={op_name="jit(step)/while/body/dot_general"}
}

%fused_stack (stack: bf16[5,64,32], new: bf16[64,32], at: s32[]) -> bf16[5,64,32] {
  %stack = bf16[5,64,32]{2,1,0:T(8,128)(2,1)} parameter(0)
  %new = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(1)
  %slice = bf16[1,64,32]{2,1,0:T(8,128)(2,1)} bitcast(%new)
  %at = s32[]{:T(128)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %update = bf16[5,64,32]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%stack, %slice, %at, %zero, %zero)
}

%body (carry: (s32[], f32[64,128], bf16[128,32], bf16[5,64,32])) -> (s32[], f32[64,128], bf16[128,32], bf16[5,64,32]) {
  %carry = (s32[]{:T(128)}, f32[64,128]{1,0:T(8,128)}, /*index=2*/bf16[128,32]{1,0:T(8,128)(2,1)}, bf16[5,64,32]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %x = f32[64,128]{1,0:T(8,128)} get-tuple-element(%carry), index=1
  %w = bf16[128,32]{1,0:T(8,128)(2,1)} get-tuple-element(%carry), index=2
  %y = bf16[5,64,32]{2,1,0:T(8,128)(2,1)} get-tuple-element(%carry), index=3
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %product = bf16[64,32]{1,0:T(8,128)(2,1)S(1)} fusion(%x, %w), kind=kOutput, calls=%fused_dot, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %stacked = bf16[5,64,32]{2,1,0:T(8,128)(2,1)} fusion(%y, %product, %i), kind=kLoop, calls=%fused_stack, backend_config={"window_config":{"estimated_cycles":"500"}}
  ROOT %out = (s32[]{:T(128)}, f32[64,128]{1,0:T(8,128)}, bf16[128,32]{1,0:T(8,128)(2,1)}, bf16[5,64,32]{2,1,0:T(8,128)(2,1)}) tuple(%next, %x, %w, %stacked)
}

%condition (carry.1: (s32[], f32[64,128], bf16[128,32], bf16[5,64,32])) -> pred[] {
  %carry.1 = (s32[]{:T(128)}, f32[64,128]{1,0:T(8,128)}, bf16[128,32]{1,0:T(8,128)(2,1)}, bf16[5,64,32]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%carry.1), index=0
  %limit = s32[]{:T(128)} constant(5)
  ROOT %less = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (p0: f32[64,128], p1: bf16[128,32]) -> bf16[5,64,32] {
  %p0 = f32[64,128]{1,0:T(8,128)} parameter(0), metadata={op_name="p[\\'x\\']"}
  %p1 = bf16[128,32]{1,0:T(8,128)(2,1)} parameter(1)
  %start = s32[]{:T(128)} constant(0)
  %room = bf16[5,64,32]{2,1,0:T(8,128)(2,1)} custom-call(), custom_call_target="AllocateBuffer"
  %copy-start = (f32[64,128]{1,0:T(8,128)S(1)}, f32[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p0)
  %copy-done = f32[64,128]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %init = (s32[]{:T(128)}, f32[64,128]{1,0:T(8,128)S(1)}, bf16[128,32]{1,0:T(8,128)(2,1)}, bf16[5,64,32]{2,1,0:T(8,128)(2,1)}) tuple(%start, %copy-done, %p1, %room)
  %loop = (s32[]{:T(128)}, f32[64,128]{1,0:T(8,128)S(1)}, bf16[128,32]{1,0:T(8,128)(2,1)}, bf16[5,64,32]{2,1,0:T(8,128)(2,1)}) while(%init), condition=%condition, body=%body
  %result = bf16[5,64,32]{2,1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=3
  ROOT %wide = f32[5,64,32]{2,1,0:T(8,128)} convert(%result), metadata={op_name="jit(step)/convert_element_type"}, backend_config={"window_config":{"estimated_cycles":"2500"}}
}
"""  # noqa: E501

# As a GPU prints it: a known trip count, an asynchronous fusion and collective, cuBLAS.
GPU = """
HloModule jit_step, is_scheduled=true

%add (l: f32[], r: f32[]) -> f32[] {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %sum = f32[] add(%l, %r)
}

%wrapped (v: f32[256]) -> bf16[256] {
  %v = f32[256]{0} parameter(0)
  ROOT %cast = bf16[256]{0} convert(%v)
}

%body (c: (s32[], bf16[64,32], bf16[32,64], f32[256])) -> (s32[], bf16[64,32], bf16[32,64], f32[256]) {
  %c = (s32[], bf16[64,32]{1,0}, bf16[32,64]{1,0}, f32[256]{0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %a = bf16[64,32]{1,0} get-tuple-element(%c), index=1
  %b = bf16[32,64]{1,0} get-tuple-element(%c), index=2
  %g = f32[256]{0} get-tuple-element(%c), index=3
  %gemm = (bf16[64,64]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %fusion-start = ((f32[256]{0}), bf16[256]{0}, u32[]) fusion-start(%g), kind=kLoop, calls=%wrapped
  %fusion-done = bf16[256]{0} fusion-done(%fusion-start)
  %all-reduce-start = bf16[256]{0} all-reduce-start(%fusion-done), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  %all-reduce-done = bf16[256]{0} all-reduce-done(%all-reduce-start)
  %all-gather-start = (f32[256]{0}, f32[512]{0}) all-gather-start(%g), channel_id=2, dimensions={0}
  %all-gather-done = f32[512]{0} all-gather-done(%all-gather-start)
  ROOT %t = (s32[], bf16[64,32]{1,0}, bf16[32,64]{1,0}, f32[256]{0}) tuple(%n, %a, %b, %g)
}

%condition (d: (s32[], bf16[64,32], bf16[32,64], f32[256])) -> pred[] {
  %d = (s32[], bf16[64,32]{1,0}, bf16[32,64]{1,0}, f32[256]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (p: (s32[], bf16[64,32], bf16[32,64], f32[256])) -> (s32[], bf16[64,32], bf16[32,64], f32[256]) {
  %p = (s32[], bf16[64,32]{1,0}, bf16[32,64]{1,0}, f32[256]{0}) parameter(0)
  ROOT %w = (s32[], bf16[64,32]{1,0}, bf16[32,64]{1,0}, f32[256]{0}) while(%p), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""  # noqa: E501


def test_figures_of_a_tpu():
    """A loop of 5 turns, the count only in its condition; arrays padded to tiles."""
    x, w, y, scalar = 64 * 128 * 4, 128 * 128 * 2, 64 * 128 * 2, 128 * 4
    dot = x + w + y
    stack = y + y + scalar  # reads the slice, writes it in place
    counter, convert = 3 * scalar, 5 * (y + 2 * y)
    assert hlo.figures(TPU) == {
        "estimated_mcycles": pytest.approx((5 * (1000 + 500) + 2500) / 1e6),
        "unknown_cycles": 0,
        "gb_accessed": (2 * x + 5 * (dot + stack + counter) + convert) / 1e9,
        "converts": 6,
        "kernels": 1 + 5 * 3 + 1,  # the copy; in the loop two fusions and an addition
        "collectives": [],
    }


def test_unknown_cycles_are_counted_and_not_added():
    """As of what a TPU7x's sparse core runs, here twice: in the loop, and after it."""
    unknown = '"estimated_cycles":"9223372036854775807"'
    text = TPU.replace('"estimated_cycles":"500"', unknown)
    figures = hlo.figures(text.replace('"estimated_cycles":"2500"', unknown))
    assert figures["estimated_mcycles"] == pytest.approx(5 * 1000 / 1e6)
    assert figures["unknown_cycles"] == 5 + 1


def test_figures_of_a_gpu():
    """A known count of 3; what is asynchronous counts once."""
    gemm = 2 * 64 * 32 * 2 + 64 * 64 * 2 + 1024
    cast, reduce, gather = 256 * 4 + 256 * 2, 2 * 256 * 2, 256 * 4 + 512 * 4
    assert hlo.figures(GPU) == {
        "estimated_mcycles": None,
        "unknown_cycles": 0,
        "gb_accessed": 3 * (gemm + cast + reduce + gather) / 1e9,
        "converts": 3,
        "kernels": 3 * 4,  # cuBLAS, a fusion and two collectives
        "collectives": [
            dict(kind="all-gather", dtype="f32", bytes=3 * 2048, text_bytes=2048),
            dict(kind="all-reduce", dtype="bf16", bytes=3 * 512, text_bytes=512),
        ],
    }


def test_matmuls_in_fp8_of_a_gpu():
    """A matmul of 64 x 32 x 64 in each of three turns; a gather of scalars."""
    text = GPU.replace("bf16[64,32]", "f8e4m3fn[64,32]")
    text = text.replace("bf16[32,64]", "f8e5m2[32,64]").replace("f32[256]", "f32[]")
    moved = 64 * 32 * 2 + 64 * 64 * 2 + 1024, 4 + 256 * 2, 2 * 256 * 2, 4 + 512 * 4
    found = fp8.compiled(text, on_gpu=True)
    assert found.pop("roofline_ms") == pytest.approx(3e3 * sum(moved) / 4.8e12)
    assert found == {"fp8_dots": 3, "launches": 3 * 4}


def test_products_of_a_step_are_counted():
    """Those of loops as often as they turn, those of nested functions once."""

    def step(x, ws):
        def layer(x, w):
            return jax.jit(lambda x: x @ w)(x), None

        x, _ = jax.lax.scan(layer, x, ws)
        narrow = x.astype(jnp.float8_e4m3fn)
        return x @ narrow.astype(jnp.float32), narrow @ narrow

    found = fp8.products(step, ones(8, 8), ones(5, 8, 8))
    assert found == {"fp8_products": 1, "other_products": 6}


def test_what_cannot_be_counted_is_an_error():
    known = ', backend_config={"known_trip_count":{"n":"3"}}'
    for text, message in {
        GPU.replace(known, ""): "how often the loop w turns",
        TPU.replace("constant(5)", "parameter(1)"): "how often the loop loop turns",
        "HloModule empty": "no ENTRY",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse(text)


def compiled(function, *args):
    here = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    return compile_for(function, args, here)


def ones(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_bytes_agree_with_cost_analysis_where_nothing_loops():
    def convolution(x, k):
        return jax.lax.conv_general_dilated(x, k, (2, 2), "SAME")

    for function, *args in (
        (lambda a, b: jnp.tanh(a @ b), ones(64, 128), ones(128, 32)),
        (convolution, ones(2, 3, 16, 16), ones(8, 3, 3, 3)),
    ):
        executable = compiled(function, *args)
        expected = executable.cost_analysis()["bytes accessed"] / 1e9
        figures = hlo.measure(executable)
        assert figures["gb_accessed"] == pytest.approx(expected, rel=0.05), args
        assert figures["peak_mb"] > 0 and figures["estimated_mcycles"] is None
