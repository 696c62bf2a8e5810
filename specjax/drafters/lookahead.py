"""Lookahead decoding: the target itself guesses far ahead in every round, and n-grams of its guesses become drafts.

Fu, Bailis, Stoica, Zhang, Break the Sequential Dependency of LLM Inference Using Lookahead Decoding, arXiv 2402.02057
(2024). Below the pending token hang, beside the candidates that are judged, ``width`` columns of ``ngram`` - 1 guesses
that are not (valid=False): a Jacobi iteration. What the target says after the last level of a column goes under the
column, the first level falls off the top, and the whole column with its new end is an n-gram for the row's pool.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import tree
from specjax.drafters.suffix import shared_beginnings
from specjax.static import bind, show, whole
from specjax.types import Array, Committed, Drafter, Proposal, PyTree, Sampling, Text, Window

EMPTY = -1  # no token


class _Settings(NamedTuple):
    width: int  # W
    levels: int  # ngram - 1
    candidates: int  # G
    keys: int  # K
    text: bool

    @property
    def judged(self) -> int:
        """Nodes of the candidates; those of the guesses come behind them."""
        return self.candidates * self.levels


class _Pool(NamedTuple):
    """What followed a first token, newest first. A first token has one bucket, which it may lose to another."""

    owner: Array  # [B, K] the first token, EMPTY if none
    rest: Array  # [B, K, G, n - 1]


class _State(NamedTuple):
    pool: _Pool
    guesses: Array  # [B, levels, W]: level l of column j stands for the token j + l + 1 after the pending one
    age: Array  # [B] Jacobi steps so far
    tail: Array  # [B, n - 1] the last committed tokens, EMPTY before the first


def lookahead(
    *, width: int = 5, ngram: int = 4, candidates: int = 4, keys: int = 1024, text: bool = True
) -> Drafter:
    """Drafts n-grams that the target guessed in parallel, or said before, and that begin with the pending token.

    No model, no training. Every window holds (ngram - 1) * (width + candidates) nodes, `num_draft_tokens`, whether
    they are judged or not: this pays where a wide window costs little more than a narrow one.

    Args:
      width: columns of guesses, W.
      ngram: tokens of an n-gram, the first one is matched: drafts are ngram - 1 long.
      candidates: n-grams kept for a first token, and judged at once, G.
      keys: first tokens the pool has room for.
      text: also learn n-grams from the prompt and the output.

    Raises:
      ValueError: not whole numbers, or too small.
    """
    settings = _Settings(
        whole("width", width, 1), whole("ngram", ngram, 2, "; the first token is matched, not drafted") - 1,
        whole("candidates", candidates, 1), whole("keys", keys, 1), text,
    )  # fmt: skip
    if not isinstance(text, bool):
        raise ValueError(f"text={show(text)}: must be True or False")
    return Drafter(
        params=(),
        init=bind(_init, settings),
        observe=bind(_observe, settings),
        draft=bind(_draft, settings),
        num_draft_tokens=settings.judged + settings.levels * settings.width,
        window_top=1,
        prompt_window=False,  # guesses begin with the first round
    )


def _init(settings: _Settings, params: PyTree, batch: int, capacity: int) -> _State:
    pool = _Pool(
        jnp.full((batch, settings.keys), EMPTY, jnp.int32),
        jnp.full((batch, settings.keys, settings.candidates, settings.levels), EMPTY, jnp.int32),
    )
    guesses = jnp.zeros((batch, settings.levels, settings.width), jnp.int32)
    return _State(pool, guesses, jnp.zeros(batch, jnp.int32), jnp.full((batch, settings.levels), EMPTY, jnp.int32))


def _observe(settings: _Settings, params: PyTree, state: _State, committed: Committed) -> _State:
    state = _jacobi(settings, state, committed)
    line = jnp.concatenate([state.tail, committed.tokens], axis=1)
    ahead = jnp.arange(settings.levels, dtype=jnp.int32)[None]
    tail = jnp.take_along_axis(line, committed.count[:, None] + ahead, axis=1)
    if not settings.text:
        return state._replace(tail=tail)
    places = np.arange(committed.tokens.shape[1])[:, None] + np.arange(settings.levels + 1)[None]
    grams = line[:, places]  # those that end with each committed token
    real = (jnp.arange(grams.shape[1])[None] < committed.count[:, None]) & (grams[:, :, 0] != EMPTY)
    return state._replace(pool=_learn(settings, state.pool, grams, real), tail=tail)


def _jacobi(settings: _Settings, state: _State, committed: Committed) -> _State:
    """One step of the guesses, in rows whose guesses the target has just read; elsewhere they only move along."""
    count, window = committed.count, committed.window
    start = 1 + settings.judged
    end = start + settings.levels * settings.width
    if window is None or window.parents is None or window.tokens.shape[1] < end:  # prefill, or no room for guesses
        return state._replace(guesses=_moved(state.guesses, count))
    flat = state.guesses.reshape(count.shape[0], -1)
    read = (count > 0) & jnp.all(window.tokens[:, start:end] == flat, axis=1)
    columns = jnp.concatenate([state.guesses, _last_answers(settings, window, end)], axis=1)  # [B, n, W]
    guesses = jnp.where(read[:, None, None], columns[:, 1:], state.guesses)
    # The level below is one token further on already, which makes up for one committed token.
    guesses = _moved(guesses, jnp.where(read, count - 1, count))
    # A column is all the target's own, but for its first token, after levels - 1 steps.
    ripe = jnp.broadcast_to((read & (state.age >= settings.levels - 1))[:, None], (count.shape[0], settings.width))
    pool = _learn(settings, state.pool, jnp.swapaxes(columns, 1, 2), ripe)
    return state._replace(pool=pool, guesses=guesses, age=state.age + read.astype(jnp.int32))


def _last_answers(settings: _Settings, window: Window, end: int) -> Array:
    """[B, 1, W]: the likeliest token after the last level of each column."""
    return window.top.ids[:, end - settings.width : end, 0][:, None].astype(jnp.int32)


def _moved(guesses: Array, count: Array) -> Array:
    """Columns moved ``count [B]`` to the left; those that fall off come back at the end, as good as any."""
    width = guesses.shape[2]
    columns = (jnp.arange(width, dtype=jnp.int32)[None] + count[:, None]) % width
    return jnp.take_along_axis(guesses, columns[:, None], axis=2)


def _learn(settings: _Settings, pool: _Pool, grams: Array, real: Array) -> _Pool:
    """Puts n-grams [B, M, n] into the pool where ``real [B, M]``, the last ones on top."""
    rows = jnp.arange(grams.shape[0])
    order = jnp.arange(settings.candidates, dtype=jnp.int32)[None]

    def put(i, pool):
        key, rest = grams[:, i, 0], grams[:, i, 1:]
        kept = _bucket(settings, pool, key)
        known = jnp.all(kept == rest[:, None], axis=2)
        leaves = jnp.where(jnp.any(known, axis=1), jnp.argmax(known, axis=1), settings.candidates - 1)
        pushed = jnp.concatenate([rest[:, None], kept[:, :-1]], axis=1)
        kept = jnp.where((order <= leaves[:, None])[:, :, None], pushed, kept)
        where = jnp.where(real[:, i], key % settings.keys, settings.keys)  # past the end: dropped
        owner = pool.owner.at[rows, where].set(key, mode="drop")
        return _Pool(owner, pool.rest.at[rows, where].set(kept, mode="drop"))

    return lax.fori_loop(0, grams.shape[1], put, pool)


def _bucket(settings: _Settings, pool: _Pool, key: Array) -> Array:
    """[B, G, n - 1]: what followed ``key [B]``."""
    rows, slot = jnp.arange(key.shape[0]), key % settings.keys
    return jnp.where((pool.owner[rows, slot] == key)[:, None, None], pool.rest[rows, slot], EMPTY)


def _draft(
    settings: _Settings, params: PyTree, keys: Array, state: _State, text: Text, sampling: Sampling, n: int
) -> tuple[Proposal, _State]:
    batch = text.lengths.shape[0]
    state = state._replace(guesses=jnp.where((state.age > 0)[:, None, None], state.guesses, _seeds(settings, text)))
    pending = jnp.take_along_axis(text.tokens, text.lengths[:, None] - 1, axis=1)[:, 0]
    tokens, parents, valid = _candidates(settings, _bucket(settings, state.pool, pending), sampling.eos_ids)
    guesses = state.guesses.reshape(batch, -1)
    comb = tree.comb(settings.levels, settings.width)
    comb = jnp.broadcast_to(jnp.asarray(np.where(comb < 0, -1, comb + settings.judged))[None], guesses.shape)
    tokens = jnp.concatenate([tokens, guesses], axis=1)[:, :n]
    parents = jnp.concatenate([parents, comb], axis=1)[:, :n]
    valid = jnp.concatenate([valid, jnp.zeros(guesses.shape, bool)], axis=1)[:, :n]
    return Proposal(tokens, None, parents, valid), state


def _seeds(settings: _Settings, text: Text) -> Array:
    """Tokens of the text to begin with, scattered over it: [B, levels, W]."""
    places = jnp.arange(settings.levels * settings.width, dtype=jnp.int32)[None] * 7 % text.lengths[:, None]
    seeds = jnp.take_along_axis(text.tokens, places, axis=1)
    return seeds.reshape(-1, settings.levels, settings.width)


def _candidates(settings: _Settings, rest: Array, eos_ids: Array) -> tuple[Array, Array, Array]:
    """Tokens, parents and validity [B, G * (n - 1)]: one branch after the other, what two share in the earlier."""
    batch = rest.shape[0]
    ends = jnp.any(rest[..., None] == eos_ids[None, None, None], axis=-1) | (rest == EMPTY)
    before = jnp.concatenate([jnp.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1)
    there = (rest != EMPTY) & (jnp.cumsum(before, axis=-1) == 0)
    _, first, alone = shared_beginnings(rest, there)
    level = jnp.arange(settings.levels, dtype=jnp.int32)[None, None]
    above = jnp.concatenate([jnp.zeros_like(first[..., :1]), first[..., :-1]], axis=-1) * settings.levels + level - 1
    parents = jnp.where(alone & (level > 0), above, -1)
    return jnp.where(alone, rest, 0).reshape(batch, -1), parents.reshape(batch, -1), alone.reshape(batch, -1)
