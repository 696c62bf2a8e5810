"""Multi-token prediction: modules that were trained with the target to say what comes after its next token.

DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv 2412.19437 (2024); one module applied again and again: Cai et al.,
FastMTP: Accelerating LLM Inference with Enhanced Multi-Token Prediction, arXiv 2509.18362 (2025).

A module joins [norm(embedding of token t + 1), norm(hidden state of t)] (the published code's order; the report writes
the halves the other way round), projects them to the hidden size and runs one decoder layer. Its own final norm and the
target's head say token t + 2. Its hidden state goes on to the next step: of the same module (``num_modules=1``), or of
the next one, which drafts one token further (`specjax.drafters.recurrent`).

    hidden state of the target    ``feature_layers``: (L + 1,), after the final norm, is what serving engines feed
    what is fed back              the layer's output (DeepSeek-V3), or that after the module's final norm (norm_output)

Weights, matrices [out, in]; names in files are those of the speculators library:

    ours                     shape      file
    embedding                [V, E]     embed_tokens.weight                      the target's if absent
    head                     [V, E]     lm_head.weight                           the target's if absent
    modules/i/token_norm     [E]        mtp_layers.i.token_layernorm.weight
    modules/i/hidden_norm    [E]        mtp_layers.i.hidden_layernorm.weight
    modules/i/projection     [E, 2 E]   mtp_layers.i.input_proj.weight
    modules/i/layer/..                  mtp_layers.i...., see llama_params
    modules/i/norm           [E]        mtp_layers.i.final_layernorm.weight
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


@dataclasses.dataclass(frozen=True)
class MTPConfig:
    """Sizes of the modules.

    Raises:
      ValueError: a number that is no whole one, more than one target layer, more than one decoder layer in a module.
    """

    layers: LlamaConfig  # of each module's decoder layer (num_layers=1); hidden_size and vocab_size are the target's
    feature_layers: tuple[int, ...]  # (k,): the target's stream after k layers, L + 1 what its head reads
    num_modules: int = 1  # 1: applied again and again; D: module d drafts token d + 1, at most D in all
    norm_output: bool = False  # what is fed back has passed the final norm

    def __post_init__(self):
        layers = tuple(whole("feature_layers", layer, 0) for layer in self.feature_layers)
        object.__setattr__(self, "feature_layers", layers)
        if not isinstance(self.layers, LlamaConfig) or self.layers.num_layers != 1:
            raise ValueError(f"layers={show(self.layers)}: give a LlamaConfig of one decoder layer (num_layers=1)")
        fit.check_layers(self.layers)
        if len(layers) != 1:
            raise ValueError(f"feature_layers={show(layers)}: a module reads one layer of the target")
        whole("num_modules", self.num_modules, 1)
        if not isinstance(self.norm_output, bool):
            raise ValueError(f"norm_output={show(self.norm_output)}: must be True or False")


def sources(config: MTPConfig) -> dict[str, Any]:
    """The weights of the module's docstring as a tree of `llama_params.Source`."""
    e, v = config.layers.hidden_size, config.layers.vocab_size

    def module(index: int) -> dict[str, Any]:
        prefix = f"mtp_layers.{index}."

        def source(name, *shape):
            return Source((f"{prefix}{name}.weight",), (shape,))

        return {
            "token_norm": source("token_layernorm", e), "hidden_norm": source("hidden_layernorm", e),
            "projection": source("input_proj", e, 2 * e), "norm": source("final_layernorm", e),
            "layer": llama_params.layer_sources(config.layers, prefix),
        }  # fmt: skip

    return {
        "embedding": Source(("embed_tokens.weight",), ((v, e),)), "head": Source(("lm_head.weight",), ((v, e),)),
        "modules": {index: module(index) for index in range(config.num_modules)},
    }  # fmt: skip


def abstract_params(config: MTPConfig, dtype=jnp.float32) -> PyTree:
    """Names, shapes and dtypes of the weights, those that may be the target's included."""
    return llama_params.abstract(sources(config), dtype)


class MTPModule(nnx.Module):
    """One module: weights only."""

    def __init__(self, weights: dict[str, Any]):
        self.token_norm, self.hidden_norm = nnx.Param(weights["token_norm"]), nnx.Param(weights["hidden_norm"])
        self.projection, self.norm = nnx.Param(weights["projection"]), nnx.Param(weights["norm"])
        self.layer = Layer(weights["layer"])


class MTP(nnx.Module):
    """All modules, with the embedding and head they share. Made with random weights (standard deviation 0.02)."""

    def __init__(self, config: MTPConfig, *, dtype=jnp.float32, rngs: nnx.Rngs | None = None):
        rngs = nnx.Rngs(0) if rngs is None else rngs

        def fresh(path, shape):
            if path[-1].key.endswith(("norm", "bias")):
                return jnp.full(shape.shape, float(path[-1].key.endswith("norm")), dtype)
            return (0.02 * jax.random.normal(rngs.params(), shape.shape)).astype(dtype)

        weights = jax.tree_util.tree_map_with_path(fresh, abstract_params(config, dtype))
        self.config = config
        self.embedding, self.head = nnx.Param(weights["embedding"]), nnx.Param(weights["head"])
        self.modules = nnx.List([MTPModule(weights["modules"][i]) for i in range(config.num_modules)])

    def __call__(
        self, module: int, tokens: Array, hidden: Array, positions: Array, slots: Reach, cache: KVCache
    ) -> tuple[Array, KVCache]:
        """Tokens [B, W] beside hidden [B, W, E], of the target or of the module before, one token back -> hidden
        [B, W, E]; the window is written behind ``cache.lengths``."""
        config, modules = self.config.layers, list(self.modules)
        net: Any = modules[module]
        embedded = rms_norm(lookup(self.embedding, tokens), net.token_norm, config.rms_eps)
        hidden = rms_norm(hidden, net.hidden_norm, config.rms_eps)
        x = linear(jnp.concatenate([embedded, hidden], axis=-1), net.projection)
        window = Window(config, angles(config, positions), slots)
        x, k, v = net.layer(x, cache.k[0], cache.v[0], cache.lengths, window)
        if self.config.norm_output:
            x = rms_norm(x, net.norm, config.rms_eps)
        return x, KVCache((k,), (v,), cache.lengths)

    def logits(self, module: int, hidden: Array) -> Array:
        """What a module says after its own hidden [B, W, E]: [B, W, V]."""
        net: Any = list(self.modules)[module]
        if not self.config.norm_output:
            hidden = rms_norm(hidden, net.norm, self.config.layers.rms_eps)
        return linear(hidden, self.head)


def fresh_params(config: MTPConfig, *, rngs: nnx.Rngs | None = None, dtype=jnp.float32) -> PyTree:
    """Random weights, without those that are the target's by default: embedding and head."""
    return {"modules": nnx.to_pure_dict(nnx.state(MTP(config, dtype=dtype, rngs=rngs)))["modules"]}


def mtp(
    config: MTPConfig, params: PyTree, target: LanguageModel, *, num_draft_tokens: int | None = None, tree: Any = None,
    coupled: bool = False, max_length: int | None = None,
) -> Drafter:  # fmt: skip
    """Drafts with multi-token prediction modules.

    Args:
      config, params: the modules, see the module's docstring; `load_drafter` reads them, `fresh_params` makes some.
      target: the model they belong to. Its embedding and head are referenced where params has none.
      num_draft_tokens: chain length, default 4, or one per module. A tree has its own number of nodes.
      tree: None draws a chain from the modules' laws, each warped like the target's (rule "rejection"). Static parents
        take the top tokens after each node as its children, by rank. `specjax.tree.Dynamic` chooses in each round.
      coupled: draw the chain with the target's own noise (rule "match").
      max_length: longest text (prompt and output) that will be asked for; default the target's context.

    Raises:
      ValueError: modules made for another target: hidden size, vocabulary, layer ids, context (names both facts);
        weights that are not the configuration's; a chain or tree deeper than there are modules.
    """
    target = checked("target", target)
    if not isinstance(config, MTPConfig):
        raise ValueError(f"config={show(config)}: give an MTPConfig")
    what, sizes = "the MTP head", config.layers
    fit.check_target(
        what, target, vocab_size=sizes.vocab_size, hidden_size=sizes.hidden_size, feature_layers=config.feature_layers
    )
    params = parallel.named("MTP", params)
    for name in ("embedding", "head"):
        if name not in params:
            params[name] = fit.target_weight(what, target, name)
    parallel.check_params("MTP", params, abstract_params(config))
    fit.check_context(what, sizes.max_position_embeddings, target, max_length)
    return recurrent.drafter(
        head_of(config), params, feature_layers=config.feature_layers, num_draft_tokens=num_draft_tokens, tree=tree,
        coupled=coupled, context_length=sizes.max_position_embeddings,
    )  # fmt: skip


def head_of(config: MTPConfig) -> recurrent.Head:
    """The pure functions of a configuration; their params are the weights, embedding and head included."""
    return recurrent.Head(
        init_cache=bind(_init_cache, config), fuse=_fuse, step=bind(_step, config), logits=bind(_logits, config),
        ids=_ids, hidden_size=config.layers.hidden_size, num_columns=config.layers.vocab_size,
        vocab_size=config.layers.vocab_size, num_modules=config.num_modules,
    )  # fmt: skip


@functools.cache
def _graph(config: MTPConfig) -> Any:
    return nnx.split(nnx.eval_shape(lambda: MTP(config)))[0]


def _init_cache(config: MTPConfig, params: PyTree, batch: int, capacity: int) -> KVCache:
    return kv.init(
        num_layers=1, batch=batch, capacity=capacity, num_kv_heads=config.layers.num_kv_heads,
        head_dim=config.layers.head_dim,
        dtype=jnp.uint16 if params["modules"][0]["projection"].dtype == jnp.bfloat16 else jnp.float32,
    )  # fmt: skip


def _fuse(params: PyTree, features: Array) -> Array:
    return features


def _net(config: MTPConfig, params: PyTree) -> Any:
    return nnx.merge(_graph(config), params)


def _step(config: MTPConfig, params: PyTree, module: int, tokens, hidden, positions, slots, cache):
    return _net(config, params)(module, tokens, hidden, positions, slots, cache)


def _logits(config: MTPConfig, params: PyTree, module: int, hidden: Array) -> Array:
    return _net(config, params).logits(module, hidden)


def _ids(params: PyTree) -> None:
    return None
