"""What the backward pass stores: what JAX keeps, and which equation made it."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import flax_amp
from _programs import PROGRAMS, WITHIN, loss_of, normal
from flax_amp import explain

X, W = jnp.ones((4, 8)), jnp.full((8, 8), 0.1)


def kept_by_jax(fun, *args, **options):
    """The bytes by dtype in the backward function, without the arguments."""
    options = {"compute_dtype": jnp.bfloat16, **options}
    loss = flax_amp.amp(fun, **options)
    leaves = jax.tree.leaves(jax.vjp(lambda w: loss(w, *args[1:]), args[0])[1])
    inputs = {x.unsafe_buffer_pointer() for x in args}
    sizes = {}
    for x in {x.unsafe_buffer_pointer(): x for x in leaves}.values():
        if x.unsafe_buffer_pointer() not in inputs and x.ndim:
            sizes[str(x.dtype)] = sizes.get(str(x.dtype), 0) + x.nbytes
    return sizes


def without_scalars(stored):
    return {dtype: n for dtype, n in stored.items() if n > 4}


def scoped(w, x):
    with jax.named_scope("up"):
        y = jnp.tanh(x @ w)
    with jax.named_scope("norm"):
        y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    with jax.named_scope("down"):
        return jnp.sum((y @ w) ** 2)


def scanned(w, x):
    def layer(x, _):
        with jax.named_scope("layer"):
            return jnp.sin(x @ w), None

    return jax.lax.scan(layer, x, length=5)[0].sum()


CASES = [("recurrent", "plain")]
# JAX and `explain` take a nested call as a call.
CASES += [
    ("mlp", name) for name in WITHIN if name not in ("cond", "vmap", "nested jit")
]


@pytest.mark.parametrize("name, around", CASES)
def test_bytes_are_those_that_jax_keeps(name, around):
    fun = loss_of(WITHIN[around](PROGRAMS[name]))
    w, x = normal(0, 4, 4), normal(1, 8, 4)
    for recompute in (True, False):
        options = dict(compute_dtype=jnp.bfloat16, recompute=recompute)
        found = explain(fun, **options)(w, x)
        assert without_scalars(found.stored) == kept_by_jax(fun, w, x, **options)
    # The trace of the gradient adds none.
    assert found.equations == explain(fun, backward=False, **options)(w, x).equations


def test_only_the_first_argument_is_trained():
    kept = {"recompute": False}
    both = explain(lambda pair: (jnp.sin(pair[1]) @ pair[0]).sum(), **kept)((W, X))
    first = explain(lambda w, x: (jnp.sin(x) @ w).sum(), **kept)(W, X)
    assert first.stored == {"bfloat16": 64}  # the factor of w
    assert both.stored == {"bfloat16": 64 + 128, "float32": 128}  # cos(x), too
    model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))  # its statistics are not trained
    found = explain(lambda m, x: m(x, use_running_average=True).sum())(model, X)
    assert not found.notes


def looped(w, x):
    return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ w, x @ w).sum()


@pytest.mark.parametrize(
    "fun, args, kwargs, reason",
    [
        (scoped, (), {"w": W, "x": X}, "the first argument has no float arrays"),
        (lambda n: n + 1, (3,), {}, "has no float arrays"),
        (looped, (W, X), {}, "ValueError: Reverse-mode differentiation"),
    ],
    ids=["keywords", "static", "while"],
)
def test_what_is_not_known_is_not_nothing(fun, args, kwargs, reason):
    found = explain(fun)(*args, **kwargs)
    assert found.stored is None
    (note,) = found.notes
    assert "what the backward pass stores is not known" in note and reason in note
    assert "Note: what the backward pass" in str(found)
    for text in (str(found), str(explain(fun, backward=False)(*args, **kwargs))):
        assert "nothing" not in text and "other" not in text
    known = " ".join(str(explain(scoped)(W, X)).split())  # lines may be wrapped
    assert "for the gradient of the first argument" in known
