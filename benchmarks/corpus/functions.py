"""One function each on what a matrix product returns: a loss of `f(x @ w)`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import optax

from benchmarks.corpus.program import Case, Programs, lazily


def _case(function: Callable[[Any], Any]) -> Case:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(32, 16)).astype(np.float32) / 6
    x = rng.normal(size=(16, 32)).astype(np.float32)

    def loss(w: Any, x: Any) -> Any:
        results = jax.tree.leaves(function(jnp.matmul(x, w)))
        reals = [jnp.abs(y) if jnp.iscomplexobj(y) else y for y in results]
        floats = [y for y in reals if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum(jnp.mean(jnp.log1p(y**2)) for y in floats)

    return Case(loss, jnp.asarray(w), (jnp.asarray(x),))


def _positive(h: Any) -> Any:
    return jax.nn.softplus(h) + 0.5


def _share(h: Any) -> Any:
    return 0.05 + 0.9 * jax.nn.sigmoid(h)


def _definite(h: Any) -> Any:
    return h @ h.T / 16 + jnp.eye(len(h))


def _labels() -> Any:
    return jnp.arange(16) % 7


def _targets(h: Any) -> Any:
    return jnp.sin(jnp.arange(h.size, dtype=h.dtype)).reshape(h.shape)


def _unary(module: Any, names: str, before: Callable[[Any], Any] = lambda h: h) -> Any:
    def apply(name: str, h: Any) -> Any:
        return getattr(module, name)(before(h))

    return {name: functools.partial(apply, name) for name in names.split()}


def _jax_nn() -> dict[str, Any]:
    heads = lambda h: h.reshape(1, 16, 2, 8)  # noqa: E731
    return _unary(
        jax.nn,
        "celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity "
        "leaky_relu log_sigmoid log_softmax logsumexp mish relu relu6 selu sigmoid "
        "silu soft_sign softmax softplus sparse_plus sparse_sigmoid squareplus "
        "standardize tanh",
    ) | {
        "dot_product_attention": lambda h: jax.nn.dot_product_attention(
            heads(h), heads(h), heads(h), is_causal=True
        ),
        "logmeanexp": lambda h: jax.nn.logmeanexp(h, axis=-1),
    }


def _jax_numpy() -> dict[str, Any]:
    several = (
        "abs arcsinh arctan cbrt ceil cos cosh cumsum diff exp exp2 expm1 floor "
        "gradient max mean median nanmean nanstd nansum ptp rint sin sinc sinh sort "
        "square std sum tan tanh trapezoid unwrap var"
    )
    positive = "log log1p log2 log10 sqrt reciprocal arccosh"
    products = "prod cumprod nanprod"
    own = {
        "arctan2": lambda h: jnp.arctan2(h, h.T),
        "average": lambda h: jnp.average(h, weights=_positive(h)),
        "convolve": lambda h: jnp.convolve(h[0], h[1]),
        "correlate": lambda h: jnp.correlate(h[0], h[1]),
        "corrcoef": jnp.corrcoef,
        "cov": jnp.cov,
        "cross": lambda h: jnp.cross(h[:, :3], h[:, 3:6]),
        "einsum": lambda h: jnp.einsum("ij,kj,kl->il", h, h, h),
        "hypot": lambda h: jnp.hypot(h, h.T + 1),
        "interp": lambda h: jnp.interp(h, jnp.linspace(-2, 2, 9), jnp.arange(9.0)),
        "kron": lambda h: jnp.kron(h[:4, :4], h[4:8, :4]),
        "logaddexp": lambda h: jnp.logaddexp(h, h.T),
        "outer": lambda h: jnp.outer(h[0], h[1]),
        "percentile": lambda h: jnp.percentile(h, 30.0, axis=0),
        "piecewise": lambda h: jnp.piecewise(h, [h < 0], [jnp.sin, jnp.cos]),
        "polyfit": lambda h: jnp.polyfit(jnp.linspace(-1, 1, 16), h, 3),
        "polyval": lambda h: jnp.polyval(h[0], jnp.tanh(h)),
        "power": lambda h: jnp.power(_positive(h), 1.7),
        "quantile": lambda h: jnp.quantile(h, 0.7, axis=0),
        "tensordot": lambda h: jnp.tensordot(h, h, 1),
        "vander": lambda h: jnp.vander(jnp.tanh(h[0]), 5),
        "vecdot": lambda h: jnp.vecdot(h, h.T),
        "select": lambda h: jnp.select([h < -1, h < 1], [h**2, h], 0.5 * h),
    }
    return (
        _unary(jnp, several)
        | _unary(jnp, positive, lambda h: 1 + _positive(h))
        | _unary(jnp, products, lambda h: 1 + h / 20)
        | own
    )


def _linalg() -> dict[str, Any]:
    spd = "cholesky det eigvalsh inv slogdet cond matrix_norm"
    eigenvalues = {
        "eigh": lambda h: jnp.linalg.eigh(_definite(h)).eigenvalues,
        "svd": lambda h: jnp.linalg.svd(h, compute_uv=False),
        "qr": jnp.linalg.qr,
        "solve": lambda h: jnp.linalg.solve(_definite(h), h),
        "lstsq": lambda h: jnp.linalg.lstsq(h[:, :4], h[:, 5])[0],
        "pinv": lambda h: jnp.linalg.pinv(h[:, :4]),
        "matrix_power": lambda h: jnp.linalg.matrix_power(h / 4, 5),
        "multi_dot": lambda h: jnp.linalg.multi_dot([h, h.T, h]),
        "norm": lambda h: jnp.linalg.norm(h, axis=1),
        "cho_solve": lambda h: jsp.linalg.cho_solve(
            jsp.linalg.cho_factor(_definite(h)), h
        ),
        "expm": lambda h: jsp.linalg.expm(h / 4),
        "lu": lambda h: jsp.linalg.lu(_definite(h))[1:],
        "solve_triangular": lambda h: jsp.linalg.solve_triangular(
            jnp.tril(h) / 4 + 2 * jnp.eye(16), h, lower=True
        ),
        "toeplitz": lambda h: jsp.linalg.toeplitz(h[0], h[0]),
        "block_diag": lambda h: jsp.linalg.block_diag(h, h),
        "cg": lambda h: jsp.sparse.linalg.cg(_definite(h), h[0])[0],
        "gmres": lambda h: jsp.sparse.linalg.gmres(_definite(h), h[0])[0],
        "bicgstab": lambda h: jsp.sparse.linalg.bicgstab(_definite(h), h[0])[0],
    }
    return _unary(jnp.linalg, spd, _definite) | eigenvalues


def _jax_scipy() -> dict[str, Any]:
    special = jsp.special
    image = lambda h: jnp.stack([h, h.T])  # noqa: E731
    stats = jsp.stats
    densities = {
        f"stats.{name}.logpdf": functools.partial(
            lambda density, h: density.logpdf(h), getattr(stats, name)
        )
        for name in "cauchy laplace logistic norm".split()
    }
    return (
        _unary(special, "erf erfc expit i0 i0e i1 i1e log_ndtr ndtr logsumexp")
        | _unary(special, "digamma gammaln expi exp1", _positive)
        | {
            "betaln": lambda h: special.betaln(_positive(h), _positive(h.T)),
            "betainc": lambda h: special.betainc(2.0, 3.0, jax.nn.sigmoid(h)),
            "entr": lambda h: special.entr(_positive(h)),
            "erfinv": lambda h: special.erfinv(0.9 * jnp.tanh(h)),
            "gammainc": lambda h: special.gammainc(2.0, _positive(h)),
            "kl_div": lambda h: special.kl_div(_positive(h), _positive(h.T)),
            "logit": lambda h: special.logit(_share(h)),
            "ndtri": lambda h: special.ndtri(_share(h)),
            "rel_entr": lambda h: special.rel_entr(_positive(h), _positive(h.T)),
            "xlog1py": lambda h: special.xlog1py(h, _positive(h)),
            "xlogy": lambda h: special.xlogy(h, _positive(h)),
            "fft.fft": lambda h: jnp.fft.fft(h),
            "fft.fft2": lambda h: jnp.fft.fft2(h),
            "fft.rfft-irfft": lambda h: jnp.fft.irfft(jnp.fft.rfft(h) * 0.3),
            "fft.dct": lambda h: jsp.fft.dct(h),
            "fft.idct": lambda h: jsp.fft.idct(h),
            "signal.convolve2d": lambda h: jsp.signal.convolve2d(h, h[:3, :3]),
            "signal.convolve": lambda h: jsp.signal.convolve(h[0], h[1]),
            "signal.fftconvolve": lambda h: jsp.signal.fftconvolve(h[0], h[1]),
            "signal.correlate": lambda h: jsp.signal.correlate(h[0], h[1]),
            "signal.detrend": lambda h: jsp.signal.detrend(h),
            "signal.stft": lambda h: jsp.signal.stft(h.ravel(), nperseg=32)[2],
            "signal.welch": lambda h: jsp.signal.welch(h.ravel(), nperseg=32)[1],
            "ndimage.map_coordinates": lambda h: jsp.ndimage.map_coordinates(
                h, list(8 + image(2 * jnp.tanh(h))), order=1
            ),
            "interpolate.RegularGridInterpolator": lambda h: (
                jsp.interpolate.RegularGridInterpolator(
                    (jnp.arange(16.0), jnp.arange(16.0)), h
                )(8 + jnp.tanh(h[:, :2]))
            ),
            "image.resize": lambda h: jax.image.resize(h, (24, 8), "bicubic"),
            "stats.gaussian_kde": lambda h: stats.gaussian_kde(h[0])(h[1]),
            "stats.t.logpdf": lambda h: stats.t.logpdf(h, 5.0),
            "stats.beta.logpdf": lambda h: stats.beta.logpdf(_share(h), 2.0, 3.0),
            "stats.gamma.logpdf": lambda h: stats.gamma.logpdf(_positive(h), 2.0),
            "stats.multivariate_normal.logpdf": lambda h: (
                stats.multivariate_normal.logpdf(h, jnp.zeros(16), _definite(h))
            ),
            "integrate.trapezoid": jsp.integrate.trapezoid,
            "experimental.odeint": _odeint,
        }
        | densities
    )


def _odeint(h: Any) -> Any:
    from jax.experimental.ode import odeint

    times = jnp.linspace(0.0, 1.0, 4)
    return odeint(lambda y, t, a: jnp.tanh(a @ y) - y, h[0], times, h / 4)


def _optax_losses() -> dict[str, Any]:
    both = (
        "convex_kl_divergence cosine_distance cosine_similarity "
        "generalized_kl_divergence hinge_loss huber_loss kl_divergence "
        "kl_divergence_with_log_targets l2_loss log_cosh poly_loss_cross_entropy "
        "ranking_softmax_loss safe_softmax_cross_entropy "
        "sigmoid_binary_cross_entropy sigmoid_focal_loss softmax_cross_entropy "
        "squared_error binary_dice_loss dice_loss perceptron_loss"
    )
    integer = (
        "multiclass_hinge_loss multiclass_perceptron_loss multiclass_sparsemax_loss "
        "softmax_cross_entropy_with_integer_labels"
    )
    losses = optax.losses

    def with_targets(name: str, h: Any) -> Any:
        logs = jax.nn.log_softmax(h) if "kl_div" in name else h
        soft = jax.nn.softmax(_targets(h))
        signed = jnp.sign(_targets(h))
        targets = signed if name in ("hinge_loss", "perceptron_loss") else soft
        return getattr(losses, name)(logs, targets)

    def with_labels(name: str, h: Any) -> Any:
        return getattr(losses, name)(h, _labels())

    found: dict[str, Any] = {}
    found |= {n: functools.partial(with_targets, n) for n in both.split()}
    found |= {n: functools.partial(with_labels, n) for n in integer.split()}
    return found | {
        "ctc_loss": lambda h: losses.ctc_loss(
            h[None], jnp.zeros((1, 16)), 1 + _labels()[None, :6], jnp.zeros((1, 6))
        ),
        "ntxent": lambda h: losses.ntxent(h, _labels()),
        "triplet_margin_loss": lambda h: losses.triplet_margin_loss(
            h, h.T, _targets(h)
        ),
        "sparsemax_loss": lambda h: losses.sparsemax_loss(h[:, 0], _labels() % 2),
        "make_fenchel_young_loss": lambda h: losses.make_fenchel_young_loss(
            jax.scipy.special.logsumexp
        )(h[0], jax.nn.softmax(_targets(h)[0])),
        "multiclass_generalized_dice_loss": lambda h: (
            losses.multiclass_generalized_dice_loss(
                h.reshape(2, 8, 16), jax.nn.one_hot(_labels().reshape(2, 8), 16)
            )
        ),
    }


def _jaxopt_losses() -> dict[str, Any]:
    from jaxopt import loss, projection, prox

    return {
        "loss.multiclass_logistic": lambda h: jax.vmap(loss.multiclass_logistic_loss)(
            _labels(), h
        ),
        "loss.multiclass_sparsemax": lambda h: jax.vmap(loss.multiclass_sparsemax_loss)(
            _labels(), h
        ),
        "loss.binary_logistic": lambda h: loss.binary_logistic_loss(
            _labels() % 2, h[:, 0]
        ),
        "projection.simplex": lambda h: jax.vmap(projection.projection_simplex)(h),
        "projection.l1_ball": lambda h: projection.projection_l1_ball(h.ravel()),
        "projection.l2_ball": lambda h: projection.projection_l2_ball(h),
        "projection.transport": lambda h: projection.projection_transport(
            h, (jnp.full(16, 1 / 16), jnp.full(16, 1 / 16))
        ),
        "prox.lasso": lambda h: prox.prox_lasso(h, 0.1),
        "prox.elastic_net": lambda h: prox.prox_elastic_net(h),
        "prox.group_lasso": lambda h: prox.prox_group_lasso(h),
    }


def _rlax() -> dict[str, Any]:
    import rlax

    returns = lambda f: lambda h: f(h[0], jax.nn.sigmoid(h[1]), h[2], 0.9)  # noqa: E731
    row = lambda h: (h[0], jnp.asarray(2), h[1, 0], 0.9, h[2])  # noqa: E731
    return {
        "lambda_returns": returns(rlax.lambda_returns),
        "discounted_returns": lambda h: rlax.discounted_returns(
            h[0], 0.9 + 0 * h[1], h[2]
        ),
        "n_step_bootstrapped_returns": lambda h: rlax.n_step_bootstrapped_returns(
            h[0], 0.9 + 0 * h[1], h[2], 3
        ),
        "q_learning": lambda h: rlax.q_learning(*row(h)),
        "double_q_learning": lambda h: rlax.double_q_learning(*row(h), h[3]),
        "policy_gradient_loss": lambda h: rlax.policy_gradient_loss(
            h, _labels(), h[:, 0], jnp.ones(16)
        ),
        "entropy_loss": lambda h: rlax.entropy_loss(h, jnp.ones(16)),
        "qpg_loss": lambda h: 1 + rlax.qpg_loss(h, h.T),
        "clipped_surrogate_pg_loss": lambda h: rlax.clipped_surrogate_pg_loss(
            jnp.exp(h[0] / 4), h[1], 0.2
        ),
        "vtrace": lambda h: rlax.vtrace_td_error_and_advantage(
            h[0], h[1], h[2], 0.9 + 0 * h[3], jnp.exp(h[4] / 4), 0.9
        ),
        "td_lambda": lambda h: rlax.td_lambda(h[0], h[1], 0.9 + 0 * h[2], h[3], 0.9),
        "quantile_q_learning": lambda h: rlax.quantile_q_learning(
            h, jnp.linspace(0, 1, 16), jnp.asarray(1), h[0, 0], 0.9, h.T, h, 1.0
        ),
        "signed_hyperbolic": lambda h: rlax.signed_hyperbolic(h),
        "twohot": lambda h: rlax.transform_to_2hot(h[0], -3.0, 3.0, 11),
        "vmpo_loss": lambda h: rlax.vmpo_loss(
            h[0],
            h[1],
            rlax.LagrangePenalty(_positive(h[2, 0]), 0.1),
            [(h[3], rlax.LagrangePenalty(_positive(h[4, 0]), 0.1))],
        )[0],
    }


def _dm_pix() -> dict[str, Any]:
    import dm_pix as pix

    color = lambda h: jax.nn.sigmoid(h[:, :15].reshape(4, 20, 3))  # noqa: E731
    hues = "rgb_to_hsv hsv_to_rgb rgb_to_hsl rgb_to_grayscale rot90 flip_left_right"
    image = lambda h: jax.nn.sigmoid(h)[..., None]  # noqa: E731
    other = lambda h: image(h.T)  # noqa: E731
    return _unary(pix, hues, color) | {
        "adjust_brightness": lambda h: pix.adjust_brightness(color(h), 0.1),
        "adjust_contrast": lambda h: pix.adjust_contrast(color(h), 0.7),
        "adjust_gamma": lambda h: pix.adjust_gamma(color(h), 0.7),
        "adjust_hue": lambda h: pix.adjust_hue(color(h), 0.1),
        "adjust_saturation": lambda h: pix.adjust_saturation(color(h), 0.7),
        "gaussian_blur": lambda h: pix.gaussian_blur(image(h), 1.0, 3),
        "solarize": lambda h: pix.solarize(color(h), 0.5),
        "psnr": lambda h: pix.psnr(image(h), other(h)),
        "ssim": lambda h: pix.ssim(image(h), other(h), filter_size=5),
        "simse": lambda h: pix.simse(image(h), other(h)),
        "rotate": lambda h: pix.rotate(image(h), 0.4),
        "affine_transform": lambda h: pix.affine_transform(
            image(h), jnp.asarray([[0.9, 0.1, 0.0], [-0.1, 0.9, 0.0], [0.0, 0.0, 1.0]])
        ),
    }


def _distrax() -> dict[str, Any]:
    import distrax as d

    def log_prob(make: Callable[[Any], Any], at: Callable[[Any], Any]) -> Any:
        return lambda h: make(h).log_prob(at(h))

    same = lambda h: h.T  # noqa: E731
    return {
        "Normal": log_prob(lambda h: d.Normal(h, _positive(h)), same),
        "Laplace": log_prob(lambda h: d.Laplace(h, _positive(h)), same),
        "Logistic": log_prob(lambda h: d.Logistic(h, _positive(h)), same),
        "Gumbel": log_prob(lambda h: d.Gumbel(h, _positive(h)), same),
        "Gamma": log_prob(
            lambda h: d.Gamma(_positive(h), 2.0), lambda h: _positive(h.T)
        ),
        "Beta": log_prob(lambda h: d.Beta(_positive(h), _positive(h.T)), _share),
        "VonMises": log_prob(lambda h: d.VonMises(h, _positive(h)), same),
        "Bernoulli": log_prob(lambda h: d.Bernoulli(h), lambda h: _targets(h) > 0),
        "Categorical": log_prob(lambda h: d.Categorical(h), lambda h: _labels()),
        "Dirichlet": log_prob(
            lambda h: d.Dirichlet(_positive(h)), lambda h: jax.nn.softmax(h.T)
        ),
        "MultivariateNormalDiag": log_prob(
            lambda h: d.MultivariateNormalDiag(h, _positive(h)), same
        ),
        "MultivariateNormalTri": log_prob(
            lambda h: d.MultivariateNormalTri(h, jnp.tril(h) / 4 + 2 * jnp.eye(16)),
            same,
        ),
        "MultivariateNormalFullCovariance": log_prob(
            lambda h: d.MultivariateNormalFullCovariance(h, _definite(h)), same
        ),
        "Mixture": log_prob(
            lambda h: d.MixtureSameFamily(
                d.Categorical(h[0]), d.Normal(h[1], _positive(h[2]))
            ),
            lambda h: h[3],
        ),
        "kl(Normal)": lambda h: d.Normal(h, _positive(h)).kl_divergence(
            d.Normal(h.T, _positive(h.T))
        ),
        "RationalQuadraticSpline": lambda h: d.RationalQuadraticSpline(
            jnp.tile(h[:, :13], 1), -3.0, 3.0
        ).forward_and_log_det(h[:, 15]),
        "sample(Normal)": lambda h: d.Normal(h, _positive(h)).sample(
            seed=jax.random.key(0)
        ),
        "Transformed(Tanh)": log_prob(
            lambda h: d.Transformed(d.Normal(h, _positive(h)), d.Tanh()),
            lambda h: 0.9 * jnp.tanh(h.T),
        ),
    }


def _numpyro() -> dict[str, Any]:
    import numpyro.distributions as d

    at = {
        "Normal": lambda h: d.Normal(h, _positive(h)).log_prob(h.T),
        "StudentT": lambda h: d.StudentT(_positive(h), h).log_prob(h.T),
        "Cauchy": lambda h: d.Cauchy(h, _positive(h)).log_prob(h.T),
        "Weibull": lambda h: d.Weibull(_positive(h), 2.0).log_prob(_positive(h.T)),
        "Gamma": lambda h: d.Gamma(_positive(h), 2.0).log_prob(_positive(h.T)),
        "NegativeBinomial": lambda h: d.NegativeBinomial2(_positive(h), 2.0).log_prob(
            _labels()
        ),
        "Poisson": lambda h: d.Poisson(_positive(h)).log_prob(_labels()),
        "BinomialLogits": lambda h: d.Binomial(9, logits=h).log_prob(_labels()),
        "LKJCholesky": lambda h: d.LKJCholesky(4, 2.0).log_prob(
            jnp.linalg.cholesky(_definite(h[:4]))
        ),
        "MultivariateStudentT": lambda h: d.MultivariateStudentT(
            5.0, h, jnp.linalg.cholesky(_definite(h))
        ).log_prob(h.T),
        "LowRankMultivariateNormal": lambda h: d.LowRankMultivariateNormal(
            h[0], h[:, :3], _positive(h[1])
        ).log_prob(h.T),
        "OrderedLogistic": lambda h: d.OrderedLogistic(
            h[:, 0], jnp.asarray([-1.0, 0.0, 1.0])
        ).log_prob(_labels() % 4),
        "TruncatedNormal": lambda h: d.TruncatedNormal(
            h, _positive(h), low=-4.0, high=4.0
        ).log_prob(jnp.tanh(h.T)),
        "GaussianRandomWalk": lambda h: d.GaussianRandomWalk(0.5, 16).log_prob(h),
        "Dirichlet": lambda h: d.Dirichlet(_positive(h)).log_prob(jax.nn.softmax(h.T)),
    }
    return at


_FUNCTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "jax.nn": _jax_nn,
    "jax.numpy": _jax_numpy,
    "jax linear algebra": _linalg,
    "jax.scipy": _jax_scipy,
    "optax.losses": _optax_losses,
    "jaxopt": _jaxopt_losses,
    "rlax": _rlax,
    "dm_pix": _dm_pix,
    "distrax": _distrax,
    "numpyro": _numpyro,
}


def _programs(table: Callable[[], dict[str, Any]]) -> Programs:
    return lazily(_case, table())


TABLES = {
    source: functools.partial(_programs, table) for source, table in _FUNCTIONS.items()
}
