"""Recurrent heads written apart in float64 numpy, without a cache, over tensors under their names in files.

And what the tests of EAGLE and of multi-token prediction share: true features, trees by brute force, fresh states.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import tree
from specjax.drafters import recurrent
from specjax.models import LlamaConfig, llama_params
from specjax.types import Committed
from tests.drafters import parallel_world as world
from tests.models.llama_oracle import oracle_rotate
from tests.small import V

LAYERS = LlamaConfig(V, world.HIDDEN, 12, 1, 4, 2, head_dim=6, rms_eps=1e-3, max_position_embeddings=64)
SMALL = LlamaConfig(3, world.HIDDEN, 12, 1, 2, 1, head_dim=4, max_position_embeddings=64)  # of the joint laws

Logits = Callable[[Sequence[int], np.ndarray, Sequence[int]], np.ndarray]


def random_tensors(sources, seed=0):
    """Tensors for a tree of `llama_params.Source`, large enough that every part shows in the logits."""
    rng, shapes = np.random.default_rng(seed), llama_params.shapes_of(sources)
    out = {name: rng.normal(size=shape) * (0.5 if len(shape) > 1 else 0.3) for name, shape in shapes.items()}
    return {name: (1 + x if "norm" in name else x).astype(np.float32) for name, x in out.items()}


def norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def attention(w, prefix, config, y, positions):
    """What causal attention over rows y [T, in] adds, [T, E]."""
    count = len(y)
    q, k, v = (
        (y @ w[f"{prefix}self_attn.{name}_proj.weight"].T + w.get(f"{prefix}self_attn.{name}_proj.bias", 0.0)).reshape(
            count, -1, config.head_dim
        )
        for name in "qkv"
    )
    if config.qk_norm:
        q = norm(q, w[f"{prefix}self_attn.q_norm.weight"], config.rms_eps)
        k = norm(k, w[f"{prefix}self_attn.k_norm.weight"], config.rms_eps)
    q, k = oracle_rotate(q, positions, config), oracle_rotate(k, positions, config)
    mixed = np.zeros_like(q)
    for head in range(config.num_heads):
        group = head // (config.num_heads // config.num_kv_heads)
        scores = np.where(np.tri(count, dtype=bool), q[:, head] @ k[:, group].T / config.head_dim**0.5, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        mixed[:, head] = share @ v[:, group] / share.sum(-1, keepdims=True)
    return mixed.reshape(count, -1) @ w[f"{prefix}self_attn.o_proj.weight"].T + w.get(
        f"{prefix}self_attn.o_proj.bias", 0.0
    )


def mlp(w, prefix, config, x):
    y = norm(x, w[f"{prefix}post_attention_layernorm.weight"], config.rms_eps)
    gate = y @ w[f"{prefix}mlp.gate_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * (y @ w[f"{prefix}mlp.up_proj.weight"].T)) @ w[
        f"{prefix}mlp.down_proj.weight"
    ].T


def layer(w, prefix, config, x, positions, normed=True):
    y = norm(x, w[f"{prefix}input_layernorm.weight"], config.rms_eps) if normed else x
    x = x + attention(w, prefix, config, y, positions)
    return x + mlp(w, prefix, config, x)


def eagle_forward(config, w, tokens, hidden):
    """Rows (token, hidden [E]) at positions 1, 2, .. -> (hidden fed back, logits)."""
    c, positions = config.layers, 1 + np.arange(len(tokens))
    x = w["embed_tokens.weight"][list(tokens)]
    if config.version == 1:
        x = np.concatenate([x, hidden], -1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
        x = layer(w, "layers.0.", c, x, positions, normed=False)
    else:
        embedded = norm(x, w["layers.0.input_layernorm.weight"], c.rms_eps)
        normed = norm(hidden, w["layers.0.hidden_norm.weight"], c.rms_eps)
        x = normed if config.norm_before_residual else hidden
        x = x + attention(w, "layers.0.", c, np.concatenate([embedded, normed], -1), positions)
        x = x + mlp(w, "layers.0.", c, x)
    for index in range(1, c.num_layers):
        x = layer(w, f"layers.{index}.", c, x, positions)
    said = x if config.version == 1 else norm(x, w["norm.weight"], c.rms_eps)
    return said if config.norm_output else x, said @ w["lm_head.weight"].T


def eagle_fused(config, w, features):
    if config.version == 1:
        return features
    if config.norm_before_fc:
        features = norm(features, w["input_norm.weight"], config.layers.rms_eps)
    if config.fc_norm:
        parts = np.split(features, len(config.feature_layers), axis=-1)
        scales = [w[f"fc_norm.{j}.weight"] for j in range(len(parts))]
        parts = [norm(part, scale, config.layers.rms_eps) for part, scale in zip(parts, scales, strict=True)]
        features = np.concatenate(parts, -1)
    return features @ w["fc.weight"].T


def eagle_logits(config, tensors) -> Logits:
    """(text, features [len(text) - 1, F] that predicted text[1:], drafted) -> logits after the last drafted token."""
    w = {name: np.asarray(value, np.float64) for name, value in tensors.items()}

    def after(text, features, drafted):
        hidden, tokens = eagle_fused(config, w, np.asarray(features, np.float64)), list(text[1:])
        for token in drafted:
            out, _ = eagle_forward(config, w, tokens, hidden)
            hidden, tokens = np.concatenate([hidden, out[-1:]]), [*tokens, token]
        return eagle_forward(config, w, tokens, hidden)[1][-1]

    return after


def mtp_forward(config, w, module, tokens, hidden, first):
    c, prefix, positions = config.layers, f"mtp_layers.{module}.", first + np.arange(len(tokens))
    embedded = norm(w["embed_tokens.weight"][list(tokens)], w[f"{prefix}token_layernorm.weight"], c.rms_eps)
    hidden = norm(hidden, w[f"{prefix}hidden_layernorm.weight"], c.rms_eps)
    x = np.concatenate([embedded, hidden], -1) @ w[f"{prefix}input_proj.weight"].T
    x = layer(w, prefix, c, x, positions)
    said = norm(x, w[f"{prefix}final_layernorm.weight"], c.rms_eps)
    return said if config.norm_output else x, said @ w["lm_head.weight"].T


def mtp_logits(config, tensors) -> Logits:
    """As `eagle_logits`. Several modules: module d reads, as in training, every token beside what module d - 1 said one
    token before, over the whole text and the drafts above."""
    w = {name: np.asarray(value, np.float64) for name, value in tensors.items()}

    def after(text, features, drafted):
        tokens, hidden = list(text[1:]), np.asarray(features, np.float64)
        if config.num_modules == 1:
            for token in drafted:
                out, _ = mtp_forward(config, w, 0, tokens, hidden, 1)
                hidden, tokens = np.concatenate([hidden, out[-1:]]), [*tokens, token]
            return mtp_forward(config, w, 0, tokens, hidden, 1)[1][-1]
        logits = None
        for module in range(len(drafted) + 1):
            hidden, logits = mtp_forward(config, w, module, tokens, hidden, 1 + module)
            tokens = [*tokens[1:], drafted[module]] if module < len(drafted) else tokens
        return logits[-1]

    return after


# --- proposals by brute force


def log_softmax(x):
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def static_paths(logits: Callable[[tuple[int, ...]], np.ndarray], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Paths of tokens of a tree whose child r is the r-th likeliest token below its parent."""
    result: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        above, rank = () if parent < 0 else result[parent], sum(p == parent for p in parents[:node])
        result.append((*above, int(np.argsort(-logits(above), kind="stable")[rank])))
    return result


def dynamic_paths(logits, num_nodes: int, width: int, depth: int) -> set[tuple[int, ...]]:
    """EAGLE-2, path by path: expand the ``width`` likeliest of each level, keep the ``num_nodes`` likeliest of all."""
    level, every = {(): 0.0}, {}
    for _ in range(depth):
        best = sorted(level, key=lambda path: -level[path])[:width]
        level = {
            (*path, int(token)): level[path] + log_softmax(logits(path))[token]
            for path in best
            for token in np.argsort(-logits(path), kind="stable")[:width]
        }
        every |= level
    return set(sorted(every, key=lambda path: -every[path])[:num_nodes])


# --- nodes fed level by level

NODES, ABOVE = (4, 9, 3, 12, 7, 4, 15), (-1, -1, 0, 0, 1, 2, 4)  # three levels


@functools.partial(jax.jit, static_argnums=0)
def _fed(head, params, state):
    batch, fed, result = state.logits.shape[0], recurrent._root(state), []
    for level, nodes in enumerate(tree.levels(ABOVE), start=1):
        tokens, above = (jnp.asarray([[x[node] for node in nodes]] * batch, jnp.int32) for x in (NODES, ABOVE))
        fed, logits = recurrent._feed(head, params, state, fed, level, tokens, above)
        result.append(logits)
    return jnp.concatenate(result, axis=1)


def assert_nodes_see_their_ancestors_only(head, drafter, state, logits) -> None:
    """Cases 82 and 83: what the head says after every node of a tree is what the oracle says of its path as a line.

    ``logits``: per row, path of tokens -> logits.
    """
    got, line = np.asarray(_fed(head, drafter.params, state.drafter)), []
    for node, parent in enumerate(ABOVE):
        line.append((*(line[parent] if parent >= 0 else ()), NODES[node]))
    for row, after in enumerate(logits):
        expected = np.asarray([after(path) for path in line])
        np.testing.assert_allclose(got[row], expected, atol=max(1e-4, 2e-6 * np.abs(expected).max()))  # float32


# --- what the target said


@functools.partial(jax.jit, static_argnums=(0, 3))
def _features(model, params, tokens, layers):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    return model.apply(params, tokens, positions, None, model.init_cache(*tokens.shape), feature_layers=layers).features


def features_of(lm, tokens, layers) -> np.ndarray:
    """[B, S, F] of whole texts in one pass."""
    return np.asarray(_features(lm.model, lm.params, jnp.asarray(tokens), layers))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _reread(init, observe, params, tokens, features, lengths):
    batch, width = tokens.shape
    committed = Committed(tokens, features, lengths, jnp.zeros(batch, jnp.int32))
    return observe(params, init(params, batch, width), committed)


def assert_state_is_fresh(lm, drafter, state) -> None:
    """Case 44: what the drafter keeps of the committed tokens is what it would make of the text in one pass over the
    target's true features: keys, values, what it said of the pending token."""
    text = state.text
    features = features_of(lm, text.tokens, drafter.feature_layers)
    features = np.concatenate([np.zeros_like(features[:, :1]), features[:, :-1]], axis=1)
    fresh = _reread(drafter.init, drafter.observe, drafter.params, text.tokens, jnp.asarray(features), text.lengths)
    lengths = np.asarray(text.lengths)
    for module, (kept, made) in enumerate(zip(state.drafter.caches, fresh.caches, strict=True)):
        np.testing.assert_array_equal(kept.lengths, lengths)
        slots = np.arange(made.k[0].shape[2])[None]
        real = ((slots > module) & (slots < lengths[:, None]))[:, None, :, None]
        for a, b in zip(jax.tree.leaves((kept.k, kept.v)), jax.tree.leaves((made.k, made.v)), strict=True):
            np.testing.assert_allclose(np.where(real, a, 0), np.where(real, b, 0), atol=1e-4)
    rows = lengths > len(fresh.caches)
    for a, b in zip(jax.tree.leaves(state.drafter[1:]), jax.tree.leaves(fresh[1:]), strict=True):
        np.testing.assert_allclose(np.asarray(a)[rows], np.asarray(b)[rows], atol=1e-4)
