"""Handwritten digits with a convolutional network: the whole way, small."""

from typing import Any


def to_explain() -> tuple[Any, ...]:
    """The state, the loss and a batch, for `python -m flax_amp explain`."""
    from configs.digits import get_config
    from examples.digits import data, model, train

    config = get_config()
    images, _ = data.load(config.split_seed)
    batch = data.batch_at(images, 0, batch_size=config.batch_size, seed=config.seed)
    state = train.create_state(config, batch["image"])
    return state, model.make_loss_fn(config.loss_weight), batch
