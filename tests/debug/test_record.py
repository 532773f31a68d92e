"""The rows of `explain` are those of the program that `amp` emits."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import flax_amp
from _programs import PROGRAMS, WITHIN, W, X, mlp
from flax_amp import explain
from flax_amp._compat import open_jaxpr
from flax_amp._rewriter.primitives import is_matmul
from helpers import MATMULS


def scoped(w, x):
    with jax.named_scope("head"):
        y = x @ w
        with jax.named_scope("inner"):
            y = jnp.tanh(y + 1.0)
        return mlp(w, y)


def stopped(w, x):
    with flax_amp.amp_stop():
        y = jax.jit(mlp)(w, x @ w) @ w
    return flax_amp.amp_stop(PROGRAMS["recurrent"])(w, y @ w)


def own_dtypes(w, x):
    return (x @ w).astype("float16") @ w.astype("float16")


FUNCTIONS = {k: f for k, f in PROGRAMS.items() if k != "convolution"} | {
    "amp_stop": stopped,
    "own dtypes": own_dtypes,
}
CASES = [(name, "plain") for name in FUNCTIONS]
CASES += [("mlp", name) for name in WITHIN if name != "plain"]


def walk(jaxpr, times=1):
    """Yields the equations of a jaxpr and of all inside, and how often they run."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        yield eqn, times
        inner = times * eqn.params.get("length", 1)
        for body in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from walk(body, inner)


def emitted(closed):
    """The matmuls by the dtype of their factors, and the operations in half."""
    matmuls, low = Counter(), 0
    for eqn, times in walk(closed):
        dtypes = [str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)]
        if eqn.primitive.name in MATMULS:
            matmuls[dtypes[0]] += times
            (contracting, _), _ = eqn.params["dimension_numbers"]
            terms = [eqn.invars[0].aval.shape[i] for i in contracting]
            size = 2 * math.prod((*eqn.outvars[0].aval.shape, *terms))
            is_half = dtypes[0] in ("float16", "bfloat16")
            low += times * size * is_matmul(eqn) * is_half
    return matmuls, low


def explained(found):
    matmuls = Counter()
    for row in found.equations:
        if row.primitive in MATMULS:
            matmuls[row.after.operands[0]] += row.times
    return matmuls, (found.low_share or 0) * found.flops


def check(fun, args, **options):
    jaxpr = jax.make_jaxpr(flax_amp.amp(fun, **options))(*args)
    found = explain(fun, backward=False, **options)(*args)
    (matmuls, low), expected = explained(found), emitted(jaxpr)
    assert (matmuls, round(low)) == expected


@pytest.mark.parametrize("name, around", CASES)
def test_figures_are_those_of_the_program(name, around):
    fun = WITHIN.get(around, lambda fun: fun)(FUNCTIONS[name])
    for dtype, recompute in (("bfloat16", True), ("float16", False)):
        check(fun, (W, X), compute_dtype=dtype, recompute=recompute)
    check(jax.grad(lambda w, x: fun(w, x).sum()), (W, X), compute_dtype="bfloat16")
    check(fun, (W, X), compute_dtype=jnp.float32)


def odd_precision(compute_dtype, original_dtypes, *invars, **params):
    """A user's function: float16 for the first operand's sake, whatever is asked."""
    return [x.astype(jnp.float16) for x in invars], params


POLICIES = {
    "primitive": {jax.lax.tanh_p: flax_amp.use_compute_precision},
    "glob": {"*/inner": jnp.float32, "head": flax_amp.use_compute_precision},
    "third dtype": {jax.lax.dot_general_p: jnp.float16},
    "own function": {jax.lax.dot_general_p: odd_precision},
    "nothing runs low": {jax.lax.dot_general_p: flax_amp.use_original_precision},
}


@pytest.mark.filterwarnings("ignore::flax_amp.PolicyWarning")
@pytest.mark.parametrize("name", POLICIES)
def test_figures_follow_a_policy(name):
    policy = flax_amp.default_amp_policy | POLICIES[name]
    for dtype in (jnp.bfloat16, jnp.float32):
        check(scoped, (W, X), compute_dtype=dtype, amp_policy=policy)
