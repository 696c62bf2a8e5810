"""Next-token laws of the target, looked up by the last tokens, grown into a tree.

Luo et al., Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling,
arXiv 2408.08696 (2024): what the target said after every row it read, rejected nodes too, is kept and proposed when
the same tokens come again. Here contexts are two tokens, backing off to one; tables of a row are its own; tables
distilled from the target's own text fill in what the row has not seen; and what followed the last few tokens when they
occurred before (Saxena, Prompt Lookup Decoding, 2023) is mixed in. No network is run to draft.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from specjax import tree
from specjax.drafters.grow import Candidates, best_first
from specjax.drafters.tables import Law, Tables, check_table, empty, look_up, num_buckets, write
from specjax.models.language_model import LanguageModel
from specjax.static import bind, show, whole
from specjax.types import Array, Committed, Drafter, Proposal, PyTree, Sampling, Text

LONGEST = 4  # tokens of context that are compared to find what to copy
COPY_WEIGHTS = (0.0, 0.1, 0.3, 0.7, 0.7)  # of the copied token, by how many tokens matched


class Recycled(NamedTuple):
    """What a row has learned."""

    unigram: Array  # [B, buckets, ways, 1 + 2 C], see `specjax.drafters.tables`
    bigram: Array  # [B, buckets, ways, 2 + 2 C]
    recent: Array  # [B, 2] the last two committed tokens, -1 where there are none


class Settings(NamedTuple):
    """Static settings."""

    vocab_size: int
    candidates: int
    copy_weights: tuple[float, ...]
    min_prob: float


def recycling(
    vocab_size: int | LanguageModel, num_draft_tokens: int = 7, tables: Tables | None = None, *, candidates: int = 4,
    copy_weights: Sequence[float] = COPY_WEIGHTS, min_prob: float = 0.0,
    read_prompts: bool | None = None,
) -> Drafter:  # fmt: skip
    """Grows a tree of the likeliest continuations under laws the target was seen to have.

    The law of a node is that of the two tokens before it in the row's own table, else in ``tables``, else that of the
    one token before it, in the same order; mixed with the token that followed the longest earlier occurrence of the
    last 1 to 4 tokens. Nodes are functions of the text, hence point masses. Nothing is proposed below an end id.

    Args:
      vocab_size: of the target, or the target.
      num_draft_tokens: nodes of the tree, N.
      tables: laws summed over the target's own text, see `specjax.drafters.build_tables`; None: only what the row
        itself has shown.
      candidates: next tokens kept per context.
      copy_weights: weight of the copied token by the number of tokens that matched, 0 .. 4; the looked-up law gets
        the rest. All 0: nothing is copied.
      min_prob: nodes that are less likely to be reached, in the drafter's own eyes, are left out, and the target reads
        a narrower window where few are left. Each width is a program of its own. 0: the tree always has N nodes, if
        there are so many.
      read_prompts: learn what the target would have said after every token of the prompt, for which its head has to
        run over the whole prompt. None: only without tables, which make up for nearly all of it.

    Raises:
      ValueError: settings out of range, or tables of another vocabulary.
    """
    vocab_size = vocab_size.model.vocab_size if isinstance(vocab_size, LanguageModel) else vocab_size
    vocab_size = whole("vocab_size", vocab_size, 1, "; or give the target")
    num_draft_tokens = whole("num_draft_tokens", num_draft_tokens, 1, "; drafter=None decodes plainly")
    candidates = whole("candidates", candidates, 1)
    if candidates > vocab_size:
        raise ValueError(f"candidates={candidates}: the vocabulary has only {vocab_size} tokens")
    try:
        weights = tuple(float(weight) for weight in copy_weights)
    except (TypeError, ValueError, OverflowError):
        weights = ()
    if len(weights) != LONGEST + 1 or not all(0 <= weight <= 1 for weight in weights):
        raise ValueError(f"copy_weights={show(copy_weights)}: must be {LONGEST + 1} numbers from 0 to 1")
    if tables is not None and not isinstance(tables, Tables):
        raise ValueError(f"tables is a {type(tables).__name__}: give what build_tables or load_tables returned")
    if tables is not None and tables.vocab_size != vocab_size:
        raise ValueError(
            f"tables are of a vocabulary of {tables.vocab_size} tokens and the target has {vocab_size}: build tables "
            "from text of this target"
        )
    if tables is not None:
        check_table("tables", 1, tables.unigram, vocab_size)
        check_table("tables", 2, tables.bigram, vocab_size)
    if read_prompts not in (None, True, False):
        raise ValueError(f"read_prompts={show(read_prompts)}: give True, False, or None for the default")
    if isinstance(min_prob, bool) or not isinstance(min_prob, (int, float)) or not 0 <= min_prob < 1:
        raise ValueError(f"min_prob={show(min_prob)}: must be a number from 0 to below 1; 0.05 is usual")
    settings = Settings(vocab_size, candidates, weights, float(min_prob))
    return Drafter(
        params=() if tables is None else (jnp.asarray(tables.unigram), jnp.asarray(tables.bigram)),
        init=bind(_init, settings),
        observe=bind(_observe, settings),
        draft=bind(_draft, settings),
        num_draft_tokens=num_draft_tokens,
        widths=tuple(sorted({1, num_draft_tokens // 2} - {0, num_draft_tokens})) if min_prob else (),
        window_top=candidates,
        prompt_window=tables is None if read_prompts is None else bool(read_prompts),
        vocab_size=vocab_size,
    )


def _init(settings: Settings, params: PyTree, batch: int, capacity: int) -> Recycled:
    """A window of N nodes brings up to N + 1 new contexts, and a text few that are new: room for two per slot."""
    shape = settings.candidates, settings.vocab_size
    return Recycled(
        empty(batch, num_buckets(min(capacity, settings.vocab_size)), 1, *shape),
        empty(batch, num_buckets(2 * capacity), 2, *shape),
        jnp.full((batch, 2), -1, jnp.int32),
    )


def _observe(settings: Settings, params: PyTree, state: Recycled, committed: Committed) -> Recycled:
    """Writes the law of every row the target has read; remembers the last two tokens."""
    both = jnp.concatenate([state.recent, committed.tokens], axis=1)
    at = committed.count[:, None] + jnp.arange(2, dtype=jnp.int32)[None]
    recent = jnp.take_along_axis(both, at, axis=1)
    window = committed.window
    if window is None:
        return state._replace(recent=recent)
    batch, width = window.tokens.shape
    # The window of a round begins with the pending token, which has been observed; a prompt chunk behind it.
    pending = window.start < committed.start
    first = jnp.where(pending, state.recent[:, 0], state.recent[:, 1])[:, None]
    above = tree.broadcast_parents(window.parents, batch, width - 1) + 1
    before = jnp.concatenate([first, jnp.take_along_axis(window.tokens, above, axis=1)], axis=1)
    ids, probs = (x[:, :, : settings.candidates] for x in window.top)
    pairs = jnp.stack([before, window.tokens], axis=-1)
    return Recycled(
        write(state.unigram, window.tokens[:, :, None], ids, probs, window.valid),
        write(state.bigram, pairs, ids, probs, window.valid & (before >= 0)),
        recent,
    )


def _draft(
    settings: Settings, params: PyTree, keys: Array, state: Recycled, text: Text, sampling: Sampling, n: int
) -> tuple[Proposal, Recycled]:
    rows = jnp.arange(text.tokens.shape[0])
    back = text.lengths[:, None] - jnp.arange(LONGEST, 0, -1, dtype=jnp.int32)[None]
    tail = jnp.where(back >= 0, jnp.take_along_axis(text.tokens, jnp.maximum(back, 0), axis=1), -1)
    history = _history(text)

    def below(context):
        """Candidates after ``context [B, 4]``, the latest token last."""
        law = backoff(_laws(params, state, context, rows))
        copied, matched = _copied(text, history, context)
        weight = jnp.asarray(settings.copy_weights)[matched]
        ends = jnp.any(context[:, -1:] == sampling.eos_ids[None], axis=1)
        return mix([(law, jnp.where(ends, 0.0, 1.0 - weight)), (copied, jnp.where(ends, 0.0, weight))])

    chained = jnp.broadcast_to(jnp.arange(-1, LONGEST - 1, dtype=jnp.int32)[None], tail.shape)

    def expand(index, tokens, parents):
        line, above = (jnp.concatenate(x, axis=1) for x in ((tail, tokens), (chained, LONGEST + parents)))
        at, context = jnp.broadcast_to(LONGEST + index, rows.shape), []
        for _ in range(LONGEST):
            context.append(line[rows, at])
            at = above[rows, at]
        return below(jnp.stack(context[::-1], axis=1))

    least = math.log(settings.min_prob) if settings.min_prob else -math.inf
    tokens, parents, valid = best_first(below(tail), expand, n, least)
    return Proposal(tokens, None, parents, valid), state


def _laws(params: PyTree, state: Recycled, context: Array, rows: Array) -> list[Law]:
    """What is known about the next token, what to trust most first."""
    paired = context[:, -2:]
    laws = [look_up(state.bigram, paired, rows), look_up(state.unigram, paired[:, 1:], rows)]
    if params:
        unigram, bigram = params
        laws = [laws[0], look_up(bigram, paired), laws[1], look_up(unigram, paired[:, 1:])]
    return laws


def backoff(laws: Sequence[Law]) -> Law:
    """The first law of each row that is known; laws may keep different numbers of candidates."""
    widest = max(law.ids.shape[1] for law in laws)
    laws = [Law(*(jnp.pad(x, ((0, 0), (0, widest - x.shape[1]))) for x in law)) for law in laws]
    chosen = laws[-1]
    for law in laws[-2::-1]:
        known = law.probs[:, :1] > 0
        chosen = Law(jnp.where(known, law.ids, chosen.ids), jnp.where(known, law.probs, chosen.probs))
    return chosen


def mix(parts: Sequence[tuple[Law, Array]]) -> Candidates:
    """The mixture of laws with weights [B]: every candidate of every law, an id that is in several of them once."""
    ids = jnp.concatenate([law.ids for law, _ in parts], axis=1)
    mass = jnp.concatenate([law.probs * weight[:, None] for law, weight in parts], axis=1)
    same = ids[:, :, None] == ids[:, None, :]
    total = jnp.sum(jnp.where(same, mass[:, None, :], 0.0), axis=2)
    earlier = jnp.tri(ids.shape[1], k=-1, dtype=bool)[None]
    repeated = jnp.any(same & earlier, axis=2)
    return Candidates(ids, jnp.where(repeated, -jnp.inf, jnp.log(total)))


def _history(text: Text) -> list[Array]:
    """[B, S] per distance: the token that many slots before each slot; -2 at the start, and at and past the last
    token, after which nothing is known to follow."""
    slots = jnp.arange(text.tokens.shape[1], dtype=jnp.int32)[None]
    known = slots < text.lengths[:, None] - 1
    shifted = [jnp.roll(text.tokens, distance, axis=1) for distance in range(LONGEST)]
    return [jnp.where(known & (slots >= distance), tokens, -2) for distance, tokens in enumerate(shifted)]


def _copied(text: Text, history: list[Array], context: Array) -> tuple[Law, Array]:
    """What followed the longest earlier occurrence of the end of ``context [B, 4]``, the most recent one of equals,
    and how many tokens matched [B]."""
    slots = text.tokens.shape[1]
    alive, run = jnp.ones(text.tokens.shape, bool), jnp.zeros(text.tokens.shape, jnp.int32)
    for distance, tokens in enumerate(history):
        alive = alive & (tokens == context[:, LONGEST - 1 - distance, None])
        run = run + alive.astype(jnp.int32)
    best = jnp.max(run * slots + jnp.arange(slots, dtype=jnp.int32)[None], axis=1)
    follow = jnp.minimum(best % slots + 1, slots - 1)
    token = jnp.take_along_axis(text.tokens, follow[:, None], axis=1)
    return Law(token, jnp.ones(token.shape)), best // slots
