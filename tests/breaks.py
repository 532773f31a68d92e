"""One-line breaks of the package, each with the tests that must see it.

    python -m tests.breaks [--only N ...]        # or: make breaks

It copies the package and its tests to a temporary directory, breaks one line at a time
there, and runs the tests that the table names for that line. A break that its tests do
not see survives; it shows a test that is missing. The exit status is 1 if one survives,
if a text does not stand in its file exactly once, or if the tests fail without a break.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = "flax_amp tests benchmarks examples configs docs pyproject.toml README.md"


class Break(NamedTuple):
    """A text of a file that stands there once, what replaces it, and who sees that."""

    file: str  # in flax_amp
    old: str
    new: str
    tests: str  # node ids in tests, with commas in between


# For each file of flax_amp: tests, and the texts with their replacements that they see.
TABLE = r"""
policy.py
  test_policy.py::test_precision_function
- return [_cast(x, dtype) for x, dtype in pairs], bind_params
+ return [x for x, _ in pairs], bind_params
  test_policy.py::test_a_word_for_fp8_is_a_key
- if functions.get(lax.dot_general_p, default) is default:
+ if True:
  rewriter/test_float32_result.py::test_in_float32_it_changes_nothing
- mine += [use_float32_result, InDtype(jnp.float32), *self.fp8_recipes]
+ mine += [InDtype(jnp.float32), *self.fp8_recipes]

_scope_paths.py
  test_policy.py::test_scope_keys
- modules.pop()
+ pass

_rewriter/primitives.py
  rewriter/test_numerics.py::test_inner_and_outer_products_of_floats
- if all(shapes[0][axis] == 1 for axis in contracted):
+ if False:
  rewriter/test_rule.py::test_cotangents_are_summed_in_float32
- math.prod(reads) > 1
+ math.prod(reads) < 1
  rewriter/test_primitives.py::test_the_walk_enters_bodies_but_no_kernels
- if eqn.primitive.name != "pallas_call":
+ if True:

_rewriter/roles.py
  rewriter/test_custom_derivatives.py::test_a_rule_that_asks_for_precision_gets_it
- if asked := asked_precision(eqn):
+ if asked := "":
  rewriter/test_transform.py::test_float64
- if is_inexact and dtype not in (jnp.float32, self.half):
+ if False:
  rewriter/test_transform.py::test_forced_scope_spares_what_cannot_be_lowered
- if decision.is_chosen and eqn.primitive.name == "jit" and _draws(eqn):
+ if False:
  rewriter/test_numerics.py::test_exact
- if not jnp.issubdtype(dtype, jnp.floating):
+ if False:

_rewriter/flow.py
  rewriter/test_flax_models.py::test_the_stream_between_checkpoints_is_half
- among(outvars, for_results)
+ among(outvars, read_in_own_region)
  rewriter/test_memory.py::test_a_relu_is_stored_once
- _MAY_BE_CHECKPOINTED = ("custom_jvp_call", "cond", *_CALLS)
+ _MAY_BE_CHECKPOINTED = ("custom_jvp_call", "cond")
  rewriter/test_hard_losses.py::test_hard_losses[from moved jit-float16]
- passes = _is_move(node) and read_in_own_region.isdisjoint(outvars)
+ passes = _is_move(node)

_rewriter/origins.py
  rewriter/test_origins.py::test_sums_that_begin_at_data_are_states
- return origin._replace(state=BEGINS_AT_DATA, begins_at=of_x.begins_at)
+ return origin
  rewriter/test_origins.py::test_sums_that_pass_the_same_weights_again_are_states
- if of_x.weights and not of_y.weights & ~of_x.weights:
+ if False:
  rewriter/test_origins.py::test_streams_and_biases_are_no_states
- self.biases |= begins_at
+ pass
  rewriter/test_origins.py::test_streams_and_biases_are_no_states
- if x.after_matmul and y.after_matmul:
+ if False:
  rewriter/test_origins.py::test_a_body_is_planned_once_for_all_layers
- classes[key] = classes.get(key, 0) | root
+ classes[(*key, root)] = root

_rewriter/rule.py
  rewriter/test_weight_matmuls.py::test_float32_sums[custom_vjp-bfloat16]
- is_wide |= not self.to_gradients.isdisjoint(node.eqn.outvars)
+ pass
  rewriter/test_six_lines.py::test_each_layer_between_matmuls
- if origin.is_sum:
+ if False:
  rewriter/test_six_lines.py::test_each_body_between_matmuls
- has_float32_too = v not in self.residual_sums
+ has_float32_too = True
  rewriter/test_rule_in_bodies.py::test_results
- if origin.state:
+ if False:
  rewriter/test_rule_in_bodies.py::test_results
- if not origin.after_matmul:
+ if False:
  rewriter/test_streams.py::test_a_state_is_not_rounded_though_its_step_multiplies_it
- is_inner = self.flow.for_results.isdisjoint(eqn.outvars)
+ is_inner = True
  rewriter/test_six_lines.py::test_each_layer_between_matmuls
- bool(v.aval.shape) and self.origins.read(v).is_argument for v in others
+ self.origins.read(v).is_argument for v in others
  rewriter/test_float32_result.py
- return Way.FLOAT32_RESULT if is_wide else Way.HALF
+ return Way.HALF

_rewriter/memory.py
  rewriter/test_memory.py::test_effects_run_once_and_in_order
- own = floor = max(own, floor)
+ own = max(own, 0)
  rewriter/test_memory.py::test_lookups_are_computed_again
- if (not is_low and v not in border) or _is_lookup(node, plan):
+ if not is_low and v not in border:

_rewriter/casts.py
  rewriter/test_casts.py::test_copies_under_each_transform
- wide = [lax.convert_element_type(c, jnp.float32) for c in cotangents]
+ wide = cotangents
  rewriter/test_casts.py::test_a_gpu_adds_up_a_batch_by_examples
- if axes and axes[0] == 0 and _has_parts([c.shape[axis] for axis in axes]):
+ if False:
  rewriter/test_casts.py::test_the_float32_sum_of_each_platform
- parts = lax.optimization_barrier(lax.reduce_sum(wide, axes[1:]))
+ parts = lax.optimization_barrier(lax.reduce_max(wide, axes[1:]))

_rewriter/emit.py
  rewriter/test_flax_models.py::test_no_cast_is_in_vain
- if key not in self.cast_up:
+ if True:
  rewriter/test_memory.py::test_barriers_of_a_model
- platforms = NOWHERE if self.emitter.in_loop else stored.barrier_platforms
+ platforms = stored.barrier_platforms
  rewriter/test_casts.py::test_the_cotangents_of_many_readers_add_up_in_float32
- self.copies[read] = copies(x, count)
+ self.copies[read] = [x]
  rewriter/test_rule.py::test_the_plan_is_asserted
- self._check(node, form, x)
+ pass
  rewriter/test_rule.py::test_a_key_for_a_scatter_has_an_effect
- results = _jaxprs.bind_in_dtype(eqn, operands, params)
+ results = _compat.bind(eqn, operands, params)

_rewriter/flow.py
  rewriter/test_graph_policy.py::test_coordinates_and_counts_are_float32
- if level == 0 and choice.role is Kind.HALF and _is_behind_matmuls(choice):
+ if False:

_rewriter/row_matmuls.py
  rewriter/test_row_matmuls.py::test_the_matmul_is_one_of_rows_and_columns
- if is_row_form or several > 1 or not (rows and columns and pairs):
+ if True:
  rewriter/test_row_matmuls.py::test_other_forms_stay_as_they_are
- if is_row_form or several > 1 or not (rows and columns and pairs):
+ if False:
  rewriter/test_row_matmuls.py::test_an_outer_product_stays_as_it_is
- if is_row_form or several > 1 or not (rows and columns and pairs):
+ if is_row_form or several > 1 or not (rows and columns):
  rewriter/test_row_matmuls.py::test_an_axis_on_several_devices_is_not_merged
- if _compat.is_in_mesh() or any(map(_may_be_sharded, factors)):
+ if False:

_rewriter/stored.py
  rewriter/test_stored.py::test_the_forward_pass_rounds
- elif is_rounded and not in_backward and copies > 1:
+ elif False:
  rewriter/test_stored.py::test_barriers_of_a_marked_value
- elif in_backward and platform in platforms:
+ elif platform in platforms:
  rewriter/test_stored.py::test_maxima_of_each_platform
- if in_backward and platform in ON_GPU:
+ if False:
  rewriter/test_stored.py::test_gradients_through_maxima
- params["again"] = params["again"].batched()
+ pass
  rewriter/test_stored.py::test_a_maximum_of_what_is_stored_is_stored
- if not all(available[1:]):
+ if False:

_rewriter/bodies.py
  rewriter/test_rule_in_bodies.py::test_a_result_is_half_only_if_it_is_in_every_branch
- return tuple(map(all, zip(*found, strict=True)))
+ return tuple(map(any, zip(*found, strict=True)))
  rewriter/test_streams.py::test_streams
- is_stream and is_float32(v) and not (before.begins_at or after.state)
+ is_stream and is_float32(v)
  rewriter/test_rule.py::test_a_scan_adds_up_the_cotangents_of_what_it_closes_over
- wide = emitter.cast_as(consts, of_consts, (False,) * start)
+ wide = consts
  rewriter/test_fp8.py::test_a_policy_for_dots_saves_matmuls_in_fp8
- params["policy"] = PolicyOfPlainMatmuls(params["policy"])
+ pass
  rewriter/test_weight_matmuls.py::test_a_policy_of_a_checkpoint_sees_plain_matmuls
- params["policy"] = PolicyOfWeightMatmuls(params["policy"])
+ pass

_rewriter/weight_matmuls.py
  rewriter/test_weight_matmuls.py::test_float32_sums[plain-bfloat16]
- cotangent = _with_weight_matmul(of_plain, g, *others, half=half, dtype=aval.dtype)
+ cotangent = _with_weight_matmul(of_plain, g, *others, half=half, dtype=half)
  rewriter/test_weight_matmuls.py::test_the_matmuls_of_other_devices_read_halves
- factors = [to_half(x, half) for x in operands[:2]]
+ factors = operands[:2]

_rewriter/custom_derivatives.py
  rewriter/test_closures.py::test_what_it_closes_over_has_no_derivative
- if atom in self.differentiated:
+ if False:
  debug/test_nonfinite_inside.py::test_a_line_of_a_rule_with_matmuls
- with _compat.own_lines():
+ with jax.named_scope(""):

_rewriter/closures.py
  rewriter/test_closures.py::test_a_rule_that_closes_over_a_traced_value
- found = _captured_by(eqn, made)
+ found = None

_rewriter/fp8.py
  rewriter/test_fp8.py::test_gradients_read_8_bit_floats
- formats=(BACKWARD, formats[1 - i])
+ formats=(formats[i], formats[1 - i])

_rewriter/transform.py
  rewriter/test_transform.py::test_weak_types_of_results
- x, getattr(aval, "weak_type", False))
+ x, False)
  rewriter/test_transform.py::test_the_program_is_that_of_plain_jax
- is_identity = dtype == jnp.float32 and not policy.may_leave_float32
+ is_identity = False

_rewriter/nnx_scopes.py
  rewriter/test_nnx_scopes.py::test_nothing_is_left_behind
- vars(value).pop(_NAME, None)
+ pass

_rewriter/policy_warnings.py
  rewriter/test_policy_warnings.py::test_no_false_alarm
- if kept and "" not in kept:
+ if kept:

_rewriter/half_params.py
  rewriter/test_half_params.py::test_models_of_the_benchmarks
- if results == self.expected:
+ if True:
  debug/test_parameters.py
- self.reasons[p] = Reason.UNROUNDED, reader
+ pass

_rewriter/value_numbers.py
  rewriter/test_value_numbers.py, rewriter/test_half_params.py
- if x.digits is Digits.FLOAT32:
+ if False:
  rewriter/test_value_numbers.py, rewriter/test_half_params.py
- if not leaves <= self.stored_in_half:
+ if False:

_rewriter/streams.py
  rewriter/test_streams.py::test_a_carry_that_no_weight_multiplies_once_is_float32
- i in x.streams and i not in states and bool(v.aval.shape)
+ bool(v.aval.shape)
  rewriter/test_streams.py::test_trained_weights_are_states
- self.states.update(carry for carry, _ in pairs & factor.matmuls)
+ pass

_training/core.py
  training/test_untrained.py::test_the_new_state_holds_the_same_array
- return old if is_unchanged else new
+ return new
  training/test_scaled_grad.py::test_redo_stops_after_so_many_times
- lambda carry: (carry[0] < retries) & carry[1][1],
+ lambda carry: carry[1][1],
  training/test_settings.py::test_a_run_with_faults
- return jax.tree.map(select, new, old)
+ return new
- step=old.step + 1, scaler=scaler, opt_state=opt_state
+ step=old.step + 1, opt_state=opt_state
- forward_finite = _tree.all_finite(output.loss)
+ forward_finite = jnp.array(True)
- opt_state = opt_state._replace(**next_counters(old.opt_state, is_kept))
+ pass
  training/test_writes.py::test_the_model_is_left_as_plain_nnx_leaves_it
- left = state.replace(params=_tree.combine(new_params, state.params))
+ left = state
  optim/test_extra_args.py::test_the_numbers_are_those_of_the_step
- extra_args=dict(value=output.loss, loss=output.loss, grad_norm=norm),
+ extra_args=dict(value=norm, loss=output.loss, grad_norm=norm),
  training/test_spikes.py::test_a_spike_changes_nothing_else
- return is_finite & ~is_spike, old.replace(opt_state=opt_state)
+ return is_finite, old.replace(opt_state=opt_state)
  training/test_spikes.py::test_a_step_that_is_not_finite_is_no_spike
- opt_state = _tree.select(is_finite, recorded, old.opt_state)
+ opt_state = recorded
  training/test_optimizer.py::test_a_step_decides_by_the_squares_of_the_gradients
- backward_finite = _tree.all_finite((square_norm, result.overwrite))
+ backward_finite = _tree.all_finite(result.grads)

_training/scaler.py
  training/test_scaler.py::test_random_runs_follow_the_rule
- falls = loss_finite & ~finite
+ falls = ~finite
- "count": jnp.where(falls | grows, 0, count),
+ "count": jnp.where(grows, 0, count),
- grows = finite & (count >= state["patience"])
+ grows = finite & (count > state["patience"])
- "scaler": jnp.fmin(jnp.fmax(scale, LOWEST), HIGHEST),
+ "scaler": scale,
  training/test_scaled_grad.py::test_loss_and_gradients_are_exact_while_the_scale_moves
- factor = 1.0 / check_scaler(state)["scaler"]
+ factor = 1.0

_training/passes.py
  training/test_untrained.py::test_training_is_that_of_the_rounded_base_in_float32
- return _tree.is_inexact_array(param) and not _tree.is_half(param)
+ return _tree.is_inexact_array(param)
  training/test_sharded.py::test_frozen_parameters_keep_their_bits
- average = base + mean(new - base)
+ average = mean(new)
  training/test_train_step.py::test_accumulation_is_in_float32
- grads=jax.tree.map(lambda g: g / count, total),
+ grads=total,
  training/test_train_step.py::test_statistics_go_through_the_micro_batches
- variables = _tree.combine(output.new_variables, variables)
+ pass
  training/test_writes.py::test_the_model_is_left_as_plain_nnx_leaves_it
- params = _tree.combine(output.new_params, params)
+ pass
- new_params=_tree.map_or_none(average_variable, output.new_params, params),
+ new_params=output.new_params,
  training/test_passes.py::test_the_average_is_that_of_the_whole_batch
- return jax.tree.map(lambda x: jnp.where(weight != 0, weight * x, 0), tree)
+ return jax.tree.map(lambda x: weight * x, tree)
- sums = jax.lax.psum(_weigh(tree, weight), axis_name)
+ sums = jax.lax.psum(tree, axis_name)
- weight = None if weights is None else weights.sum()
+ weight = None if weights is None else weights.mean()
  training/test_passes.py::test_a_guarded_loss_without_weight
- loss = jnp.where(is_mean, output.loss, jnp.nan)
+ loss = output.loss
  training/test_writes.py::test_a_micro_batch_without_weight_writes_nothing
- return None if new is None else jnp.where(counts, new, old)
+ return new

_training/loss_checks.py
  training/test_loss_checks.py::test_a_weight_has_no_derivative
- if output.weight is not None and not observer.has_looked:
+ if False:
  training/test_loss_checks.py::test_over_devices
- same_on = self._options.axes if self._options.accum_steps == 1 else ()
+ same_on = ()
  training/test_writes.py::test_parameters_that_a_call_hands_on_are_not_written
- return None if number in self._unchanged else x
+ return x
  training/test_writes.py::test_a_loss_may_swap_parameters
- if origin is not None and traced.names[origin] == f"{name}{keystr(path)}":
+ if origin is not None:

_training/untrained.py
  training/test_untrained.py::test_a_half_parameter_that_may_train_is_refused
- if name in ("add", "add_any", "sub") and last == _ZEROS:
+ if name in ("add", "add_any", "sub"):
  training/test_untrained.py::test_a_half_parameter_that_may_train_is_refused
- flags = list(map(operator.and_, flags, unchanged))
+ pass
  training/test_untrained.py::test_a_parameter_that_no_step_changes_may_be_half
- return _common(operands[1:])
+ return None
  training/test_untrained.py::test_a_parameter_that_no_step_changes_may_be_half
- return _results(bodies(eqn)[0], operands)
+ return [None] * len(eqn.outvars)
  training/test_untrained.py::test_evaluation_and_tools_read_it_as_it_is
- return leaf if is_unchanged else _tree.float32_if_bfloat16(leaf)
+ return _tree.float32_if_bfloat16(leaf)

_training/dependence.py
  training/test_loss_checks.py::test_no_other_loss_warns
- may_be_total = varies and on_parameters is OnParameters.NOT
+ may_be_total = varies
- return x._replace(division=None, is_total=x.is_total and keeps_total)
+ return x
- one_is_enough = name in _PRODUCTS or not result.aval.shape
+ one_is_enough = True
- if name in _SUMS and not result.aval.shape:
+ if name in _SUMS:
  training/test_loss_checks.py::test_a_mean_over_a_total_warns_once
- varies = any(x.varies for x in operands) or name.startswith(_RANDOM)
+ varies = any(x.varies for x in operands)
- is_power = eqn.primitive.name == "integer_pow"
+ is_power = False
  training/test_loss_checks.py::test_a_weight_has_no_derivative
- if name in _ZERO_DERIVATIVE or not _is_inexact(result):
+ if False:

_training/step_call.py
  training/test_step_call.py::test_an_array_in_two_places_is_copied
- leaf = _tree.own(leaf) if id(leaf) in seen else leaf
+ pass

_training/progress.py
  training/test_progress.py::test_a_search_from_the_highest_to_the_lowest_scale_is_no_alarm
- limit = _MAX_SKIPS_IN_SEARCH if may_fall else _MAX_SKIPS
+ limit = _MAX_SKIPS

_training/nnx_step.py
  docs/test_pages.py::test_each_line_runs
- nnx.update(self.objects, self.optimizer_variables)
+ pass
  training/test_nnx_step.py::test_equals_the_step_on_a_state
- held: dict[str, Any] = {"step": self.step}
+ held: dict[str, Any] = {}

checkpoint/_manager.py
  checkpoint/test_directory.py::test_nothing_complete_is_lost_or_replaced
- newest = next(filter(self._is_intact, others), None)
+ newest = None

checkpoint/_migrate.py
  checkpoint/test_migrate.py::test_a_dtype_is_cast_if_no_value_changes
- same = np.array_equal(before, after, equal_nan=True)
+ same = True
  training/test_untrained.py::test_migrate_does_not_round_moments_nor_to_infs
- and not is_moment:
+ and True:
  training/test_untrained.py::test_migrate_does_not_round_moments_nor_to_infs
- same |= stays_finite
+ same = True
  training/test_untrained.py::test_migrate_rounds_the_base_of_a_float32_run
- same |= stays_finite
+ pass

optim/_optimizer.py
  optim/test_optim.py::test_in_make_train_step
- return jnp.maximum(counts[0] - 1, 0) if counts else None
+ return counts[0] if counts else None

optim/_call.py
  optim/test_optim.py::test_replacing_a_number_by_a_number_compiles_nothing
- array = space.array(new, old.dtype if fits else None)
+ array = space.array(new)

metrics/_log.py
  metrics/test_log.py::test_steps_in_any_order
- found[name] = series = {s: v for s, v in series.items() if s < step}
+ pass

checkpoint/_damage.py
  checkpoint/test_damage.py::test_a_flipped_byte_of_an_array_is_named
- {n for n in names if found[n] != listed[n]}
+ set()
  checkpoint/test_damage.py::test_an_outage_is_not_taken_for_damage
- return isinstance(error, kinds) or
+ return True or

checkpoint/_state.py
  checkpoint/test_checkpoint.py::test_messages
- isinstance(manager, Manager) or manager.read_only:
+ isinstance(manager, Manager):

checkpoint/_steps.py
  checkpoint/test_damage.py::test_another_format_and_another_number_are_named
- _FORMAT = 3
+ _FORMAT = 4

optim/_small_state.py
  optim/test_small_state.py::test_roundings_are_unbiased
- word = (word + (bits & 0xFFFF)) & np.uint32(0xFFFF0000)
+ word = (word + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
  optim/test_small_state.py::test_what_bfloat16_has_stays_and_no_finite_number_becomes_an_inf
- bounded = jnp.clip(x, -_LARGEST, _LARGEST)
+ bounded = x
  optim/test_small_state.py::test_the_rounding_matches_the_model
- return _hash(_hash(index ^ (key * factor)) + key)
+ return _hash(_hash(index ^ key) + key)

optim/_spike_rule.py
  optim/test_skip_spikes.py::test_the_rule_by_hand
- jnp.where(is_known & (value > most), most, value)
+ value
- / (count - 1))
+ / count)
- jnp.where(seen + 1 < 2 * window, seen + 1, window)
+ jnp.minimum(seen + 1, window)
  optim/test_skip_spikes.py::test_no_spike_hides_another
- _MOST_RECORDED = np.float32(6)
+ _MOST_RECORDED = np.float32(8)
  optim/test_skip_spikes.py::test_a_spike_in_the_warmup_passes_and_hides_no_other
- is_known = (history.seen >= FEWEST) & (spread > 0)
+ is_known = (history.seen >= 64) & (spread > 0)
  optim/test_skip_spikes.py::test_constant_losses
- spread = jnp.maximum(spread, _LEAST_SPREAD * jnp.abs(mean))
+ pass
  optim/test_skip_spikes.py::test_zeros_tell_no_size
- is_known = (history.seen >= FEWEST) & (spread > 0)
+ is_known = history.seen >= FEWEST
  optim/test_skip_spikes.py::test_what_is_not_finite_is_not_recorded
- _tree.select(is_finite, _with_value(history, recorded), history)
+ _with_value(history, recorded)

optim/_skip_spikes.py
  optim/test_skip_spikes.py::test_a_new_level_becomes_normal
- is_new_level = state.spikes_in_a_row >= self.window // 2
+ is_new_level = jnp.array(False)
  optim/test_skip_spikes.py::test_a_spike_changes_no_bit
- inner_state = _tree.select(is_spike, state.inner_state, inner_state)
+ pass
  optim/test_skip_spikes.py::test_micro_steps_with_a_spike_are_dropped_together
- return old._replace(**chosen, inner_opt_state=keep_counts(*inside))
+ return old._replace(inner_opt_state=keep_counts(*inside))
  optim/test_skip_spikes.py::test_another_guard_drops_no_micro_steps
- name: _tree.select(is_spike, getattr(new, name), getattr(old, name))
+ name: getattr(new, name)
  optim/test_skip_spikes.py::test_wherever_it_stands
- yield from _spike_states(state.inner_state)
+ pass
  optim/test_skip_spikes.py::test_a_step_donates_and_is_traced_once
- inner_state=jax.tree.map(_tree.strong_copy, self.inner.init(params)),
+ inner_state=self.inner.init(params),
  optim/test_skip_spikes.py::test_what_is_judged
- loss = extra.get("value")
+ pass
- norms = {"grad_norms": grad_norm, "update_norms": norm}
+ norms = {"grad_norms": grad_norm}
  optim/test_skip_spikes.py::test_gradients_whose_squares_overflow_are_a_spike
- [_tree.widen(x) for x in leaves]
+ leaves

metrics/_collection.py
  metrics/test_collection.py::test_a_window_is_what_its_steps_reported
- share = other.steps[0] / jnp.maximum(steps[0], 1)
+ share = 0.5
- steps=jnp.int32([finite, ~finite]),
+ steps=jnp.int32([1, ~finite]),

debug/_run.py
  debug/test_nonfinite_inside.py::test_the_first_cause
- fresh &= ~is_kind(x)
+ fresh &= False
  debug/test_nonfinite.py::test_a_bad_example_beside_another_fault
- rank = -1 if i in faults else 2
+ rank = 2

debug/_nonfinite.py
  debug/test_nonfinite.py::test_only_layers_at_fault_are_in_float32
- tried = self._one_by_one(fault, every), every,
+ tried = every,

debug/_rounded.py
  debug/test_rounded.py::test_what_a_loss_reads
- return [] if _is_half_step(step) else _floats(step)
+ return _floats(step)
  debug/test_rounded.py::test_classes_and_metrics_are_no_problem
- arrays = [x for x in results if x.v.aval.shape or x in moved]
+ arrays = results
  debug/test_rounded.py::test_classes_and_metrics_are_no_problem
- return "problem" if is_read_again or _cancels(graph, chain, matmuls) else "note"
+ return "problem"
  debug/test_rounded.py::test_ranks_of_rounded_results
- return "problem" if is_read_again or _cancels(graph, chain, matmuls) else "note"
+ return "problem" if is_read_again else "note"
  debug/test_rounded.py::test_what_is_no_position_is_no_problem
- if "reduce_max" not in readers:
+ if True:
  debug/test_rounded.py::test_what_is_no_position_is_no_problem
- if is_sum and step.visit is not None and step.visit.is_planned_half:
+ if is_sum and step.visit is not None:
  debug/test_rounded.py::test_what_is_no_position_is_no_problem
- least = _size(step.results[0]) if found is self.data else 0
+ least = 0

debug/_graph.py
  debug/test_rounded.py::test_what_a_loss_reads
- left += self.same_as.get(value, ())
+ pass

debug/_gap.py
  debug/test_compare_training.py
- limits.append(max(size, critical * error))
+ limits.append(critical * error)

debug/_training_runs.py
  debug/test_compare_training.py
- run.cut(ends.index(_step_of(session.trained) - first))
+ pass

debug/_compare_training.py
  debug/test_compare_training.py::test_what_is_wrong_is_told
- _check_differs(seed, run, runs[0][:-1])
+ pass

debug/_sensitivity.py
  debug/test_sensitivity.py
- found = self._search(self._fall, enough, most) or found
+ pass
  debug/test_sensitivity.py
- return self._needed(found, enough)
+ return found
  debug/test_sensitivity.py
- return self.rounded(self.before_cast(x), switch)
+ return self.in_float32(x)
  debug/test_sensitivity.py
- return [x._replace(is_cast=is_cast) if isinstance(x, _Half) else x for x in found]
+ return found
  debug/test_sensitivity.py
- return [_Half(exact, run.switch(eqn, BORDER), is_cast=True)]
+ return [_Half(wide, run.switch(eqn, BORDER), is_cast=True)]
  debug/test_sensitivity.py
- if kind != OPERAND and is_of_backward and not is_forward_value:
+ if False:

debug/_parameters.py
  debug/test_parameters.py
- return "it is a result of the function"
+ return ""

debug/_compare_precision.py
  debug/test_compare_precision.py::test_float32_results_are_the_cheaper_remedy
- best = min(enough, key=_cost, default=None)
+ best = None
"""


def breaks(table: str) -> Iterator[Break]:
    for block in table.strip().split("\n\n"):
        file, *lines = block.splitlines()
        for line in lines:
            match line[:2]:
                case "  ":
                    tests = line[2:]
                case "- ":
                    old = line[2:]
                case "+ ":
                    yield Break(file, old, line[2:], tests)


BREAKS = [*breaks(TABLE)]


def copy_of_the_project(folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "_build")
    for name in COPIED.split():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder)


def run(folder: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs tests in a copy of the project. The status is 1 if one of them fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not slow", *(f"tests/{test}" for test in tests)]
    # A file that changes within a second may have the bytecode of the one before.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )


def what_is_wrong(folder: Path, each: Break) -> str:
    """Returns what is wrong with a break, or nothing if its tests see it."""
    path = folder / "flax_amp" / each.file
    text = path.read_text()
    if (count := text.count(each.old)) != 1:
        return f"the text stands there {count} times; expected once"
    path.write_text(text.replace(each.old, each.new))
    ran = run(folder, each.tests.split(", "))
    path.write_text(text)
    if ran.returncode == 0:
        return "it survives"
    # Any other status is that of tests that do not exist, or cannot be imported.
    return "" if ran.returncode == 1 else f"the tests did not run:\n{ran.stdout}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, nargs="+", help="numbers of breaks")
    numbers = parser.parse_args().only or range(len(BREAKS))
    problems = 0
    with tempfile.TemporaryDirectory() as name:
        copy_of_the_project(folder := Path(name))
        tests = {test for n in numbers for test in BREAKS[n].tests.split(", ")}
        plain = run(folder, sorted(tests))
        if plain.returncode:
            sys.exit(f"the tests fail without a break:\n{plain.stdout}")
        for n in numbers:
            each = BREAKS[n]
            wrong = what_is_wrong(folder, each)
            problems += bool(wrong)
            print(f"{n:2} {each.file}: {each.old}: {wrong or 'seen'}", flush=True)
    print(f"{len(numbers)} breaks, {problems} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
