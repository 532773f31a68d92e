"""A plugin of pytest: the optimizers of `flax_amp.optim` in the place of optax's.

Every function of optax that returns an optimizer makes a pytree optimizer, wherever
optax and its tests call it. Its state is shown as that of optax; an update passes the
pytree through `jit`, so that its arrays are traced as in training.
"""

import functools
import sys

import jax
import optax

from flax_amp import optim

# optax's tests call methods of `MultiSteps`; `with_extra_args_support` takes an
# optimizer that was made already.
NOT_THESE = {"MultiSteps", "with_extra_args_support"}


@jax.jit
def compiled(tx, grads, params, extra_args):
    return tx.update(grads, params, **extra_args)


def in_optax(tx):
    def update(grads, state, params=None, **extra_args):
        now = tx.replace(opt_state=state)
        if any(map(callable, extra_args.values())):  # no arguments of a compiled step
            new = jax.jit(lambda now: now.update(grads, params, **extra_args))(now)
        else:
            new = compiled(now, grads, params, extra_args)
        return new[0], new[1].opt_state

    init = lambda params: tx.init(params).opt_state  # noqa: E731
    return optax.GradientTransformationExtraArgs(init, update)


def stand_in(make):
    @functools.wraps(make.wrapped_factory)
    def instead(*args, **kwargs):
        made = make(*args, **kwargs)
        return in_optax(made) if isinstance(made, optim.Optimizer) else made

    return instead


def pytest_configure():
    makers = [getattr(optim, name) for name in {*dir(optim)} - NOT_THESE]
    makers = [make for make in makers if hasattr(make, "wrapped_factory")]
    # By identity, as some values of modules have no hash.
    stand_ins = {id(make.wrapped_factory): stand_in(make) for make in makers}
    modules = [
        m for name, m in sys.modules.items() if name.partition(".")[0] == "optax"
    ]
    for module in modules:
        for name, value in list(vars(module).items()):
            setattr(module, name, stand_ins.get(id(value), value))
