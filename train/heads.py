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

Several texts may be packed into a row (``documents``): positions begin anew with each, and neither attention nor a
pair of row and token crosses from one to another; what a place says is what it would say if its text stood alone.
`Said.valid` tells which places have such a pair.

Weights may be bfloat16: keys and values are then kept as bfloat16 and not as their bits, so gradients flow through
them. A draft is a chain here; trees are not trained on.
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
    valid: Array  # [B, P] bool: that token is there, in the same text as all that the place has read
    odds: Array | None = None  # [B, P] of the confidence head: log-odds that this draft token would be accepted


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


class Layout(NamedTuple):
    """How texts lie in rows."""

    positions: Array  # [B, T] int32, from 0 in each text
    documents: Array | None  # [B, T] int32, -1: padding; None: one text a row

    def together(self, ours: Array, theirs: Array) -> Array | bool:
        """Whether places ``ours [X]`` and ``theirs [Y]`` of a row belong to one text: [B, X, Y]."""
        if self.documents is None:
            return True
        return self.documents[:, ours][:, :, None] == self.documents[:, theirs][:, None]


def layout(tokens: Array, documents: Array | None = None) -> Layout:
    """Positions of tokens [B, T]; see `specjax.train.types.Batch` for documents [B, T]."""
    everywhere = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    if documents is None:
        return Layout(everywhere, None)
    begins = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return Layout(everywhere - jax.lax.cummax(jnp.where(begins, everywhere, 0), axis=1), documents)


def window_mask(documents: Array | None) -> Array | None:
    """[B, T, T]: a token sees earlier ones of its own text, and itself. None, causal, where a row is one text."""
    if documents is None:
        return None
    width = documents.shape[1]
    return jnp.tril(jnp.ones((width, width), bool))[None] & (documents[:, :, None] == documents[:, None])


def read(target: LanguageModel, tokens: Array, layers: tuple[int, ...], documents: Array | None = None) -> Reading:
    """The target's logits and features over tokens [B, T]; no gradient flows into it."""
    positions, mask = layout(tokens, documents).positions, window_mask(documents)
    out = target.model.apply(target.params, tokens, positions, mask, None, feature_layers=layers)
    return Reading(*jax.lax.stop_gradient((out.logits, out.features)))


def ids(params: PyTree) -> Array | None:
    """Target ids of the columns of a reduced vocabulary; None: column i is token i."""
    return params.get("ids")


def laws(
    config: HeadConfig, params: PyTree, weights: PyTree, tokens: Array, features: Array, *, depth: int | None = None,
    anchors: Any = None, documents: Array | None = None,
) -> tuple[Said, ...]:  # fmt: skip
    """The head's logits, one entry per depth.

    Args:
      config, params: the head, as its factory takes it (`specjax.drafters.eagle`, ..).
      weights: the target's params; embedding and projection are read from it where the head shares them. Gradients
        do not flow into it.
      tokens: [B, T] int32, texts from position 0.
      features: [B, T, F] of the same texts, see `read`.
      depth: draft tokens ahead, see `depth_of`.
      anchors: [A] int, places of the pending tokens of DFlash blocks, below T; None: every place from 1 on.
      documents: [B, T] int32, which text of its row a token belongs to, -1: padding; None: a row is one text.

    Raises:
      ValueError: no configuration of a head; a depth it does not have.
    """
    tokens = jnp.asarray(tokens)
    weights, lay = jax.lax.stop_gradient(weights), layout(tokens, documents)
    depth = depth_of(config, depth)
    if isinstance(config, MedusaConfig):
        return _medusa(config, params, _weight(weights, "head"), features, lay, depth)
    if isinstance(config, EagleConfig):
        own = {name: leaf for name, leaf in params.items() if name != "ids"}
        if "head" not in own:  # frozen: the target's rows
            own["head"] = _rows(_weight(weights, "head"), ids(params))
        own = {"weights": {"embedding": _weight(weights, "embedding"), **own}, "ids": ids(params)}
        return _recurrent(eagle_head(config), own, tokens, features, lay, depth)
    if isinstance(config, MTPConfig):
        own = {**{name: _weight(weights, name) for name in ("embedding", "head")}, **params}
        return _recurrent(mtp_head(config), own, tokens, features, lay, depth)
    anchors = np.arange(1, tokens.shape[1]) if anchors is None else anchors
    return _dflash(config, params, weights, tokens, features, anchors, lay, depth)


def depth_of(config: HeadConfig, depth: Any = None) -> int:
    """The draft tokens ahead that a head is trained on; None: all heads, modules or rows of a block, and 3 where one
    module is fed its own hidden states.

    Raises:
      ValueError: no configuration of a head; a depth it does not have.
    """
    if isinstance(config, MedusaConfig):
        limit = usual = config.num_heads
    elif isinstance(config, DFlashConfig):
        limit = usual = config.num_laws
    elif isinstance(config, MTPConfig) and config.num_modules > 1:
        limit = usual = config.num_modules
    elif isinstance(config, (EagleConfig, MTPConfig)):
        limit, usual = recurrent.ANY_DEPTH, 3
    else:
        raise ValueError(f"config={show(config)}: give the configuration of a head")
    depth = usual if depth is None else whole("depth", depth, 1)
    if depth > limit:
        raise ValueError(f"depth={depth}: this head drafts {limit} tokens ahead")
    return depth


def _weight(weights: PyTree, name: str) -> Array:
    """The target's embedding or projection; the projection may be the embedding."""
    return weights.get(name, weights["embedding"])


def _rows(weight: Array, ids: Array | None) -> Array:
    return weight if ids is None else weight[ids]


def about_one_text(lay: Layout, first: Array, rows: Array, least: int = 0) -> Array:
    """[B, P]: the token after row rows[p] is there, and of the text of place first[p], whose position in it is
    ``least`` or more."""
    batch, width = lay.positions.shape
    about, first = jnp.minimum(rows + 1, width - 1), jnp.minimum(first, width - 1)
    fits = (rows + 1 < width)[None] & (lay.positions[:, first] >= least)
    if lay.documents is None:
        return jnp.broadcast_to(fits, (batch, rows.shape[0]))
    return fits & (lay.documents[:, first] == lay.documents[:, about]) & (lay.documents[:, about] >= 0)


def _medusa(
    config: MedusaConfig, params: PyTree, shared: Array, features: Array, lay: Layout, depth: int
) -> tuple[Said, ...]:
    """Head d at hidden row r, which predicted token r + 1, is about token r + 2 + d: row r + 1 + d."""
    heads: Any = nnx.merge(medusa_graph(config), params).heads
    width, said = features.shape[1], []
    for d, head in enumerate(list(heads)[:depth]):
        rows = jnp.arange(1 + d, width, dtype=jnp.int32)
        said.append(Said(head(features[:, : width - 1 - d], shared), rows, about_one_text(lay, rows - 1 - d, rows)))
    return tuple(said)


def _recurrent(
    head: recurrent.Head, params: PyTree, tokens: Array, features: Array, lay: Layout, depth: int
) -> tuple[Said, ...]:
    """Pass d at token i stands for the node of depth d whose pending token is i - d; its slots are those of pass d."""
    batch, width = tokens.shape
    own = head.num_modules > 1
    passes = 1 if own else depth  # that share a cache
    begins = (lay.positions == 0)[..., None]
    hidden = head.fuse(params, _behind(features, begins))
    cache = jax.tree.map(_real, head.init_cache(params, batch, passes * width))
    said = []
    for d in range(depth):
        module, start = (d, 0) if own else (0, d * width)
        visible = _module_reach(lay, d) if own else _pass_reach(lay, d, passes)
        slots = Reach(visible, None, jnp.int32(1))
        cache = cache._replace(lengths=jnp.full(batch, start, jnp.int32))
        out, cache = head.step(params, module, tokens, hidden, lay.positions, slots, cache)
        rows = jnp.arange(d + 1, width, dtype=jnp.int32)  # a pending token has a token before it
        said.append(Said(head.logits(params, module, out[:, d + 1 :]), rows, about_one_text(lay, rows, rows, d + 1)))
        hidden = _behind(out, begins)
    return tuple(said)


def _real(x: Array) -> Array:
    """bfloat16 as itself, not as its bits, which have no gradient."""
    return x.astype(jnp.bfloat16) if x.dtype == jnp.uint16 else x


def _behind(x: Array, begins: Array) -> Array:
    """Entry i is entry i - 1 of x [B, T, E]: what is known when token i is read. Nothing where a text begins."""
    return jnp.where(begins, 0.0, jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0))))


def _module_reach(lay: Layout, module: int) -> Array:
    """[B, T, T]: earlier tokens, without the first ones, as `recurrent` hides them."""
    width = lay.positions.shape[1]
    place = jnp.arange(width)
    seen = (place[:, None] >= place[None])[None] & (lay.positions > module)[:, None]
    return seen & lay.together(place, place)


def _pass_reach(lay: Layout, d: int, passes: int) -> Array:
    """[B, T, passes * T]: token i of pass d sees tokens 1 .. i - d of pass 0, and token i - d + c of each pass c up to
    its own: its ancestors and itself."""
    batch, width = lay.positions.shape
    place = jnp.arange(width)
    token, c, slot = np.arange(width)[:, None, None], np.arange(passes)[None, :, None], np.arange(width)[None, None]
    seen = np.where(c == 0, slot <= token - d, (c <= d) & (slot == token - d + c))
    same = jnp.broadcast_to((lay.positions >= 1)[:, None] & lay.together(place, place), (batch, width, width))
    return (jnp.asarray(seen)[None] & same[:, :, None]).reshape(batch, width, passes * width)


def _dflash(
    config: DFlashConfig, params: PyTree, weights: PyTree, tokens: Array, features: Array, anchors: Any, lay: Layout,
    depth: int,
) -> tuple[Said, ...]:  # fmt: skip
    """All blocks of a text in one window behind its context: a block sees the features before its anchor and itself."""
    net, sizes, (batch, width), block = DFlash(config, params), config.layers, tokens.shape, config.block_size
    anchors = jnp.asarray(anchors, jnp.int32)
    count = anchors.shape[0]
    cache = jax.tree.map(_real, net.init_cache(batch, width + (count - 1) * block))
    cache = net.observe(features, lay.positions, cache, jnp.full(batch, width, jnp.int32))

    inside = jnp.arange(block, dtype=jnp.int32)[None, None]
    positions = (lay.positions[:, anchors][:, :, None] + inside).reshape(batch, -1)
    first = inside == 0
    block_tokens = jnp.where(first, tokens[:, anchors][:, :, None], config.mask_token_id).reshape(batch, -1)
    slots = Reach(_block_reach(lay, anchors, block), None, jnp.int32(1))

    x = _through(net, lookup(weights["embedding"], block_tokens), Window(sizes, angles(sizes, positions), slots), cache)
    hidden = x.reshape(batch, count, block, -1)
    lead = 0 if config.sample_from_anchor else 1
    head = None if config.draft_vocab_size else _weight(weights, "head")
    said = []
    for d in range(depth):
        row, above = hidden[:, :, lead + d], tokens[:, jnp.minimum(anchors + d, width - 1)]
        laws = net.laws(row, head, -np.inf)
        logits = laws.logits
        if laws.markov is not None:
            logits = logits + _latent(laws.markov.above, above, laws.markov.out)
        valid = about_one_text(lay, anchors, anchors + d, 1)
        said.append(Said(logits, anchors + d, valid, _odds(net, row, head, above) if config.confidence else None))
    return tuple(said)


def _block_reach(lay: Layout, anchors: Array, block: int) -> Array:
    """[B, A * block, T + A * block]: the features before a block's anchor, of its own text, and the block itself."""
    (batch, width), count = lay.positions.shape, anchors.shape[0]
    place = jnp.arange(width, dtype=jnp.int32)
    before = (place[None] < anchors[:, None])[None] & lay.together(anchors, place)
    before = jnp.repeat(jnp.broadcast_to(before, (batch, count, width)), block, axis=1)
    of = np.repeat(np.arange(count), block)
    itself = jnp.broadcast_to(jnp.asarray(of[:, None] == of[None])[None], (batch, count * block, count * block))
    return jnp.concatenate([before, itself], axis=2)


def _latent(above: Array, tokens: Array, out: Array) -> Array:
    """What the Markov term adds after tokens [B, P]: above [V, R] at them, times out [M, R] or [R]."""
    latent = jnp.take(above, tokens, axis=0, mode="clip").astype(out.dtype)
    subscripts = "bpr,mr->bpm" if out.ndim == 2 else "bpr,r->bp"
    return jnp.einsum(subscripts, latent, out, preferred_element_type=jnp.float32, precision="highest")


def _odds(net: Any, row: Array, head: Array | None, above: Array) -> Array:
    """Log-odds [B, P] of the confidence head. It learns to judge what is said, and does not change it: no gradient
    flows from it into the block model."""
    laws = net.laws(jax.lax.stop_gradient(row), head, 0.0)
    assert laws.confidence is not None
    odds = laws.confidence.odds
    if laws.confidence.weight is not None and laws.markov is not None:
        odds = odds + _latent(jax.lax.stop_gradient(laws.markov.above), above, laws.confidence.weight)
    return odds


def _through(net: Any, x: Array, window: Window, cache: KVCache) -> Array:
    for layer, k, v in zip(net.layers, cache.k, cache.v, strict=True):
        x, _, _ = layer(x, k, v, cache.lengths, window)
    return rms_norm(x, net.norm, window.config.rms_eps)
