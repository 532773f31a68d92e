"""examples/imagenet: its images, its settings, and a run of a few steps."""

import importlib
import io
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import flax_amp
from configs.imagenet import default
from examples.imagenet import input_pipeline, model, train
from flax_amp import metrics

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
TINY = dict(
    precision="16-mixed",
    model="ResNetTiny",
    width=4,
    dataset="synthetic",
    synthetic_classes=3,
    image_size=32,
    batch_size=16,
    num_train_steps=3,
    warmup_epochs=0.25,
    num_epochs=1.0,
    log_every_steps=2,
)


def small(**overrides):
    config = default.get_config()
    config.update(TINY | overrides)
    return config


def test_imagenet_variants_change_the_default():
    known = dict(default.get_config())
    found = {}
    for path in (ROOT / "configs" / "imagenet").glob("[!_]*.py"):
        config = importlib.import_module(f"configs.imagenet.{path.stem}").get_config()
        assert set(config) == set(known)
        found[path.stem] = config.precision, config.batch_size
    assert found == {
        "default": ("32-true", 128),
        "v100_x8": ("32-true", 512),
        "v100_x8_mixed_precision": ("16-mixed", 2048),
        "tpu": ("bf16-mixed", 1024),
        "fake_data_benchmark": ("bf16-mixed", 256 * 8),
    }


def test_imagenet_synthetic_images_follow_from_seed_and_step():
    def batches(first_step, **overrides):
        images = input_pipeline.load(small(**overrides)).train(first_step)
        return [b["image"].sum(dtype=int) for b in itertools.islice(images, 9)]

    assert batches(0)[3:] == batches(3)[:6]
    assert len(set(batches(0))) == 8 and batches(0)[0] == batches(0)[8]
    assert batches(0) != batches(0, seed=1)
    (test,) = input_pipeline.load(small()).test()
    assert test["image"].shape == (16, 32, 32, 3)
    assert test["image"].dtype == np.uint8 and test["label"].dtype == np.int32
    for label in range(3):  # noise averages out, the pattern of a class stays
        assert test["image"][test["label"] == label].mean(axis=0).std() > 20


def test_imagenet_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r"imagenet2012.*--config.dataset=synthetic"):
        input_pipeline.load(default.get_config())


def test_imagenet_refuses_bad_settings(tmp_path):
    for overrides, message in (
        ({"batch_size": 12}, "batch_size=12 does not split over 8 devices"),
        ({"model": "ResNet51"}, "model is 'ResNet51'; expected one of .*'ResNet50'"),
        ({"precision": "float8"}, "precision is 'float8'"),
    ):
        with pytest.raises(ValueError, match=message):
            train.train_and_evaluate(small(**overrides), tmp_path)


def test_imagenet_resnet50_has_its_parameters():
    net = model.create("ResNet50", num_classes=1000, width=64)
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), np.uint8)
    init = jax.eval_shape(lambda x: net.init(jax.random.key(0), x, train=False), image)
    sizes = [np.prod(leaf.shape) for leaf in jax.tree.leaves(init["params"])]
    assert sum(sizes) == 25_557_032  # as everywhere
    decays = train.is_kernel(init["params"])
    assert sum(jax.tree.leaves(decays)) == 53 + 1  # convolutions and the last layer


def test_imagenet_warms_up_and_decays():
    config = small(warmup_epochs=2.0, num_epochs=10.0, batch_size=512)
    state = jax.eval_shape(lambda: train.create_state(config, 3, 10))
    assert state.precision == "16-mixed"
    rate = train.make_schedule(config, 10)
    rates = [float(rate(step)) for step in (0, 10, 20, 60, 100)]
    np.testing.assert_allclose(rates, [0, 0.1, 0.2, 0.1, 0], atol=1e-6)


def test_imagenet_counts_no_padding():
    logits = np.float32([[9, 0, 0], [0, 9, 0], [0, 0, 9]])
    state = SimpleNamespace(variables={}, apply_fn=lambda *_, **__: logits)
    batch = {"image": None, "label": np.int32([0, 2, -1])}
    found = model.eval_fn({}, batch, state=state).compute()
    assert found["accuracy"] == 0.5
    assert found["loss"] == pytest.approx(4.5, abs=0.01)


@pytest.mark.slow
def test_imagenet_trains_on_eight_devices_and_resumes(tmp_path):
    straight, summary = train.train_and_evaluate(small(), tmp_path / "straight")
    assert summary["step"] == 3 and np.isfinite(summary["test_loss"])
    assert summary["scale"] == 2**15 and summary["skipped"] == 0
    for leaf in jax.tree.leaves(straight):
        assert leaf.sharding.is_fully_replicated and len(leaf.devices()) == 8
    broken = tmp_path / "broken"
    _, saved = train.train_and_evaluate(
        small(), broken, should_stop=lambda step: step == 2
    )
    assert saved["step"] == 2 and "test_loss" not in saved  # it only saves
    resumed, again = train.train_and_evaluate(small(), broken)
    assert again == summary | {"resumed_from": 2}
    for leaf, expected in zip(*map(jax.tree.leaves, (resumed, straight)), strict=True):
        np.testing.assert_array_equal(leaf, expected)
    logged = metrics.read(broken)
    assert [step for step, _ in logged["train/loss"]] == [2, 3]
    assert [step for step, _ in logged["test/loss"]] == [3]


@pytest.mark.slow
def test_imagenet_times_its_images_alone(tmp_path, monkeypatch):
    seconds, saved = [], flax_amp.checkpoint.save

    class Slow(input_pipeline.Synthetic):
        def train(self, first_step):
            for batch in super().train(first_step):
                seconds.append(1)
                yield batch

        def test(self):
            seconds.append(100)
            return super().test()

    def slow_save(*args):
        seconds.append(100)
        return saved(*args)

    clock = SimpleNamespace(monotonic=lambda: sum(seconds))
    monkeypatch.setattr(train, "time", clock)
    monkeypatch.setattr(input_pipeline, "Synthetic", Slow)
    monkeypatch.setattr(flax_amp.checkpoint, "save", slow_save)
    config = small(num_train_steps=25, log_every_steps=5, checkpoint_epochs=2)
    train.train_and_evaluate(config, tmp_path)
    assert sum(seconds) == 25 + 100 * (2 + 4)  # two are saved, each epoch is tested
    found = metrics.read(tmp_path)["train/images_per_s"]
    steps = [5, 8, 10, 15, 16, 20, 24, 25]  # those of 8 end an epoch
    assert found == [(step, config.batch_size) for step in steps]


@pytest.mark.slow
def test_imagenet_learns_the_synthetic_images(tmp_path):
    config = small(num_train_steps=40, num_epochs=5.0, batch_size=64)
    _, summary = train.train_and_evaluate(config, tmp_path)
    assert summary["test_accuracy"] > 0.6  # 1/3 by chance


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of TensorFlow
def test_imagenet_reads_tensorflow_datasets(tmp_path, monkeypatch):
    tf, tfds = map(pytest.importorskip, ("tensorflow", "tensorflow_datasets"))

    class TinyImages(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "image": tfds.features.Image(encoding_format="jpeg"),
                "label": tfds.features.ClassLabel(num_classes=5),
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, manager):
            return {name: self._generate_examples() for name in ("train", "validation")}

        def _generate_examples(self):
            for i in range(20):  # a white square of 64 pixels in a wide gray image
                image = np.full((64, 96, 3), 100, np.uint8)
                image[:, 16:80] = 255
                yield (
                    i,
                    {
                        "image": io.BytesIO(tf.io.encode_jpeg(image).numpy()),
                        "label": i % 5,
                    },
                )

    builder = TinyImages(data_dir=tmp_path)
    monkeypatch.setattr(tfds, "builder", {"tiny_images": builder}.get)
    images = input_pipeline.load(small(dataset="tiny_images"))
    assert images.num_classes == 5
    assert images.train_examples == 20
    batches = images.train(0)
    batch, again = next(batches), next(batches)
    assert batch["image"].shape == again["image"].shape == (16, 32, 32, 3)
    assert batch["image"].dtype == np.uint8 and batch["label"].dtype == np.int32
    first, last = images.test()
    assert (first["image"] > 250).all()  # the center
    assert (last["label"] >= 0).tolist() == [True] * 4 + [False] * 12
    assert last["image"].shape == first["image"].shape
