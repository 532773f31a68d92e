"""The Flax models of transformers at a tiny size, with the dtype that they take.

A row gives the class, the kind of its inputs, and how it differs from its family.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.corpus.case import Case, Kind, Loss, total

_NEW_CLIP = jnp.clip

_TEXT: dict[str, Any] = dict(
    vocab_size=99,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
)
_SEQ: dict[str, Any] = (
    dict(vocab_size=99, d_model=32, pad_token_id=1, decoder_start_token_id=2)
    | dict(encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64)
    | dict(decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64)
    | dict(max_position_embeddings=64)
)
_IMAGE = {k: v for k, v in _TEXT.items() if "vocab" not in k and "max" not in k} | dict(
    image_size=32, patch_size=8
)
_FAMILIES: dict[str, Any] = {
    "TEXT": _TEXT,
    "GROUPED": _TEXT | dict(num_key_value_heads=2, head_dim=8),
    "GPT": dict(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "SEQ": _SEQ,
    "T5": dict(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    | dict(decoder_start_token_id=0),
    "IMAGE": _IMAGE,
    "CONV": dict(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2])
    | dict(layer_type="basic"),
    "WHISPER": _SEQ
    | dict(num_mel_bins=8, max_source_positions=16, max_target_positions=16)
    | dict(eos_token_id=98, bos_token_id=98),
    "WAVE": _TEXT
    | dict(conv_dim=[16, 16], conv_stride=[4, 2], conv_kernel=[8, 3])
    | dict(num_feat_extract_layers=2, do_stable_layer_norm=True)
    | dict(num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    | dict(feat_extract_norm="layer"),
    "CLIP": dict(
        text_config=_TEXT | dict(eos_token_id=98),
        vision_config=_IMAGE,
        projection_dim=32,
    ),
}


def _case(make: Callable[[], tuple[Any, str, dict[str, Any]]]) -> Case:
    import transformers

    transformers.logging.set_verbosity_error()
    jnp.clip = _clip  # type: ignore[assignment]
    cls, kind, config = make()
    settings = cls.config_class(**config)
    inputs = _inputs(kind)
    model = cls(settings, seed=0, _do_init=False, **_shape(kind))
    init = jax.jit(model.init_weights, static_argnums=1)
    params = init(jax.random.PRNGKey(0), model.input_shape)

    def hand(dtype: Any) -> Loss:
        return _loss(cls(settings, dtype=dtype, _do_init=False, **_shape(kind)))

    return Case(_loss(model), params, (inputs,), hand)


def _clip(x: Any, min: Any = None, max: Any = None, **old: Any) -> Any:
    """`jnp.clip` with the names that T5 calls its bounds by, which are gone."""
    return _NEW_CLIP(x, old.get("a_min", min), old.get("a_max", max))


def _loss(model: Any) -> Loss:
    def loss(params: Any, inputs: Any) -> Any:
        leaves = jax.tree.leaves(model(**inputs, params=params).to_tuple())
        return total([x for x in leaves if x.size])

    return loss


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


def _shape(kind: str) -> dict[str, Any]:
    """Returns the shape that a model is initialized with, where its default is big."""
    shapes: dict[str, Any] = {"audio": (1, 8, 32), "wave": (1, 400)}
    return {"input_shape": shapes[kind]} if kind in shapes else {}


TRANSFORMERS = Kind("", _case, _FAMILIES)
