"""Between two matmuls all is float32, and only what a matmul reads is rounded.

Each program here was wrong once: a number was rounded for a matmul, and a loss, a sum
or a loop that lost digits by it read the rounded number. The error of each value and
gradient is at most 1.1 times that of the program whose products alone are cast.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.nn import sigmoid, softplus

from _twin_errors import assert_as_exact, normal
from flax_amp import PolicyWarning, amp, default_amp_policy
from helpers import HALVES, equations, relative_error

SIZE = 8


def matrices(seed):
    """The weights of two layers, and eight rows of data."""
    return normal(seed, *[(SIZE, SIZE)] * 3)


def table(programs):
    """One test for each program in each half."""
    name = lambda x: getattr(x, "__name__", x)  # noqa: E731
    cases = pytest.mark.parametrize("program", programs, ids=name)
    halves = pytest.mark.parametrize("dtype", HALVES, ids=name)
    return lambda test: cases(halves(test))


# --- a loss beside a product, behind something that is called -------------------------


@jax.custom_vjp
def bounded(t):
    """The identity, whose cotangents are bounded."""
    return t


bounded.defvjp(lambda t: (t, None), lambda _, ct: (jnp.clip(ct, -1e3, 1e3),))

MASK = np.arange(SIZE**2).reshape(SIZE, SIZE) % 5 > 0
BEHIND = {
    "nothing": lambda t: t,
    "where": lambda t: jnp.where(MASK, t, 0.5),
    "roll": lambda t: jnp.roll(t, 1, 0),
    "flip": lambda t: jnp.flip(t, 0),
    "take": lambda t: jnp.take(t, np.arange(SIZE)[::-1], axis=0),
    "pad": lambda t: jnp.pad(t, ((0, 1), (0, 0))),
    "tril": jnp.tril,
    "relu": jax.nn.relu,
    "nnx.jit": lambda t: nnx.jit(lambda t: t[::-1])(t),
    "optimization_barrier": lax.optimization_barrier,
    "custom_vjp": bounded,
    "checkpoint": jax.checkpoint(lambda t: jnp.sin(t) / jnp.sin(1.0)),
    "cond": lambda t: lax.cond(t.sum() < 1e6, lambda t: t, lambda t: t / 2, t),
}


def of_certain(t):
    """Minus the log-likelihood of zeros, which is infinite where `t` is one."""
    return -jnp.log(1 - t).mean()


def wide(seed):
    """Logits up to ten: in bfloat16 the sigmoid of seven is one."""
    w, x, v = matrices(seed)
    return w, 1.2 * x, v


@table(BEHIND)
def test_a_loss_behind_a_call(program, dtype):
    def loss(w, x, v):
        t = BEHIND[program](sigmoid(x @ w))
        return of_certain(t) + (t @ v).mean()

    assert_as_exact(loss, dtype, wide)


# --- losses beside a call that has products inside ------------------------------------


def actor(w, x, v):
    """Its own result is lost, and the loss is of what its product reads."""
    t, y = jax.jit(lambda x: ((t := sigmoid(x @ w)), t @ v))(x)
    return of_certain(t) + y.mean()


def head(w, x, v):
    """No product outside reads the number."""
    return of_certain(jax.jit(lambda x: sigmoid(jnp.tanh(x @ v) @ w))(x))


def head_and_product(w, x, v):
    """As above, with another result that a product outside reads."""
    t, y = jax.jit(lambda x: ((t := sigmoid(x @ w)), jnp.sin(t)))(x)
    return of_certain(t) + (y @ v).mean()


def log_density(w, x, v):
    """A policy's action and its log-density, of which large numbers cancel."""
    mean, logp = jax.jit(lambda x: ((m := x @ w), 500 + jnp.tanh(m).sum(-1)))(x)
    return (logp - logp.mean()).var() + (mean @ v).var()


@table([actor, head, head_and_product, log_density])
def test_a_call_with_products_that_returns_what_a_loss_reads(program, dtype):
    assert_as_exact(program, dtype, wide)


# --- a bias on the way to a loss is added in float32 -------------------------------


def logits(w, x, v):
    return -jax.nn.log_softmax(x @ w + v[0][None])[:, 0].mean()


def probabilities(w, x, v):
    return of_certain(0.99 * sigmoid(jnp.tanh(x @ w) @ w + v[0][None]))


@table([logits, probabilities])
def test_a_bias_before_a_loss(program, dtype):
    assert_as_exact(program, dtype, matrices, count=32)


# --- numbers of which most digits cancel ----------------------------------------------


def squashed(w, x, v):
    """The log-density of a squashed action (SAC), beside a product of it."""
    u = jnp.tanh(x @ w)
    return -jnp.log(1 - u**2 + 1e-6).mean() + (u @ v).mean()


def centred(w, x, v):
    """A temperature and its mean."""
    t = 300 + jnp.tanh(x @ w)
    return (((t - t.mean()) @ v) ** 2).mean()


def batch_norm(w, x, v):
    y = x @ w + 100
    return ((y - y.mean(0)[None]) * lax.rsqrt(y.var(0) + 1e-5)[None] @ v).var()


def log_weights(w, x, v):
    """Weights of log-densities around -500, which a product reads centred."""
    logp = -500 + jnp.tanh(x @ w)
    return (((logp - logp.mean(-1, keepdims=True)) @ v) ** 2).mean()


def vicreg(w, x, v):
    """Spread and covariance of features with an offset."""
    z = 3 + jnp.tanh(x @ w)
    z = z - z.mean(0)[None]
    covariance = z.T @ z / SIZE
    apart = jnp.sum(jnp.square(covariance * (1 - jnp.eye(SIZE))))
    spread = jax.nn.relu(1 - jnp.sqrt(z.var(0) + 1e-4)).mean()
    return spread + apart / SIZE + 0.1 * ((z @ v) ** 2).mean()


def second_moment(w, x, v):
    """`E[x**2] - E[x]**2`, and what it normalizes is read by a product."""
    y = 5 + jnp.tanh(x @ w)
    mean = y.mean(-1, keepdims=True)
    variance = (y**2).mean(-1, keepdims=True) - mean**2
    return (((y - mean) * lax.rsqrt(variance + 1e-3) @ v) ** 2).mean()


def survival(w, x, v):
    """What is left of a distribution behind each class, beside a product of it."""
    e = jnp.exp((y := x @ w) - y.max(-1, keepdims=True))
    passed = jnp.cumsum(e, -1) / e.sum(-1, keepdims=True)
    return -jnp.log(1 - passed[:, :-1] + 1e-6).mean() + (passed @ v).mean()


def forces(w, x, v):
    """A loss of a gradient by the data."""
    force = jax.grad(lambda x: (jnp.tanh(jnp.tanh(x @ w) @ v)).sum())(x)
    return ((force - 0.1) ** 2).mean()


STATISTICS = [centred, batch_norm, log_weights, vicreg, second_moment]


@table([*STATISTICS, squashed, survival, forces])
def test_digits_that_cancel(program, dtype):
    assert_as_exact(
        program, dtype, wide if program in (squashed, survival) else matrices
    )


# --- a loop without products is arithmetic --------------------------------------------

STEPS = 2048


def times(seed):
    w, v, x = normal(seed, (SIZE, SIZE), (SIZE, SIZE), (STEPS, SIZE))
    return w / 3, x, v / 3


def decays(w, x, v):
    """What a recurrence multiplies and adds. The decay is one in half precision."""
    dt = softplus(x @ w - 7)
    return jnp.exp(-dt), dt * (x @ v)


def recurrence(h, z):
    h = z[0] * h + z[1]
    return h, h


def scanned(w, x, v):
    return ((lax.scan(recurrence, jnp.zeros(SIZE), decays(w, x, v))[1] @ w) ** 2).mean()


def indexed(w, x, v):
    """The loop closes over the decays."""
    a, b = decays(w, x, v)
    step = lambda h, t: recurrence(h, (a[t], b[t]))  # noqa: E731
    return ((lax.scan(step, jnp.zeros(SIZE), np.arange(STEPS))[1] @ w) ** 2).mean()


def counted(w, x, v):
    a, b = decays(w, x, v)
    h = lax.fori_loop(0, STEPS, lambda t, h: a[t] * h + b[t], jnp.zeros(SIZE))
    return ((h[None] @ w) ** 2).mean()


def state_space(w, x, v):
    """Selective, and with the steps and the decays that Mamba starts with."""
    dt = softplus(x @ w + jnp.log(jnp.expm1(jnp.geomspace(1e-3, 1e-1, SIZE)))[None])
    b, c = jnp.split(x @ v, 2, -1)
    decay = jnp.exp(-dt[:, :, None] * jnp.arange(1.0, 5.0)[None, None])
    added = (dt * x)[:, :, None] * b[:, None]

    def step(h, z):
        h, _ = recurrence(h, z)
        return h, (h * z[2][None]).sum(-1)

    y = lax.scan(step, jnp.zeros((SIZE, 4)), (decay, added, c))[1]
    return ((y @ w) ** 2).mean()


def gated_unit(w, x, v):
    """RG-LRU: nothing is left of the square root if the decay is rounded to one."""
    a = jnp.exp(-0.016 * sigmoid(x @ w))
    b = jnp.sqrt(1 - a**2) * (x @ v)
    return ((lax.scan(recurrence, jnp.zeros(SIZE), (a, b))[1] @ w) ** 2).mean()


@table([scanned, indexed, counted, state_space, gated_unit])
def test_decays_before_a_loop(program, dtype):
    assert_as_exact(program, dtype, times)


# --- the size of what is emitted ------------------------------------------------------


@jax.custom_vjp
def rounded(x):
    """Straight through."""
    return jnp.round(x * 16) / 16


def dense(x, w):
    return jnp.tanh(x @ w)


rounded.defvjp(lambda x: (rounded(x), None), lambda _, ct: (ct,))
by_vjp, by_jvp = jax.custom_vjp(dense), jax.custom_jvp(dense)
by_vjp.defvjp(lambda *xs: (dense(*xs), xs), lambda xs, ct: jax.vjp(dense, *xs)[1](ct))
by_jvp.defjvp(lambda xs, tangents: jax.jvp(dense, xs, tangents))
LAYERS = {  # from the results of all former layers, and a weight
    "plain": lambda xs, w: dense(xs[-1], w),
    "residual": lambda xs, w: xs[-1] + dense(xs[-1], w),
    "straight through": lambda xs, w: dense(rounded(xs[-1]), rounded(w)),
    "custom_vjp": lambda xs, w: by_vjp(xs[-1], w),
    "custom_jvp": lambda xs, w: by_jvp(xs[-1], w),
    "sum over all former layers": lambda xs, w: dense(sum(xs), w),
    "jit": lambda xs, w: jax.jit(dense)(xs[-1], w),
}


def size(fn, layer, depth):
    """The number of equations of value and gradient."""

    def loss(w, x):
        xs = [x]
        for _ in range(depth):
            xs.append(layer(xs, w))
        return (xs[-1] ** 2).mean()

    w, x, _ = matrices(0)
    traced = jax.make_jaxpr(jax.value_and_grad(fn(loss)))(w, x)
    return sum(1 for _ in equations(traced))


@pytest.mark.parametrize("name", LAYERS)
def test_the_program_grows_as_the_users_does(name):
    """What layers add is in proportion to what they add to the user's program."""
    layer, depths = LAYERS[name], (15, 30, 60)
    ours, plain = (
        np.diff([size(fn, layer, depth) for depth in depths])
        for fn in (amp, lambda fn: fn)
    )
    ratios = ours / plain
    assert ratios[1] <= 1.1 * ratios[0], ratios
    assert ratios.max() <= 4, ratios


def test_nested_calls():
    def fn(x):
        return jnp.tanh(x @ w).sum()

    w, x, _ = matrices(0)
    for _ in range(60):
        fn = jax.jit(functools.partial(lambda fn, x: fn(x), fn))
    jax.make_jaxpr(jax.grad(amp(fn)))(x)


# --- a program in which no product runs in half ---------------------------------------


def test_a_batch_in_float64_is_told():
    with jax.enable_x64(True):
        w = jnp.ones((SIZE, SIZE), jnp.float32)
        x = np.ones((SIZE, SIZE))  # float64, as NumPy makes it
        with pytest.warns(PolicyWarning, match="float64"):
            amp(lambda w, x: (x @ w).sum())(w, x)


# --- moves of sums -------------------------------------------------------------------


def test_a_sum_that_is_moved_before_a_loss():
    """Probabilities of a mixture, which a product reads, too: rounded, they are one."""
    w, x, v = matrices(0)

    def loss(w, x, v):
        g = sigmoid(x[:, :1])
        p = (g * sigmoid(7 + x @ w) + (1 - g) * sigmoid(8 + x @ w)).reshape(2, 4, SIZE)
        return -jnp.log(1 - p).mean() + (p @ v).mean()

    expected, found = (jax.value_and_grad(f)(w, x, v) for f in (loss, amp(loss)))
    for a, b in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        np.testing.assert_allclose(b, a, rtol=0.05, atol=0.02)


# --- what leaves a call with a product inside ----------------------------------------


@jax.custom_vjp
def gate_with_rule(x, w):
    return sigmoid(6 + x @ w)


gate_with_rule.defvjp(
    lambda x, w: (gate_with_rule(x, w), (x, w)),
    lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct),
)


def gate(x, w):
    return sigmoid(6 + x @ w)


CALLS = {
    "jit": jax.jit(gate),
    "checkpoint": jax.checkpoint(gate),
    "cond": lambda x, w: lax.cond(x.sum() > 0, gate, lambda x, w: gate(x, -w), x, w),
    "scan": lambda x, w: lax.scan(lambda c, x: (c, gate(x, w)), 0.0, x[None])[1][0],
    "custom_vjp": gate_with_rule,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_gate_that_leaves_a_call(name):
    """A loss and a product read it: rounded, it would be one, and its loss infinite."""
    w, x, v = matrices(0)

    def loss(w, x, v):
        t = CALLS[name](x, w)
        return -jnp.log(1 - t).mean() + (t @ v).mean()

    np.testing.assert_allclose(amp(loss)(w, x, v), loss(w, x, v), rtol=0.01)


# --- found by a reader ---------------------------------------------------------------


@pytest.mark.parametrize("steps", [16, 512])
@pytest.mark.parametrize("read", ["arithmetic", "matmul"])
def test_a_scan_adds_up_the_cotangents_of_what_it_closes_over(read, steps):
    """In float32: a half would lose the small terms of many steps."""
    w0, w, x = (
        jax.random.normal(k, (16, 16)) / 4
        for k in jax.random.split(jax.random.key(0), 3)
    )

    def loss(w0):
        h = x @ w0

        def step(c, _):
            seen = jnp.sin(h) if read == "arithmetic" else jax.nn.softmax(c @ h) @ h
            return c + (jnp.tanh(c @ w) * 0.1 + seen) / steps, None

        return (jax.lax.scan(step, jnp.zeros_like(h), length=steps)[0] ** 2).mean()

    assert relative_error(jax.grad(amp(loss))(w0), jax.grad(loss)(w0)) < 0.012


def test_a_comparison_reads_its_number_as_it_is():
    eye = jnp.eye(4)

    def limited(h, limit):
        return jnp.where(jnp.abs(h @ eye) < limit, h @ eye, 0) @ eye

    big = jnp.full((4, 4), 40000.0)
    found = amp(lambda h: limited(h, 1e9), precision="16-mixed")(big)
    assert jnp.array_equal(found, big)
    h = jnp.full((4, 4), 256.0)
    assert jnp.array_equal(amp(lambda h: limited(h, 257.0))(h), h)


def test_a_mask_is_finite_under_vmap():
    """The rank of a mask does not matter."""
    mask, q = jnp.full((2, 4), -1e9), jnp.ones((4, 4))
    masked = lambda m: jax.nn.softmax(q @ q.T + m[None]) @ q  # noqa: E731
    attention = amp(masked, precision="16-mixed")
    found = jax.vmap(attention)(mask)
    assert jnp.array_equal(found, jnp.stack([attention(mask[0])] * 2))
    assert jnp.array_equal(found[0], q)


def test_a_tangent_that_overflows_is_seen():
    def biased(b):
        return (jnp.ones((4, 4)) @ jnp.eye(4) + b[None]) @ jnp.eye(4)

    fn, b = amp(biased, precision="16-mixed"), jnp.ones(4)
    _, tangent = jax.jvp(fn, (b,), (1e5 * b,))
    assert not jnp.isfinite(tangent).any()


def test_bits_are_those_of_float32():
    def bits(h):
        return jax.lax.bitcast_convert_type(h @ jnp.eye(4), jnp.uint32)

    policy = default_amp_policy | {"amp_default": jnp.bfloat16}
    assert amp(bits, amp_policy=policy)(jnp.ones((4, 4))).shape == (4, 4)


@pytest.mark.parametrize("last", [lambda x: x + 64.0 / (1 + x * x), None])
def test_what_is_no_small_step_is_rounded(last):
    """A numerator is no factor, and one small step says nothing of those before."""

    def loss(ws, x):
        for w in ws:
            x = x + jnp.tanh(x @ w)
        x = last(x) if last else x + 0.01 * jnp.sin(x)
        return (x @ ws[0]).sum()

    ws = [jnp.eye(4)] * 3
    found = jax.make_jaxpr(amp(loss))(ws, jnp.ones((2, 4)))
    halves = [e for _, e in equations(found) if e.primitive.name == "flax_amp_stored"]
    adds = [v for e in halves for v in e.outvars if v.aval.shape == (2, 4)]
    assert {str(v.aval.dtype) for v in adds} == {"bfloat16"}
