"""Losses that are divided by a total of their examples, and losses that are not."""

import jax
import jax.numpy as jnp
import optax

from examples.sharded import make_mesh

ROWS, LENGTH, WORDS, WIDTH = 8, 6, 16, 8

_keys = jax.random.split(jax.random.key(0), 8)
PARAMS = {
    "embed": 0.3 * jax.random.normal(_keys[0], (WORDS, WIDTH)),
    "head": 0.3 * jax.random.normal(_keys[1], (WIDTH, WORDS)),
    "value": jax.random.normal(_keys[2], (WIDTH, 1)),
    "temperature": jnp.float32(1),
}
_tokens = jax.random.randint(_keys[3], (ROWS, LENGTH), 0, WORDS)
_lengths = jax.random.randint(_keys[4], (ROWS,), 1, LENGTH + 1)
BATCH = {
    "x": _tokens,
    "y": jnp.roll(_tokens, -1, 1),
    "length": _lengths,
    "mask": (jnp.arange(LENGTH)[None] < _lengths[:, None]).astype(jnp.float32),
    "features": jax.random.normal(_keys[5], (ROWS, WIDTH)),
    "advantage": jax.random.normal(_keys[6], (ROWS,)),
}


def cross_entropy(params, batch):
    logits = params["embed"][batch["x"]] @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def masked(params, batch):
    return (cross_entropy(params, batch) * batch["mask"]).sum()


def values(params, batch):
    return (batch["features"] @ params["value"])[:, 0]


def square(tree):
    return sum((leaf**2).sum() for leaf in jax.tree.leaves(tree))


def rows_of(batch):
    """A batch as one of batches of one example."""
    return jax.tree.map(lambda x: x[:, None], batch)


QUOTIENTS, OTHERS = {}, {}


def quotient(loss):
    QUOTIENTS[loss.__name__] = loss
    return loss


def other(loss):
    OTHERS[loss.__name__] = loss
    return loss


# Means over the tokens of a batch, in the ways in which people write them.


@quotient
def mask(p, b):
    return masked(p, b) / b["mask"].sum()


@quotient
def at_least_one(p, b):
    return masked(p, b) / jnp.maximum(b["mask"].sum(), 1)


@quotient
def clipped(p, b):
    return masked(p, b) / jnp.clip(b["mask"].sum(), 1)


@quotient
def epsilon(p, b):
    return masked(p, b) / (b["mask"].sum() + 1e-8)


@quotient
def where(p, b):
    kept = b["mask"] > 0
    return jnp.where(kept, cross_entropy(p, b), 0).sum() / kept.sum()


@quotient
def mean_where(p, b):
    return jnp.mean(cross_entropy(p, b), where=b["mask"] > 0)


@quotient
def nanmean(p, b):
    return jnp.nanmean(jnp.where(b["mask"] > 0, cross_entropy(p, b), jnp.nan))


@quotient
def over_a_mesh(p, b):
    """The sums of parts of the batch on two devices, inside of the loss."""

    def sums(losses, mask):
        return jax.lax.psum(((losses * mask).sum(), mask.sum()), "pair")

    mesh = make_mesh(pair=2)
    spec = jax.sharding.PartitionSpec("pair")
    options = dict(mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec())
    total, count = jax.shard_map(sums, **options)(cross_entropy(p, b), b["mask"])
    return total / count


@quotient
def average(p, b):
    return jnp.average(cross_entropy(p, b), weights=b["mask"])


@quotient
def padding_ids(p, b):
    kept = b["y"] != 0
    return (cross_entropy(p, b) * kept).sum() / kept.sum()


@quotient
def count_nonzero(p, b):
    return masked(p, b) / jnp.count_nonzero(b["mask"])


@quotient
def mean_over_mean(p, b):
    return (cross_entropy(p, b) * b["mask"]).mean() / b["mask"].mean()


@quotient
def lengths(p, b):
    kept = jnp.arange(LENGTH)[None] < b["length"][:, None]
    return (cross_entropy(p, b) * kept).sum() / b["length"].sum()


@quotient
def inverse(p, b):
    return masked(p, b) * (1.0 / b["mask"].sum())


@quotient
def power(p, b):
    return masked(p, b) * b["mask"].sum() ** -1


@quotient
def shares(p, b):
    return (cross_entropy(p, b) * (b["mask"] / b["mask"].sum())).sum()


@quotient
def inner_products(p, b):
    mask = b["mask"]
    return jnp.vdot(cross_entropy(p, b), mask) / jnp.vdot(mask, mask)


@quotient
def with_penalty(p, b):
    return masked(p, b) / b["mask"].sum() + 1e-3 * square(p)


@quotient
def zero_without_tokens(p, b):
    count = b["mask"].sum()
    return jnp.where(count > 0, masked(p, b) / jnp.where(count > 0, count, 1), 0)


@quotient
def branch(p, b):
    count, total = b["mask"].sum(), masked(p, b)
    return jax.lax.cond(count > 0, lambda: total / count, lambda: 0.0)


@quotient
def nan_to_num(p, b):
    return jnp.nan_to_num(masked(p, b) / b["mask"].sum())


@quotient
def chunks(p, b):
    def add(sums, chunk):
        total, count = sums
        return (total + masked(p, chunk), count + chunk["mask"].sum()), None

    halves = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), b)
    (total, count), _ = jax.lax.scan(add, (0.0, 0.0), halves)
    return total / count


@quotient
def random_mask(p, b):
    kept = jax.random.bernoulli(jax.random.key(3), 0.5, b["x"].shape)
    return (cross_entropy(p, b) * kept).sum() / kept.sum()


@quotient
def in_a_jit(p, b):
    mean = jax.jit(lambda losses, mask: (losses * mask).sum() / mask.sum())
    return mean(cross_entropy(p, b), b["mask"])


@quotient
def in_a_checkpoint(p, b):
    return jax.checkpoint(mask)(p, b)


@quotient
def kept_dimensions(p, b):
    losses = cross_entropy(p, b) * b["mask"]
    return (losses.sum(keepdims=True) / b["mask"].sum(keepdims=True)).sum()


@quotient
def error_over_variation(p, b):
    total = ((values(p, b) - b["advantage"]) ** 2).sum()
    return total / (b["advantage"] ** 2).sum()


# Losses without such a mean, or whose denominator no weight could mend.


@other
def mean(p, b):
    return cross_entropy(p, b).mean()


@other
def mean_of_means(p, b):
    losses = cross_entropy(p, b) * b["mask"]
    return (losses.sum(-1) / b["mask"].sum(-1)).mean()


@other
def vmap_of_means(p, b):
    return jax.vmap(mask, in_axes=(None, 0))(p, rows_of(b)).mean()


@other
def map_of_means(p, b):
    return jax.lax.map(lambda row: mask(p, row), rows_of(b)).mean()


@other
def shape(p, b):
    return masked(p, b) / b["x"].size


@other
def constant(p, b):
    return masked(p, b) / 1000.0


@other
def temperature(p, b):
    return cross_entropy(p, b).mean() / p["temperature"]


@other
def sum_of_parameters(p, b):
    return cross_entropy(p, b).mean() / square(p)


@other
def norm_of_parameters(p, b):
    return cross_entropy(p, b).mean() / jnp.sqrt(square(p))


@other
def clipped_policy(p, b):
    advantage = b["advantage"] - b["advantage"].mean()
    advantage = advantage / (b["advantage"].std() + 1e-8)
    ratio = jnp.exp(values(p, b))
    bounded = jnp.clip(ratio, 0.8, 1.2)
    return -jnp.minimum(ratio * advantage, bounded * advantage).mean()


@other
def overlap(p, b):
    guess, truth = jax.nn.sigmoid(values(p, b)), 1.0 * (b["advantage"] > 0)
    return 1 - 2 * (guess * truth).sum() / (guess.sum() + truth.sum())


@other
def contrast(p, b):
    z = b["features"] @ p["head"]
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    labels = jnp.arange(len(z))
    logits = z @ z.T / 0.1
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@other
def root_of_a_mean(p, b):
    return jnp.sqrt(masked(p, b) / b["mask"].sum())


@other
def normalized_features(p, b):
    x = b["features"]
    return (((x - x.mean()) / x.std() @ p["value"]) ** 2).mean()


@other
def largest_feature(p, b):
    x = b["features"]
    return ((x / jnp.abs(x).max() @ p["value"]) ** 2).mean()


@other
def masked_pool(p, b):
    h = (p["embed"][b["x"]] * b["mask"][..., None]).sum(1)
    h = h / b["mask"].sum(1, keepdims=True)
    logits, labels = h @ p["head"], b["y"][:, 0]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@other
def masked_normalization(p, b):
    h, kept, count = p["embed"][b["x"]], b["mask"][..., None], b["mask"].sum()
    middle = (h * kept).sum((0, 1), keepdims=True) / count
    spread = ((h - middle) ** 2 * kept).sum((0, 1), keepdims=True) / count
    logits = (h - middle) / jnp.sqrt(spread + 1e-5) @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, b["y"]).mean()


@other
def autoencoder(p, b):
    middle = b["features"] @ p["head"]
    z = middle + jax.random.normal(jax.random.key(0), middle.shape)
    error = (z @ p["embed"] - b["features"]) ** 2
    return error.mean() + 0.5 * (middle**2).mean()


@other
def hinge(p, b):
    return jax.nn.relu(1 - values(p, b)).mean()


@other
def focal(p, b):
    losses = cross_entropy(p, b)
    return (losses * (1 - jnp.exp(-losses)) ** 2).mean()


@other
def balance_of_experts(p, b):
    gates = jax.nn.softmax(b["features"] @ p["head"])
    count = jax.nn.one_hot(gates.argmax(-1), WORDS).sum(0)
    return (count / count.sum() * gates.mean(0)).sum()


@other
def hard_examples(p, b):
    losses = cross_entropy(p, b)
    hard = losses > jnp.median(losses)
    return (losses * hard).sum() / hard.sum()


@other
def attention(p, b):
    h = p["embed"][b["x"]]
    scores = jnp.where(b["mask"][:, None] > 0, h @ h.mT, -1e9)
    logits = jax.nn.softmax(scores) @ h @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, b["y"]).mean()


@other
def balanced_classes(p, b):
    count = jax.nn.one_hot(b["y"], WORDS).sum((0, 1)) + 1
    return (cross_entropy(p, b) / count[b["y"]]).mean()


@other
def triplet(p, b):
    z = b["features"] @ p["head"]
    near, far = (((z - jnp.roll(z, n, 0)) ** 2).sum(-1) for n in (1, 2))
    return jax.nn.relu(near - far + 1).mean()


@other
def entropy(p, b):
    logs = jax.nn.log_softmax(b["features"] @ p["head"])
    return (logs * jnp.exp(logs)).sum(-1).mean()


@other
def active_units(p, b):
    h = jax.nn.relu(b["features"] @ p["head"])
    return h.sum() / (h != 0).sum()


@other
def huber(p, b):
    return optax.huber_loss(values(p, b), b["advantage"]).mean()


@other
def dropout(p, b):
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, b["features"].shape)
    return ((b["features"] * kept / 0.9 @ p["value"]) ** 2).mean()


@other
def recurrence_of_means(p, b):
    def add(total, column):
        losses, kept = column
        return total + (losses * kept).sum() / kept.sum(), None

    columns = cross_entropy(p, b).T, b["mask"].T
    return jax.lax.scan(add, 0.0, columns)[0] / LENGTH
