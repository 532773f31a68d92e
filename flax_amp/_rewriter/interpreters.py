"""Rules for interpreters of `jax.experimental` that do not know what is emitted.

`jet` and `sparsify` have no rule for `jax.checkpoint`, in which regions are emitted.
The rules are for JAX's own primitives, so that a user's `jax.checkpoint` has them, too.
Those of the primitives of this package for `jet` stand beside each of them.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import jet
from jax.extend.core.primitives import reduce_precision_p, remat_p

from flax_amp._compat import Array, Arrays, Jaxpr
from flax_amp._jaxpr.evaluate import evaluate
from flax_amp._rewriter.casts import rounded_function_p, saturate_p
from flax_amp._rewriter.embedding_lookup import lookup_p
from flax_amp._rewriter.fp8_dot import fp8_dot_p, plain_params
from flax_amp._rewriter.recompute.stored import stored_p

_ELEMENTWISE = saturate_p, rounded_function_p, stored_p, reduce_precision_p


def _checkpoint_series(
    primals: Arrays,
    series: Any,
    *,
    jaxpr: Jaxpr,
    policy: Any,
    prevent_cse: bool,
    **_: Any,
) -> Any:
    def call(*operands: Array) -> Arrays:
        return evaluate(jaxpr, operands)

    # Rules get the terms of the series without their factorials.
    expand = functools.partial(jet.jet, call, factorial_scaled=False)
    checkpoint = jax.checkpoint(expand, policy=policy, prevent_cse=prevent_cse)
    return checkpoint(tuple(primals), tuple(series))


jet.jet_rules.setdefault(remat_p, _checkpoint_series)  # type: ignore[arg-type]
if reduce_precision_p not in jet.jet_rules:
    jet.deflinear(reduce_precision_p)


def add_sparse_rules() -> None:
    """Adds rules for `jax.experimental.sparse`, if something has imported it.

    Nobody calls `sparsify` without that, and the import takes half a second.
    """
    sparse = sys.modules.get("jax.experimental.sparse.transform")
    if sparse is None or stored_p in sparse.sparse_rules_bcoo:
        return
    bcoo, bcsr = sparse.sparse_rules_bcoo, sparse.sparse_rules_bcsr

    def checkpoint(env: Any, *values: Any, jaxpr: Jaxpr, **_: Any) -> Any:
        # The body is evaluated in place: `env` would keep its tracers otherwise.
        return sparse.eval_sparse(jaxpr, (), values, env)

    def elementwise(primitive: Any, env: Any, value: Any, **params: Any) -> Any:
        outs = primitive.bind(env.data(value), **params)
        outs = outs if primitive.multiple_results else [outs]
        names = "indices_ref", "indptr_ref", "indices_sorted", "unique_indices"
        same = {name: getattr(value, name) for name in names}
        return [env.sparse(value.shape, out, **same) for out in outs]

    def lookup(env: Any, *values: Any, dtype: Any, **params: Any) -> Any:
        return bcoo[jax.lax.gather_p](env, *values, **params)

    def product(rules: Any, env: Any, *values: Any, **params: Any) -> Any:
        # Products with sparse arrays stay float32, in fp8 as well as in half precision.
        wide = [
            env.dense(env.data(value).astype(params["dtype"]).astype(jnp.float32))
            if value.is_dense()
            else value
            for value in values
        ]
        plain = plain_params(**params | {"dtype": jnp.dtype(jnp.float32)})
        return rules[jax.lax.dot_general_p](env, *wide, **plain)

    for rules in (bcoo, bcsr):
        rules.setdefault(remat_p, checkpoint)
        rules.setdefault(fp8_dot_p, functools.partial(product, rules))
        for primitive in _ELEMENTWISE:
            rules.setdefault(primitive, functools.partial(elementwise, primitive))
    bcoo.setdefault(lookup_p, lookup)  # JAX has no rule for a gather from a BCSR array
