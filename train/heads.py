"""What a head says about whole texts at once, as it will say it in decoding: teacher forcing.

`laws` gives the logits of every kind of head at every place of texts [B, T], one entry per draft depth, from one pass
of the target without a cache; each entry names the target's rows it is to be compared with. Row r of the target is the
law of token r + 1. Pairing is that of decoding: with pending token i, depth d (from 0) is about token i + 1 + d, that
is row i + d.

    Medusa    head d reads the hidden state that predicted token i
    EAGLE,    pass 0 reads token i beside the hidden state that predicted it; pass d reads the tokens from there on
    MTP       beside what pass d - 1 said one token before, and looks back as a draft does: at the pass-0 slots up to
              its pending token, and at its own ancestors. Modules of their own see all earlier tokens of their own.
    DFlash    a block at every anchor i: token i and masks, over the target's features before i

What is not there yet: trees (a draft is a chain), the confidence head of a block drafter, packing several texts into
one row, bfloat16 (a bfloat16 cache keeps bits, which have no gradient).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.drafters import recurrent
from specjax.drafters.dflash import DFlash, DFlashConfig, dflash
from specjax.drafters.eagle import EagleConfig, eagle
from specjax.drafters.eagle import head_of as eagle_head
from specjax.drafters.medusa import MedusaConfig, medusa
from specjax.drafters.medusa import graph as medusa_graph
from specjax.drafters.mtp import MTPConfig, mtp
from specjax.drafters.mtp import head_of as mtp_head
from specjax.models.attention import Reach
from specjax.models.language_model import LanguageModel
from specjax.models.llama import Window, lookup, rms_norm
from specjax.models.rope import angles
from specjax.static import show, whole
from specjax.types import Array, Drafter, KVCache, PyTree

HeadConfig = MedusaConfig | EagleConfig | MTPConfig | DFlashConfig


class Reading(NamedTuple):
    """One pass of the target over whole texts."""

    logits: Array  # [B, T, V], row r is about token r + 1
    features: Array  # [B, T, F] the hidden states the head reads


class Said(NamedTuple):
    """What a head says at one depth."""

    logits: Array  # [B, P, M]
    rows: Array  # [P] int32: place p is about the token that row rows[p] of the target is about


def feature_layers(config: HeadConfig, num_layers: int) -> tuple[int, ...]:
    """The target's hidden states a head reads; ``num_layers`` is the target's."""
    return (num_layers + 1,) if isinstance(config, MedusaConfig) else config.feature_layers


def drafter(config: HeadConfig, params: PyTree, target: LanguageModel, **options: Any) -> Drafter:
    """The drafter of a head: what its kind's factory makes, which knows the ``options``.

    Raises:
      ValueError: no configuration of a head; what the factory refuses.
    """
    factories = {MedusaConfig: medusa, EagleConfig: eagle, MTPConfig: mtp, DFlashConfig: dflash}
    if type(config) not in factories:
        raise ValueError(f"config={show(config)}: give the configuration of a head")
    return factories[type(config)](config, params, target, **options)


def read(target: LanguageModel, tokens: Array, layers: tuple[int, ...]) -> Reading:
    """The target's logits and features over tokens [B, T]; no gradient flows into it."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    out = target.model.apply(target.params, tokens, positions, None, None, feature_layers=layers)
    return Reading(*jax.lax.stop_gradient((out.logits, out.features)))


def ids(params: PyTree) -> Array | None:
    """Target ids of the columns of a reduced vocabulary; None: column i is token i."""
    return params.get("ids")


def laws(
    config: HeadConfig, params: PyTree, weights: PyTree, tokens: Array, features: Array, *, depth: int | None = None,
    anchors: Any = None,
) -> tuple[Said, ...]:  # fmt: skip
    """The head's logits, one entry per depth.

    Args:
      config, params: the head, as its factory takes it (`specjax.drafters.eagle`, ..).
      weights: the target's params; embedding and projection are read from it where the head shares them. Gradients
        do not flow into it.
      tokens: [B, T] int32, texts from position 0.
      features: [B, T, F] of the same texts, see `read`.
      depth: draft tokens ahead; None is all heads, modules or rows of a block, and 3 where one module is fed its own
        hidden states.
      anchors: [A] int, places of the pending tokens of DFlash blocks, below T; None: every place from 1 on.

    Raises:
      ValueError: no configuration of a head; a depth it does not have; a block drafter with a confidence head.
    """
    weights, width = jax.lax.stop_gradient(weights), tokens.shape[1]
    if isinstance(config, MedusaConfig):
        depth = _depth(depth, config.num_heads)
        return _medusa(config, params, _weight(weights, "head"), features, depth)
    if isinstance(config, EagleConfig):
        shared = ("embedding", "head") if config.version == 1 else ("embedding",)
        own = {name: leaf for name, leaf in params.items() if name != "ids"}
        own = {**{name: _weight(weights, name) for name in shared}, **own}
        own = {"weights": own, "ids": ids(params)}
        depth = _depth(3 if depth is None else depth, recurrent.ANY_DEPTH)
        return _recurrent(eagle_head(config), own, tokens, features, depth)
    if isinstance(config, MTPConfig):
        limit = config.num_modules if config.num_modules > 1 else recurrent.ANY_DEPTH
        depth = _depth(min(3, limit) if depth is None else depth, limit)
        own = {**{name: _weight(weights, name) for name in ("embedding", "head")}, **params}
        return _recurrent(mtp_head(config), own, tokens, features, depth)
    if isinstance(config, DFlashConfig):
        anchors = np.arange(1, width) if anchors is None else anchors
        return _dflash(config, params, weights, tokens, features, anchors, _depth(depth, config.num_laws))
    raise ValueError(f"config={show(config)}: give the configuration of a head")


def _depth(depth: Any, limit: int) -> int:
    depth = limit if depth is None else whole("depth", depth, 1)
    if depth > limit:
        raise ValueError(f"depth={depth}: this head drafts {limit} tokens ahead")
    return depth


def _weight(weights: PyTree, name: str) -> Array:
    """The target's embedding or projection; the projection may be the embedding."""
    return weights.get(name, weights["embedding"])


def _medusa(config: MedusaConfig, params: PyTree, shared: Array, features: Array, depth: int) -> tuple[Said, ...]:
    """Head d at hidden row r, which predicted token r + 1, is about token r + 2 + d: row r + 1 + d."""
    heads: Any = nnx.merge(medusa_graph(config), params).heads
    width = features.shape[1]
    return tuple(
        Said(head(features[:, : width - 1 - d], shared), jnp.arange(1 + d, width, dtype=jnp.int32))
        for d, head in enumerate(list(heads)[:depth])
    )


def _recurrent(
    head: recurrent.Head, params: PyTree, tokens: Array, features: Array, depth: int
) -> tuple[Said, ...]:
    """Pass d at token i stands for the node of depth d whose pending token is i - d; its slots are those of pass d."""
    batch, width = tokens.shape
    own = head.num_modules > 1
    passes = 1 if own else depth  # that share a cache
    hidden = head.fuse(params, _behind(features))
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], tokens.shape)
    cache = head.init_cache(params, batch, passes * width)
    said = []
    for d in range(depth):
        module, start = (d, 0) if own else (0, d * width)
        visible = _module_reach(width, d) if own else _pass_reach(width, d, passes)
        slots = Reach(jnp.broadcast_to(visible, (batch, *visible.shape)), None, jnp.int32(1))
        cache = cache._replace(lengths=jnp.full(batch, start, jnp.int32))
        out, cache = head.step(params, module, tokens, hidden, positions, slots, cache)
        rows = jnp.arange(d + 1, width, dtype=jnp.int32)  # a pending token has a token before it
        said.append(Said(head.logits(params, module, out[:, d + 1 :]), rows))
        hidden = _behind(out)
    return tuple(said)


def _behind(x: Array) -> Array:
    """Entry i is entry i - 1 of x [B, T, E]: what is known when token i is read."""
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))


def _module_reach(width: int, module: int) -> np.ndarray:
    """[T, T]: earlier tokens, without the first ones, as `recurrent` hides them."""
    token, slot = np.arange(width)[:, None], np.arange(width)[None]
    return (slot <= token) & (slot > module)


def _pass_reach(width: int, d: int, passes: int) -> np.ndarray:
    """[T, passes * T]: token i of pass d sees tokens 1 .. i - d of pass 0, and token i - d + c of each pass c up to its
    own: its ancestors and itself."""
    token = np.arange(width)[:, None, None]
    c, slot = np.arange(passes)[None, :, None], np.arange(width)[None, None]
    seen = np.where(c == 0, slot <= token - d, (c <= d) & (slot == token - d + c))
    return (seen & (slot >= 1)).reshape(width, passes * width)


def _dflash(
    config: DFlashConfig, params: PyTree, weights: PyTree, tokens: Array, features: Array, anchors: Any, depth: int
) -> tuple[Said, ...]:
    """All blocks of a text in one window behind its context: a block sees the features before its anchor and itself."""
    if config.confidence:
        raise ValueError("confidence=True: the confidence head is not trained yet; make the head without one")
    net, sizes, (batch, width), block = DFlash(config, params), config.layers, tokens.shape, config.block_size
    anchors = jnp.asarray(anchors, jnp.int32)
    count = anchors.shape[0]
    everywhere = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], tokens.shape)
    cache = net.init_cache(batch, width + (count - 1) * block)
    cache = net.observe(features, everywhere, cache, jnp.full(batch, width, jnp.int32))

    places = anchors[:, None] + jnp.arange(block, dtype=jnp.int32)[None]  # [A, block]
    first = (jnp.arange(block) == 0)[None, None]
    block_tokens = jnp.where(first, tokens[:, anchors][:, :, None], config.mask_token_id).reshape(batch, -1)
    positions = jnp.broadcast_to(places.reshape(1, -1), block_tokens.shape)
    before = jnp.arange(width)[None] < jnp.repeat(anchors, block)[:, None]
    of = np.repeat(np.arange(count), block)
    visible = jnp.concatenate([before, jnp.asarray(of[:, None] == of[None])], axis=1)
    slots = Reach(jnp.broadcast_to(visible[None], (batch, *visible.shape)), None, jnp.int32(1))

    x = _through(net, lookup(weights["embedding"], block_tokens), Window(sizes, angles(sizes, positions), slots), cache)
    hidden = x.reshape(batch, count, block, -1)
    lead = 0 if config.sample_from_anchor else 1
    head = None if config.draft_vocab_size else _weight(weights, "head")
    said = []
    for d in range(depth):
        row = hidden[:, :, lead + d]
        logits = net.laws(row, head, -np.inf).logits
        if config.markov_rank:
            above = tokens[:, jnp.minimum(anchors + d, width - 1)]
            latent = jnp.take(params["above"], above, axis=0, mode="clip").astype(jnp.float32)
            logits = logits + jnp.einsum("bpr,rm->bpm", latent, params["out"].astype(jnp.float32), precision="highest")
        said.append(Said(logits, anchors + d))
    return tuple(said)


def _through(net: Any, x: Array, window: Window, cache: KVCache) -> Array:
    for layer, k, v in zip(net.layers, cache.k, cache.v, strict=True):
        x, _, _ = layer(x, k, v, cache.lengths, window)
    return rms_norm(x, net.norm, window.config.rms_eps)
