"""`small_state`: an optimizer that stores its moments and the parameters in bfloat16.

The arrays in bfloat16 are cast to float32, the optimizer computes in float32 as ever,
and the results are rounded back. Rounding to the nearest number would not work: the
second moment of Adam would keep its value for ever (`docs/small_states.md`). So the
rounding is stochastic (Gupta et al., "Deep Learning with Limited Numerical Precision",
2015). Between the numbers `a` and `b`, `x` becomes `b` with the probability
`(x - a) / (b - a)`, and is right on average:

    x              0 01111110 0110011|0110011001100110      float32
    random bits    +                 |1011010000111001
    sum, cut off   0 01111110 0110100|                      bfloat16

The bits are added as integers: XLA may drop a cast to bfloat16 and back. The bits are a
hash of the number of the update, of the name of the leaf, and of the index of the
element. They are stored nowhere. A run that is resumed draws the same bits, and so does
every layout of devices, because a hash of an index does not depend on shards.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_amp import _tree
from flax_amp.optim._extra_args import taking_any
from flax_amp.optim._optimizer import INJECTED, Optimizer, check_optimizer
from flax_amp.optim._spike_rule import SpikeState

PyTree = Any
Rounding = Literal["stochastic", "nearest"]
Where = Callable[[str, Any], bool]
# An optimizer of optax, or of `flax_amp.optim`.
Tx = TypeVar("Tx", bound=Any)

_LARGEST = float(jnp.finfo(jnp.bfloat16).max)
# Fields of the states of optax in which gradients add up. They have to be exact.
_SUMS = ("acc_grads", "grad_acc")
# The states of optimizers that may be around an optimizer and change no update, except
# to zeros, each with its field for the state inside.
_INNER_FIELD_OF = dict.fromkeys(
    (optax.ApplyIfFiniteState, SpikeState, *INJECTED), "inner_state"
)
_INNER_FIELD_OF |= {Optimizer: "opt_state", optax.MultiStepsState: "inner_opt_state"}


class SmallState(NamedTuple):
    """The state of an optimizer that `small_state` wraps."""

    roundings: jax.Array  # int32[], the number of updates whose results were rounded
    inner_state: PyTree  # the state of the optimizer, with some leaves in bfloat16


def has_two_dimensions(path: str, leaf: Any) -> bool:
    """Whether a leaf has two or more dimensions. Leaves with fewer are small anyway."""
    return leaf.ndim >= 2


def no_moments(path: str, leaf: Any) -> bool:
    """Takes no leaf: the moments stay float32, and only parameters are bfloat16."""
    return False


@dataclasses.dataclass(frozen=True)
class _RoundingOptimizer:
    """The two functions of an optimizer with a small state."""

    inner: Any  # the optimizer of optax, as it was given
    rounding: Rounding
    where: Where

    def init(self, params: PyTree) -> SmallState:
        """Returns the state of a new run."""
        state = self.inner.init(jax.tree.map(_tree.float32_if_bfloat16, params))
        leaves = jax.tree_util.tree_leaves_with_path(params)
        shapes = {_names(keys): x.shape for keys, x in leaves if _tree.is_numeric(x)}

        def as_stored(keys: Any, leaf: Any) -> Any:
            is_half = self._is_stored_half(_names(keys), leaf, shapes)
            return leaf.astype(jnp.bfloat16) if is_half else leaf

        inner_state = jax.tree_util.tree_map_with_path(as_stored, state)
        return SmallState(jnp.zeros((), jnp.int32), inner_state)

    def _is_stored_half(self, path: Any, leaf: Any, shapes: Any) -> bool:
        """Whether a leaf of a state belongs to a parameter, and `where` takes it."""
        if getattr(leaf, "dtype", None) != jnp.float32 or not leaf.ndim:
            return False
        # The path `0/mu/kernel` ends with the path of the parameter `kernel`.
        suffixes = (path[i:] for i in range(len(path) + 1))
        of_parameter = any(shapes.get(suffix) == leaf.shape for suffix in suffixes)
        is_sum = any(name in _SUMS for name in path)
        return bool(of_parameter and not is_sum and self.where("/".join(path), leaf))

    def update(
        self, updates: PyTree, state: SmallState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, SmallState]:
        """Returns the updates and the next state, with all bfloat16 arrays rounded.

        The update of a parameter in bfloat16 is the rounded new parameter minus the old
        parameter. `optax.apply_updates` adds the update to the old parameter: if the
        parameter shrinks by a factor of more than about 2**16 in an update, the result
        is a few of its smallest steps off.
        """
        if not isinstance(state, SmallState) or params is None:
            raise TypeError(
                f"flax_amp.optim.small_state: update got a {type(state).__name__} and "
                f"{'no ' if params is None else ''}parameters; expected "
                "tx.update(grads, state, params), with the state of tx.init."
            )
        grads, wide_params = jax.tree.map(_tree.float32_if_bfloat16, (updates, params))
        inner_state = self._as_the_optimizer_has_it(state.inner_state, wide_params)
        inner = taking_any(self.inner)
        updates, new = inner.update(grads, inner_state, wide_params, **extra)
        key = key_of(state.roundings)

        def rounded_leaf(keys: Any, new: Any, old: Any) -> Any:
            is_half = _is_bfloat16(old) and new.dtype == jnp.float32
            return self._rounded(new, key, keys) if is_half else new

        def rounded_update(keys: Any, update: Any, param: Any) -> Any:
            if not _is_bfloat16(param):
                return update
            old = _tree.float32_if_bfloat16(param)
            keys = (jax.tree_util.GetAttrKey("params"), *keys)
            rounded = self._rounded(old + update, key, keys)
            return _tree.float32_if_bfloat16(rounded) - old

        map_ = jax.tree_util.tree_map_with_path
        updates = map_(rounded_update, updates, params)
        inner_state = map_(rounded_leaf, new, state.inner_state)
        # The count may wrap around. If the count stopped at its largest number, every
        # later update would draw the same bits.
        return updates, SmallState(state.roundings + 1, inner_state)

    def _as_the_optimizer_has_it(self, stored: PyTree, params: PyTree) -> PyTree:
        """Returns a state with the dtypes that the optimizer itself gives its state.

        An optimizer that stores a moment in bfloat16 by its own `mu_dtype` has to get
        the moment in bfloat16: in the branches of `optax.MultiSteps`, the old state and
        the new state must have the same dtypes.
        """
        own = jax.eval_shape(self.inner.init, params)

        def cast(leaf: Any, like: Any) -> Any:
            return leaf.astype(like.dtype) if _is_bfloat16(leaf) else leaf

        return jax.tree.map(cast, stored, own)

    def _rounded(self, x: jax.Array, key: jax.Array, path: Any) -> jax.Array:
        if self.rounding == "nearest":
            return x.astype(jnp.bfloat16)
        name = "\0".join(_names(path))  # {"a/b": ...} is not {"a": {"b": ...}}
        return round_stochastically(x, random_bits(x.shape, key, name))


def small_state(
    tx: Tx,
    dtype: Any = jnp.bfloat16,
    *,
    rounding: Rounding = "stochastic",
    where: Where = has_two_dimensions,
) -> Tx:
    """Makes an optimizer that stores its state, and the parameters, in bfloat16.

    The optimizer computes in float32, as `tx` does. Leaves of its state that belong to
    a parameter and have the shape of the parameter are stored in bfloat16, with a
    stochastic rounding; counts, keys, small leaves and gradients that are being added
    up stay as they are. Parameters that are bfloat16 themselves are updated in float32,
    and rounded in the same way: `update` needs the parameters.

    `small_state` has to be around an `optax.chain`, or the last optimizer in the chain:
    a later optimizer would change updates that are rounded.

    Args:
      tx: an optimizer of optax, or of `flax_amp.optim`.
      dtype: bfloat16. No further dtype of two bytes has the range of float32.
      rounding: "stochastic", or "nearest", with which the second moment of Adam keeps
        its value, and small updates of parameters are lost.
      where: `where(path, leaf)`, which tells whether a leaf of the state that belongs
        to a parameter is stored in bfloat16. The path is `0/mu/Dense_0/kernel`.

    Returns:
      An optimizer of the kind of `tx`, whose state is a `SmallState`.

    Example:
      >>> params = {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}
      >>> state = small_state(optax.adam(1e-3)).init(params)
      >>> {name: x.dtype.name for name, x in state.inner_state[0].nu.items()}
      {'bias': 'float32', 'kernel': 'bfloat16'}
    """
    name = "flax_amp.optim.small_state"
    if getattr(dtype, "__name__", str(dtype)) not in ("bfloat16", "bf16"):
        raise ValueError(f"{name}: {dtype=}; expected bfloat16. Leave dtype out.")
    if rounding not in ("stochastic", "nearest"):
        raise ValueError(f"{name}: {rounding=}; expected 'stochastic' or 'nearest'.")
    check_optimizer(tx, name)
    if isinstance(tx, Optimizer):
        wrapped = Optimizer(small_state, tx, dtype, rounding=rounding, where=where)
        return wrapped  # type: ignore[return-value]
    made = _RoundingOptimizer(tx, rounding, where)
    return optax.GradientTransformationExtraArgs(
        _tree.Method(made, "init"), _tree.Method(made, "update")
    )


@jax.custom_jvp
def round_stochastically(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Rounds each float32 number to the bfloat16 number below or above, at random.

    The lower 16 bits of `bits`, uint32[...], are random. Infs and NaNs stay, and no
    finite number becomes an inf. The derivative is the derivative of the mean of the
    result, which is `x`.
    """
    bounded = jnp.clip(x, -_LARGEST, _LARGEST)
    word = jax.lax.bitcast_convert_type(bounded, jnp.uint32)
    # The lower 16 bits of a float32 number are the bits that bfloat16 lacks.
    word = (word + (bits & 0xFFFF)) & np.uint32(0xFFFF0000)
    # The upper half alone would do, as a uint16. But a fusion of XLA for TPUs ends at a
    # bitcast of its result: an update of Adam would read its gradients twice.
    rounded = jax.lax.bitcast_convert_type(word, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


@round_stochastically.defjvp
def _round_jvp(primals: Any, tangents: Any) -> Any:
    out = round_stochastically(*primals)
    return out, tangents[0].astype(out.dtype)


def random_bits(shape: tuple[int, ...], key: jax.Array, name: str) -> jax.Array:
    """Returns a hash of a key, of a name and of the index of each element.

    The key is a uint32[] whose bits are all random. By XLA's estimate for a TPU v5e,
    an update of Adam, all in bfloat16, takes 1.57 times as long with threefry, and 1.12
    times with `unsafe_rbg`, whose bits also depend on the sharding.
    """
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        iota = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        # Elements of a larger leaf that are 2**32 apart share their bits.
        index += iota * np.uint32(stride % 2**32)
        stride *= shape[axis]
    # Multiplied, not added: with a sum, the same two elements of two leaves would share
    # their bits in every update. An odd factor loses no bit of the key.
    factor = np.uint32(zlib.crc32(name.encode()) | 1)
    # Hashed twice: after a single round, elements whose indices differ in a few bits
    # are correlated by up to 0.05.
    return _hash(_hash(index ^ (key * factor)) + key)


def key_of(count: jax.Array) -> jax.Array:
    """Returns the key of an update, uint32[], from the number of earlier updates."""
    # Without the 1, the first key would be 0, the hash of 0. The factor is 2**32 over
    # the golden ratio, which spreads consecutive counts over all words.
    return _hash((count.astype(jnp.uint32) + 1) * np.uint32(0x9E3779B9))


def _hash(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit words: `lowbias32`, found by C. Wellons in a search."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def rounds_parameters(opt_state: PyTree) -> bool:
    """Whether the optimizer of a state rounds all bfloat16 parameters.

    `small_state` has to be the outermost optimizer that changes updates: an optimizer
    around `small_state` would round to the nearest number.
    """
    if isinstance(opt_state, SmallState):
        return True
    if type(opt_state) is tuple and opt_state:  # the state of a chain
        return rounds_parameters(opt_state[-1])
    for kind, field in _INNER_FIELD_OF.items():
        if isinstance(opt_state, kind):
            return rounds_parameters(getattr(opt_state, field))
    return False


def _is_bfloat16(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jnp.bfloat16


def _names(keys: Any) -> tuple[str, ...]:
    """Returns the path of a leaf as plain names, which Linen and NNX share."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)
