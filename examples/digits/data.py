"""scikit-learn's handwritten digits: 1797 grey images of 8x8, shipped with it.

The order of the batches is a pure function of (seed, step). A resumed run sees the same
batches as an uninterrupted one, without any iterator state in the checkpoint.
"""

import numpy as np
from sklearn.datasets import load_digits

Batch = dict[str, np.ndarray]
NUM_CLASSES = 10


def load(split_seed: int, test_size: int = 360) -> tuple[Batch, Batch]:
    """Returns the training and the test images; the seed determines the split."""
    digits = load_digits()
    images = (digits.images[..., None] / 16.0).astype(np.float32)  # 0..16 -> 0..1
    labels = digits.target.astype(np.int32)
    order = np.random.default_rng(split_seed).permutation(len(labels))
    test, train = np.split(order, [test_size])
    return (
        {"image": images[train], "label": labels[train]},
        {"image": images[test], "label": labels[test]},
    )


def batch_at(data: Batch, step: int, *, batch_size: int, seed: int) -> Batch:
    """Returns the batch of one step.

    Each epoch has an order of its own. Its last examples are dropped if they do not
    fill a batch.
    """
    size = len(data["label"])
    if not 0 < batch_size <= size:
        raise ValueError(f"batch_size={batch_size} must be between 1 and {size}")
    epoch, index = divmod(step, size // batch_size)
    order = np.random.default_rng((seed, epoch)).permutation(size)
    rows = order[index * batch_size : (index + 1) * batch_size]
    return {name: values[rows] for name, values in data.items()}
