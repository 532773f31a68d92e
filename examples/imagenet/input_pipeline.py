"""Batches of images in uint8, which the model normalizes on the device.

`load` returns a `Tfds` or a `Synthetic`. Both have the number of classes and that of
examples to train on, `train(first_step)`, which never ends, and `test()`, whose last
batch is filled up with examples of the label -1.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from ml_collections import ConfigDict

Batch = dict[str, np.ndarray]
SYNTHETIC = "synthetic"
CROP_PADDING = 32  # pixels around the center that evaluation cuts off


def load(config: ConfigDict) -> "Tfds | Synthetic":
    return Synthetic(config) if config.dataset == SYNTHETIC else Tfds(config)


class Synthetic:
    """Noise over one coarse pattern for each class: learnable, and made at once.

    There are eight batches to train on and one to test on, which stay in memory. They
    are a function of the seed alone.
    """

    def __init__(self, config: ConfigDict) -> None:
        self.batch_size, self.seed = config.batch_size, config.seed
        self.num_classes = config.synthetic_classes
        self.train_examples = 8 * self.batch_size
        self.pixels = config.image_size
        self.cell = -(-self.pixels // 4)  # pixels, rounded up
        rng = np.random.default_rng(self.seed)
        self.patterns = rng.integers(0, 128, (self.num_classes, 4, 4, 3), np.uint8)
        self._batch = functools.lru_cache(maxsize=9)(self._make_batch)

    def train(self, first_step: int) -> Iterator[Batch]:
        while True:
            yield self._batch(first_step % 8)
            first_step += 1

    def test(self) -> Iterator[Batch]:
        yield self._batch(8)

    def _make_batch(self, index: int) -> Batch:
        rng = np.random.default_rng((self.seed, index))
        label = rng.integers(0, self.num_classes, self.batch_size, np.int32)
        shape = (self.batch_size, self.pixels, self.pixels, 3)
        noise = rng.integers(0, 128, shape, np.uint8)
        cell = np.ones((self.cell, self.cell, 1), np.uint8)
        fine = np.kron(self.patterns[label], cell)[:, : self.pixels, : self.pixels]
        return {"image": noise + fine, "label": label}


class Tfds:
    """A data set of tensorflow_datasets with JPEG images, such as `imagenet2012`."""

    def __init__(self, config: ConfigDict) -> None:
        try:
            import tensorflow as tf
            import tensorflow_datasets as tfds
        except ImportError as error:
            raise ImportError(
                f"config.dataset is {config.dataset!r}, but tensorflow_datasets cannot "
                f"be imported ({error}). Run `pip install tensorflow "
                "tensorflow_datasets`, or train on synthetic images with "
                f"--config.dataset={SYNTHETIC}."
            ) from error
        tf.config.set_visible_devices([], "GPU")  # they belong to JAX
        self.tf, self.tfds, self.config = tf, tfds, config
        self.builder = tfds.builder(config.dataset)
        self.builder.download_and_prepare()  # nothing happens if it is there
        info = self.builder.info
        self.num_classes = info.features["label"].num_classes
        self.train_examples = info.splits["train"].num_examples

    def train(self, first_step: int) -> Iterator[Batch]:
        """Yields batches in an order that is another one after each restart."""
        config, seed = self.config, self.config.seed + first_step
        images = self._read("train", shuffle_files=True, seed=seed)
        images = images.repeat().shuffle(config.shuffle_buffer_size, seed)
        return self._batches(images, augment=True)

    def test(self) -> Iterator[Batch]:
        images = self._read("validation", shuffle_files=False, seed=0)
        for batch in self._batches(images, augment=False):
            missing = self.config.batch_size - len(batch["label"])
            image = np.pad(batch["image"], [(0, missing), (0, 0), (0, 0), (0, 0)])
            label = np.pad(batch["label"], (0, missing), constant_values=-1)
            yield {"image": image, "label": label}

    def _read(self, split: str, *, shuffle_files: bool, seed: int) -> Any:
        images = self.builder.as_dataset(
            split=split,
            shuffle_files=shuffle_files,
            decoders={"image": self.tfds.decode.SkipDecoding()},
            read_config=self.tfds.ReadConfig(shuffle_seed=seed),
        )
        return images.cache() if self.config.cache else images

    def _batches(self, images: Any, *, augment: bool) -> Any:
        """Returns batches; augmented, they are all full, of random crops and flips."""
        tf, pixels = self.tf, self.config.image_size
        crop = self._random_crop if augment else self._center_crop

        def prepare(example: Any) -> Any:
            image = tf.io.decode_and_crop_jpeg(
                example["image"], crop(example["image"]), channels=3
            )
            image = tf.image.resize(image, (pixels, pixels), method="bicubic")
            if augment:
                image = tf.image.random_flip_left_right(image)
            image = tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8)
            return {"image": image, "label": tf.cast(example["label"], tf.int32)}

        images = images.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        images = images.batch(self.config.batch_size, drop_remainder=augment)
        return images.prefetch(self.config.prefetch).as_numpy_iterator()

    def _random_crop(self, jpeg: Any) -> Any:
        """Returns a window with 8 to 100 % of the pixels, at most 4:3 or 3:4."""
        tf = self.tf
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(jpeg),
            tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
            min_object_covered=0.1,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(0.08, 1.0),
            max_attempts=10,
        )
        return tf.concat([begin[:2], size[:2]], axis=0)

    def _center_crop(self, jpeg: Any) -> Any:
        tf, pixels = self.tf, self.config.image_size
        shape = tf.io.extract_jpeg_shape(jpeg)[:2]
        share = pixels / (pixels + CROP_PADDING)
        side = tf.cast(share * tf.cast(tf.reduce_min(shape), tf.float32), tf.int32)
        return tf.concat([(shape - side) // 2, [side, side]], axis=0)
