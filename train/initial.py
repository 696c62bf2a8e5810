"""Heads to start training from: sizes that suit a target, and weights that begin with what the target knows.

Copying the target's last layer beats random weights by far in short runs: the head starts by saying what the target
has just said, and has to learn only to look one token further.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.drafters.dflash import DFlashConfig
from specjax.drafters.dflash import fresh_params as fresh_dflash
from specjax.drafters.eagle import EagleConfig
from specjax.drafters.eagle import fresh_params as fresh_eagle
from specjax.drafters.medusa import MedusaConfig
from specjax.drafters.medusa import fresh_params as fresh_medusa
from specjax.drafters.mtp import MTPConfig
from specjax.drafters.mtp import fresh_params as fresh_mtp
from specjax.models import int8
from specjax.models.language_model import LanguageModel
from specjax.static import show
from specjax.train.heads import HeadConfig, read
from specjax.types import Array, Model, PyTree

KINDS = ("medusa", "eagle", "mtp", "dflash", "eagle1")


def config_for(
    kind: str, target: LanguageModel, *, draft_vocab_size: int = 0, num_draft_tokens: int = 4, **settings: Any
) -> HeadConfig:
    """A small head of a kind, with layers like the target's.

    "eagle" is EAGLE-3 over the streams after layers 2, L / 2 and L - 3 and what the target's head reads, each normed.
    It goes on from the third: `params_for` starts that norm's scale with the size the stream usually has.

    Args:
      kind: one of `KINDS`.
      target: a Llama-family model.
      draft_vocab_size: tokens that can be drafted, 0 is all; EAGLE-3 and DFlash.
      num_draft_tokens: Medusa heads, or laws in a DFlash block; the others draft as far as they are asked to.
      settings: fields of the configuration that are to be others, e.g. ``feature_layers=(2, 15, 27)`` or, for DFlash,
        ``markov_rank=64, confidence=True``.

    Raises:
      ValueError: an unknown kind or setting; a reduced vocabulary for a head that shares the target's projection.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={show(kind)}: choose one of {', '.join(map(repr, KINDS))}")
    if draft_vocab_size and kind in ("medusa", "mtp", "eagle1"):
        raise ValueError(f"draft_vocab_size={draft_vocab_size}: a {kind} head drafts from the whole vocabulary: 0")
    config = _config_for(kind, target.config, draft_vocab_size, num_draft_tokens)
    known = [field.name for field in dataclasses.fields(config)]
    for name in settings:
        if name not in known:
            raise ValueError(f"{name}={show(settings[name])}: a {kind} head has {', '.join(known)}")
    return dataclasses.replace(config, **settings)


def _config_for(kind: str, config: Any, draft_vocab_size: int, num_draft_tokens: int) -> HeadConfig:
    last = config.num_layers
    one = dataclasses.replace(
        config, num_layers=1, tie_embeddings=False, windows=(), ropes=(), embedding_scale=1.0, logit_softcap=0.0
    )  # fmt: skip
    if kind == "medusa":
        return MedusaConfig(config.hidden_size, config.vocab_size, num_heads=num_draft_tokens, shared=True)
    if kind == "eagle":
        late = max(last - 3, last // 2)
        streams = (*sorted({min(2, late), last // 2, late}), last + 1)
        return EagleConfig(one, streams, draft_vocab_size=draft_vocab_size, fc_norm=True)
    if kind == "eagle1":
        return EagleConfig(one, (last + 1,), version=1)
    if kind == "mtp":
        return MTPConfig(one, (last + 1,))
    streams = tuple(sorted({min(2, last - 1), last // 2, last - 1}))
    return DFlashConfig(
        one, streams, mask_token_id=config.pad_id or 0, block_size=num_draft_tokens + 1,
        draft_vocab_size=draft_vocab_size,
    )  # fmt: skip


def params_for(
    config: HeadConfig, target: LanguageModel, *, ids: Any = None, seed: int = 0, own_head: bool = True
) -> PyTree:
    """Weights to start from: the target's last layer, final norm and projection where the head has their like.

    Medusa heads start as in their paper: blocks that do nothing yet, before the target's projection.

    Args:
      config: of the head; its layers must have the target's sizes.
      target: its params are unrolled or stacked.
      ids: [M] target ids of a reduced vocabulary, ascending; not looked at without one.
      seed: of what stays random.
      own_head: for EAGLE-3, False leaves the output head to the target: its rows at ``ids``, which are neither
        trained nor stored.

    Raises:
      ValueError: a reduced vocabulary without ids.
    """
    rngs = nnx.Rngs(seed)
    if not getattr(config, "draft_vocab_size", 0):
        ids = None
    if isinstance(config, MedusaConfig):
        return fresh_medusa(config, target, rngs=rngs)
    if isinstance(config, MTPConfig):
        return _mtp(fresh_mtp(config, rngs=rngs), target)
    if ids is None and config.draft_vocab_size:
        raise ValueError(f"draft_vocab_size={config.draft_vocab_size}: give ids, which tokens these are")
    if isinstance(config, EagleConfig):
        made = _eagle(config, fresh_eagle(config, rngs=rngs), target, ids)
        return made if own_head else {name: leaf for name, leaf in made.items() if name != "head"}
    return _dflash(config, fresh_dflash(config, ids=ids, rngs=rngs), target)


def last_layer(target: LanguageModel) -> dict[str, Array]:
    """The target's last layer. Raises ValueError if it is quantised."""
    layers = int8.floating("target", target).params["layers"]
    if "qkv" in layers:  # stacked
        return jax.tree.map(operator.itemgetter(-1), layers)
    return layers[max(layers)]


def _like(params: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
    """``params`` with the weights of ``source`` that have the same name and shape."""
    return {
        name: jnp.array(source[name], leaf.dtype) if getattr(source.get(name), "shape", None) == leaf.shape else leaf
        for name, leaf in params.items()
    }


def _head_rows(target: LanguageModel, ids: Any) -> Array:
    weight = target.params.get("head", target.params["embedding"])
    return jnp.array(weight if ids is None else weight[jnp.asarray(ids)], jnp.float32)


def _pass(fc: Array, size: int, stream: int) -> Array:
    """[E, F E]: one of the streams goes through, the others not yet."""
    begin = stream * size
    return jnp.zeros_like(fc).at[:, begin : begin + size].set(jnp.eye(size, dtype=fc.dtype))


def _eagle(config: EagleConfig, params: PyTree, target: LanguageModel, ids: Any) -> PyTree:
    size, source = config.layers.hidden_size, last_layer(target)
    first = _like(params["layers"][0], source)
    if config.version == 3:  # attention reads [embedding, hidden]
        qkv = jnp.concatenate([first["qkv"][:, :size], jnp.asarray(source["qkv"], first["qkv"].dtype)], axis=1)
        first |= {"qkv": qkv, "hidden_norm": jnp.array(source["input_norm"], qkv.dtype)}
        first["input_norm"] = jnp.ones_like(first["input_norm"])
        params = {**params, "norm": jnp.array(target.params["final_norm"], qkv.dtype), "head": _head_rows(target, ids)}
    layers = getattr(target.config, "num_layers", 0)
    streams = [layer for layer in config.feature_layers if layer <= layers] or config.feature_layers
    stream = 1 if config.version == 1 else config.feature_layers.index(max(streams))  # beside the embedding
    params = {**params, "layers": {**params["layers"], 0: first}, "fc": _pass(params["fc"], size, stream)}
    if config.fc_norm:  # the layer goes on from a stream of the size it was trained with
        usual = stream_size(target.model, config.feature_layers[stream], target.params)
        norm = jnp.full_like(params["fc_norm"][stream], usual)
        params["fc_norm"] = {**params["fc_norm"], stream: norm}
    return params if not config.draft_vocab_size else {**params, "ids": jnp.asarray(ids, jnp.int32)}


@functools.partial(jax.jit, static_argnums=(0, 1))
def stream_size(model: Model, layer: int, params: PyTree) -> Array:
    """[] what the root mean square of one of the target's streams usually is: the median over a text of 32 tokens from
    all over the vocabulary. First tokens can be 50 times larger."""
    tokens = (jnp.arange(32, dtype=jnp.int32) * model.vocab_size // 32)[None]
    features = read(LanguageModel(model, params), tokens, (layer,)).features
    return jnp.median(jnp.sqrt(jnp.mean(features * features, axis=-1)))


def _mtp(params: PyTree, target: LanguageModel) -> PyTree:
    modules = {}
    for index, module in params["modules"].items():
        size = module["norm"].shape[0]
        modules[index] = {
            **module, "layer": _like(module["layer"], last_layer(target)),
            "projection": module["projection"].at[:, size:].set(jnp.eye(size, dtype=module["projection"].dtype)),
            "norm": jnp.array(target.params["final_norm"], module["norm"].dtype),
        }  # fmt: skip
    return {**params, "modules": modules}


def _dflash(config: DFlashConfig, params: PyTree, target: LanguageModel) -> PyTree:
    source = last_layer(target)
    made = {
        **params, "layers": {index: _like(layer, source) for index, layer in params["layers"].items()},
        "fc": _pass(params["fc"], config.layers.hidden_size, len(config.feature_layers) - 1),
        "hidden_norm": jnp.array(source["input_norm"], params["fc"].dtype),
        "norm": jnp.array(target.params["final_norm"], params["fc"].dtype),
    }  # fmt: skip
    return made if not config.draft_vocab_size else {**made, "head": _head_rows(target, params["ids"])}
