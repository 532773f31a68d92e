"""A plugin of pytest: flax_amp in the place of jaxamp, jmp and jamp.

`suites.py` runs the test files of those packages with it, unchanged. Each name that
they import is here, made of flax_amp's functions and of as little else as possible.
"""

import functools
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import flax_amp
from flax_amp import _tree

# --- jaxamp: the scaler is a NamedTuple ----------------------------------------------


class DynamicScalerState(NamedTuple):
    patience: Any = 2000
    adjust_factor: Any = 2.0
    scaler: Any = 2.0**15
    count: Any = 0
    total_resets: Any = 0


def with_named_tuple(transform):
    def transformed(fun, **options):
        grad_fn = transform(fun, **options)

        def call(*args, dynamic_scaler_state):
            ours = dynamic_scaler_state._asdict()
            new, out = grad_fn(*args, dynamic_scaler_state=ours)
            return DynamicScalerState(**{key: new[key] for key in ours}), out

        return call

    return transformed


JAXAMP = dict(
    amp=functools.partial(flax_amp.amp, compute_dtype=jnp.float16),  # its default
    amp_stop=flax_amp.amp_stop,
    default_amp_policy=flax_amp.default_amp_policy,
    use_original_precision=flax_amp.use_original_precision,
    use_compute_precision=flax_amp.use_compute_precision,
    DynamicScalerState=DynamicScalerState,
    dynamic_scale_grad=with_named_tuple(flax_amp.dynamic_scale_grad),
    dynamic_scale_value_and_grad=with_named_tuple(
        flax_amp.dynamic_scale_value_and_grad
    ),
)

# --- jmp and jamp: the scaler is an object -------------------------------------------

NO_LIMIT = 2.0**126  # the widest limits that flax_amp takes


@jax.tree_util.register_pytree_node_class
class LossScale:
    """A scaler of flax_amp with the methods and properties of one of jmp."""

    def __init__(self, scaler):
        self.scaler = scaler

    loss_scale = property(lambda self: self.scaler["scaler"])
    counter = property(lambda self: self.scaler["count"])
    period = property(lambda self: self.scaler["patience"] + 1)
    factor = property(lambda self: self.scaler["adjust_factor"])

    def __eq__(self, other):
        return self.scaler == other.scaler

    def scale(self, tree):
        return jax.tree.map(lambda x: flax_amp.scale_loss(x, self.scaler), tree)

    def unscale(self, tree):
        return flax_amp.unscale_grads(tree, self.scaler)

    def adjust(self, grads_finite):
        return LossScale(flax_amp.update_scaler(self.scaler, grads_finite))

    def tree_flatten(self):
        return (self.scaler,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def dynamic(loss_scale, counter=0, period=2000, factor=2, min_loss_scale=1.0):
    scaler = flax_amp.init_scaler(
        scaler=loss_scale,
        patience=int(period) - 1,  # jmp grows on the period-th finite step
        adjust_factor=factor,
    )
    return LossScale(scaler | {"count": jnp.asarray(counter, jnp.int32)})


JMP = dict(
    NoOpLossScale=lambda: LossScale(flax_amp.no_scaler()),
    StaticLossScale=lambda value: LossScale(flax_amp.static_scaler(value)),
    DynamicLossScale=dynamic,
    all_finite=flax_amp.all_finite,
    LossScale=LossScale,
    select_tree=_tree.select,
)


def pytest_configure():
    modules = {"jaxamp": JAXAMP, "jmp": {}, "jmp._src": {}}
    modules |= {"jmp.loss_scale": JMP, "jmp._src.loss_scale": JMP}
    for name, attributes in modules.items():
        sys.modules[name] = module = types.ModuleType(name)
        vars(module).update(attributes)
        outer, _, last = name.rpartition(".")
        if outer:
            setattr(sys.modules[outer], last, module)
