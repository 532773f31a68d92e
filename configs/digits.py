"""Handwritten digits: a small conv net with BatchNorm and dropout, in float16.

    python -m examples.digits.main --config=configs/digits.py --workdir=runs/digits

It takes about 15 seconds on 2 CPU cores. The test accuracy is 0.98 to 0.99 in every
precision.
Override a value with `--config.learning_rate=0.001`.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The settings of `examples/digits`."""
    config = ml_collections.ConfigDict()

    # Precision. Nothing in the model or the loss is about it.
    config.precision = "16-mixed"  # float16; or bf16-mixed, or 32-true
    config.loss_scaling = True  # dynamic, for 16-mixed; the others need none
    config.scale_patience = 50  # finite steps before it doubles; 2000 in a long run
    config.gain = 1.0  # 60000 makes float16 overflow, to try --debug_overflow on
    config.debug_overflow = False  # explain the steps that are skipped
    config.loss_weight = 1.0  # multiplies the loss; 1e-5 underflows unscaled float16

    # Model.
    config.features = (16, 32, 64)  # channels of the three convolutions
    config.dropout_rate = 0.2  # before the last layer

    config.init_from = ""  # a run to take the first weights and statistics from

    # Optimizer.
    config.learning_rate = 2e-3  # peak; cosine decay to 0 after the warm-up
    config.warmup_steps = 50  # linear, from 0
    config.weight_decay = 1e-4  # of adamw
    config.clip_norm = 1.0  # global norm of the unscaled gradients
    config.batch_size = 64  # of 1437 training images; 22 steps are an epoch
    config.num_steps = 600  # about 27 epochs

    # Reproducibility: seeds and step determine the data order and dropout.
    config.seed = 0  # parameters, dropout, order of the batches
    config.split_seed = 0  # which 360 images are the test set

    # How often, in steps.
    config.log_every = 50  # metrics leave the device only then
    config.eval_every = 100  # test accuracy
    config.checkpoint_every = 100  # saved in the background
    config.checkpoints_to_keep = 3  # newest
    return config
