"""Peer packages as methods: jmp, mpx and jaxamp, each used as its README says.

All three are optional. A missing one raises `NotInstalledError` when its variant is
made, and no earlier.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.method import Method, NotInstalledError, Result, unscaled
from benchmarks.problem import problem

PyTree = Any


def jmp_bf16(model: str, size: str) -> Method:
    """jmp: parameters and inputs cast at the top of the loss, no scaler."""
    jmp = _load("jmp", "jmp")
    task = problem(model, size)
    policy = jmp.Policy(jnp.float32, jnp.bfloat16, jnp.float32)

    def loss(params: PyTree, others: PyTree, batch: PyTree) -> tuple[Any, PyTree]:
        params, batch = policy.cast_to_compute((params, batch))
        loss, others = task.loss(params, others, batch)
        return policy.cast_to_output(loss), others

    return unscaled(task, loss)


def jmp_fp16(model: str, size: str) -> Method:
    """jmp in float16 with `DynamicLossScale`, in the order of its README."""
    jmp = _load("jmp", "jmp")
    task = problem(model, size)
    policy = jmp.Policy(jnp.float32, jnp.float16, jnp.float32)

    def loss(
        params: PyTree, others: PyTree, batch: PyTree, loss_scale: Any
    ) -> tuple[Any, PyTree]:
        params, batch = policy.cast_to_compute((params, batch))
        loss, others = task.loss(params, others, batch)
        loss = policy.cast_to_output(loss)
        return loss_scale.scale(loss), (loss, others)

    def gradients(
        params: PyTree, others: PyTree, scaler: PyTree, batch: PyTree
    ) -> Result:
        # Arrays alone go in and out: as an argument of jit the object itself does not
        # survive JAX 0.12.
        loss_scale = jmp.DynamicLossScale(scaler["loss_scale"], scaler["counter"])
        grad = jax.grad(loss, has_aux=True)
        grads, (value, others) = grad(params, others, batch, loss_scale)
        grads = loss_scale.unscale(grads)
        finite = jmp.all_finite(grads)
        new = loss_scale.adjust(finite)
        scaler = {"loss_scale": new.loss_scale, "counter": new.counter}
        return Result(value, others, grads, finite, scaler)

    return Method(task, gradients, lambda: _scaler("loss_scale", 2.0**15))


def mpx_bf16(model: str, size: str) -> Method:
    """mpx: `filter_grad`, with a loss scale of 1 because bfloat16 needs none.

    Not `filter_value_and_grad`: in 0.1.8 it forgets to cast its arguments and computes
    in float32. The loss comes back as aux instead.
    """
    mpx = _load("mpx", "mixed-precision-for-JAX")
    task = problem(model, size)

    def gradients(
        params: PyTree, others: PyTree, scaler: PyTree, batch: PyTree
    ) -> Result:
        def loss(params: PyTree, batch: PyTree) -> tuple[Any, PyTree]:
            loss, new_others = task.loss(params, others, batch)
            return loss, (loss, new_others)

        mpx.set_half_precision_datatype(jnp.bfloat16)  # global; read while tracing
        scaling = mpx.DynamicLossScaling(
            scaler["loss_scaling"], jnp.ones(()), counter=scaler["counter"]
        )
        new, finite, grads, (value, new_others) = mpx.filter_grad(
            loss, scaling, has_aux=True
        )(params, batch)
        scaler = {"loss_scaling": new.loss_scaling, "counter": new.counter}
        return Result(value, new_others, grads, finite, scaler)

    return Method(task, gradients, lambda: _scaler("loss_scaling", 1.0))


def jaxamp_bf16(model: str, size: str, compute_dtype: DTypeLike = "bfloat16") -> Method:
    """jaxamp: `amp` around the loss, corrected to run on current JAX."""
    jaxamp = _load("jaxamp", "jaxamp")
    _correct_jaxamp()
    task = problem(model, size)
    loss_amp = jaxamp.amp(task.loss, compute_dtype=jnp.dtype(compute_dtype))

    return unscaled(task, loss_amp)


def _scaler(name: str, value: float) -> PyTree:
    return {name: jnp.asarray(value, jnp.float32), "counter": jnp.zeros((), jnp.int32)}


def _load(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotInstalledError(
            f"{package}: not installed ({error}); pip install {package}"
        ) from error


# What jaxamp 0.0.4 needs on current JAX: `Primitive.get_bind_params` used to return
# `(subfuns, params)` and now returns `params`. JAX itself calls it too, so the
# primitives stay as they are, and jaxamp's evaluator is handed a jaxpr that shows it
# the old form.


def _correct_jaxamp() -> None:
    """Wraps jaxamp's evaluator, once."""
    module = importlib.import_module("jaxamp._amp")
    evaluate = module.amp_eval_jaxpr
    if getattr(evaluate, "corrected", False):
        return

    def corrected(dtype: Any, policy: Any, closed: Any, *args: Any) -> Any:
        view = _View(closed, jaxpr=_View(closed.jaxpr, eqns=list(_eqns(closed))))
        return evaluate(dtype, policy, view, *args)

    vars(corrected)["corrected"] = True
    vars(module)["amp_eval_jaxpr"] = corrected


def _eqns(closed: Any) -> Iterator["_View"]:
    for eqn in closed.jaxpr.eqns:
        yield _View(eqn, primitive=_Primitive(eqn.primitive))


class _View:
    """An object with some of its attributes replaced."""

    def __init__(self, target: Any, **replaced: Any):
        vars(self).update(replaced)
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class _Primitive(_View):
    """A primitive whose `get_bind_params` has its former result."""

    def get_bind_params(self, params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        result = self._target.get_bind_params(params)
        return result if isinstance(result, tuple) else ((), result)

    def __hash__(self) -> int:
        return hash(self._target)

    def __eq__(self, other: object) -> bool:
        return other is self._target or other is self
