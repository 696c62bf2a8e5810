"""DFlash: one pass of a small bidirectional model fills a whole block of draft tokens.

Chen et al., DFlash: Block Diffusion for Flash Speculative Decoding, arXiv 2602.06036 (2026). The Markov term and the
confidence head are those of Cheng et al., DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive
Generation, arXiv 2607.05147 (2026), in the first-order form.

A block is [pending token, mask, mask, ..], at the positions of the tokens it stands for; every entry sees every other.
The target's features (streams of several layers, concatenated; `fc`, then `hidden_norm`) enter as extra keys and values
of every draft layer, one per position before the pending token. These are the draft cache: written in ``observe`` from
what the target really saw, never from a guess, so a rejected block leaves nothing behind; the block's own keys and
values go to scratch slots. The feature of the pending token is not known yet: the pending token itself is in the block.
Embedding and head are the target's, by reference; a reduced vocabulary has a head of its own.

Weights, matrices [out, in] (`specjax.drafters.dflash_files` for the published layout): fc [E, F E], hidden_norm [E],
layers/i as in `specjax.models.llama_params`, norm [E]; for a reduced vocabulary of M tokens head [M, E] and ids [M],
the target's ids in ascending order; above [V, R] and out [M, R] of the Markov term; confidence [E or E + R] and
confidence_bias [] of the confidence head.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import cache as kv
from specjax.drafters import fit, parallel
from specjax.models import llama_params
from specjax.models.attention import reach
from specjax.models.config import LlamaConfig
from specjax.models.language_model import LanguageModel, checked
from specjax.models.llama import Layer, Window, linear, lookup, rms_norm
from specjax.models.rope import angles
from specjax.static import bind, show, whole
from specjax.types import Array, Committed, Drafter, KVCache, Proposal, PyTree, Sampling, Text


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """Sizes of a block drafter.

    Raises:
      ValueError: a size that is no whole number, layer ids that are none, a confidence head that asks for a Markov term
        there is not.
    """

    layers: LlamaConfig  # of the draft layers; hidden_size and vocab_size are the target's
    feature_layers: tuple[int, ...]  # streams of the target: k is the stream after k layers
    mask_token_id: int
    block_size: int = 8
    sample_from_anchor: bool = False  # row j is about the token j + 1 after the pending one, not j (row 0: nothing)
    draft_vocab_size: int = 0  # M; 0: the target's vocabulary, and its head
    markov_rank: int = 0  # R; 0: no Markov term
    confidence: bool = False
    confidence_with_markov: bool = False

    def __post_init__(self):
        if not isinstance(self.layers, LlamaConfig):
            raise ValueError(f"layers={show(self.layers)}: give a LlamaConfig of the draft layers")
        fit.check_layers(self.layers)
        object.__setattr__(self, "feature_layers", tuple(self.feature_layers))
        if not self.feature_layers:
            raise ValueError("feature_layers=(): name at least one stream of the target")
        for layer in self.feature_layers:
            whole("feature_layers", layer, 0)
        whole("block_size", self.block_size, 1 if self.sample_from_anchor else 2)
        for name in ("mask_token_id", "draft_vocab_size", "markov_rank"):
            whole(name, getattr(self, name), 0)
        if self.mask_token_id >= self.layers.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id}: the vocabulary has {self.layers.vocab_size} tokens, and the mask "
                "is embedded like any other"
            )
        if self.draft_vocab_size > self.layers.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size}, but the target has {self.layers.vocab_size} tokens"
            )
        if self.confidence_with_markov and not (self.confidence and self.markov_rank):
            raise ValueError("confidence_with_markov=True needs confidence=True and markov_rank of 1 or more")

    @property
    def num_laws(self) -> int:
        """Draft tokens a block has laws for."""
        return self.block_size - (0 if self.sample_from_anchor else 1)

    @property
    def num_columns(self) -> int:
        """Tokens it can draft."""
        return self.draft_vocab_size or self.layers.vocab_size


def shapes(config: DFlashConfig) -> dict[str, Any]:
    """The weights as a nested dict of shapes."""
    size, columns, rank = config.layers.hidden_size, config.num_columns, config.markov_rank
    tree: dict[str, Any] = {
        "fc": (size, len(config.feature_layers) * size), "hidden_norm": (size,), "norm": (size,),
        "layers": jax.tree.map(lambda leaf: leaf.shape, llama_params.abstract_params(config.layers)["layers"]),
    }  # fmt: skip
    if config.draft_vocab_size:
        tree |= {"head": (columns, size), "ids": (columns,)}
    if rank:
        tree |= {"above": (config.layers.vocab_size, rank), "out": (columns, rank)}
    if config.confidence:
        tree |= {"confidence": (size + (rank if config.confidence_with_markov else 0),), "confidence_bias": ()}
    return tree


def abstract_params(config: DFlashConfig, dtype=jnp.float32) -> PyTree:
    """Names, shapes and dtypes of the weights."""

    def leaf(path, shape):
        kind = jnp.int32 if path[-1].key == "ids" else dtype
        return jax.ShapeDtypeStruct(shape, kind)

    return jax.tree_util.tree_map_with_path(leaf, shapes(config), is_leaf=lambda x: isinstance(x, tuple))


def fresh_params(config: DFlashConfig, *, ids: Any = None, rngs: nnx.Rngs | None = None, dtype=jnp.float32) -> PyTree:
    """Random weights to start from. ``ids [M]``, ascending: the reduced vocabulary; default the first M tokens."""
    rngs = nnx.Rngs(0) if rngs is None else rngs

    def leaf(path, weight):
        name = path[-1].key
        if name == "ids":
            return jnp.asarray(np.arange(weight.shape[0]) if ids is None else np.asarray(ids), jnp.int32)
        if name.endswith(("norm", "bias")):
            return jnp.full(weight.shape, name.endswith("norm"), weight.dtype)
        fan_in = weight.shape[-1] if name != "above" else config.layers.hidden_size
        return (fan_in**-0.5 * jax.random.normal(rngs.params(), weight.shape)).astype(weight.dtype)

    return jax.tree_util.tree_map_with_path(leaf, abstract_params(config, dtype))


class Block(NamedTuple):
    """What one pass says about a block of T rows."""

    hidden: Array  # [B, T, E] normed, what the head reads
    cache: KVCache  # the block in scratch slots, ``lengths`` unchanged


class DFlash(nnx.Module):
    """The block model: weights only, as a nested dict of the `shapes` of its configuration."""

    def __init__(self, config: DFlashConfig, params: PyTree | None = None, *, rngs: nnx.Rngs | None = None):
        weights = fresh_params(config, rngs=rngs) if params is None else params
        self.config = config

        def maybe(name, kind: Any = nnx.Param):
            return kind(weights[name]) if name in weights else None

        self.fc, self.hidden_norm = nnx.Param(weights["fc"]), nnx.Param(weights["hidden_norm"])
        self.layers = nnx.List([Layer(weights["layers"][index]) for index in range(config.layers.num_layers)])
        self.norm, self.head = nnx.Param(weights["norm"]), maybe("head")
        self.ids = maybe("ids", nnx.Variable)  # not trained
        self.above, self.out = maybe("above"), maybe("out")
        self.confidence, self.confidence_bias = maybe("confidence"), maybe("confidence_bias")

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for texts of ``capacity`` tokens, with a block's scratch slots behind them."""
        sizes = self.config.layers
        return kv.init(
            num_layers=sizes.num_layers, batch=batch, capacity=capacity + self.config.block_size,
            num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim,
            dtype=jnp.uint16 if self.fc.dtype == jnp.bfloat16 else jnp.float32,
        )  # fmt: skip

    def observe(self, features: Array, positions: Array, cache: KVCache, count: Array) -> KVCache:
        """Adds the first ``count [B]`` of features [B, T, F E], at positions [B, T], to the context."""
        eps = self.config.layers.rms_eps
        context = rms_norm(linear(features, self.fc), self.hidden_norm, eps)
        window = self._window(positions, cache)
        layers: Any = self.layers
        keys, values = [], []
        for layer, k, v in zip(layers, cache.k, cache.v, strict=True):
            _, k_new, v_new = layer.heads(context, window)  # no norm of the layer before it: the context is normed
            keys.append(kv.write(k, k_new, cache.lengths))
            values.append(kv.write(v, v_new, cache.lengths))
        return KVCache(tuple(keys), tuple(values), cache.lengths + count)

    def __call__(self, tokens: Array, positions: Array, cache: KVCache, embedding: Any) -> Block:
        """Reads blocks tokens [B, T] at positions [B, T] behind the context; embedding [V, E]."""
        x, window = lookup(embedding, tokens), self._window(positions, cache)
        layers: Any = self.layers
        keys, values = [], []
        for layer, k, v in zip(layers, cache.k, cache.v, strict=True):
            x, k, v = layer(x, k, v, cache.lengths, window)
            keys.append(k)
            values.append(v)
        return Block(
            rms_norm(x, self.norm, self.config.layers.rms_eps), KVCache(tuple(keys), tuple(values), cache.lengths)
        )

    def _window(self, positions: Array, cache: KVCache) -> Window:
        width, sizes = positions.shape[1], self.config.layers
        slots = reach(jnp.ones((width, width), bool), cache.lengths, width, cache.k[0].shape[-2])
        return Window(sizes, angles(sizes, positions), slots)

    def laws(self, hidden: Array, head: Any, least: float) -> parallel.Laws:
        """What rows hidden [B, D, E] say about the tokens they stand for; head [V, E] unless there is one here."""
        logits = linear(hidden, head if self.head is None else self.head)
        markov = confidence = None
        if self.above is not None and self.out is not None:
            markov = parallel.Markov(self.above[...], self.out[...])
        if self.confidence is not None and self.confidence_bias is not None and least > -np.inf:
            weight = self.confidence[...].astype(jnp.float32)
            size = self.config.layers.hidden_size
            odds = jnp.einsum("bde,e->bd", hidden, weight[:size], precision="highest")
            odds = odds + self.confidence_bias[...].astype(jnp.float32)[None, None]
            tail = weight[size:] if self.config.confidence_with_markov else None
            confidence = parallel.Confidence(odds, tail, least)
        return parallel.Laws(logits, None if self.ids is None else self.ids[...], markov, confidence)


class _Params(NamedTuple):
    net: PyTree
    embedding: Array  # the target's
    head: Array | None  # the target's, unless the vocabulary is reduced


def dflash(
    config: DFlashConfig, params: PyTree, target: LanguageModel, num_draft_tokens: int | None = None, *,
    tree: Any = None, coupled: bool = False, min_confidence: float = 0.0,
) -> Drafter:  # fmt: skip
    """Drafts a block in one pass.

    Args:
      config, params: the block model, see the module's docstring; `fresh_params` makes some.
      target: the model it was made for; embedding and head are referenced.
      num_draft_tokens: chain length, default what a block holds. The whole block is filled in any case. A tree has its
        own number of nodes.
      tree: None draws a chain from the laws of the block's rows, each warped like the target's, with the Markov term if
        there is one (rule "rejection"). Static parents take each row's top tokens as children by rank;
        `specjax.tree.Dynamic` chooses the likeliest paths in each round.
      coupled: draw the chain with the target's own noise (rule "match").
      min_confidence: ends a path where the confidence head gives less; it looks at the context and the token above,
        never at the token it decides about. 0 is off.

    Raises:
      ValueError: a drafter made for another target (names both facts), weights that are not the configuration's, ids
        that are not ascending ids of the target, a tree deeper than a block, min_confidence without a confidence head.
    """
    target = checked("target", target)
    if not isinstance(config, DFlashConfig):
        raise ValueError(f"config={show(config)}: give a DFlashConfig")
    _check(config, params, target, min_confidence)
    form = parallel.form(tree, num_draft_tokens, coupled, config.num_laws, config.num_columns, "rows to draft from")
    least = float(np.log(min_confidence) - np.log1p(-min_confidence)) if min_confidence > 0 else -np.inf
    head = None if config.draft_vocab_size else parallel.projection(target)
    return Drafter(
        params=_Params(params, target.params["embedding"], head),
        init=bind(_init, config),
        observe=bind(_observe, config),
        draft=bind(_draft, config, form, least),
        num_draft_tokens=form.num_nodes,
        feature_layers=config.feature_layers,
        default_rule=form.default_rule,
        context_length=config.layers.max_position_embeddings,
        vocab_size=config.layers.vocab_size,
    )


def _check(config: DFlashConfig, params: PyTree, target: LanguageModel, min_confidence: Any) -> None:
    hidden, layers = parallel.sizes(target)
    facts = {
        "hidden_size": (config.layers.hidden_size, hidden),
        "vocab_size": (config.layers.vocab_size, target.model.vocab_size),
    }
    parallel.check_fit("the DFlash drafter", facts)
    for layer in config.feature_layers:
        if layer > layers + 1:
            raise ValueError(
                f"the DFlash drafter reads the target's stream after layer {layer} and the target has {layers} layers: "
                "it was made for another target"
            )
    parallel.check_params("DFlash", params, abstract_params(config))
    if config.draft_vocab_size:
        ids = np.asarray(params["ids"])
        if ids.dtype.kind not in "iu" or ids[0] < 0 or ids[-1] >= config.layers.vocab_size or (np.diff(ids) <= 0).any():
            raise ValueError(
                f"DFlash weight ids={show(ids)}: must be ascending token ids of the target, below "
                f"{config.layers.vocab_size}; offsets (d2t) have to be added to 0, 1, 2, .."
            )
    if isinstance(min_confidence, bool) or not isinstance(min_confidence, (int, float)) or not 0 <= min_confidence < 1:
        raise ValueError(f"min_confidence={show(min_confidence)}: must be a number from 0 (off) to below 1")
    if min_confidence > 0 and not config.confidence:
        raise ValueError(f"min_confidence={min_confidence}: this drafter has no confidence head; leave it at 0")


@functools.cache
def _graph(config: DFlashConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: DFlash(config)))


def _module(config: DFlashConfig, params: PyTree) -> Any:
    graph, state = _graph(config)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def _init(config: DFlashConfig, params: _Params, batch: int, capacity: int) -> KVCache:
    return _module(config, params.net).init_cache(batch, capacity)


def _observe(config: DFlashConfig, params: _Params, state: KVCache, committed: Committed) -> KVCache:
    """The feature that predicted token i is that of the position before it; the text's first token has none."""
    first = (committed.start == 0).astype(jnp.int32)
    slots = jnp.arange(committed.tokens.shape[1], dtype=jnp.int32)[None]
    inside = jnp.minimum(slots + first[:, None], committed.tokens.shape[1] - 1)
    features = jnp.take_along_axis(committed.features.astype(jnp.float32), inside[:, :, None], axis=1)
    count = jnp.maximum(committed.count - first, 0)
    return _module(config, params.net).observe(features, state.lengths[:, None] + slots, state, count)


def _draft(
    config: DFlashConfig, form: parallel.Form, least: float, params: _Params, keys: Array, state: KVCache, text: Text,
    sampling: Sampling, n: int,
) -> tuple[Proposal, KVCache]:  # fmt: skip
    net, first = _module(config, params.net), 0 if config.sample_from_anchor else 1
    pending = parallel.pending_token(text)
    slots = jnp.arange(config.block_size, dtype=jnp.int32)[None]
    tokens = jnp.where(slots == 0, pending[:, None], config.mask_token_id)
    block = net(tokens, text.lengths[:, None] - 1 + slots, state, params.embedding)
    hidden = block.hidden[:, first : first + min(form.depth, n)]
    laws = net.laws(hidden, params.head, least)
    return parallel.propose(form, laws, keys, text, sampling, config.layers.vocab_size, n), block.cache
