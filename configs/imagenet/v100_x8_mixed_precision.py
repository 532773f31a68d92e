"""Eight GPUs of 16 GB, in float16 with a loss scaler."""

import ml_collections

from configs.imagenet import default


def get_config() -> ml_collections.ConfigDict:
    config = default.get_config()
    config.precision = "16-mixed"  # these GPUs have no bfloat16
    config.batch_size = 2048  # 256 a device
    config.cache = True  # the data set in memory, 180 GB
    return config
