"""The calls of NNX modules leave scopes, as those of Linen modules do."""

import threading

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

from flax_amp import (
    AmpTrainState,
    _compat,
    amp,
    default_amp_policy,
    make_eval_step,
    make_train_step,
    use_original_precision,
)
from helpers import assert_identical, equations

# The policy that asks for names here names nothing.
pytestmark = pytest.mark.filterwarnings("ignore::flax_amp.PolicyWarning")

SIZE, LAYERS = 8, 3
X = jnp.ones((2, SIZE))


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.query = nnx.Linear(SIZE, SIZE, rngs=rngs)
        self.out = nnx.Linear(SIZE, SIZE, rngs=rngs)

    def project(self, x):
        return self.query(x)

    def __call__(self, x):
        return self.out(jax.nn.softmax(self.project(x)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(SIZE, rngs=rngs)
        self.attention = Attention(rngs)

    def __call__(self, x):
        return x + self.attention(self.norm(x))


class Model(nnx.Module):
    """Layers in a list, each called through a transform."""

    def __init__(self, rngs, transform=lambda call: call):
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.transform = transform

    def __call__(self, x):
        for layer in self.layers:
            x = self.transform(lambda layer, x: layer(x))(layer, x)
        return x


class Stack(nnx.Module):
    """Layers stacked by `nnx.vmap`, run by `nnx.scan`."""

    def __init__(self, rngs):
        make = nnx.vmap(Block, in_axes=0)
        self.blocks = nnx.split_rngs(splits=LAYERS)(make)(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def layers(x, block):
            return block(x)

        return layers(x, self.blocks)


def scopes(fn, *args):
    """The full scope of every matmul and exponential, in order."""
    return found_in(jax.make_jaxpr(fn)(*args).jaxpr, ())


def found_in(jaxpr, outer):
    found = []
    for eqn in jaxpr.eqns:
        path = outer + _compat.scope_names(eqn)
        if eqn.primitive.name in ("dot_general", "exp"):
            found.append("/".join(path))
        for param in eqn.params.values():
            for inner in param if isinstance(param, tuple | list) else (param,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += found_in(inner, path)
    return found


def mean(model, x):
    return model(x).mean()


# Names are given where a policy asks for scopes.
SCOPED = default_amp_policy | {"no such scope": use_original_precision}


def lowered(fn=mean, amp_policy=SCOPED):
    return amp(fn, compute_dtype=jnp.bfloat16, amp_policy=amp_policy)


def in_block(path):
    inside = "attention/query", "attention", "attention/out"
    return [f"{path}/{scope}" for scope in inside]


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, nnx.jit, nnx.remat, lambda f: jax.checkpoint(f)],
    ids=["plain", "jit", "remat", "checkpoint"],
)
def test_paths_of_layers(transform):
    model = Model(nnx.Rngs(0), transform)
    expected = [s for i in range(LAYERS) for s in in_block(f"Model/layers/{i}")]

    assert scopes(lowered(), model, X) == expected


def test_paths_in_a_scanned_stack():
    assert scopes(lowered(), Stack(nnx.Rngs(0)), X) == in_block("Stack/blocks")


def test_layers_called_through_a_closure():
    class Closure(Model):
        def __call__(self, x):
            return jax.checkpoint(lambda x: self.layers[1](x))(x)

    found = scopes(lowered(), Closure(nnx.Rngs(0)), X)
    assert found == in_block("Closure/layers/1")


def test_methods_are_named_unless_a_method_calls_them():
    attention = Attention(nnx.Rngs(0))

    by_name = scopes(lowered(lambda m, x: m.project(x)), attention, X)
    assert by_name == ["Attention.project/query"]
    assert scopes(lowered(), attention, X)[0] == "Attention/query"


def test_modules_of_one_call_keep_their_own_names():
    pair = {"a": Attention(nnx.Rngs(0)), "b": [Block(nnx.Rngs(1))]}
    found = scopes(lowered(lambda m, x: m["b"][0](m["a"](x))), pair, X)
    assert found == ["Attention/query", "Attention", "Attention/out"] + in_block(
        "Block"
    )


def test_inherited_methods_open_one_scope():
    class Scaled(Attention):
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Holder(nnx.Module):
        def __init__(self, rngs):
            self.inner = Scaled(rngs)

        def __call__(self, x):
            return self.inner(x)

    found = scopes(lowered(), Holder(nnx.Rngs(0)), X)
    assert found == [f"Holder/inner{s}" for s in ("/query", "", "/out")]


def test_a_jitted_method_of_equal_layers_is_traced_once():
    traces = []

    class Jitted(Block):
        @nnx.jit
        def __call__(self, x):
            traces.append(x)
            return x + self.attention(self.norm(x))

    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Jitted(rngs) for _ in range(LAYERS)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    found = scopes(lowered(), Layers(nnx.Rngs(0)), X)

    assert len(traces) == 1
    assert [path.split("/")[:3] for path in found[::3]] == [
        ["Layers", "layers", str(i)] for i in range(LAYERS)
    ]


def test_methods_of_a_mixin_are_named():
    class Mixin:
        def __call__(self, x):
            return self.query(x)

    class Mixed(Mixin, nnx.Module):
        def __init__(self, rngs):
            self.query = nnx.Linear(SIZE, SIZE, rngs=rngs)

    assert scopes(lowered(), Mixed(nnx.Rngs(0)), X) == ["Mixed/query"]


def test_no_names_where_no_policy_asks_for_them():
    found = scopes(lowered(amp_policy=default_amp_policy), Model(nnx.Rngs(0)), X)
    assert found == [""] * (3 * LAYERS)


# Code that takes modules for equal, and modules that look into themselves


def stack_layers(model, x):
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *model.layers)
    return jax.lax.scan(lambda x, layer: (layer(x), None), x, layers)[0].mean()


def map_over_two(model, x):
    first, last = model.layers[0], model.layers[-1]
    return jax.tree.map(lambda a, b: (a + b) / 2, first, last)(x).mean()


def choose(model, x):
    layers = model.layers
    return jax.lax.cond(x[0, 0] > 0, lambda: layers[0], lambda: layers[1])(x).mean()


def stack_states(model, x):
    graphdef, _ = nnx.split(model.layers[0])
    states = map(nnx.state, model.layers)
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

    def layer(x, state):
        return nnx.merge(graphdef, state)(x), None

    return jax.lax.scan(layer, x, states)[0].mean()


@pytest.mark.parametrize("fn", [stack_layers, map_over_two, choose])
def test_code_that_needs_equal_modules_is_told_why_it_fails(fn):
    calls = []

    def counted(model, x):
        calls.append(x)
        return fn(model, x)

    model = Model(nnx.Rngs(0))
    with pytest.raises((ValueError, TypeError), match="different structures here"):
        lowered(counted)(model, X)
    assert len(calls) == 1
    assert_untouched(model, nnx.graphdef(Model(nnx.Rngs(0))))
    lowered(fn, default_amp_policy)(model, X)

    state = AmpTrainState.create(model=model, tx=optax.sgd(0.1))
    step = make_train_step(fn, amp_policy=SCOPED)
    with pytest.raises((ValueError, TypeError), match="nnx.split"):
        step(state, X)


def test_states_of_modules_have_no_names():
    model = Model(nnx.Rngs(0))
    value = lowered(stack_states)(model, X)
    assert_identical(value, lowered(stack_layers, default_amp_policy)(model, X))


def test_linen_modules_inside_of_nnx():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.bridge.ToNNX(nn.Dense(SIZE), rngs=rngs).lazy_init(X)

        def __call__(self, x):
            return self.dense(x)

    found = scopes(lowered(), Mixed(nnx.Rngs(0)), X)
    assert len(found) == 1 and found[0].startswith("Mixed/")


def test_errors_of_the_function_are_its_own():
    def wrong(model, x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        lowered(wrong)(Model(nnx.Rngs(0)), X)
    assert caught.value.__context__ is None
    notes = getattr(caught.value, "__notes__", [])  # JAX may add one
    assert not any("nnx.Module" in note for note in notes)


# Policies


def matmuls_by_dtype(fn, *args):
    return [
        eqn.invars[0].aval.dtype.name
        for _, eqn in equations(jax.make_jaxpr(fn)(*args))
        if eqn.primitive.name == "dot_general"
    ]


@pytest.mark.parametrize(
    "key, full",
    [
        ("Model/layers/1", [2, 3]),
        ("*/layers/2/attention/out", [5]),
        ("*/query", [0, 2, 4]),
        ("Model", range(6)),
    ],
)
def test_keys_select_what_they_name(key, full):
    policy = default_amp_policy | {key: use_original_precision}
    found = matmuls_by_dtype(lowered(amp_policy=policy), Model(nnx.Rngs(0)), X)
    expected = ["float32" if i in full else "bfloat16" for i in range(6)]
    assert found == expected


def test_keys_work_in_both_steps():
    policy = default_amp_policy | {"*/query": use_original_precision}
    state = AmpTrainState.create(model=Model(nnx.Rngs(0)), tx=optax.sgd(0.1))
    step = make_train_step(mean, amp_policy=policy, jit=False)
    evaluate = make_eval_step(mean, amp_policy=policy, jit=False)

    forward = 2 * LAYERS
    expected = ["float32", "float16"] * LAYERS
    assert matmuls_by_dtype(step, state, X)[:forward] == expected
    assert matmuls_by_dtype(evaluate, state, X) == expected


# Nothing of it stays


def test_clones_carry_no_name():
    model = Model(nnx.Rngs(0))
    clone = lowered(lambda m, x: nnx.clone(m))(model, X)
    assert nnx.graphdef(clone) == nnx.graphdef(model)


def assert_untouched(model, before):
    assert nnx.graphdef(model) == before
    for cls in (Model, Block, Attention, nnx.Linear):
        assert not hasattr(cls.__call__, "__wrapped__")


def test_nothing_is_left_behind():
    model = Model(nnx.Rngs(0))
    before = nnx.graphdef(model)
    lowered()(model, X)
    assert_untouched(model, before)


def test_nothing_is_left_behind_by_an_error():
    class UnusualError(Exception):
        pass

    def fail(model, x):
        model(x)
        raise UnusualError

    model = Model(nnx.Rngs(0))
    before = nnx.graphdef(model)
    with pytest.raises(UnusualError):
        lowered(fail)(model, X)
    assert_untouched(model, before)


def test_a_returned_module_is_as_it_was():
    model = Model(nnx.Rngs(0))
    returned = lowered(lambda m, x: m.layers[0])(model, X)
    assert nnx.graphdef(returned) == nnx.graphdef(model.layers[0])


def test_other_threads_go_on_undisturbed():
    """Two traces overlap, and a third thread uses the same classes without names."""
    both_trace, plain_called = threading.Barrier(3), threading.Event()
    found, errors = {}, []

    def trace(name, other):
        def fn(model, x):
            both_trace.wait(timeout=60)
            assert plain_called.wait(timeout=60)
            return other(model(x))

        try:
            found[name] = scopes(lowered(fn), Model(nnx.Rngs(0)), X)
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(target=trace, args=args)
        for args in [("mean", jnp.mean), ("sum", jnp.sum)]
    ]
    for thread in threads:
        thread.start()
    both_trace.wait(timeout=60)
    plain = found_in(jax.make_jaxpr(mean)(Model(nnx.Rngs(0)), X).jaxpr, ())
    plain_called.set()
    for thread in threads:
        thread.join()

    assert not errors
    assert plain == [""] * (3 * LAYERS)
    expected = [s for i in range(LAYERS) for s in in_block(f"Model/layers/{i}")]
    assert found == {"mean": expected, "sum": expected}
    assert not hasattr(Model.__call__, "__wrapped__")
