"""The commands: what they print, their exit codes, and one line for an error."""

import importlib
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import flax_amp
from flax_amp import __main__

pytestmark = pytest.mark.once

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))
THIS = "debug.test_command"


def deep(w, x):
    for i in range(6):
        with jax.named_scope(f"Layer_{i}"):
            x = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return jnp.dot(x, w, precision="highest").sum()


def to_explain():
    return deep, (W, jax.ShapeDtypeStruct((4, 8), jnp.float32))


def sound():
    return lambda w, x: jnp.tanh(x @ w).mean(), (W, X)


def overflows():
    def loss(w, x):
        with jax.named_scope("net"):
            y = jnp.tanh((x * 1e5) @ w)
        with jax.named_scope("head"):
            return (y @ w).mean()

    return loss, (W, X)


def of_a_pair():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return (model, optimizer), lambda model, x: (model(x) ** 2).mean(), X


def wrong():
    return deep, W


def raising():
    raise KeyError("no data")


def exits():
    raise SystemExit(3)


def run(capsys, *arguments):
    code = __main__.main(arguments)
    return code, capsys.readouterr()


def test_explain(capsys):
    target = THIS.replace(".", "/")
    code, printed = run(capsys, "explain", target)
    assert code == 1 and printed.out.startswith("deep") and "  Layer_*" in printed.out
    code, printed = run(capsys, "explain", f"{THIS}:sound", "--precision", "bf16")
    assert code == 0 and "in bfloat16" in printed.out
    code, printed = run(capsys, "explain", f"{target}.py", "--only", "problems")
    assert "  Layer_*" not in printed.out
    code, printed = run(capsys, "explain", "./examples/digits")
    assert code == 0 and "  ConvNet" in printed.out


def test_nonfinite(capsys):
    code, printed = run(capsys, "nonfinite", f"{THIS}:overflows", "--precision", "fp16")
    assert code == 1 and '{"net": jnp.float32}' in printed.out
    code, printed = run(capsys, "nonfinite", f"{THIS}:of_a_pair", "--scale", "8")
    assert code == 0 and "scale 8: nothing" in printed.out


def test_compare(capsys):
    code, printed = run(capsys, "compare", f"{THIS}:of_a_pair")
    assert code == 0 and "as exact as usual" in printed.out
    code, printed = run(capsys, "compare", f"{THIS}:overflows", "--precision", "fp16")
    assert code == 1 and "net in float32" in printed.out


def test_measure(capsys, monkeypatch):
    updates = []
    monkeypatch.setattr(jax.config, "update", lambda *args: updates.append(args))
    code, printed = run(capsys, "measure", f"{THIS}:sound")
    assert code == 0 and "the least of 20 steps" in printed.out
    assert not updates  # the device stays the user's


@pytest.mark.parametrize("name", ["explain", "nonfinite", "compare", "measure"])
def test_help_says_what_the_function_returns(capsys, name):
    with pytest.raises(SystemExit) as ended:
        __main__.main([name, "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: flax_amp {name}" in printed
    for form in ("(loss_fn, args)", "(state, loss_fn, ba", "((model, optimizer), lo"):
        assert form in printed
    assert "FUNCTION, by default to_explain, takes nothing" in printed
    with pytest.raises(SystemExit) as ended:
        __main__.main([name, "module", "--colour"])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and f"usage: flax_amp {name}" in printed
    assert "unrecognized arguments: --colour" in printed


@pytest.mark.parametrize("name", ["explain", "measure"])
@pytest.mark.parametrize(
    "target, message",
    [
        ("no.such", "error: no.such: "),
        (f"{THIS}:nothing", f"module '{THIS}' has no attribute 'nothing'"),
        (f"{THIS}:wrong", "(loss_fn)(*args), "),
        (f"{THIS}:W", "object is not callable"),
        (f"{THIS}:raising", "KeyError: 'no data'"),
        (f"{THIS}:exits", "SystemExit: 3"),
        (":sound", "invalid format"),
    ],
)
def test_errors_are_one_line(capsys, name, target, message):
    code, printed = run(capsys, name, target)
    assert code == 2 and not printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ") and message in line


def test_the_console_script():
    root = Path(flax_amp.__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["flax_amp"].partition(":")
    assert getattr(importlib.import_module(module), name) is __main__.main
