"""ResNet-50 on ImageNet in float32, for one GPU.

    python -m examples.imagenet.main --config=configs/imagenet/default.py

Override a value with `--config.batch_size=256`.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The settings of `examples/imagenet`."""
    config = ml_collections.ConfigDict()

    config.precision = "32-true"  # or 16-mixed, or bf16-mixed

    # Model.
    config.model = "ResNet50"  # or ResNet101, ResNet152; ResNetTiny for tests
    config.width = 64  # channels of the first stage

    # Data.
    config.dataset = "imagenet2012:5.*.*"  # a name for tfds.builder, or synthetic
    config.image_size = 224  # pixels
    config.cache = False  # the data set in memory, 180 GB
    config.shuffle_buffer_size = 16 * 128  # images
    config.prefetch = 10  # batches that are ready
    config.synthetic_classes = 1000  # of synthetic images; others know theirs

    # Optimizer: SGD with Nesterov momentum, a linear warm-up and a cosine decay to 0.
    config.learning_rate = 0.1  # peak for a batch of 256; in proportion to the batch
    config.warmup_epochs = 5.0  # from 0
    config.momentum = 0.9  # of SGD
    config.weight_decay = 1e-4  # of kernels, not of biases or BatchNorm
    config.label_smoothing = 0.0  # 0.1 is usual for longer runs
    config.batch_size = 128  # over all devices
    config.num_epochs = 100.0  # the schedule is as long

    config.num_train_steps = -1  # -1: as many as the epochs have
    config.steps_per_eval = -1  # -1: all test images

    config.seed = 0  # parameters, order of the images, synthetic images

    # How often.
    config.log_every_steps = 100  # metrics leave the devices only then
    config.checkpoint_epochs = 1  # saved in the background
    config.checkpoints_to_keep = 3  # newest
    return config
