"""One word for the precision: what steps compute in, and the scaler of a new run."""

import dataclasses
import functools
import re
import warnings
from typing import get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx, serialization

from _steps import counting, linear_batch, linear_loss, linear_state, raised
from flax_amp import (
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


class EmaState(AmpTrainState):
    ema: dict


def linen_state(**options):
    model = nn.Dense(2)
    params = model.init(jax.random.key(0), X)["params"]
    return AmpTrainState.create(
        apply_fn=model.apply, params=params, tx=optax.sgd(0.1), **options
    )


def linen_loss(params, batch, *, state):
    return state.apply_fn({"params": params}, batch).mean()


def nnx_state(**options):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    return AmpTrainState.create(model=model, tx=optax.sgd(0.1), **options)


def nnx_loss(model, batch):
    return model(batch).mean()


def as_it_is(loss):
    return loss


def by_state(scaler, precision, wrap=as_it_is, **options):
    """Returns the dtypes of the products of each step, and the scaler."""
    state = linen_state(scaler=scaler, **precision)
    makers = make_train_step, make_eval_step
    steps = [make(wrap(linen_loss), **options) for make in makers]
    return [dtypes_of(step, state, X) for step in steps], state.scaler


def by_optimizer(scaler, precision, wrap=as_it_is, **options):
    """The same for the step on an `nnx.Optimizer`."""
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    graphdef, arrays = nnx.split((model, optimizer))
    step = make_nnx_train_step(wrap(nnx_loss), jit=False, **precision, **options)

    def pure(arrays):
        return step(*nnx.merge(graphdef, arrays), scaler, X)

    step_dtypes = dtypes_of(pure, arrays)
    step = make_nnx_train_step(wrap(nnx_loss), donate=False, **precision, **options)
    new, _ = step(model, optimizer, scaler, X)
    assert new["count"] == 1
    return [step_dtypes], new | {"count": jnp.int32(0)}


MAKERS = {
    "state": by_state,
    "nnx step": by_optimizer,
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("word", [None, *WORDS])
def test_a_word_says_dtype_and_scaler(word, maker):
    precision = {} if word is None else {"precision": word}
    name, scaler = WORDS[word or "bf16-mixed"]
    others = {"float16", "bfloat16", "float32"} - {name}
    mine = static_scaler(8.0)
    for given, options, wanted, dtype in [
        (None, {}, scaler, name),
        (mine, {}, mine, name),
        *((mine, {"compute_dtype": jnp.dtype(x)}, mine, x) for x in others),
        *((None, {"compute_dtype": x}, scaler, x) for x in others - {"float16"}),
    ]:
        row = given is mine, options
        dtypes, found = MAKERS[maker](given and dict(given), precision, **options)
        assert all(dtypes), row
        assert {x for step in dtypes for dot in step for x in dot} == {dtype}, row
        found = {key: found[key] for key in wanted}  # without what the step counts
        assert jax.tree.map(float, found) == jax.tree.map(float, wanted), row


@pytest.mark.parametrize("maker", MAKERS)
def test_a_loss_that_is_rewritten_already_is_taken_as_it_is(maker):
    """Whatever the word is: its options are those of `amp`, which the step has not."""
    half = functools.partial(amp, compute_dtype=jnp.float16, recompute=False)
    ways = half, lambda loss: functools.partial(half(loss)), lambda f: jax.jit(half(f))
    for wrap in ways if maker == "state" else ways[:2]:
        for word in WORDS:
            dtypes, _ = MAKERS[maker](None, {"precision": word}, wrap)
            assert {x for step in dtypes for dot in step for x in dot} == {"float16"}


@pytest.mark.parametrize("maker", MAKERS)
def test_options_beside_a_loss_that_is_rewritten_already(maker):
    for options in ({"compute_dtype": jnp.float16}, {"amp_policy": {}}):
        with pytest.raises(ValueError, match="is already rewritten by amp, and "):
            MAKERS[maker](None, {}, amp, **options)


def test_there_are_no_other_words():
    # tests/rewriter/test_fp8.py has those of fp8.
    assert get_args(Precision) == (*WORDS, "fp8-mixed", *ALIASES, "fp8")


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_says_the_same(alias):
    """A state holds the word, so that steps of both are one program."""
    word = ALIASES[alias]
    assert linen_state(precision=alias).precision == word
    state = linear_state(precision="32-true").replace(precision=alias)
    assert state.precision == word
    # A state that was made otherwise works as well.
    odd = dataclasses.replace(state, precision=alias)
    found = dtypes_of(make_train_step(linear_loss, jit=False), odd, linear_batch())
    assert {x for dot in found for x in dot} == {WORDS[word][0]}
    dtypes, scaler = MAKERS["nnx step"](None, {"precision": alias})
    assert {x for step in dtypes for dot in step for x in dot} == {WORDS[word][0]}
    assert float(scaler["scaler"]) == float(WORDS[word][1]["scaler"])


def test_the_word_is_static():
    tx = optax.sgd(0.1)

    def make(**options):
        options |= dict(tx=tx, precision="16-mixed", ema={"w": X[0]})
        return EmaState.create(params={"w": X[0]}, **options)

    state = make()
    assert "precision='16-mixed'" in repr(state)
    same = make(scaler=static_scaler(2.0))
    assert jax.tree.structure(same) == jax.tree.structure(state)
    words = {w: state.replace(precision=w) for w in WORDS}
    assert len(set(map(jax.tree.structure, words.values()))) == len(WORDS)
    step = make_train_step(linear_loss, donate=False)
    for survivor in (
        state.replace(step=3),
        jax.eval_shape(make),
        jax.jit(make)(),
        jax.vmap(lambda w: make().replace(ema={"w": w}))(X),
        step(state, linear_batch())[0],
        state.apply_gradients(grads=state.params),
    ):
        assert isinstance(survivor, EmaState)
        assert survivor.precision == "16-mixed"


def test_a_word_is_traced_once():
    loss_fn, traces = counting(linear_loss)
    step = make_train_step(loss_fn)
    tx, evaluate = optax.sgd(0.1), make_eval_step(linear_loss)
    for count, word in enumerate(WORDS, 1):
        for scale in (2.0, 4.0):
            state = linear_state(tx, precision=word, scaler=static_scaler(scale))
            for _ in range(2):
                state, _ = step(state, linear_batch())
            evaluate(state, linear_batch())
        assert len(traces) == count
    state = linear_state(tx, precision="16-mixed")
    state, _ = step(state, linear_batch())
    assert len(traces) == len(WORDS)


@pytest.mark.parametrize(
    "old, new", [("16-mixed", "bf16-mixed"), ("32-true", "16-mixed")]
)
def test_a_restored_run_may_change_its_word(old, new, tmp_path):
    """Nothing of the word is on disk; the scaler follows the rules that it has."""
    saved, target = (linear_state(precision=w, scaler=None) for w in (old, new))
    assert "precision" not in serialization.to_state_dict(saved)
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, saved.replace(step=jnp.int32(5)))
    assert not [*tmp_path.glob("**/*precision*")]
    with pytest.warns(checkpoint.CheckpointWarning) as told:
        state = checkpoint.restore(tmp_path, target)
    assert (state.precision, int(state.step)) == (new, 5)
    assert jax.tree.structure(state) == jax.tree.structure(target)
    assert float(state.scaler["scaler"]) == float(WORDS[new][1]["scaler"])
    assert len(told) == 1


@pytest.mark.parametrize("word", ["float16", 16, None, jnp.float16], ids=str)
def test_other_words_are_errors(word):
    def given_to(make, jit):
        state = dataclasses.replace(linear_state(), precision=word)
        return lambda: make(linear_loss, jit=jit)(state, linear_batch())

    expected = f" is {word!r}; expected one of 'bf16-mixed'"
    for name, call in [
        ("AmpTrainState.create: ", lambda: linen_state(precision=word)),
        ("AmpTrainState.create: ", lambda: nnx_state(precision=word)),
        ("make_nnx_train_step: ", lambda: make_nnx_train_step(sum, precision=word)),
        ("AmpTrainState.replace: ", lambda: linear_state().replace(precision=word)),
        ("train_step: state.", given_to(make_train_step, True)),
        ("train_step: state.", given_to(make_train_step, False)),
        ("eval_step: state.", given_to(make_eval_step, True)),
        ("eval_step: state.", given_to(make_eval_step, False)),
    ]:
        raised(call, ValueError, f"^{re.escape(name + 'precision' + expected)}")


# float16 without a scale

F16 = {"precision": "16-mixed"}


def state_step(options, **precision):
    step = make_train_step(linen_loss, donate=False, **options)
    scaler = precision.pop("scaler", None)
    return step, (linen_state(scaler=scaler, **precision), X)


def nnx_step(options, **precision):
    scaler = precision.pop("scaler", None)
    step = make_nnx_train_step(nnx_loss, donate=False, **options, **precision)
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return step, (model, optimizer, scaler, X)


@pytest.mark.parametrize("make", [state_step, nnx_step])
@pytest.mark.parametrize(
    "options, precision, warns",
    [
        ({"jit": False}, F16 | {"scaler": no_scaler()}, True),
        ({"compute_dtype": "float16"}, {"precision": "32-true"}, True),
        ({}, F16 | {"scaler": static_scaler(2.0**-3)}, True),
        ({}, F16 | {"scaler": init_scaler(scaler=1.0)}, False),
        ({}, {}, False),
        ({"compute_dtype": "bfloat16"}, F16 | {"scaler": no_scaler()}, False),
    ],
    ids=str,
)
def test_float16_without_a_scale_warns_once(make, options, precision, warns):
    step, args = make(options, **precision)
    if make is state_step:  # what is traced tells nothing, and is not the one warning
        jax.eval_shape(step, *args)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            step(*args)
    assert len(told) == warns
    for warning in told:
        assert warning.filename == __file__
        message = str(warning.message)
        assert message.startswith("train_step: the step computes in float16 with a sc")
        for part in ("6e-8", "init_scaler()", "precision='bf16-mixed'"):
            assert part in message
