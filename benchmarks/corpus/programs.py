"""The programs of the corpus, which are the rows of programs.toml."""

import functools
import importlib
import pathlib
import tomllib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from flax import nnx

Loss = Callable[..., Any]  # of parameters and of what `args` holds; returns a scalar


class Program(NamedTuple):
    """A loss with its arguments; it is differentiated by the first of them.

    Attributes:
      loss: the function, in float32; `amp` is put around it.
      params: what it is differentiated by.
      args: its other arguments.
      hand: the same function with a dtype set by hand, if its authors have one.
    """

    loss: Loss
    params: Any
    args: tuple[Any, ...] = ()
    hand: Callable[[Any], Loss] | None = None


def all_programs() -> dict[str, Callable[[], Program]]:
    """Returns what makes each program, by package and name."""
    text = pathlib.Path(__file__).with_suffix(".toml").read_text()
    found: dict[str, Callable[[], Program]] = {}
    for package, table in tomllib.loads(text).items():
        for labels, code in _lines(table["rows"]):
            for label in labels.split():
                make = functools.partial(_make, table, code.replace("@", label))
                found[f"{package}/{label.replace('~', ' ')}"] = make
    return found


def _lines(text: str) -> list[list[str]]:
    """Returns the lines "label: expression" of a text, each in two parts."""
    return [x.split(": ", 1) for x in text.replace("\n    ", " ").splitlines() if x]


def _make(table: dict[str, Any], code: str) -> Program:
    names = {"jax": jax, "jnp": jnp, "jsp": jsp, "nnx": nnx, "normal": normal}
    names["m"] = importlib.import_module(table["module"])
    for name, expression in _lines(table.get("names", "")):
        names[name] = eval(expression, names)
    arguments, make = _KINDS[table["kind"]]
    return make(eval(f"lambda {arguments}: ({code})", names))


def normal(*shape: int, seed: int = 0) -> Any:
    """Returns normal numbers, the same ones for the same seed."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def total(found: Any) -> Any:
    """Returns a scalar of all floats of a tree; it grows like their logarithm."""
    leaves = [jnp.abs(y) if jnp.iscomplexobj(y) else y for y in jax.tree.leaves(found)]
    floats = [y for y in leaves if jnp.issubdtype(y.dtype, jnp.floating) and y.size]
    return sum(jnp.mean(jnp.log1p(y.astype(jnp.float32) ** 2)) for y in floats)


# --- kinds of rows: how an expression becomes a program ------------------------------


def _of_matmul(function: Callable[[Any], Any]) -> Program:
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=s).astype(np.float32) for s in ((32, 16), (16, 32)))
    return Program(lambda w, x: total(function(jnp.matmul(x, w))), w / 6, (x,))


def _solver(function: Callable[[Any, Any], Any]) -> Program:
    w, x = normal(8, 8) / 4, normal(8, seed=1)
    return Program(lambda w, x: total(function(w, x)), w, (x,))


def _linen(make: Callable[[dict[str, Any]], tuple[Any, Any]]) -> Program:
    module, x = make({})
    variables = module.init(jax.random.key(0), x)

    def loss_of(s: dict[str, Any]) -> Loss:
        module, _ = make(s)
        return lambda variables, x: total(module.apply(variables, x))

    return Program(loss_of({}), variables, (x,), lambda d: loss_of({"dtype": d}))


def _nnx(make: Callable[[dict[str, Any]], tuple[Any, Any]]) -> Program:
    def loss_of(s: dict[str, Any]) -> tuple[Loss, Any, Any]:
        module, x = make(s)
        parts: Any = nnx.split(module, nnx.Param, ...)
        graph, params, rest = parts

        def loss(params: Any, x: Any) -> Any:
            return total(nnx.merge(graph, params, rest, copy=True)(x))

        return loss, params, x

    loss, params, x = loss_of({})
    return Program(loss, params, (x,), lambda d: loss_of({"dtype": d})[0])


def _equinox(make: Callable[[Any], tuple[Any, ...]]) -> Program:
    """A model and its input, and how the model is called if not with that alone."""
    import equinox as eqx

    model, x, *called = make(jax.random.key(0))
    call = called[0] if called else lambda model, x: model(x)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: Any, x: Any) -> Any:
        model = eqx.combine(params, static)
        return total(jax.vmap(lambda x: call(model, x))(x))

    return Program(loss, params, (x,))


def _transformers(make: Callable[[], tuple[Any, str, dict[str, Any]]]) -> Program:
    """A class of transformers, the kind of its inputs, and its configuration."""
    import transformers

    transformers.logging.set_verbosity_error()
    jnp.clip = _clip  # type: ignore[assignment]
    cls, kind, config = make()
    settings = cls.config_class(**config)
    shape = {"audio": (1, 8, 32), "wave": (1, 400)}.get(kind)
    options: Any = {"input_shape": shape} if shape else {}
    model = cls(settings, seed=0, _do_init=False, **options)
    init = jax.jit(model.init_weights, static_argnums=1)
    params = init(jax.random.PRNGKey(0), model.input_shape)

    def loss_of(model: Any) -> Loss:
        return lambda params, inputs: total(model(**inputs, params=params).to_tuple())

    def hand(dtype: Any) -> Loss:
        return loss_of(cls(settings, dtype=dtype, _do_init=False, **options))

    return Program(loss_of(model), params, (_inputs(kind),), hand)


_new_clip = jnp.clip


def _clip(x: Any, min: Any = None, max: Any = None, **old: Any) -> Any:
    """`jnp.clip` with the names that T5 calls its bounds by, which are gone."""
    return _new_clip(x, old.get("a_min", min), old.get("a_max", max))


def _inputs(kind: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 98, (2, 48 if kind == "long" else 12))
    image = rng.normal(size=(2, 3, 32, 32)).astype(np.float32)
    if kind == "image":
        return {"pixel_values": image}
    if kind == "both":
        return {"pixel_values": image, "input_ids": ids}
    if kind == "seq2seq":
        ids[:, -1] = 98  # the end
        return {"input_ids": ids, "decoder_input_ids": ids[:, :8]}
    if kind == "audio":
        features = rng.normal(size=(2, 8, 32)).astype(np.float32)
        return {"input_features": features, "decoder_input_ids": ids[:, :8]}
    if kind == "wave":
        return {"input_values": rng.normal(size=(2, 400)).astype(np.float32)}
    return {"input_ids": ids}


# By name: what the expression is a function of, and what makes the program
_KINDS: dict[str, tuple[str, Callable[[Any], Program]]] = {
    "matmul": ("h", _of_matmul),
    "solver": ("w, x", _solver),
    "linen": ("s", _linen),
    "nnx": ("s", _nnx),
    "equinox": ("k", _equinox),
    "transformers": ("", _transformers),
}
