"""The calls of NNX modules leave scopes, as those of Linen modules do."""

import threading

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from flax_amp import (
    AmpTrainState,
    amp,
    default_amp_policy,
    make_train_step,
    use_original_precision,
)
from helpers import scoped_equations

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


class Model(nnx.Module):
    """Layers in a list, each called through a transform."""

    def __init__(self, rngs, transform=lambda call: call):
        self.layers = nnx.List([Attention(rngs) for _ in range(LAYERS)])
        self.transform = transform

    def __call__(self, x):
        for layer in self.layers:
            x = self.transform(lambda layer, x: layer(x))(layer, x)
        return x


def scopes(fn, *args):
    """The full scope of every matmul and exponential, in order."""
    return [
        "/".join(path)
        for path, eqn in scoped_equations(jax.make_jaxpr(fn)(*args))
        if eqn.primitive.name in ("dot_general", "exp")
    ]


def mean(model, x):
    return model(x).mean()


# Names are given where a policy asks for scopes; see test_scope_keys.py for the keys.
SCOPED = default_amp_policy | {"no such scope": use_original_precision}


def lowered(fn=mean, amp_policy=SCOPED):
    return amp(fn, compute_dtype=jnp.bfloat16, amp_policy=amp_policy)


def in_attention(path):
    return [f"{path}/query", path, f"{path}/out"]


def through(transform):
    return lambda rngs: Model(rngs, transform)


def call(model, x):
    return model(x)


LAYER_PATHS = [
    path for i in range(LAYERS) for path in in_attention(f"Model/layers/{i}")
]
PATHS = {  # name: (what makes the model, the function of it, the scopes that it opens)
    "layers": (Model, call, LAYER_PATHS),
    "jitted layers": (through(nnx.jit), call, LAYER_PATHS),
    "checkpointed layers": (through(lambda f: jax.checkpoint(f)), call, LAYER_PATHS),
    "method": (Attention, lambda m, x: m.project(x), ["Attention.project/query"]),
}


@pytest.mark.parametrize("name", PATHS)
def test_paths(name):
    make, fn, expected = PATHS[name]
    assert scopes(lowered(fn), make(nnx.Rngs(0)), X) == expected


# --- code that takes modules for equal, and modules that look into themselves ---------


def stack_layers(model, x):
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *model.layers)
    return jax.lax.scan(lambda x, layer: (layer(x), None), x, layers)[0].mean()


def map_over_two(model, x):
    first, last = model.layers[0], model.layers[-1]
    return jax.tree.map(lambda a, b: (a + b) / 2, first, last)(x).mean()


def choose(model, x):
    layers = model.layers
    return jax.lax.cond(x[0, 0] > 0, lambda: layers[0], lambda: layers[1])(x).mean()


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


# --- nothing of it stays -------------------------------------------------------------


def assert_untouched(model, before):
    assert nnx.graphdef(model) == before
    for cls in (Model, Attention, nnx.Linear):
        assert not hasattr(cls.__call__, "__wrapped__")


def test_nothing_is_left_behind():
    """In a model, its clone, one that is returned, and after an error."""

    class UnusualError(Exception):
        pass

    def fail(model, x):
        model(x)
        raise UnusualError

    model = Model(nnx.Rngs(0))
    before = nnx.graphdef(model)
    lowered()(model, X)
    assert_untouched(model, before)
    with pytest.raises(UnusualError) as caught:
        lowered(fail)(model, X)
    notes = getattr(caught.value, "__notes__", [])  # JAX may add one
    assert not any("nnx.Module" in note for note in notes)
    assert_untouched(model, before)
    clone = lowered(lambda m, x: nnx.clone(m))(model, X)
    assert nnx.graphdef(clone) == before
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
    plain = scopes(mean, Model(nnx.Rngs(0)), X)
    plain_called.set()
    for thread in threads:
        thread.join()

    assert not errors
    assert plain == [""] * (3 * LAYERS)
    assert found == {"mean": LAYER_PATHS, "sum": LAYER_PATHS}
    assert not hasattr(Model.__call__, "__wrapped__")
