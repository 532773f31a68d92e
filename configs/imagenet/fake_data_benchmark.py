"""The speed of a step on all devices, with synthetic images."""

import jax
import ml_collections

from configs.imagenet import default


def get_config() -> ml_collections.ConfigDict:
    config = default.get_config()
    config.precision = "bf16-mixed"  # or 32-true, to compare with
    config.dataset = "synthetic"  # made once, then taken from memory
    config.batch_size = 256 * jax.device_count()  # each device computes 256 images
    config.num_train_steps = 100  # the first lines hold the time to compile
    config.log_every_steps = 20  # images per second, over so many steps
    config.checkpoint_epochs = 1000  # none but the last
    return config
