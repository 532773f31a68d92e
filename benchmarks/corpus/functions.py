"""One function each on what a matmul returns: a loss of `f(h)` with `h = x @ w`.

See `program.rows` for what a row is.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np

from benchmarks.corpus.program import Case, Programs, rows

# By source: what is imported as `m`, and the rows.
_TABLES = {
    "jax.nn": (
        "jax.nn",
        """
celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu
    log_sigmoid log_softmax logsumexp mish relu relu6 selu sigmoid silu soft_sign
    softmax softplus sparse_plus sparse_sigmoid squareplus standardize tanh: m.@(h)
dot_product_attention: m.@(*[h.reshape(1, 16, 2, 8)] * 3, is_causal=True)
logmeanexp: m.@(h, axis=-1)
""",
    ),
    "jax.numpy": (
        "jax.numpy",
        """
abs arcsinh arctan cbrt ceil cos cosh cumsum diff exp exp2 expm1 floor gradient max
    mean median nanmean nanstd nansum ptp rint sin sinc sinh sort square std sum tan
    tanh trapezoid unwrap var corrcoef cov: m.@(h)
log log1p log2 log10 sqrt reciprocal arccosh: m.@(1 + pos(h))
prod cumprod nanprod: m.@(1 + h / 20)
arctan2 logaddexp vecdot: m.@(h, h.T)
average: m.@(h, weights=pos(h))
convolve correlate outer: m.@(h[0], h[1])
cross: m.@(h[:, :3], h[:, 3:6])
einsum: m.@("ij,kj,kl->il", h, h, h)
hypot: m.@(h, h.T + 1)
interp: m.@(h, m.linspace(-2, 2, 9), m.arange(9.0))
kron: m.@(h[:4, :4], h[4:8, :4])
percentile: m.@(h, 30.0, axis=0)
piecewise: m.@(h, [h < 0], [m.sin, m.cos])
polyfit: m.@(m.linspace(-1, 1, 16), h, 3)
polyval: m.@(h[0], m.tanh(h))
power: m.@(pos(h), 1.7)
quantile: m.@(h, 0.7, axis=0)
tensordot: m.@(h, h, 1)
vander: m.@(m.tanh(h[0]), 5)
select: m.@([h < -1, h < 1], [h**2, h], 0.5 * h)
""",
    ),
    "jax linear algebra": (
        "jax.numpy.linalg",
        """
cholesky det eigvalsh inv slogdet cond matrix_norm: m.@(definite(h))
eigh: m.@(definite(h)).eigenvalues
svd: m.@(h, compute_uv=False)
qr: m.@(h)
solve: m.@(definite(h), h)
lstsq: m.@(h[:, :4], h[:, 5])[0]
pinv: m.@(h[:, :4])
matrix_power: m.@(h / 4, 5)
multi_dot: m.@([h, h.T, h])
norm: m.@(h, axis=1)
cho_solve: jsp.linalg.@(jsp.linalg.cho_factor(definite(h)), h)
expm: jsp.linalg.@(h / 4)
lu: jsp.linalg.@(definite(h))[1:]
solve_triangular: jsp.linalg.@(jnp.tril(h) / 4 + 2 * jnp.eye(16), h, lower=True)
toeplitz: jsp.linalg.@(h[0], h[0])
block_diag: jsp.linalg.@(h, h)
cg gmres bicgstab: jsp.sparse.linalg.@(definite(h), h[0])[0]
""",
    ),
    "jax.scipy": (
        "jax.scipy.special",
        """
erf erfc expit i0 i0e i1 i1e log_ndtr ndtr logsumexp: m.@(h)
digamma gammaln expi exp1: m.@(pos(h))
betaln kl_div rel_entr: m.@(pos(h), pos(h.T))
betainc: m.@(2.0, 3.0, jax.nn.sigmoid(h))
entr: m.@(pos(h))
erfinv: m.@(0.9 * jnp.tanh(h))
gammainc: m.@(2.0, pos(h))
logit ndtri: m.@(share(h))
xlog1py xlogy: m.@(h, pos(h))
fft.fft fft.fft2: jnp.@(h)
fft.rfft-irfft: jnp.fft.irfft(jnp.fft.rfft(h) * 0.3)
fft.dct fft.idct signal.detrend: jsp.@(h)
signal.convolve2d: jsp.@(h, h[:3, :3])
signal.convolve signal.fftconvolve signal.correlate: jsp.@(h[0], h[1])
signal.stft: jsp.@(h.ravel(), nperseg=32)[2]
signal.welch: jsp.@(h.ravel(), nperseg=32)[1]
ndimage.map_coordinates: jsp.@(
    h, list(8 + jnp.stack([2 * jnp.tanh(h), (2 * jnp.tanh(h)).T])), order=1)
interpolate.RegularGridInterpolator: jsp.@(
    (jnp.arange(16.0), jnp.arange(16.0)), h)(8 + jnp.tanh(h[:, :2]))
image.resize: jax.@(h, (24, 8), "bicubic")
stats.gaussian_kde: jsp.@(h[0])(h[1])
stats.t.logpdf: jsp.@(h, 5.0)
stats.beta.logpdf: jsp.@(share(h), 2.0, 3.0)
stats.gamma.logpdf: jsp.@(pos(h), 2.0)
stats.multivariate_normal.logpdf: jsp.@(h, jnp.zeros(16), definite(h))
integrate.trapezoid: jsp.@(h)
experimental.odeint: jax.experimental.ode.odeint(
    lambda y, t, a: jnp.tanh(jnp.matmul(a, y)) - y, h[0], jnp.linspace(0.0, 1.0, 4),
    h / 4)
stats.cauchy.logpdf stats.laplace.logpdf stats.logistic.logpdf
    stats.norm.logpdf: jsp.@(h)
""",
    ),
    "optax.losses": (
        "optax.losses",
        """
convex_kl_divergence generalized_kl_divergence kl_divergence
    kl_divergence_with_log_targets: m.@(jax.nn.log_softmax(h), soft(h))
cosine_distance cosine_similarity huber_loss l2_loss log_cosh poly_loss_cross_entropy
    ranking_softmax_loss safe_softmax_cross_entropy sigmoid_binary_cross_entropy
    sigmoid_focal_loss softmax_cross_entropy squared_error binary_dice_loss
    dice_loss: m.@(h, soft(h))
hinge_loss perceptron_loss: m.@(h, jnp.sign(targets(h)))
multiclass_hinge_loss multiclass_perceptron_loss multiclass_sparsemax_loss
    softmax_cross_entropy_with_integer_labels ntxent: m.@(h, labels())
ctc_loss: m.@(h[None], jnp.zeros((1, 16)), 1 + labels()[None, :6], jnp.zeros((1, 6)))
triplet_margin_loss: m.@(h, h.T, targets(h))
sparsemax_loss: m.@(h[:, 0], labels() % 2)
make_fenchel_young_loss: m.@(jsp.special.logsumexp)(h[0], jax.nn.softmax(targets(h)[0]))
multiclass_generalized_dice_loss: m.@(
    h.reshape(2, 8, 16), jax.nn.one_hot(labels().reshape(2, 8), 16))
""",
    ),
    "jaxopt": (
        "jaxopt",
        """
loss.multiclass_logistic loss.multiclass_sparsemax: jax.vmap(m.@_loss)(labels(), h)
loss.binary_logistic: m.@_loss(labels() % 2, h[:, 0])
projection.simplex: jax.vmap(m.projection.projection_simplex)(h)
projection.l1_ball: m.projection.projection_l1_ball(h.ravel())
projection.l2_ball: m.projection.projection_l2_ball(h)
projection.transport: m.projection.projection_transport(
    h, (jnp.full(16, 1 / 16), jnp.full(16, 1 / 16)))
prox.lasso: m.prox.prox_lasso(h, 0.1)
prox.elastic_net: m.prox.prox_elastic_net(h)
prox.group_lasso: m.prox.prox_group_lasso(h)
""",
    ),
    "rlax": (
        "rlax",
        """
lambda_returns: m.@(h[0], jax.nn.sigmoid(h[1]), h[2], 0.9)
discounted_returns: m.@(h[0], 0.9 + 0 * h[1], h[2])
n_step_bootstrapped_returns: m.@(h[0], 0.9 + 0 * h[1], h[2], 3)
q_learning: m.@(h[0], jnp.asarray(2), h[1, 0], 0.9, h[2])
double_q_learning: m.@(h[0], jnp.asarray(2), h[1, 0], 0.9, h[2], h[3])
policy_gradient_loss: m.@(h, labels(), h[:, 0], jnp.ones(16))
entropy_loss: m.@(h, jnp.ones(16))
qpg_loss: 1 + m.@(h, h.T)
clipped_surrogate_pg_loss: m.@(jnp.exp(h[0] / 4), h[1], 0.2)
vtrace: m.vtrace_td_error_and_advantage(
    h[0], h[1], h[2], 0.9 + 0 * h[3], jnp.exp(h[4] / 4), 0.9)
td_lambda: m.@(h[0], h[1], 0.9 + 0 * h[2], h[3], 0.9)
quantile_q_learning: m.@(
    h, jnp.linspace(0, 1, 16), jnp.asarray(1), h[0, 0], 0.9, h.T, h, 1.0)
signed_hyperbolic: m.@(h)
twohot: m.transform_to_2hot(h[0], -3.0, 3.0, 11)
vmpo_loss: m.@(h[0], h[1], m.LagrangePenalty(pos(h[2, 0]), 0.1),
    [(h[3], m.LagrangePenalty(pos(h[4, 0]), 0.1))])[0]
""",
    ),
    "dm_pix": (
        "dm_pix",
        """
rgb_to_hsv hsv_to_rgb rgb_to_hsl rgb_to_grayscale rot90 flip_left_right: m.@(color(h))
adjust_brightness adjust_hue: m.@(color(h), 0.1)
adjust_contrast adjust_gamma adjust_saturation: m.@(color(h), 0.7)
gaussian_blur: m.@(gray(h), 1.0, 3)
solarize: m.@(color(h), 0.5)
psnr simse: m.@(gray(h), gray(h.T))
ssim: m.@(gray(h), gray(h.T), filter_size=5)
rotate: m.@(gray(h), 0.4)
affine_transform: m.@(gray(h),
    jnp.asarray([[0.9, 0.1, 0.0], [-0.1, 0.9, 0.0], [0.0, 0.0, 1.0]]))
""",
    ),
    "distrax": (
        "distrax",
        """
Normal Laplace Logistic Gumbel VonMises: m.@(h, pos(h)).log_prob(h.T)
MultivariateNormalDiag: m.@(h, pos(h)).log_prob(h.T)
Gamma: m.@(pos(h), 2.0).log_prob(pos(h.T))
Beta: m.@(pos(h), pos(h.T)).log_prob(share(h))
Bernoulli: m.@(h).log_prob(targets(h) > 0)
Categorical: m.@(h).log_prob(labels())
Dirichlet: m.@(pos(h)).log_prob(jax.nn.softmax(h.T))
MultivariateNormalTri: m.@(h, jnp.tril(h) / 4 + 2 * jnp.eye(16)).log_prob(h.T)
MultivariateNormalFullCovariance: m.@(h, definite(h)).log_prob(h.T)
Mixture: m.MixtureSameFamily(
    m.Categorical(h[0]), m.Normal(h[1], pos(h[2]))).log_prob(h[3])
kl(Normal): m.Normal(h, pos(h)).kl_divergence(m.Normal(h.T, pos(h.T)))
RationalQuadraticSpline: m.@(
    jnp.tile(h[:, :13], 1), -3.0, 3.0).forward_and_log_det(h[:, 15])
sample(Normal): m.Normal(h, pos(h)).sample(seed=jax.random.key(0))
Transformed(Tanh): m.Transformed(
    m.Normal(h, pos(h)), m.Tanh()).log_prob(0.9 * jnp.tanh(h.T))
""",
    ),
    "numpyro": (
        "numpyro.distributions",
        """
Normal Cauchy: m.@(h, pos(h)).log_prob(h.T)
StudentT: m.@(pos(h), h).log_prob(h.T)
Weibull Gamma: m.@(pos(h), 2.0).log_prob(pos(h.T))
NegativeBinomial: m.NegativeBinomial2(pos(h), 2.0).log_prob(labels())
Poisson: m.@(pos(h)).log_prob(labels())
BinomialLogits: m.Binomial(9, logits=h).log_prob(labels())
LKJCholesky: m.@(4, 2.0).log_prob(jnp.linalg.cholesky(definite(h[:4])))
MultivariateStudentT: m.@(5.0, h, jnp.linalg.cholesky(definite(h))).log_prob(h.T)
LowRankMultivariateNormal: m.@(h[0], h[:, :3], pos(h[1])).log_prob(h.T)
OrderedLogistic: m.@(h[:, 0], jnp.asarray([-1.0, 0.0, 1.0])).log_prob(labels() % 4)
TruncatedNormal: m.@(h, pos(h), low=-4.0, high=4.0).log_prob(jnp.tanh(h.T))
GaussianRandomWalk: m.@(0.5, 16).log_prob(h)
Dirichlet: m.@(pos(h)).log_prob(jax.nn.softmax(h.T))
""",
    ),
}


def _targets(h: Any) -> Any:
    return jnp.sin(jnp.arange(h.size, dtype=h.dtype)).reshape(h.shape)


_NAMES = {
    "jax": jax,
    "jnp": jnp,
    "jsp": jsp,
    "labels": lambda: jnp.arange(16) % 7,
    "targets": _targets,
    "soft": lambda h: jax.nn.softmax(_targets(h)),
    "pos": lambda h: jax.nn.softplus(h) + 0.5,
    "share": lambda h: 0.05 + 0.9 * jax.nn.sigmoid(h),
    "definite": lambda h: h @ h.T / 16 + jnp.eye(len(h)),
    "color": lambda h: jax.nn.sigmoid(h[:, :15].reshape(4, 20, 3)),
    "gray": lambda h: jax.nn.sigmoid(h)[..., None],
}


def _case(module: str, expression: str) -> Case:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(32, 16)).astype(np.float32) / 6
    x = rng.normal(size=(16, 32)).astype(np.float32)
    importlib.import_module("jax.experimental.ode")
    code = compile(expression, expression, "eval")
    names = _NAMES | {"m": importlib.import_module(module)}

    def loss(w: Any, x: Any) -> Any:
        results = jax.tree.leaves(eval(code, names | {"h": jnp.matmul(x, w)}))
        reals = [jnp.abs(y) if jnp.iscomplexobj(y) else y for y in results]
        floats = [y for y in reals if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum(jnp.mean(jnp.log1p(y**2)) for y in floats)

    return Case(loss, jnp.asarray(w), (jnp.asarray(x),))


def _programs(module: str, text: str) -> Programs:
    return {name: functools.partial(_case, module, code) for name, code in rows(text)}


TABLES = {
    source: functools.partial(_programs, *table) for source, table in _TABLES.items()
}
