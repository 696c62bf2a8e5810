"""Suffix decoding: the longest suffix of the text that occurred before, here or in earlier outputs, goes on as it did.

Oliaro, Jia, Campos, Qiao, SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications, arXiv 2411.04975
(2024). The suffix tree of the paper is replaced by a comparison of whole arrays, a few passes over [B, S].
The proposal is a function of text and pool, hence point masses.
"""

import numbers
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.static import bind, show, whole
from specjax.types import Array, Committed, Drafter, Proposal, PyTree, Sampling, Text

CANDIDATES = 16  # occurrences that vote
SEPARATOR = -1  # no token: a match never crosses it
NOTHING = -2  # stands for tokens before the start of a text: equal to nothing


class Pool(NamedTuple):
    """Earlier texts, oldest first, a separator behind each. Pools of one size share a compiled program."""

    tokens: Array  # [P] int32


class _Settings(NamedTuple):
    max_match: int
    min_match: int
    factor: float
    branching: bool


class _Candidates(NamedTuple):
    """Occurrences of the suffix, the longest first, then the most recent, and what followed them."""

    match: Array  # [B, M] int32 matching tokens, 0 for none
    tokens: Array  # [B, M, n] what followed
    there: Array  # [B, M, n] bool: something did, and no end id came before it


def suffix(
    num_draft_tokens: int = 8, *, max_match: int = 16, min_match: int = 1, factor: float = 4.0,
    branching: bool = False, pool: Pool | None = None,
) -> Drafter:
    """Looks up the longest suffix of the text that occurred before and proposes what followed it.

    Among occurrences that match equally long the continuation most of them share wins, then the most recent; those in
    the text itself come before those in the pool. The longer the match, the longer the proposal: ``factor`` times its
    length. A continuation that reaches the end of the text repeats itself, as the text is about to.

    Args:
      num_draft_tokens: most nodes of a proposal, N.
      max_match: tokens that are compared; longer matches count as this long.
      min_match: shortest match that is followed.
      factor: proposed tokens per matching token.
      branching: propose a tree: where continuations disagree, the better supported come first until N nodes are
        spent. Not for rule "block".
      pool: earlier texts, see `suffix_pool` and `remember`. Every row of a call reads them, so a pool holds only texts
        that whoever asks may see. Without one nothing is shared.

    Raises:
      ValueError: not whole numbers, or 1 <= min_match <= max_match does not hold; factor not a positive number; a pool
        of another kind.
    """
    num_draft_tokens = whole("num_draft_tokens", num_draft_tokens, 1, "; drafter=None decodes plainly")
    max_match, min_match = whole("max_match", max_match, 1), whole("min_match", min_match, 1)
    if min_match > max_match:
        raise ValueError(f"min_match={min_match}, max_match={max_match}: must be 1 <= min_match <= max_match")
    if isinstance(factor, bool) or not isinstance(factor, numbers.Real) or not 0 < factor <= sys.float_info.max:
        raise ValueError(f"factor={show(factor)}: must be a number over 0")
    if not isinstance(branching, bool):
        raise ValueError(f"branching={show(branching)}: must be True or False")
    if pool is not None and not (isinstance(pool, Pool) and _is_pool(pool.tokens)):
        raise ValueError(f"pool={show(pool)}: give specjax.drafters.suffix_pool(size), filled by `remember`, or None")
    settings = _Settings(max_match, min_match, float(factor), branching)
    params = () if pool is None else Pool(jnp.asarray(pool.tokens, jnp.int32))
    widths = tuple(width for width in (0, 4) if width < num_draft_tokens)  # a short match is not worth a wide window
    return Drafter(params, _init, _observe, bind(_draft, settings), num_draft_tokens, widths=widths)


def _is_pool(tokens: Any) -> bool:
    return getattr(tokens, "ndim", None) == 1 and np.issubdtype(tokens.dtype, np.integer)


def suffix_pool(size: int) -> Pool:
    """An empty pool of ``size`` tokens; a few thousand cost next to nothing beside a model.

    Raises:
      ValueError: not a whole number, 2 or more.
    """
    return Pool(jnp.full(whole("size", size, 2), SEPARATOR, jnp.int32))


def remember(pool: Pool, texts: Iterable[Sequence[int]]) -> Pool:
    """A pool that also holds ``texts`` (token ids, for instance `Generation.tokens`); the oldest make room.

    The pool given is not changed. A text longer than the pool keeps its end.

    Raises:
      ValueError: a text that is not a sequence of token ids.
    """
    if not isinstance(pool, Pool):
        raise ValueError(f"pool={show(pool)}: give specjax.drafters.suffix_pool(size)")
    if not isinstance(texts, Iterable):
        raise ValueError(f"texts={show(texts)}: give a list of texts, each a list of token ids")
    parts = [np.asarray(pool.tokens)]
    for row, text in enumerate(texts):
        parts += [_token_ids(row, text), np.asarray([SEPARATOR], np.int32)]
    return Pool(jnp.asarray(np.concatenate(parts)[-pool.tokens.shape[0] :]))


def _token_ids(row: int, text: Any) -> np.ndarray:
    try:
        ids = np.asarray(text)
    except ValueError:
        ids = np.zeros((1, 1))
    if ids.ndim != 1 or (ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 2**31)):
        raise ValueError(f"texts: text {row} is {show(text)}: give a list of texts, each a list of token ids")
    return ids.astype(np.int32)


def _init(params: PyTree, batch: int, capacity: int) -> tuple:
    return ()


def _observe(params: PyTree, state: tuple, committed: Committed) -> tuple:
    return state


def _draft(
    settings: _Settings, params: PyTree, keys: Array, state: tuple, text: Text, sampling: Sampling, n: int
) -> tuple[Proposal, tuple]:
    shelf = params.tokens if isinstance(params, Pool) else jnp.zeros(0, jnp.int32)
    found = _look_up(settings, shelf, text, sampling.eos_ids, n)
    return (_tree if settings.branching else _chain)(settings, found), state


def _look_up(settings: _Settings, shelf: Array, text: Text, eos_ids: Array, n: int) -> _Candidates:
    """The best `CANDIDATES` occurrences in pool and text, which lie side by side in one array [B, P + 1 + S]."""
    batch = text.tokens.shape[0]
    before = jnp.concatenate([shelf, jnp.full(1, SEPARATOR, jnp.int32)])
    size = before.shape[0]
    tokens = jnp.concatenate([jnp.broadcast_to(before[None], (batch, size)), text.tokens], axis=1)
    width, end = tokens.shape[1], size + text.lengths[:, None]
    slots = jnp.arange(width, dtype=jnp.int32)[None]
    match = _match_lengths(settings.max_match, tokens, size, end)
    score = jnp.where(match >= settings.min_match, match * width + slots, 0)  # longest, then most recent
    score, slot = lax.top_k(score, min(CANDIDATES, width))
    ahead = jnp.arange(n, dtype=jnp.int32)[None, None]
    period = (end - 1 - slot)[:, :, None]  # what follows up to the end of the text follows again
    own = (slot >= size)[:, :, None]
    follow = slot[:, :, None] + 1 + jnp.where(own, ahead % jnp.maximum(period, 1), ahead)
    after = jnp.take_along_axis(tokens[:, None], jnp.minimum(follow, width - 1), axis=2)
    ends = jnp.any(after[..., None] == eos_ids[None, None, None], axis=-1)
    behind = jnp.concatenate([jnp.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1)
    closed = jnp.cumsum((after == SEPARATOR) | behind, axis=2) > 0
    return _Candidates(score // width, after, (score > 0)[:, :, None] & ~closed)


def _match_lengths(longest: int, tokens: Array, size: int, end: Array) -> Array:
    """[B, W]: how many tokens up to this slot equal the last tokens of the text, which lies in slots ``size`` to ``end
    [B, 1]``, at most ``longest``; 0 at and past its last token, which would match itself."""
    edge = jnp.full((tokens.shape[0], 1), SEPARATOR, jnp.int32)

    def more(carry):  # matches are short as a rule: a few passes over the pool, not max_match
        return (carry[0] < longest) & jnp.any(carry[2])

    def compare(carry):
        back, run, alive, shifted = carry
        at = end - 1 - back
        last = jnp.where(at >= size, jnp.take_along_axis(tokens, jnp.maximum(at, 0), axis=1), NOTHING)
        alive = alive & (shifted == last)
        return back + 1, run + alive.astype(jnp.int32), alive, jnp.concatenate([edge, shifted[:, :-1]], axis=1)

    earlier = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < end - 1
    start = (jnp.int32(0), jnp.zeros(tokens.shape, jnp.int32), earlier, tokens)
    return lax.while_loop(more, compare, start)[1]


def _chain(settings: _Settings, found: _Candidates) -> Proposal:
    """Token by token, what most of the longest matches agree on; those that disagree with it fall away."""
    count, n = found.tokens.shape[1:]
    rank = jnp.arange(count, dtype=jnp.int32)[None]
    alive, tokens, valid = found.match > 0, [], []
    for depth in range(n):
        alive = alive & found.there[:, :, depth]
        match = jnp.where(alive, found.match, 0)
        best = jnp.max(match, axis=1, keepdims=True)
        leading = alive & (match == best)
        same = found.tokens[:, :, None, depth] == found.tokens[:, None, :, depth]
        votes = jnp.sum(same & leading[:, None], axis=2, dtype=jnp.int32)
        chosen = jnp.argmax(jnp.where(leading, votes * count - rank, -count), axis=1)
        token = jnp.take_along_axis(found.tokens[:, :, depth], chosen[:, None], axis=1)
        alive = alive & (found.tokens[:, :, depth] == token)
        valid.append((best > 0) & (depth < _reach(settings, best)))
        tokens.append(token)
    offered = jnp.cumsum(~jnp.concatenate(valid, axis=1), axis=1) == 0
    return Proposal(jnp.where(offered, jnp.concatenate(tokens, axis=1), 0), None, None, offered)


def _reach(settings: _Settings, match: Array) -> Array:
    """How many tokens a match of this length supports."""
    return jnp.maximum(jnp.floor(settings.factor * match.astype(jnp.float32)), 1.0).astype(jnp.int32)


def _tree(settings: _Settings, found: _Candidates) -> Proposal:
    """The trie of all continuations, cut to its n best supported nodes.

    A node's support falls from parent to child, so parents come before children and none is missing.
    """
    batch, count, n = found.tokens.shape
    depth = jnp.arange(1, n + 1, dtype=jnp.int32)[None, None]
    there = found.there & (depth <= _reach(settings, found.match)[:, :, None])
    same, first, alone = shared_beginnings(found.tokens, there)
    support = _support(found.match, same, depth)

    def flat(x):  # breadth first, so that a tie never puts a child before its parent
        return jnp.swapaxes(x, 1, 2).reshape(batch, n * count)

    score, node = lax.top_k(flat(jnp.where(alone, support, 0.0)), n)
    valid = score > 0
    rows = jnp.arange(batch)[:, None]
    order = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], (batch, n))
    place = jnp.full((batch, n * count), -1, jnp.int32).at[rows, node].set(order)
    level = node // count
    above = (level - 1) * count + first[rows, node % count, jnp.maximum(level - 1, 0)]
    parents = jnp.where(valid & (level > 0), place[rows, jnp.maximum(above, 0)], -1)
    return Proposal(jnp.where(valid, flat(found.tokens)[rows, node], 0), None, parents, valid)


def shared_beginnings(tokens: Array, there: Array) -> tuple[Array, Array, Array]:
    """Sequences as a trie: which of their tokens are one node.

    Args:
      tokens: [B, M, n] M sequences, the best first.
      there: [B, M, n] bool: the sequence has this token, and all before it.

    Returns:
      same [B, M, M, n]: two sequences agree up to this token; first [B, M, n]: the first sequence that agrees with
      this one so far, whose node stands for both; alone [B, M, n]: the token is there and is its own node.
    """
    same = (tokens[:, :, None] == tokens[:, None]) & there[:, :, None] & there[:, None]
    same = jnp.cumsum(~same, axis=3) == 0
    first = jnp.argmax(same, axis=2).astype(jnp.int32)
    return same, first, there & (first == jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :, None])


def _support(match: Array, same: Array, depth: Array) -> Array:
    """[B, M, n]: how likely the node is. A text that matched m tokens goes on to match with probability m / (m + 1),
    so d more with m / (m + d); occurrences that disagree share that by the square of their length."""
    length = match.astype(jnp.float32)
    weight = length**2
    agreeing = jnp.sum(jnp.where(same, weight[:, None, :, None], 0.0), axis=2)
    total = jnp.maximum(jnp.sum(weight, axis=1), 1.0)
    longest = jnp.max(jnp.where(same, length[:, None, :, None], 0.0), axis=2)
    return agreeing / total[:, None, None] * longest / (longest + depth.astype(jnp.float32))
