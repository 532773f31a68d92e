"""One word for the precision, over policy.py and all files of `_training`.

The word says the dtype that steps compute in, and the scaler of a new run.
"""

import functools
import warnings
from typing import get_args

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx, serialization

from _steps import linear_objects, linear_state, raised
from flax_amp import (
    AmpOptimizer,
    AmpTrainState,
    Precision,
    amp,
    checkpoint,
    init_scaler,
    make_eval_step,
    make_nnx_train_step,
    make_train_step,
    no_scaler,
    static_scaler,
)
from helpers import dtypes_of

pytestmark = pytest.mark.once

X = jnp.ones((2, 3))
WORDS = {
    "bf16-mixed": ("bfloat16", no_scaler()),
    "16-mixed": ("float16", init_scaler()),
    "32-true": ("float32", no_scaler()),
}
ALIASES = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}


def linen_state(**options):
    params = {"w": jnp.ones((3, 2))}
    return AmpTrainState.create(params=params, tx=optax.sgd(0.1), **options)


def linen_loss(params, batch):
    return (batch @ params["w"]).mean()


def nnx_objects(**options):
    model, _ = linear_objects()
    return model, AmpOptimizer(model, optax.sgd(0.1), **options)


def nnx_loss(model, batch):
    return model(batch).mean()


def by_state(given, loss=lambda loss: loss, **options):
    """Returns the dtypes of the matmuls of each step, and the scaler."""
    state = linen_state(**given)
    steps = [m(loss(linen_loss), **options) for m in (make_train_step, make_eval_step)]
    return [x for step in steps for x in dtypes_of(step, state, X)], state.scaler


def by_optimizer(given, loss=lambda loss: loss, **options):
    """The same for the step on an `AmpOptimizer`; a model by itself tells none."""
    graphdef, arrays = nnx.split(nnx_objects(**given))
    step = make_nnx_train_step(loss(nnx_loss), jit=False, **options)
    found = dtypes_of(lambda a: step(*nnx.merge(graphdef, a), X), arrays)
    evaluate = make_eval_step(loss(nnx_loss), jit=False, **options)
    if options or loss(nnx_loss) is not nnx_loss:
        found += dtypes_of(lambda a: evaluate(nnx.merge(graphdef, a)[0], X), arrays)
    scaler = nnx.merge(graphdef, arrays)[1].scaler
    return found, {key: x[...] for key, x in scaler.items()}


MAKERS = {"state": by_state, "optimizer": by_optimizer}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("word", [None, *WORDS, *ALIASES])
def test_a_word_says_dtype_and_scaler(word, maker):
    given = {} if word is None else {"precision": word}
    name, scaler = WORDS[ALIASES.get(word, word) or "bf16-mixed"]
    mine = static_scaler(8.0)
    cases = [
        ({}, {}, scaler, name),
        ({"scaler": mine}, {}, mine, name),
        *(({}, {"precision": w}, scaler, WORDS[w][0]) for w in WORDS),
    ]
    # An alias is replaced by its word before anything else.
    for more, options, wanted, dtype in cases[:1] if word in ALIASES else cases:
        dtypes, found = MAKERS[maker](given | more, **options)
        assert dtypes and {x for dot in dtypes for x in dot} == {dtype}
        assert jax.tree.map(float, found) == jax.tree.map(float, wanted)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_loss_that_is_rewritten_already_is_taken_as_it_is(maker):
    """Whatever the word is: its options are those of `amp`, which the step has not."""
    half = functools.partial(amp, precision="fp16", recompute=False)
    for wrap in (half, lambda loss: functools.partial(half(loss))):
        for word in WORDS:
            dtypes, _ = MAKERS[maker]({"precision": word}, wrap)
            assert {x for dot in dtypes for x in dot} == {"float16"}
    for options in ({"precision": "bf16"}, {"amp_policy": {}}):
        with pytest.raises(ValueError, match=r"is amp\(...\) already, and "):
            MAKERS[maker]({}, amp, **options)


def test_a_word_is_everywhere_the_same_and_no_other_is():
    assert get_args(Precision) == (*WORDS, "fp8-mixed", *ALIASES, "fp8")
    for word in ("float16", 16, jnp.float16):
        for call in (
            lambda w=word: linen_state(precision=w),
            lambda w=word: nnx_objects(precision=w),
            lambda w=word: amp(nnx_loss, precision=w),
            lambda w=word: make_train_step(linen_loss, precision=w),
            lambda w=word: make_nnx_train_step(nnx_loss, precision=w),
            lambda w=word: make_eval_step(nnx_loss, precision=w),
            lambda w=word: make_eval_step(linen_loss)(
                linen_state().replace(precision=w), X
            ),
        ):
            raised(
                call, ValueError, f"precision is .*{word}.*; expected .*'bf16-mixed'"
            )


@pytest.mark.parametrize(
    "old, new", [("16-mixed", "bf16-mixed"), ("32-true", "16-mixed")]
)
def test_a_restored_run_may_change_its_word(old, new, tmp_path):
    """Nothing of the word is on disk; the scaler follows the rules that it has."""
    saved, target = (linear_state(precision=w, scaler=None) for w in (old, new))
    assert "precision" not in serialization.to_state_dict(saved)
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, saved.replace(step=jnp.int32(5)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", checkpoint.CheckpointWarning)
        state = checkpoint.restore(tmp_path, target)
    assert (state.precision, int(state.step)) == (new, 5)
    assert jax.tree.structure(state) == jax.tree.structure(target)
    assert float(state.scaler["scaler"]) == float(WORDS[new][1]["scaler"])


# float16 without a scale


UNSCALED = {"precision": "fp16", "scaler": no_scaler()}
NO_SCALE = "float16 without a loss scale.*AmpOptimizer"


@pytest.mark.parametrize(
    "options, given, warns",
    [
        ({}, UNSCALED, True),
        ({"precision": "fp16"}, {"precision": "fp32"}, True),
        ({"precision": "fp16"}, {"scaler": init_scaler()}, False),
        ({"precision": "bf16"}, UNSCALED, False),
    ],
)
def test_float16_without_a_scale_warns_once(options, given, warns):
    of_state = make_train_step(linen_loss, donate=False, **options)
    jax.eval_shape(of_state, linen_state(**given), X)  # values tell, types do not
    of_objects = make_nnx_train_step(nnx_loss, donate=False, **options)
    for step, *args in [
        (of_state, linen_state(**given), X),
        (of_objects, *nnx_objects(**given), X),
    ]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                step(*args)
        assert [warning.filename for warning in told] == [__file__] * warns
        assert all("float16 without a loss scale" in str(w.message) for w in told)


def test_a_plain_optimizer_of_nnx_has_no_scale():
    model, _ = linear_objects()
    plain = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = make_nnx_train_step(nnx_loss, precision="16-mixed")
    raised(lambda: step(model, plain, X), TypeError, NO_SCALE)
    for word in ("bf16", "fp32"):
        make_nnx_train_step(nnx_loss, precision=word)(model, plain, X)
