"""EAGLE: a small decoder that goes on from the target's hidden states.

EAGLE-1: Li et al., EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty, arXiv 2401.15077 (2024). `fc`
joins [embedding of token t + 1, hidden state of t]; the first layer has no input norm; the target's own head reads the
result, which predicts the target's next hidden state (the one its head reads: ``feature_layers=(L + 1,)``).
EAGLE-2: Li et al., arXiv 2406.16858 (2024): the same head under ``tree=specjax.tree.Dynamic(..)``.
EAGLE-3: Li et al., arXiv 2503.01840 (2025): `fc` fuses the hidden states of several layers once; the first layer's
attention reads [norm(embedding), norm(hidden)]; its own norm and head, usually over the most frequent tokens only.

Variants of EAGLE-3, as the speculators library has them:
    norm_before_residual    the first layer's residual is the normed hidden state, not the raw one
    norm_before_fc          one RMS norm over the concatenated target states before `fc`
    fc_norm                 one RMS norm per target state before `fc`
    norm_output             the head's hidden state is fed back after the final norm, not before

Weights (matrices [out, in]; F target states of Et each, E the head's own size, M draft tokens; names in files are those
of the speculators library):

    ours                  shape              file
    embedding             [V, E]             embed_tokens.weight             the target's if absent
    fc                    [E, F Et]          fc.weight                       EAGLE-1: [E, 2 E]
    fc_bias               [E]                fc.bias                         EAGLE-1, fc_bias
    input_norm            [F Et]             input_norm.weight               norm_before_fc
    fc_norm/j             [Et]               fc_norm.j.weight                fc_norm
    layers/i/..           see llama_params   layers.i...                     EAGLE-3: layers/0/qkv is [.., 2 E]
    layers/0/hidden_norm  [E]                layers.0.hidden_norm.weight     EAGLE-3
    norm                  [E]                norm.weight                     EAGLE-3
    head                  [M, E]             lm_head.weight                  the target's rows if absent
    ids                   [M] int32          d2t (as offsets)                a reduced vocabulary: target ids, ascending
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as kv
from specjax.drafters import fit, parallel, recurrent
from specjax.models import llama_params
from specjax.models.attention import Reach
from specjax.models.config import LlamaConfig
from specjax.models.language_model import LanguageModel, checked
from specjax.models.llama import Layer, Window, linear, lookup, rms_norm
from specjax.models.llama_params import Source
from specjax.models.rope import angles
from specjax.static import bind, show, whole
from specjax.types import Array, Drafter, KVCache, PyTree

VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """Sizes and variants of a head.

    Raises:
      ValueError: layer ids that are no whole numbers, or none; a variant of the other version; a draft vocabulary
        larger than the target's.
    """

    layers: LlamaConfig  # of the head's decoder layers; vocab_size is the target's
    feature_layers: tuple[int, ...]  # streams of the target: k is the stream after k layers, L + 1 what its head reads
    version: int = 3  # 1 (also EAGLE-2) or 3
    draft_vocab_size: int = 0  # M; 0: the target's vocabulary
    target_hidden_size: int = 0  # Et; 0: that of the head
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False

    def __post_init__(self):
        layers = tuple(whole("feature_layers", layer, 0) for layer in self.feature_layers)
        object.__setattr__(self, "feature_layers", layers)
        if not isinstance(self.layers, LlamaConfig):
            raise ValueError(f"layers={show(self.layers)}: give a LlamaConfig of the head's decoder layers")
        fit.check_layers(self.layers)
        if self.version not in (1, 3):
            raise ValueError(f"version={show(self.version)}: 1 (also for EAGLE-2) or 3")
        if not layers or (self.version == 1 and len(layers) != 1):
            need = "one layer, what the target's head reads" if self.version == 1 else "one layer or more"
            raise ValueError(f"feature_layers={show(layers)}: EAGLE-{self.version} reads {need}")
        for name in (*VARIANTS, "fc_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={show(getattr(self, name))}: must be True or False")
        wrong = [name for name in VARIANTS if getattr(self, name)] if self.version == 1 else []
        wrong += ["fc_bias"] if self.fc_bias and self.version == 3 else []
        wrong += ["draft_vocab_size"] if self.draft_vocab_size and self.version == 1 else []
        if wrong:
            raise ValueError(f"{wrong[0]}={getattr(self, wrong[0])}: EAGLE-{self.version} has no such variant")
        vocab = self.layers.vocab_size
        if not 0 <= whole("draft_vocab_size", self.draft_vocab_size, 0, "; 0 is the target's vocabulary") <= vocab:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size}, but the target has {vocab} tokens")
        size = whole("target_hidden_size", self.target_hidden_size, 0) or self.layers.hidden_size
        if self.version == 1 and size != self.layers.hidden_size:
            raise ValueError(f"target_hidden_size={size}: EAGLE-1 has the target's own, {self.layers.hidden_size}")
        object.__setattr__(self, "target_hidden_size", size)

    @property
    def num_columns(self) -> int:
        return self.draft_vocab_size or self.layers.vocab_size


def sources(config: EagleConfig) -> dict[str, Any]:
    """The weights of the module's docstring, `ids` apart, as a tree of `Source`."""
    e, v = config.layers.hidden_size, config.layers.vocab_size
    f = len(config.feature_layers) * config.target_hidden_size

    def source(name, *shape):
        return Source((name,), (shape,))

    first, third = {}, config.version == 3
    if third:
        first = {"hidden_norm": source("layers.0.hidden_norm.weight", e)}
    layers = {
        i: llama_params.layer_sources(config.layers, f"layers.{i}.", inputs=2 * e if third and i == 0 else None)
        for i in range(config.layers.num_layers)
    }
    layers[0] |= first
    tree: dict[str, Any] = {"embedding": source("embed_tokens.weight", v, e), "layers": layers}
    tree["fc"] = source("fc.weight", e, f if third else 2 * e)
    tree["head"] = source("lm_head.weight", config.num_columns, e)
    if third:
        tree["norm"] = source("norm.weight", e)
    else:
        del layers[0]["input_norm"]
    if config.fc_bias:
        tree["fc_bias"] = source("fc.bias", e)
    if config.norm_before_fc:
        tree["input_norm"] = source("input_norm.weight", f)
    if config.fc_norm:
        each = range(len(config.feature_layers))
        tree["fc_norm"] = {j: source(f"fc_norm.{j}.weight", config.target_hidden_size) for j in each}
    return tree


def abstract_params(config: EagleConfig, dtype=jnp.float32) -> PyTree:
    """Names, shapes and dtypes of the weights, those that may be the target's included."""
    params = llama_params.abstract(sources(config), dtype)
    if config.draft_vocab_size:
        params["ids"] = jax.ShapeDtypeStruct((config.draft_vocab_size,), jnp.int32)
    return params


class FirstLayer(Layer):
    """The first layer of EAGLE-3: attention reads [norm(embedding), norm(hidden)]."""

    def __init__(self, weights: dict[str, Array], norm_before_residual: bool):
        super().__init__(weights)
        self.hidden_norm = nnx.Param(weights["hidden_norm"])
        self.norm_before_residual = norm_before_residual

    def first(self, embedded: Array, hidden: Array, k: Any, v: Any, lengths: Array, window: Window):
        """embedded, hidden [B, W, E] and this layer's cache -> ([B, W, E], k, v)."""
        eps, token_norm = window.config.rms_eps, self.input_norm
        assert token_norm is not None
        normed = rms_norm(hidden, self.hidden_norm, eps)
        y = jnp.concatenate([rms_norm(embedded, token_norm, eps), normed], axis=-1)
        y, k, v = self.attention(y, k, v, lengths, window)
        x = (normed if self.norm_before_residual else hidden) + y
        return x + self.mlp(rms_norm(x, self.post_norm, eps)), k, v


class Eagle(nnx.Module):
    """The head as a module that holds only weights, `ids` apart. Made with random ones (standard deviation 0.02)."""

    def __init__(self, config: EagleConfig, *, dtype=jnp.float32, rngs: nnx.Rngs | None = None):
        rngs = nnx.Rngs(0) if rngs is None else rngs

        def fresh(path, shape):
            name = [key.key for key in path if isinstance(key.key, str)][-1]
            if name.endswith(("norm", "bias")):
                return jnp.full(shape.shape, float(name.endswith("norm")), dtype)
            return (0.02 * jax.random.normal(rngs.params(), shape.shape)).astype(dtype)

        shapes = llama_params.abstract(sources(config), dtype)
        weights = jax.tree_util.tree_map_with_path(fresh, shapes)

        def maybe(name):
            return nnx.Param(weights[name]) if name in weights else None

        self.config = config
        self.embedding, self.head = nnx.Param(weights["embedding"]), nnx.Param(weights["head"])
        self.norm = maybe("norm")
        self.fc, self.fc_bias, self.input_norm = nnx.Param(weights["fc"]), maybe("fc_bias"), maybe("input_norm")
        norms = weights.get("fc_norm", {})
        self.fc_norm = nnx.List([nnx.Param(norms[j]) for j in range(len(norms))]) if norms else None
        layers = [Layer(weights["layers"][i]) for i in range(1, config.layers.num_layers)]
        first = weights["layers"][0]
        self.layers = nnx.List(
            [Layer(first) if config.version == 1 else FirstLayer(first, config.norm_before_residual), *layers]
        )

    def fuse(self, features: Array) -> Array:
        """The target's hidden states [B, W, F Et] -> what is fed beside the embedding, [B, W, E]."""
        if self.config.version == 1:
            return features
        eps = self.config.layers.rms_eps
        if self.input_norm is not None:
            features = rms_norm(features, self.input_norm, eps)
        if self.fc_norm is not None:
            norms: Any = self.fc_norm
            parts = jnp.split(features, len(norms), axis=-1)
            features = jnp.concatenate([rms_norm(x, norm, eps) for x, norm in zip(parts, norms, strict=True)], axis=-1)
        return linear(features, self.fc)

    def __call__(
        self, tokens: Array, hidden: Array, positions: Array, slots: Reach, cache: KVCache
    ) -> tuple[Array, KVCache]:
        """Tokens [B, W] beside hidden [B, W, E], that of the target (fused) or of this head one token before ->
        hidden [B, W, E]; the window is written behind ``cache.lengths``."""
        config, layers = self.config.layers, list(self.layers)
        window = Window(config, angles(config, positions), slots)
        x, ks, vs = lookup(self.embedding, tokens), [], []
        for index, layer in enumerate(layers):
            old = cache.k[index], cache.v[index], cache.lengths, window
            if index == 0 and isinstance(layer, FirstLayer):
                x, k, v = layer.first(x, hidden, *old)
            elif index == 0:
                x, k, v = layer(linear(jnp.concatenate([x, hidden], axis=-1), self.fc, self.fc_bias), *old)
            else:
                x, k, v = layer(x, *old)
            ks.append(k)
            vs.append(v)
        if self.config.norm_output and self.norm is not None:
            x = rms_norm(x, self.norm, config.rms_eps)
        return x, KVCache(tuple(ks), tuple(vs), cache.lengths)

    def logits(self, hidden: Array) -> Array:
        """What the head says after hidden [B, W, E], its own: [B, W, M]."""
        if self.norm is not None and not self.config.norm_output:
            hidden = rms_norm(hidden, self.norm, self.config.layers.rms_eps)
        return linear(hidden, self.head)


def fresh_params(config: EagleConfig, *, rngs: nnx.Rngs | None = None, dtype=jnp.float32) -> PyTree:
    """Random weights, without those that are the target's by default (the embedding; EAGLE-1: the head) and without
    ``ids``, which only the user knows."""
    params = nnx.to_pure_dict(nnx.state(Eagle(config, dtype=dtype, rngs=rngs)))
    shared = ("embedding", "head") if config.version == 1 else ("embedding",)
    return {name: weight for name, weight in params.items() if name not in shared}


def eagle(
    config: EagleConfig, params: PyTree, target: LanguageModel, *, num_draft_tokens: int | None = None,
    tree: Any = None, coupled: bool = False, max_length: int | None = None,
) -> Drafter:  # fmt: skip
    """Drafts with an EAGLE head.

    Args:
      config, params: the head, see the module's docstring; `load_drafter` reads one, `fresh_params` makes one.
      target: the model it reads. Its embedding and head are referenced where params has none; of the head, the rows
        of a reduced vocabulary are copied.
      num_draft_tokens: chain length, default 4. A tree has its own number of nodes.
      tree: None draws a chain from the head's laws, each warped like the target's (rule "rejection"). Static parents
        take the top tokens after each node as its children, by rank. `specjax.tree.Dynamic` is EAGLE-2.
      coupled: draw the chain with the target's own noise (rule "match").
      max_length: longest text (prompt and output) that will be asked for; default the target's context.

    Raises:
      ValueError: a head made for another target: hidden size, vocabulary, layer ids, draft ids, context (names both
        facts); weights that are not the configuration's; a tree with more nodes or children than there can be.
    """
    target = checked("target", target)
    if not isinstance(config, EagleConfig):
        raise ValueError(f"config={show(config)}: give an EagleConfig")
    what, sizes = f"the EAGLE-{config.version} head", config.layers
    fit.check_target(
        what, target, vocab_size=sizes.vocab_size, hidden_size=config.target_hidden_size,
        feature_layers=config.feature_layers,
    )  # fmt: skip
    params = parallel.named("EAGLE", params)
    if "embedding" not in params:
        params["embedding"] = fit.target_weight(what, target, "embedding")
    rows = None  # of the target's head, to be copied
    if "head" not in params:
        params["head"] = fit.target_weight(what, target, "head")
        if config.draft_vocab_size:
            rows = params["head"]
            params["head"] = jax.ShapeDtypeStruct((config.draft_vocab_size, rows.shape[1]), rows.dtype)
    parallel.check_params("EAGLE", params, abstract_params(config))
    ids = params.pop("ids", None)
    if ids is not None:
        fit.check_ids(what, ids, config.draft_vocab_size, sizes.vocab_size)
        ids = jnp.asarray(ids, jnp.int32)
    if rows is not None:
        params["head"] = rows[ids]
    fit.check_context(what, sizes.max_position_embeddings, target, max_length)
    return recurrent.drafter(
        head_of(config), {"weights": params, "ids": ids}, feature_layers=config.feature_layers,
        num_draft_tokens=num_draft_tokens, tree=tree, coupled=coupled, context_length=sizes.max_position_embeddings,
    )  # fmt: skip


def head_of(config: EagleConfig) -> recurrent.Head:
    """The pure functions of a configuration; their params are ``{"weights": .., "ids": [M] or None}``."""
    return recurrent.Head(
        init_cache=bind(_init_cache, config), fuse=bind(_fuse, config), step=bind(_step, config),
        logits=bind(_logits, config), ids=_ids, hidden_size=config.layers.hidden_size,
        num_columns=config.num_columns, vocab_size=config.layers.vocab_size,
    )  # fmt: skip


@functools.cache
def _graph(config: EagleConfig) -> Any:
    return nnx.split(nnx.eval_shape(lambda: Eagle(config)))[0]


def _init_cache(config: EagleConfig, params: PyTree, batch: int, capacity: int) -> KVCache:
    return kv.init(
        num_layers=config.layers.num_layers, batch=batch, capacity=capacity, num_kv_heads=config.layers.num_kv_heads,
        head_dim=config.layers.head_dim,
        dtype=jnp.uint16 if params["weights"]["layers"][0]["qkv"].dtype == jnp.bfloat16 else jnp.float32,
    )  # fmt: skip


def _module(config: EagleConfig, params: PyTree) -> Any:
    return nnx.merge(_graph(config), params["weights"])


def _fuse(config: EagleConfig, params: PyTree, features: Array) -> Array:
    return _module(config, params).fuse(features)


def _step(config: EagleConfig, params: PyTree, module: int, tokens, hidden, positions, slots, cache):
    return _module(config, params)(tokens, hidden, positions, slots, cache)


def _logits(config: EagleConfig, params: PyTree, module: int, hidden: Array) -> Array:
    return _module(config, params).logits(hidden)


def _ids(params: PyTree) -> Array | None:
    return params["ids"]
