"""The code of README.md runs as it is printed, in order, in one namespace."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


class WithBatchNorm(nn.Module):
    """A model for the block that shows batch statistics and dropout."""

    @nn.compact
    def __call__(self, x, *, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
        return nn.Dense(10)(nn.Dropout(0.1, deterministic=not train)(x))


# Its policy is for larger models than the one that it trains.
def test_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # it saves to "run"
    example, policy, explain, step, optimizers, resume, migrate = BLOCKS
    names = {}
    exec(example, names)
    assert "'grads_finite': True" in capsys.readouterr().out
    exec(policy, names)
    _, metrics = names["train_step"](names["state"], names["batch"])
    assert metrics["grads_finite"]
    exec(explain, names)
    assert "100 % in half precision" in " ".join(capsys.readouterr().out.split())

    model = WithBatchNorm()
    names |= dict(model=model, tx=optax.sgd(0.1))
    names["variables"] = model.init(jax.random.key(0), jnp.ones((1, 64)), train=False)
    # Identical images have no variance: their BatchNorm amplifies gradients by 316.
    names["batch"]["image"] = jax.random.normal(jax.random.key(1), (32, 64))
    exec(step, names)
    names["state"], metrics = names["train_step"](names["state"], names["batch"])
    assert metrics["grads_finite"]
    train_state = names["state"]
    names["params"] = train_state.params
    names["grads"] = jax.tree.map(jnp.ones_like, train_state.params)
    exec(optimizers, names)
    assert names["rate"] == jnp.float32(1e-4)
    assert names["state"].hyperparams["max_norm"] == 0.5
    names["state"] = train_state
    exec(resume, names)
    assert int(names["state"].step) == 1

    Path("run").rename("old_run")
    whole, part, renamed = migrate.splitlines()
    exec(whole, names)
    assert int(names["state"].step) == 1
    exec(part.replace("head", "Dense_1"), names)
    with pytest.raises(ValueError, match="params/embed/kernel: .* on disk, not in"):
        exec(renamed.replace(r', r"Block_(\d+)": r"blocks/\1"', ""), names)
