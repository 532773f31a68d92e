"""The reader of HLO text behind `benchmarks/`, on written and on compiled modules."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import hlo
from benchmarks.hlo_text import parse, parse_shapes

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


def compiled(function, *args):
    return jax.jit(function).lower(*args).compile()


def ones(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


class TestParse:
    def test_finds_trip_count_in_condition_of_tpu_loop(self):
        module = parse(TPU)
        fused = {"fused_dot": 5, "fused_stack": 5}
        assert module.runs == ({"main": 1, "body": 5}, fused)
        assert module.unknown_loops == []

    def test_finds_known_trip_count(self):
        assert parse(GPU).runs[0] == {"main": 1, "body": 3}

    def test_counts_a_loop_of_unknown_length_once_and_names_it(self):
        text = GPU.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")
        module = parse(text)
        assert module.runs[0] == {"main": 1, "body": 1}
        assert module.unknown_loops == ["w"]

    def test_shapes(self):
        shape, other = parse_shapes("(bf16[3,100]{1,0:T(8,128)(2,1)S(1)}, pred[])")
        assert (shape.dtype, shape.dims) == ("bf16", (3, 100))
        assert shape.bytes == 600
        assert shape.padded_bytes == 8 * 128 * 2
        assert (other.dims, other.bytes) == ((), 1)
        sizes = {"s4[3]": 2, "f8e4m3fn[3]": 3, "f4e2m1fn[4]": 2, "c64[1]": 8}
        assert {text: parse_shapes(text)[0].bytes for text in sizes} == sizes

    def test_text_without_entry(self):
        with pytest.raises(ValueError, match="no ENTRY"):
            parse("HloModule empty\n")


class TestTpuText:
    def test_estimated_seconds(self):
        cycles = 5 * (1000 + 500) + 2500
        assert hlo.estimated_seconds(TPU, hz=1e6) == pytest.approx(cycles / 1e6)

    def test_bytes(self):
        x, w, y, scalar = 64 * 128 * 4, 128 * 128 * 2, 64 * 128 * 2, 128 * 4
        dot = x + w + y
        stack = y + y + scalar  # reads the slice, writes it in place
        counter = 3 * scalar
        convert = 5 * (y + 2 * y)
        expected = 2 * x + 5 * (dot + stack + counter) + convert
        assert hlo.bytes_accessed(TPU) == expected

    def test_dots(self):
        assert hlo.flops_by_dtype(TPU) == {"bf16": 5 * 2 * 64 * 128 * 32}

    def test_converts(self):
        assert hlo.converts(TPU) == 6


class TestGpuText:
    def test_kernels(self):
        assert hlo.kernels(GPU) == 12  # cuBLAS, a fusion and two collectives

    def test_dots(self):
        assert hlo.flops_by_dtype(GPU) == {"bf16": 3 * 2 * 64 * 32 * 64}

    def test_asynchronous_collectives_count_once(self):
        assert hlo.collectives(GPU) == [
            dict(kind="all-gather", dtype="f32", bytes=3 * 2048, text_bytes=2048),
            dict(kind="all-reduce", dtype="bf16", bytes=3 * 512, text_bytes=512),
        ]

    def test_converts_of_asynchronous_fusion(self):
        assert hlo.converts(GPU) == 3

    def test_no_estimate(self):
        assert hlo.estimated_seconds(GPU) == 0


class TestCompiled:
    """Against what XLA itself says of programs without loops, on the CPU."""

    @pytest.mark.parametrize(
        "function, args",
        [
            (lambda a, b: jnp.tanh(a @ b), (ones(64, 128), ones(128, 32))),
            (
                lambda a, b: jnp.einsum("bij,bkj->bik", a, b),
                (ones(4, 32, 16), ones(4, 8, 16)),
            ),
            (
                lambda x, k: jax.lax.conv_general_dilated(x, k, (2, 2), "SAME"),
                (ones(2, 3, 16, 16), ones(8, 3, 3, 3)),
            ),
        ],
        ids=["dot", "batched dot", "convolution"],
    )
    def test_flops_and_bytes_agree_with_cost_analysis(self, function, args):
        executable = compiled(function, *args)
        cost = executable.cost_analysis()
        text = executable.as_text()
        (flops,) = hlo.flops_by_dtype(text).values()
        assert flops == pytest.approx(cost["flops"], rel=0.02)
        assert hlo.bytes_accessed(text) == pytest.approx(
            cost["bytes accessed"], rel=0.05
        )

    def test_loop_counts_as_often_as_it_turns(self):
        def step(x, ws):
            def layer(x, w):
                return jnp.tanh(x @ w.astype(jnp.float32)), None

            return jax.lax.scan(layer, x, ws)[0].sum()

        args = ones(32, 64), ones(7, 64, 64, dtype=jnp.bfloat16)
        text = compiled(jax.grad(step, argnums=1), *args).as_text()
        assert parse(text).unknown_loops == []
        flops = sum(hlo.flops_by_dtype(text).values())
        assert flops == pytest.approx(7 * 3 * 2 * 32 * 64 * 64, rel=0.1)
        assert hlo.converts(text) >= 7

    def test_longest_branch_of_a_conditional_counts(self):
        def step(pred, x):
            return jax.lax.cond(pred, lambda x: jnp.tanh(x @ x) @ x, lambda x: x, x)

        text = compiled(step, ones(dtype=jnp.bool_), ones(32, 32)).as_text()
        (flops,) = hlo.flops_by_dtype(text).values()
        assert flops == 2 * 2 * 32**3

    def test_measure(self):
        targets = pytest.importorskip("benchmarks.targets")
        device = jax.devices("cpu")
        build = targets.compile_for(device, lambda x: x * 2 + 1, (ones(8, 8),))
        figures = hlo.measure(build)
        assert figures["estimated_ms"] is None
        assert figures["gb_accessed"] == pytest.approx(2 * 256 / 1e9, rel=0.1)
        assert figures["dots"] == {} and figures["collectives"] == []
        assert min(figures[f"{stage}_s"] for stage in ("trace", "lower", "compile")) > 0
