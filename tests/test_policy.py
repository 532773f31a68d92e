"""Policies: words, precision functions, lookup by scope, primitive and default."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import flax_amp
from flax_amp._rewriter.primitives import TRAITS, Kind
from flax_amp.policy import (
    InDtype,
    KeyKind,
    Policy,
    long_word,
    read_precision,
    with_matmul_dtype,
    without_fp8,
)

F16, F32, BF16 = jnp.float16, jnp.float32, jnp.bfloat16


def decide(entries, primitive, *scopes):
    return Policy(entries).decide(Primitive(primitive), scopes)


def test_default_policy_is_a_plain_dict_of_functions():
    for entries in (flax_amp.default_amp_policy, flax_amp.jaxamp_policy):
        assert type(entries) is dict
        assert all(callable(fn) for fn in entries.values())
        assert entries["amp_stop"] is flax_amp.use_original_precision
        assert entries["amp_default"] is flax_amp.use_original_precision
    low = {
        key.name
        for key, fn in flax_amp.default_amp_policy.items()
        if fn is flax_amp.use_compute_precision
    }
    matmuls = {name for name, row in TRAITS.items() if row.kind is Kind.MATMUL}
    assert low == matmuls
    assert len(flax_amp.default_amp_policy) == len(low) + 2


# --- precision functions, called as the seed calls them ------------------------------


@pytest.mark.parametrize(
    ("function", "arriving", "original", "expected"),
    [
        (flax_amp.use_compute_precision, (F32, F32), (F32, F32), (F16, F16)),
        (flax_amp.use_original_precision, (F16, F32), (F32, F32), (F32, F32)),
        (flax_amp.use_original_precision, (F16, F16), (F32, BF16), (F32, BF16)),
        (InDtype(BF16), (F32, F16), (F32, F32), (BF16, BF16)),
        (flax_amp.use_fp8(), (F32, F32), (F32, F32), (F16, F16)),
        (flax_amp.use_compute_precision, (jnp.int32,), (jnp.int32,), (jnp.int32,)),
    ],
)
def test_precision_function(function, arriving, original, expected):
    operands = [jnp.ones(2, dtype) for dtype in arriving]
    invars, params = function(F16, original, *operands, axes=(0,))
    assert tuple(x.dtype for x in invars) == expected
    assert params["axes"] == (0,)


def test_result_dtype_parameters_follow():
    params = dict(preferred_element_type=jnp.dtype(F32), out_dtype=None, precision=None)
    _, new = flax_amp.use_compute_precision(F16, (F32,), jnp.ones(2), **params)
    assert new == dict(params, preferred_element_type=jnp.dtype(F16))


# --- words ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "compute_dtype", "matmul_dtype"),
    [
        (("bf16-mixed", "bf16"), BF16, None),
        (("16-mixed", "fp16"), F16, None),
        (("32-true", "fp32"), F32, None),
        (("fp8-mixed", "fp8"), BF16, "fp8"),
    ],
)
def test_words(words, compute_dtype, matmul_dtype):
    for word in words:
        assert read_precision(word) == (compute_dtype, matmul_dtype)
        assert long_word(word) == words[0]


DOT = jax.lax.dot_general_p
FP8 = flax_amp.use_fp8(emulate=True)


def test_a_word_for_fp8_is_a_key():
    for value in ("fp8", flax_amp.use_fp8, flax_amp.use_fp8()):
        for entries in (None, flax_amp.default_amp_policy):
            changed = with_matmul_dtype(entries, value)
            assert Policy(changed).fp8_recipes == {flax_amp.use_fp8()}
            assert decide(changed, "dot_general").function == flax_amp.use_fp8()
    assert with_matmul_dtype(None, None) is None
    mine = flax_amp.default_amp_policy | {DOT: F32, "head": BF16}
    assert not Policy(with_matmul_dtype(mine, FP8)).fp8_recipes
    assert Policy(with_matmul_dtype({"head": FP8}, FP8)).fp8_recipes == {FP8}


def test_a_policy_without_fp8():
    """A scope loses its key: else its norms would be in half precision, too."""
    plain = flax_amp.default_amp_policy
    assert without_fp8(plain | {DOT: FP8, "mlp": "fp8"}) == plain
    both = Policy(plain | {DOT: FP8, "mlp": flax_amp.use_fp8, "head": BF16})
    assert both.fp8_recipes == {FP8, flax_amp.use_fp8()}


def test_what_may_leave_float32():
    plain = flax_amp.default_amp_policy
    for entries in ({}, plain, plain | {DOT: FP8}, plain | {"head": F32}):
        assert not Policy(entries).may_leave_float32
    for value in (BF16, lambda *args, **params: (args, params)):
        assert Policy(plain | {"head": value}).may_leave_float32


# --- lookup --------------------------------------------------------------------------

ORIGINAL, COMPUTE = flax_amp.use_original_precision, flax_amp.use_compute_precision


@pytest.mark.parametrize(
    ("keys", "scopes", "winner"),
    [
        (["Dense_0"], ("Model", "Dense_0"), "Dense_0"),
        (["Dense_0"], ("Model", "Dense_01"), None),
        (["*/LayerNorm_*"], ("Model", "block", "LayerNorm_3"), "*/LayerNorm_*"),
        (["LayerNorm_*"], ("Model", "block", "LayerNorm_3"), "LayerNorm_*"),
        (["block/attn"], ("Model", "block", "attn", "query"), "block/attn"),
        (["block/attn"], ("Model", "block", "mlp"), None),
        (["Model/block"], ("Model", "block"), "Model/block"),
        (["inner", "outer"], ("outer", "inner"), "outer"),  # the outermost wins
        (["outer", "inner"], ("outer", "inner"), "outer"),
        (["amp_stop"], ("Model", "amp_stop"), "amp_stop"),
        (["block_[01]"], ("Model", "block_1"), "block_[01]"),
        (["embed"], ("LM", "embed.attend"), "embed"),
        (["*/embed"], ("LM", "embed.attend"), "*/embed"),
        (["*/embed"], ("LM", "embed_2.attend"), None),
        (["embed.attend"], ("LM", "embed"), None),
        (["embed.attend"], ("LM", "embed.lookup"), None),
        (["*.attend", "embed"], ("LM", "embed.attend"), "*.attend"),
        (["embed.*"], ("LM", "embed"), None),
        (["LM/enc/d"], ("LM.run", "enc.encode", "d"), "LM/enc/d"),
        (["LM/enc/d"], ("LM", "enc", "enc.encode", "d"), "LM/enc/d"),
        (["enc/d"], ("LM", "enc", "enc.encode", "enc.helper", "d"), "enc/d"),
        (["LM/embed"], ("LM", "LM.logits", "embed.attend"), "LM/embed"),
        (["enc.helper/d"], ("enc", "enc.encode", "enc.helper", "d"), "enc.helper/d"),
        (["enc/d"], ("enc", "other.encode", "d"), None),
        (["a/a/b"], ("a", "a", "b"), "a/a/b"),  # a child of the same name
        (["a/b"], ("a", "a", "b"), "a/b"),
        (["layer"], ("layer.0",), None),  # a number is no method
        (["layer.0"], ("layer.0.encode",), "layer.0"),
        (["layers"], ("Model", "layers/0"), "layers"),
        (["layers/0/d"], ("Model", "layers/0.encode", "d"), "layers/0/d"),
        (["Model/layers/*"], ("Model", "layers/0", "d"), "Model/layers/*"),
        (["a"], ("", "a"), "a"),
    ],
)
def test_scope_keys(keys, scopes, winner):
    decision = decide(dict.fromkeys(keys, ORIGINAL), "exp", *scopes)
    assert (decision.key if decision.key_kind is KeyKind.SCOPE else None) == winner


def test_scope_before_primitive_before_default():
    entries = {"here": ORIGINAL, jax.lax.exp_p: COMPUTE, "amp_default": BF16}
    assert decide(entries, "exp", "here").function is ORIGINAL
    assert decide(entries, "exp", "there").function is COMPUTE
    assert decide(entries, "log", "there").function == InDtype(BF16)
    assert decide({}, "log").function is ORIGINAL


@pytest.mark.parametrize("key", ["scope", jax.lax.exp_p, "amp_default", "amp_stop"])
@pytest.mark.parametrize(
    "dtype", [BF16, jnp.dtype(BF16), "bfloat16", F32, np.float32, np.dtype("float16")]
)
def test_a_dtype_as_a_value(key, dtype):
    scope = "amp_stop" if key == "amp_stop" else "scope"
    decision = decide({key: dtype}, "exp", scope)
    assert decision.function == InDtype(dtype)


def test_wrong_entries_are_listed_together():
    wrong = {
        "string": "float12",
        "integer": jnp.int32,
        "complex": np.dtype("complex64"),
        "none": None,
        "array": jnp.float32(1),
        "number": np.float32(1),
        "class": object,
        "raw": InDtype,
        "8 bits": jnp.float8_e4m3fn,
        "named 8 bits": "float8_e5m2",
    }
    entries = {3: ORIGINAL, jnp.exp: ORIGINAL, "scope": BF16} | wrong
    with pytest.raises(TypeError) as error:
        Policy(entries | {jax.lax.exp_p: 3})
    message = str(error.value)
    assert "\n  3: <function use_original" in message and "'scope'" not in message
    for key, value in wrong.items():
        assert f"  {key!r}: {value!r}\n" in message
    assert "float dtypes of at least 16 bits (jnp.float32)" in message
    with pytest.raises(TypeError, match="amp_policy: got list; expected a dict"):
        Policy([ORIGINAL])


@pytest.mark.parametrize("value, seen", [("fp9", "'fp9'"), (BF16, "bfloat16"), (1, 1)])
def test_wrong_matmul_dtype(value, seen):
    with pytest.raises(TypeError, match=f"matmul_dtype: got .*{seen}.*expected 'fp8'"):
        with_matmul_dtype(None, value)


# --- what jaxamp's own test of a linear layer expects, under both policies -----------

amp = functools.partial(flax_amp.amp, compute_dtype=F16)  # jaxamp's default
POLICIES = (flax_amp.default_amp_policy, flax_amp.jaxamp_policy)


def linear(params, x):
    with jax.named_scope("Linear"):
        return params["weight"] @ x + params["bias"]


def linear_in_half(params, x):
    half = jax.tree.map(lambda p: p.astype(F16), params)
    return linear(half, x.astype(F16)).astype(F32)


def linear_with_half_weight(params, x):
    matmul = params["weight"].astype(F16) @ x.astype(F16)
    return matmul.astype(F32) + params["bias"]


@pytest.mark.filterwarnings("ignore:.*of this program runs in:flax_amp.PolicyWarning")
@pytest.mark.filterwarnings("ignore:.*in half precision without:flax_amp.PolicyWarning")
@pytest.mark.parametrize("policy", POLICIES, ids=["default", "jaxamp"])
def test_linear(policy):
    with_policy = functools.partial(amp, amp_policy=policy)
    weight = jax.random.uniform(jax.random.key(0), (10, 2), minval=-1)
    params, x = {"weight": weight, "bias": weight[:, 0]}, jnp.array([5.0, 2.0])
    full, half = linear(params, x), linear_in_half(params, x)
    assert not np.allclose(full, half)
    # The seed's policy adds the bias in half precision, too.
    wanted = linear_with_half_weight(params, x) if policy is POLICIES[0] else half
    np.testing.assert_allclose(with_policy(linear)(params, x), wanted)
    np.testing.assert_allclose(with_policy(linear_in_half)(params, x), half)
    np.testing.assert_allclose(with_policy(flax_amp.amp_stop(linear))(params, x), full)
    by_scope = amp(
        linear, amp_policy=policy | {"Linear": flax_amp.use_original_precision}
    )
    np.testing.assert_allclose(by_scope(params, x), full)
