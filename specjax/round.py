"""prefill, and one round: draft -> verify -> accept -> commit.

Both are pure and jit-compatible: model, drafter functions and rule are static, everything else is traced. The state
between rounds holds the text, the target's cache, the drafter's state and the counts. ``cache.lengths`` is always
``text.lengths - 1``, because the last committed token is pending: the next window starts with it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import cache as kv
from specjax import rows, sharding, tree
from specjax.accept import Rule, accept
from specjax.noise import top_k
from specjax.proposal import check_keys, check_proposal, first_nodes
from specjax.static import whole
from specjax.stats import Counts
from specjax.types import Array, Committed, Drafter, KVCache, Model, Proposal, PyTree, Sampling, Sparse, Text, Window
from specjax.warp import warp

RUNNING, STOP, LENGTH, CAPACITY, NONFINITE = range(5)
FINISH_REASONS = (None, "stop", "length", "capacity", "nonfinite")


class Limits(NamedTuple):
    """Where a row ends, besides ``sampling.eos_ids``. Traced."""

    max_new_tokens: Array  # [B] int32
    stop_sequences: Array  # [Q, W] int32, left-padded with -1; a row of -1 never matches


class State(NamedTuple):
    """Everything the next round needs."""

    text: Text
    cache: KVCache
    drafter: PyTree
    keys: Array  # [B] typed keys
    finish: Array  # [B] int32, RUNNING .. NONFINITE
    counts: Counts
    pace: PyTree = ()  # of the policy that chooses the number of draft tokens, see `specjax.adaptive`


class Round(NamedTuple):
    """What one round added. Entries at or past ``count`` mean nothing."""

    tokens: Array  # [B, T]
    count: Array  # [B] emitted tokens, 0 for rows that had finished
    num_accepted: Array  # [B] draft tokens among them
    raw_logprobs: Array | None  # [B, T] under softmax(logits); None unless asked for
    warped_logprobs: Array | None  # [B, T] under the law that was sampled
    nodes: Array  # [] int32, draft nodes in the window that the target read


def prefill(
    model: Model, params: PyTree, drafter: Drafter, text: Text, keys: Array, *, chunk: int = 64
) -> State:
    """Reads the prompts, all but their last token, in chunks of fixed width; logits are computed only for drafters
    that ask for a window.

    Args:
      text: ``lengths == prompt_lengths >= 1``; the token buffer's width S is the capacity of the caches and must be
        at least prompt + new tokens + 1 + N in every row, and a multiple of ``chunk``.
      keys: [B] typed keys.
      chunk: prompt tokens per forward pass.

    Raises:
      ValueError: chunk no whole number, or one that does not divide the capacity; keys of another type than threefry;
        a cache with another number of slots.
    """
    chunk = whole("chunk", chunk, 1, "; 64 to 512 is usual")
    check_keys(keys)
    batch, capacity = text.tokens.shape
    if capacity % chunk:
        raise ValueError(f"text holds {capacity} tokens, which chunk={chunk} does not divide")
    chex.assert_shape([text.lengths, text.prompt_lengths, keys], (batch,))
    cache = model.init_cache(batch, capacity)
    _check_cache(cache, batch, capacity)
    state = drafter.init(drafter.params, batch, capacity)
    width = jnp.max(text.prompt_lengths)

    def read(i, carry):
        cache, state, previous = carry
        start = i * chunk
        tokens = lax.dynamic_slice_in_dim(text.tokens, start, chunk, axis=1)
        positions = jnp.broadcast_to((start + jnp.arange(chunk, dtype=jnp.int32))[None], (batch, chunk))
        out = model.apply(params, tokens, inside(model, positions), None, cache, feature_layers=drafter.feature_layers)
        lengths = jnp.minimum(text.prompt_lengths - 1, start + chunk)
        features = jnp.concatenate([previous, out.features[:, :-1]], axis=1)  # token i is predicted by feature i - 1
        count = jnp.clip(text.prompt_lengths - start, 0, chunk)
        real = jnp.arange(chunk)[None] < count[:, None]
        begins = jnp.full(batch, start, jnp.int32)
        window = window_seen(drafter, tokens, None, real, begins, out.logits) if drafter.prompt_window else None
        committed = Committed(tokens, features, count, begins, window)
        state = drafter.observe(drafter.params, state, committed)
        return out.cache._replace(lengths=lengths), state, out.features[:, -1:]

    features = feature_shape(model, params, drafter, cache)
    carry = (cache, state, jnp.zeros((batch, 1, features.shape[-1]), features.dtype))
    cache, state, _ = lax.fori_loop(0, -(-width // chunk), read, carry)
    counts = Counts.zeros(batch, drafter.num_draft_tokens)
    state = State(text, cache, state, keys, jnp.full(batch, RUNNING, jnp.int32), counts)
    return sharding.settled(model.layout, state)


def window_seen(drafter: Drafter, tokens: Array, parents, valid: Array, start: Array, logits: Array) -> Window | None:
    """What the target would say after each row, for a drafter that asks."""
    if not drafter.window_top:
        return None
    top, ids = top_k(logits, drafter.window_top)
    total = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
    probs = jnp.exp(top - total)
    return Window(tokens, parents, valid, start, Sparse(ids, jnp.where(jnp.isfinite(probs), probs, 0.0)))


def _check_cache(cache: KVCache, batch: int, capacity: int) -> None:
    """A cache with fewer slots than the text (a ring) could not roll back a window that wrapped around it."""
    chex.assert_shape(cache.lengths, (batch,))
    for leaf in jax.tree.leaves((cache.k, cache.v)):
        if leaf.ndim < 4 or leaf.shape[-2] != capacity:
            raise ValueError(
                f"init_cache({batch}, {capacity}) gave layers of shape {leaf.shape}, {leaf.shape[-2]} slots: rounds "
                f"roll back by length alone, which needs [.., B, H, S, D] with S = {capacity}"
            )


def inside(model: Model, positions: Array) -> Array:
    """A chunk or window may end past the context; nothing there is ever kept, but a table must not be read there."""
    return positions if model.context_length is None else jnp.minimum(positions, model.context_length - 1)


def feature_shape(model: Model, params: PyTree, drafter: Drafter, cache: KVCache) -> jax.ShapeDtypeStruct:
    """Of what the drafter reads of one row of a window, [B, 1, E]."""
    tokens = jnp.zeros((cache.lengths.shape[0], 1), jnp.int32)
    out = jax.eval_shape(
        lambda *args: model.apply(*args, None, cache, feature_layers=drafter.feature_layers), params, tokens, tokens
    )
    return out.features


def round(
    model: Model,
    params: PyTree,
    drafter: Drafter,
    rule: Rule,
    state: State,
    sampling: Sampling,
    limits: Limits,
    *,
    num_draft_tokens: int | None = None,
    logprobs: bool = False,
) -> tuple[State, Round]:
    """One draft -> verify -> accept -> commit for every row that has not finished; the others do not change.

    Args:
      num_draft_tokens: N of this round, static, 0 .. drafter.num_draft_tokens (the default). 0 is a plain step.
      logprobs: also return log-probabilities of the emitted tokens.

    Raises:
      ValueError: num_draft_tokens out of range.
      AssertionError: a model or drafter returned shapes that do not belong together (chex).
    """
    num_nodes = drafter.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
    if not 0 <= num_nodes <= drafter.num_draft_tokens:
        raise ValueError(f"num_draft_tokens={num_nodes}: this drafter was built for 0..{drafter.num_draft_tokens}")
    proposal, drafter_state = _draft(drafter, state, sampling, num_nodes)
    check_proposal(proposal, (state.finish.shape[0], 1 + num_nodes, model.vocab_size))
    state = state._replace(drafter=drafter_state)

    def finish_with(nodes, state, proposal):
        part = first_nodes(proposal, nodes)
        return _verify_accept_commit(
            model, params, drafter, rule, state, part, sampling, limits, num_nodes, logprobs
        )

    widths = [*(w for w in drafter.widths if w < num_nodes), num_nodes]
    if len(widths) == 1:
        return finish_with(num_nodes, state, proposal)
    # A window as narrow as the longest draft of the batch: a round in which nothing was found is a plain step.
    drafted = jnp.max(jnp.where(proposal.valid, jnp.arange(1, num_nodes + 1, dtype=jnp.int32)[None], 0), axis=1)
    longest = jnp.max(jnp.where(state.finish == RUNNING, drafted, 0))
    shapes = jax.eval_shape(functools.partial(finish_with, num_nodes), state, proposal)
    carry = (state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[1]))
    for below, width in zip([-1, *widths], widths, strict=False):
        chosen = (longest > below) & ((longest <= width) | (width == num_nodes))
        carry = once(chosen, lambda carry, width=width: finish_with(width, carry[0], proposal), carry)
    return carry


def once(flag: Array, fn: Callable[[PyTree], PyTree], carry: PyTree) -> PyTree:
    """``fn(carry)`` where flag, else carry: a loop of at most one step, which unlike ``lax.cond`` copies no cache."""
    return lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(flag), fn(c[1])), (flag, carry))[1]


def _verify_accept_commit(
    model: Model, params: PyTree, drafter: Drafter, rule: Rule, state: State, proposal: Proposal, sampling: Sampling,
    limits: Limits, widest: int, logprobs: bool,
) -> tuple[State, Round]:
    """The round after the draft; the result is padded to windows of 1 + ``widest``."""
    text, (batch, num_nodes) = state.text, proposal.tokens.shape
    pending_at = text.lengths - 1

    # verify: the target reads the window
    pending = jnp.take_along_axis(text.tokens, pending_at[:, None], axis=1)
    window = jnp.concatenate([pending, proposal.tokens], axis=1)
    mask = tree.window_mask(proposal.parents, num_nodes)
    positions = pending_at[:, None] + jnp.atleast_2d(tree.depths(proposal.parents, num_nodes))
    out = model.apply(
        params, window, inside(model, positions), None if proposal.parents is None else jnp.asarray(mask), state.cache,
        feature_layers=drafter.feature_layers,
    )  # fmt: skip
    chex.assert_shape(out.logits, (batch, 1 + num_nodes, model.vocab_size))
    seen = jnp.asarray(mask)[..., 1:]
    with sharding.on(model.layout):
        probs = warp(out.logits, sampling, text, proposal.tokens, seen if seen.ndim == 3 else seen[None])

        # accept: the random decision
        acceptance = accept(rule, state.keys, proposal, probs, pending_at)
    path, num_accepted = acceptance.path, acceptance.num_accepted
    slots = jnp.arange(1 + num_nodes, dtype=jnp.int32)[None]
    shifted = jnp.take_along_axis(window, jnp.roll(path, -1, axis=1), axis=1)
    tokens = jnp.where(slots == num_accepted[:, None], acceptance.next_token[:, None], shifted)

    # commit: what is kept, cut at stops, budget and rows without a law
    lawless = jnp.isnan(rows.take(probs[:, :, 0], rows.take(path, num_accepted)))
    count, finish = _cut(state, sampling, limits, tokens, num_accepted + 1 - lawless.astype(jnp.int32), lawless)
    count = jnp.where(state.finish == RUNNING, count, 0)
    finish = jnp.where(state.finish == RUNNING, finish, state.finish)
    features = jnp.take_along_axis(out.features, path[:, :, None], axis=1)
    judged = jnp.concatenate([jnp.ones((batch, 1), bool), proposal.valid], axis=1)
    seen_window = window_seen(
        drafter, window, proposal.parents, judged & (state.finish == RUNNING)[:, None], pending_at, out.logits
    )
    committed = Committed(tokens, features, count, text.lengths, seen_window)
    drafter_state = drafter.observe(drafter.params, state.drafter, committed)
    new_state = state._replace(
        text=text._replace(tokens=_append(text, tokens, count), lengths=text.lengths + count),
        cache=kv.commit(out.cache, None if proposal.parents is None else path, count),
        drafter=drafter_state,
        finish=finish,
        counts=state.counts.add(proposal, acceptance, count, state.finish == RUNNING),
    )
    raw = warped = None
    if logprobs:
        raw = _token_logprobs(out.logits, path, tokens)
        warped = jnp.log(rows.take(probs, path, tokens))
    info = Round(tokens, count, jnp.minimum(count, num_accepted), raw, warped, jnp.int32(num_nodes))
    return sharding.settled(model.layout, new_state), pad(info, 1 + widest)


def pad(info: Round, width: int) -> Round:
    """The same for windows of ``width``."""
    return jax.tree.map(lambda x: x if x.ndim < 2 else jnp.pad(x, ((0, 0), (0, width - x.shape[1]))), info)


def _draft(drafter: Drafter, state: State, sampling: Sampling, num_nodes: int) -> tuple[Proposal, PyTree]:
    if num_nodes == 0:
        batch = state.finish.shape[0]
        none = jnp.zeros((batch, 0), jnp.int32)
        return Proposal(none, None, None, none.astype(bool)), state.drafter
    return drafter.draft(drafter.params, state.keys, state.drafter, state.text, sampling, num_nodes)


def _cut(state: State, sampling: Sampling, limits: Limits, tokens: Array, count: Array, lawless: Array):
    """How many of ``tokens [B, T]`` the row keeps, and why it ends, if it does."""
    text = state.text
    left = limits.max_new_tokens - (text.lengths - text.prompt_lengths)
    stops = stops_of(text, sampling.eos_ids, limits.stop_sequences, tokens)
    width = tokens.shape[1]
    first = jnp.min(jnp.where(stops, jnp.arange(width, dtype=jnp.int32)[None], width), axis=1)
    kept = jnp.minimum(jnp.minimum(count, first + 1), left)
    stopped = first + 1 <= kept
    finish = jnp.where(lawless & (kept == count), NONFINITE, RUNNING)
    finish = jnp.where(kept >= left, LENGTH, finish)
    return kept, jnp.where(stopped, STOP, finish)


def stops_of(text: Text, eos_ids: Array, sequences: Array, tokens: Array) -> Array:
    """[B, T] bool: the text, its generated part, ends with an eos id or a stop sequence after this token."""
    ends = jnp.any(tokens[:, :, None] == eos_ids[None, None], axis=-1)  # padding is -1, no token
    width = sequences.shape[1]
    position = text.lengths[:, None] + jnp.arange(tokens.shape[1])[None]
    back = position[:, :, None] - jnp.arange(width - 1, -1, -1)[None, None]  # [B, T, W] positions of the last W tokens
    old = rows.take(text.tokens, jnp.clip(back, 0, text.tokens.shape[1] - 1))
    new = rows.take(tokens, jnp.clip(back - text.lengths[:, None, None], 0, tokens.shape[1] - 1))
    recent = jnp.where(back < text.lengths[:, None, None], old, new)
    recent = jnp.where(back >= text.prompt_lengths[:, None, None], recent, -2)
    same = (recent[:, :, None, :] == sequences[None, None]) | (sequences == -1)[None, None]
    return ends | jnp.any(jnp.all(same, axis=-1) & jnp.any(sequences != -1, axis=-1)[None, None], axis=-1)


def _append(text: Text, tokens: Array, count: Array) -> Array:
    capacity = text.tokens.shape[1]
    slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    where = jnp.where(slots < count[:, None], text.lengths[:, None] + slots, capacity)
    return rows.put(text.tokens, tokens, where)


def _token_logprobs(logits: Array, path: Array, tokens: Array) -> Array:
    top = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(logits - top), axis=-1)) + top[..., 0]
    return rows.take(logits, path, tokens) - rows.take(total, path)


def truncate(state: State, lengths: Array, finish: Array) -> State:
    """Cuts rows back to ``lengths [B]`` (never before the prompt) and marks them ``finish [B]``: text, cache alike.

    Only for rows that end here: a drafter has already observed what is cut.
    """
    lengths = jnp.clip(lengths, state.text.prompt_lengths, state.text.lengths)
    kept = jnp.arange(state.text.tokens.shape[1])[None] < lengths[:, None]
    text = state.text._replace(tokens=jnp.where(kept, state.text.tokens, 0), lengths=lengths)
    return state._replace(text=text, cache=kv.crop(state.cache, lengths - 1), finish=finish)


def no_limits(max_new_tokens, batch: int) -> Limits:
    """Limits with a budget and nothing else, for people who build their own loop."""
    budget = jnp.broadcast_to(jnp.asarray(np.asarray(max_new_tokens, np.int32)), (batch,))
    return Limits(budget, jnp.full((1, 1), -1, jnp.int32))
