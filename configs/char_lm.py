"""A GPT on the characters of Python's standard library, in Linen or NNX.

    python -m examples.char_lm.main --config=configs/char_lm.py --workdir=runs/char_lm

Override a value with `--config.api=nnx`. It takes about two minutes on 2 CPU cores.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The settings of `examples/char_lm`."""
    config = ml_collections.ConfigDict()

    config.api = "linen"  # or nnx: the same model
    config.precision = "16-mixed"  # float16; or bf16-mixed, or 32-true
    config.scale_patience = 200  # finite steps before the scale of 16-mixed doubles

    # Text.
    config.text_dir = ""  # a folder of Python sources; that of the standard library
    config.max_chars = 4_000_000  # of all files, by name
    config.length = 64  # characters that the model sees

    # Model: 0.6 million parameters.
    config.width = 128  # of the residual stream
    config.layers = 3  # of one scan, with remat
    config.heads = 4  # of attention

    # Optimizer: adamw, with a linear warm-up and a cosine decay to 0.
    config.learning_rate = 3e-3  # peak
    config.warmup_steps = 100  # from 0
    config.weight_decay = 0.1  # of adamw
    config.clip_norm = 1.0  # global norm of the unscaled gradients
    config.batch_size = 16  # windows
    config.num_steps = 2000  # 2 million characters

    # Sampling, at the end.
    config.sample_chars = 500  # written on from the beginning of the test text
    config.temperature = 0.8  # below 1: rather what is likely

    config.seed = 0  # parameters, batches, sample

    # How often, in steps.
    config.log_every = 100  # metrics leave the device only then
    config.eval_every = 200  # bits per character of the test text
    config.eval_windows = 256  # of the test text, at equal distances
    config.checkpoint_every = 500  # saved in the background
    config.checkpoints_to_keep = 2  # newest
    return config
