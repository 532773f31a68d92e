"""Eight TPU cores or more, in bfloat16."""

import ml_collections

from configs.imagenet import default


def get_config() -> ml_collections.ConfigDict:
    config = default.get_config()
    config.precision = "bf16-mixed"  # needs no loss scaler
    config.batch_size = 1024  # 128 a core of a v3-8
    config.cache = True  # the data set in memory, 180 GB
    return config
