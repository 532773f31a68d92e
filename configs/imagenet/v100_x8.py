"""Eight GPUs of 16 GB, in float32."""

import ml_collections

from configs.imagenet import default


def get_config() -> ml_collections.ConfigDict:
    config = default.get_config()
    config.batch_size = 512  # 64 a device
    config.cache = True  # the data set in memory, 180 GB
    return config
