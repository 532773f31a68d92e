"""For type checkers: the names that `flax_amp.optim` has from optax 0.2.8."""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from flax_amp.optim._optimizer import Optimizer, Schedule

if TYPE_CHECKING:
    _optimizers = cast(tuple[Callable[..., Optimizer], ...], ())
    _schedules = cast(tuple[Callable[..., Schedule], ...], ())

    # fmt: off
    (
        MultiSteps, acprop, adabelief, adadelta, adafactor, adagrad, adam, adamax,
        adamaxw, adamw, adan, adaptive_grad_clip, add_decayed_weights, add_noise,
        ademamix, adopt, amsgrad, apply_every, apply_if_finite, centralize, chain,
        clip, clip_by_block_rms, clip_by_global_norm, cocob, conditionally_mask,
        conditionally_transform, dadapt_adamw, differentially_private_aggregate, dog,
        dowg, dpsgd, ema, flatten, freeze, fromage, galore,
        hutchinson_estimator_diag_hessian, identity, keep_params_nonnegative, lamb,
        lars, lbfgs, lion, lookahead, madgrad, masked, measure_with_ema, mechanize,
        momo, momo_adam, multi_transform, muon, nadam, nadamw, named_chain, noisy_sgd,
        normalize, normalize_by_update_norm, novograd, optimistic_adam,
        optimistic_adam_v2, optimistic_gradient_descent, partition, polyak_sgd,
        prodigy, radam, reduce_on_plateau, rmsprop, rprop, sam, scale, scale_by_acprop,
        scale_by_adadelta, scale_by_adam, scale_by_adamax, scale_by_adan,
        scale_by_ademamix, scale_by_adopt, scale_by_amsgrad,
        scale_by_backtracking_linesearch, scale_by_belief, scale_by_cocob,
        scale_by_distance_over_gradients, scale_by_factored_rms, scale_by_galore,
        scale_by_lbfgs, scale_by_learning_rate, scale_by_lion, scale_by_madgrad,
        scale_by_muon, scale_by_novograd, scale_by_optimistic_gradient,
        scale_by_param_block_norm, scale_by_param_block_rms, scale_by_polyak,
        scale_by_radam, scale_by_rms, scale_by_rprop, scale_by_rss, scale_by_schedule,
        scale_by_sign, scale_by_simplified_ademamix, scale_by_sm3, scale_by_stddev,
        scale_by_trust_ratio, scale_by_yogi, scale_by_zoom_linesearch, schedule_free,
        schedule_free_adamw, schedule_free_sgd, selective_transform, set_to_zero, sgd,
        sign_sgd, signum, simplified_ademamix, sm3, snapshot, sophia,
        split_real_and_imaginary, stateless, stateless_with_tree_map, trace,
        with_extra_args_support, yogi, zero_nans,
    ) = _optimizers
    (
        constant_schedule, cosine_decay_schedule, cosine_onecycle_schedule,
        exponential_decay, join_schedules, linear_onecycle_schedule, linear_schedule,
        piecewise_constant_schedule, piecewise_interpolate_schedule,
        polynomial_schedule, sgdr_schedule, warmup_constant_schedule,
        warmup_cosine_decay_schedule, warmup_exponential_decay_schedule,
    ) = _schedules
