"""NNX: a deep network learns digits, then learns inverted images with LoRA alone.

    python -m examples.nnx_finetune

The layers are one stack (`nnx.vmap`), run by `nnx.scan` and `nnx.remat`, with BatchNorm
and dropout inside. First everything but the LoRA factors trains. Then the images are
inverted, and `wrt=nnx.LoRAParam` trains only the factors: the optimizer does not see
the rest of the model.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import flax_amp
from examples.digits import data

LAYERS, WIDTH, STEPS = 4, 64, 200


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=4, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.norm(self.dense(x))))


class Network(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(64, WIDTH, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block))(rngs)
        self.head = nnx.Linear(WIDTH, data.NUM_CLASSES, rngs=rngs)

    def __call__(self, images):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def layers(x, block):
            return block(x)

        x = self.embed(images.reshape(len(images), -1))
        return self.head(layers(x, self.blocks))


def loss_fn(model, batch):
    return optax.losses.softmax_cross_entropy_with_integer_labels(
        model(batch["image"]), batch["label"]
    ).mean()


def accuracy(model, batch):
    return (model(batch["image"]).argmax(-1) == batch["label"]).mean()


# Module paths are keys of a policy: here the classifier stays in float32.
POLICY = flax_amp.default_amp_policy | {"*/head": flax_amp.use_original_precision}


def batches(images):
    for step in range(STEPS):
        yield data.batch_at(images, step, batch_size=64, seed=0)


def inverted(images):
    return {**images, "image": 1 - images["image"]}


def train(model, wrt, images):
    """Trains what `wrt` selects, in place."""
    optimizer = flax_amp.AmpOptimizer(model, optax.adam(3e-3), wrt=wrt)
    train_step = flax_amp.make_nnx_train_step(loss_fn, amp_policy=POLICY)
    for batch in batches(images):
        metrics = train_step(model, optimizer, batch)
    flax_amp.check_progress((model, optimizer), metrics)


def report(title, model, images):
    evaluate = flax_amp.make_eval_step(accuracy, amp_policy=POLICY)
    print(f"{title:34} accuracy {float(evaluate(model, images)):.2%}")


def main():
    train_images, test_images = data.load(split_seed=0)

    model = Network(nnx.Rngs(0))
    all_but_lora = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    train(model, all_but_lora, train_images)
    report("trained", model, test_images)
    report("on negatives", model, inverted(test_images))

    frozen = jnp.copy(model.blocks.dense.kernel[...])
    train(model, nnx.LoRAParam, inverted(train_images))
    report("on negatives, after LoRA", model, inverted(test_images))
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, kind)))
        for kind in (nnx.LoRAParam, nnx.Param)
    ]
    print(f"{sizes[0]} of {sizes[1]} parameters were trained;", end=" ")
    same = bool(jnp.array_equal(frozen, model.blocks.dense.kernel[...]))
    print("the others kept their bits" if same else "OTHERS CHANGED")


if __name__ == "__main__":
    main()
