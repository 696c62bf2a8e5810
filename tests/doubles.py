"""Tiny targets and drafters with known behaviour.

Targets: `table_lm` (logits depend on the last token only) and `hash_lm` (logits depend on every token and position
before, through the cache: a stale, missing or misplaced slot changes them). Drafters: scripted ones that are right or
wrong where they are told to be, and ones that sample chains and trees from a given table of laws. Every drafter keeps
a record of what it observed, so a test can ask whether that was the text.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax.static import bind
from specjax.types import Array, Committed, Drafter, KVCache, Model, ModelOutput, Proposal, Sparse, Text
from tests.oracle.hashlm import HashConfig, hash_params

# --- targets


def table_lm(vocab_size: int) -> Model:
    """params: logits [V, V], row = last token. The cache stores the tokens, so that it can be checked."""
    return Model(bind(_table_cache), bind(_table_apply), vocab_size)


def _table_cache(batch: int, capacity: int) -> KVCache:
    return kv.init(num_layers=1, batch=batch, capacity=capacity, num_kv_heads=1, head_dim=1)


def _table_apply(params, tokens, positions, window_mask, cache, *, feature_layers=(), logits_at=None):
    if logits_at is not None:
        kept = jnp.take_along_axis(tokens, logits_at[:, None], axis=1)
    else:
        kept = tokens
    window = tokens[:, :, None, None].astype(jnp.float32)
    k, v = (kv.write(layer[0], window, cache.lengths) for layer in (cache.k, cache.v))
    features = jax.nn.one_hot(tokens, params.shape[0]) if feature_layers else jnp.zeros((*tokens.shape, 0))
    return ModelOutput(params[kept], features, cache._replace(k=(k,), v=(v,)))


def hash_lm(config: HashConfig, seed: int = 0) -> tuple[Model, dict[str, Array]]:
    """(model, params) of the transformer of `tests.oracle.hashlm`."""
    params = {name: jnp.asarray(value) for name, value in hash_params(config, seed).items()}
    return Model(bind(_hash_cache, config), bind(_hash_apply, config), config.vocab_size), params


def _hash_cache(config: HashConfig, batch: int, capacity: int) -> KVCache:
    return kv.init(
        num_layers=config.num_layers, batch=batch, capacity=capacity, num_kv_heads=config.num_heads,
        head_dim=config.width // config.num_heads,
    )  # fmt: skip


def _hash_apply(
    config: HashConfig, params, tokens, positions, window_mask, cache, *, feature_layers=(), logits_at=None
) -> ModelOutput:
    batch, width = tokens.shape
    visible, written = _visible(window_mask, cache, width)
    theta = _angles(positions, config.width)
    x = params["embed"][tokens] + jnp.concatenate([jnp.sin(theta), jnp.cos(theta)], axis=-1)
    streams, keys, values = [x], [], []
    heads = (batch, width, config.num_heads, config.width // config.num_heads)
    for layer in range(config.num_layers):
        y = _normed(x)
        q, k, v = (jnp.reshape(y @ params[name][layer], heads) for name in ("query", "key", "value"))
        keys.append(kv.write(cache.k[layer], _rotate(k, positions), cache.lengths))
        values.append(kv.write(cache.v[layer], v, cache.lengths))
        scores = jnp.einsum("bthd,bhsd->bhts", _rotate(q, positions), keys[-1]) * heads[-1] ** -0.5
        share = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
        safe = jnp.where(written[:, None, :, None], values[-1], 0.0)  # 0 * NaN of an unused slot is NaN
        x = x + jnp.einsum("bhts,bhsd->bthd", share, safe).reshape(x.shape) @ params["out"][layer]
        streams.append(x)
    read = _normed(x)
    features = [*streams, read]
    features = jnp.concatenate([features[k] for k in feature_layers], -1) if feature_layers else x[..., :0]
    if logits_at is not None:
        read = jnp.take_along_axis(read, logits_at[:, None, None], axis=1)
    return ModelOutput(read @ params["head"].T, features, cache._replace(k=tuple(keys), v=tuple(values)))


def _visible(window_mask, cache: KVCache, width: int) -> tuple[Array, Array]:
    """[B, T, S] slots each window row sees, and [B, S] slots that hold anything."""
    batch, capacity = cache.lengths.shape[0], cache.k[0].shape[2]
    if window_mask is None:
        window_mask = jnp.tri(width, dtype=bool)
    window_mask = jnp.broadcast_to(window_mask, (batch, width, width))
    offset = jnp.arange(capacity)[None, :] - cache.lengths[:, None]  # [B, S]; window entry, or negative: committed
    index = jnp.broadcast_to(jnp.clip(offset, 0, width - 1)[:, None, :], (batch, width, capacity))
    in_window = jnp.take_along_axis(window_mask, index, axis=2) & (offset < width)[:, None, :]
    return jnp.where((offset < 0)[:, None, :], True, in_window), offset < width


def _angles(positions: Array, size: int) -> Array:
    return positions[..., None].astype(jnp.float32) / (3.0 ** jnp.arange(size // 2, dtype=jnp.float32))[None, None, :]


def _rotate(x: Array, positions: Array) -> Array:
    theta = _angles(positions, x.shape[-1])[:, :, None, :]
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _normed(x: Array) -> Array:
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


# --- what every drafter double remembers


class Record(NamedTuple):
    """What was observed. ``in_order``: every chunk started where the last one ended."""

    tokens: Array  # [B, S]
    count: Array  # [B]
    in_order: Array  # [B] bool


def _init(params, batch: int, capacity: int) -> Record:
    return Record(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool))


def _observe(params, state: Record, committed: Committed) -> Record:
    slots = jnp.arange(committed.tokens.shape[1], dtype=jnp.int32)[None, :]
    real = slots < committed.count[:, None]
    where = jnp.where(real, committed.start[:, None] + slots, state.tokens.shape[1])
    tokens = state.tokens.at[jnp.arange(where.shape[0])[:, None], where].set(committed.tokens, mode="drop")
    in_order = state.in_order & ((committed.count == 0) | (committed.start == state.count))
    return Record(tokens, state.count + committed.count, in_order)


# --- scripted drafters: right and wrong where told


class Script(NamedTuple):
    """The continuation to propose and where to miss, by absolute position."""

    tokens: Array  # [B, S] or [S]: the token at each position, for instance what greedy decoding gives
    wrong: Array  # [S, N] bool: in the round whose pending token is here, draft token i is off by one (mod V)
    count: Array  # [S] int32: how many draft tokens that round proposes


def scripted(tokens, vocab_size: int, num_draft_tokens: int, *, wrong=None, count=None) -> Drafter:
    """Proposes ``tokens`` by absolute position: OracleDraft when they are right, with misses where ``wrong`` says so.

    Args:
        tokens: [S] or [B, S]; positions past the end propose the last entry.
        wrong: [N] or [S, N] bool; None never misses, ``[True] * N`` is AntiDraft, a single True is FlipDraft.
        count: [S] proposals per round; None is N always.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    size = tokens.shape[-1]
    wrong = np.zeros(num_draft_tokens, bool) if wrong is None else np.asarray(wrong, bool)
    wrong = jnp.asarray(np.broadcast_to(wrong, (size, num_draft_tokens)))
    count = jnp.asarray(np.full(size, num_draft_tokens) if count is None else count, jnp.int32)
    draft = bind(_scripted_draft, vocab_size)
    return Drafter(Script(tokens, wrong, count), bind(_init), bind(_observe), draft, num_draft_tokens)


def flip(slot: int, num_draft_tokens: int) -> np.ndarray:
    """``wrong`` for a drafter that misses at one slot only."""
    return np.arange(num_draft_tokens) == slot


def _scripted_draft(vocab: int, params: Script, keys, state, text: Text, sampling, n: int):
    batch, size = text.lengths.shape[0], params.tokens.shape[-1]
    table = jnp.broadcast_to(params.tokens, (batch, size))
    pending = jnp.minimum(text.lengths - 1, size - 1)
    ahead = jnp.minimum(text.lengths[:, None] + jnp.arange(n)[None, :], size - 1)
    tokens = jnp.take_along_axis(table, ahead, axis=1)
    tokens = jnp.where(params.wrong[pending][:, :n], (tokens + 1) % vocab, tokens)
    valid = jnp.arange(n)[None, :] < params.count[pending][:, None]
    return Proposal(tokens, None, None, valid), state


# --- drafters that sample from a table of laws q [V, V] by the token above


def _draw_keys(keys: Array, text: Text, node: int) -> Array:
    """Noise of its own for each (row, pending position, node)."""

    def one(key, position):
        return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, 7001), position), node)

    return jax.vmap(one)(keys, text.lengths)


def _draw(keys: Array, law: Array) -> Array:
    return jax.vmap(jax.random.categorical)(keys, jnp.log(law)).astype(jnp.int32)


def _pending(text: Text) -> Array:
    return jnp.take_along_axis(text.tokens, text.lengths[:, None] - 1, axis=1)[:, 0]


def sampled(
    q, parents=None, *, num_draft_tokens: int | None = None, kind: str = "iid", sparse: str | None = None,
    ragged: str | None = None, dynamic: bool = False, claim: str | None = None,
) -> Drafter:  # fmt: skip
    """Chains and trees drawn from ``q [V, V]`` (row = the token above).

    Args:
        q: laws, rows sum to 1.
        parents: topology; None is a chain of ``num_draft_tokens``.
        kind: "iid" siblings, "distinct" (without replacement), "top" (the most probable in order, point masses).
        sparse: "shared" or "rows" writes the laws as `Sparse` with the ids reversed: one vocabulary, or ids per node.
        ragged: "text" offers a number of nodes that depends on the committed text; "path" stops offering below a
            drafted 0 (allowed: a node's own token does not decide); "own" drops a drafted 0 itself (biased on purpose).
        dynamic: parents are given per row, [B, N].
        claim: misreports the law, on purpose: "table" gives the row of ``q`` whatever the token was drawn from (a
            softmax for a top token, a law that still has the earlier siblings), "sharp" a sharper one.
    """
    parents_given = parents is not None
    parents = tuple(range(-1, (num_draft_tokens or 0) - 1)) if parents is None else tuple(parents)
    options = (parents, parents_given, kind, sparse, ragged, dynamic, claim)
    rule = "match" if kind == "top" else "rejection"
    q = jnp.asarray(q, jnp.float32)
    return Drafter(q, bind(_init), bind(_observe), bind(_sampled_draft, *options), len(parents), default_rule=rule)


def _sampled_draft(
    parents, is_tree, kind, sparse, ragged, dynamic, claim, q, keys, state, text: Text, sampling, n: int
) -> tuple[Proposal, Any]:
    parents = parents[:n]
    batch, vocab = text.lengths.shape[0], q.shape[0]
    above, tokens, laws, valid = _pending(text), [], [], []
    for node, parent in enumerate(parents):
        law = table = q[above if parent < 0 else tokens[parent]]
        older = [tokens[m] for m in range(node) if parents[m] == parent]
        if kind == "top":
            tokens.append(jnp.argsort(-law, axis=-1)[:, len(older)].astype(jnp.int32))
        else:
            if kind == "distinct":
                for token in older:
                    law = jnp.where(jnp.arange(vocab)[None, :] == token[:, None], 0.0, law)
                law = law / law.sum(-1, keepdims=True)
            tokens.append(_draw(_draw_keys(keys, text, node), law))
        if claim == "sharp":
            table = law**2 / (law**2).sum(-1, keepdims=True)
        laws.append(law if claim is None else table)
        offered = jnp.ones(batch, bool)
        if ragged == "text":
            offered = node < (text.lengths * 5 + above) % (n + 1)
        if ragged == "path" and parent >= 0:
            offered = valid[parent] & (tokens[parent] != 0)
        if ragged == "own":
            offered = tokens[node] != 0
        valid.append(offered)
    stacked = jnp.stack(laws, axis=1)
    probs: Array | Sparse | None = None if kind == "top" and claim is None else stacked
    if sparse and probs is not None:
        ids = jnp.arange(vocab - 1, -1, -1, dtype=jnp.int32)
        probs = Sparse(ids if sparse == "shared" else jnp.broadcast_to(ids, stacked.shape), stacked[..., ::-1])
    topology: Any = np.asarray(parents, np.int32) if is_tree else None
    if dynamic:
        topology = jnp.broadcast_to(jnp.asarray(topology), (batch, n))
    return Proposal(jnp.stack(tokens, 1), probs, topology, jnp.stack(valid, 1)), state
