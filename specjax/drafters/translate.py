"""A small language model drafts although its vocabulary is another one: token-level intersection.

Only tokens that mean the same in both vocabularies are ever proposed: q is the draft model's law restricted to them
and renormalised, a law over target ids like any other, so the accept rules stay exact whatever the overlap is. What
was committed is read by the draft model in its own spelling: every target token has a fixed sequence of draft tokens
with the same bytes, one for a shared token, several or none for others. The draft model therefore has lengths and
positions of its own.

Timor et al., Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies,
arXiv 2502.05202 (2025), algorithm TLI. The spelling of single tokens, instead of encoding the text again, is ours: it
runs inside jit and never revises what was read.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.drafters.checked import checked_pair
from specjax.models.language_model import LanguageModel
from specjax.noise import Role, argmax, at, gumbel, inverse_cdf, uniform
from specjax.static import bind
from specjax.types import Array, Committed, Drafter, KVCache, Model, Proposal, PyTree, Sampling, Sparse, Text
from specjax.warp import warp


class Vocabularies(NamedTuple):
    """How the tokens of a target and those of a draft model correspond."""

    target_ids: Array  # [M] int32 ascending, the shared tokens
    draft_ids: Array  # [M] int32, the same tokens in the draft vocabulary
    spelling: Array  # [L] int32 draft tokens of all target tokens, one after the other
    starts: Array  # [V + 1] int32, token v is spelled spelling[starts[v] : starts[v + 1]]
    begin: Array  # [] int32 target token that stands for the draft's begin token, -1 if none does

    @property
    def num_shared(self) -> int:
        """M: how many tokens the draft model can propose."""
        return self.target_ids.shape[0]


class _Params(NamedTuple):
    draft: PyTree
    vocabularies: Vocabularies


class _State(NamedTuple):
    cache: KVCache  # the committed text, pending token included, in the draft's spelling
    logits: Array  # [B, V'] after the pending token
    read: Array  # [B] draft tokens of the committed text; those past the last slot are counted, not kept


class _Settings(NamedTuple):
    target_size: int
    coupled: bool
    begin_id: int | None  # draft token that every text begins with
    slots_per_token: int


def translate(
    draft: LanguageModel, target: LanguageModel, num_draft_tokens: int = 4, *, coupled: bool = False,
    max_length: int | None = None,
) -> Drafter:
    """Drafts with a model of another vocabulary. For one of the same vocabulary `specjax.drafters.model` is cheaper.

    ``drafter.params.vocabularies.num_shared`` tells how many tokens the two have in common; the fewer of the text
    they cover, the less is accepted. A text whose draft spelling outgrows the draft's cache (two slots per target
    token) or context is decoded without drafts from there on.

    Args:
      draft: the small model, with its tokenizer.
      target: the model it drafts for, with its tokenizer; compared, not used.
      num_draft_tokens: chain length K.
      coupled: draw drafts with the noise the target will use (rule "match"), see `specjax.drafters.model`.
      max_length: longest text (prompt and output, in target tokens) that will be asked for; default the target's
        context.

    Raises:
      ValueError: a model without a tokenizer that tells the bytes of its tokens; two vocabularies without a common
        piece of text; a draft context shorter than max_length. An argument that is no language model or whole number.
    """
    draft, target, num_draft_tokens = checked_pair(draft, target, num_draft_tokens, coupled, max_length)
    vocabularies = compare(draft, target)
    settings = _Settings(
        target_size=target.model.vocab_size,
        coupled=coupled,
        begin_id=_begin_id(draft),
        slots_per_token=min(2, max(1, int(np.max(np.diff(vocabularies.starts))))),
    )
    return Drafter(
        params=_Params(draft.params, vocabularies),
        init=bind(_init, draft.model, settings),
        observe=bind(_observe, draft.model, settings),
        draft=bind(_draft, draft.model, settings),
        num_draft_tokens=num_draft_tokens,
        default_rule="match" if coupled else "rejection",
        context_length=draft.model.context_length,
        vocab_size=target.model.vocab_size,
    )


# --- vocabularies, on the host ------------------------------------------------------------------------------------


def compare(draft: LanguageModel, target: LanguageModel) -> Vocabularies:
    """The tokens two models share, and how every target token is spelled in draft tokens.

    Pieces of text are the same where their bytes are. Control tokens are the same where their strings are, and failing
    that the two end tokens and the two begin tokens are. Ids never matter, and ids past a tokenizer's end (rows that
    pad a model's vocabulary) are no tokens. Other target tokens are spelled with the fewest draft tokens of the same
    bytes; a control token without counterpart, or bytes that the draft cannot write, are left out.

    Raises:
      ValueError: see `translate`.
    """
    draft_index, target_index = _index("draft", draft), _index("target", target)
    shared = {token: draft_index[key] for key, token in target_index.items() if key in draft_index}
    if not any(key in draft_index for key in target_index if not key[0]):
        raise ValueError(
            f"draft and target have no piece of text in common ({draft.model.vocab_size} and "
            f"{target.model.vocab_size} tokens): nothing could be proposed; choose another draft model"
        )
    for role in ("eos_id", "bos_id"):
        ours: Any = getattr(target.tokenizer, role, None)
        theirs: Any = getattr(draft.tokenizer, role, None)
        inside = ours in target_index.values() and theirs in draft_index.values()
        if inside and ours not in shared and theirs not in shared.values():
            shared[ours] = theirs
    spelled = _spellings(draft_index, target, shared)
    begin = [token for token, theirs in shared.items() if theirs == getattr(draft.tokenizer, "bos_id", None)]
    target_ids = sorted(shared)
    return Vocabularies(
        target_ids=jnp.asarray(target_ids, jnp.int32),
        draft_ids=jnp.asarray([shared[token] for token in target_ids], jnp.int32),
        spelling=jnp.asarray([token for spelling in spelled for token in spelling], jnp.int32),
        starts=jnp.asarray(np.cumsum([0, *map(len, spelled)]), jnp.int32),
        begin=jnp.int32(begin[0] if begin else -1),
    )


def _index(name: str, lm: LanguageModel) -> dict[tuple[bool, bytes], int]:
    """(control token?, bytes) -> id. Of ids with equal bytes the last: those of byte fallback come first."""
    tokenizer: Any = lm.tokenizer
    if tokenizer is None or not all(hasattr(tokenizer, part) for part in ("pieces", "special_ids")):
        lacks = "no tokenizer" if tokenizer is None else "a tokenizer without `pieces` and `special_ids`"
        raise ValueError(f"the {name} model has {lacks}: vocabularies are compared by the bytes of their tokens")
    pieces = tokenizer.pieces[: lm.model.vocab_size]
    return {(token in tokenizer.special_ids, piece): token for token, piece in enumerate(pieces) if piece}


def _spellings(
    draft_index: dict[tuple[bool, bytes], int], target: LanguageModel, shared: dict[int, int]
) -> list[list[int]]:
    """Draft tokens of every target id."""
    tokenizer: Any = target.tokenizer
    writes = {piece: token for (special, piece), token in draft_index.items() if not special}
    longest = max(map(len, writes))
    spelled: list[list[int]] = [[] for _ in range(target.model.vocab_size)]
    for token, piece in enumerate(tokenizer.pieces[: target.model.vocab_size]):
        if token in shared:
            spelled[token] = [shared[token]]
        elif token not in tokenizer.special_ids:
            spelled[token] = _spell(piece, writes, longest)
    return spelled


def _spell(piece: bytes, writes: dict[bytes, int], longest: int) -> list[int]:
    """The fewest tokens that write ``piece``; none if none do."""
    best: list[list[int] | None] = [[], *[None] * len(piece)]  # of every beginning of the piece
    for end in range(1, len(piece) + 1):
        for start in range(max(0, end - longest), end):
            before, known, token = best[start], best[end], writes.get(piece[start:end])
            if before is not None and token is not None and (known is None or len(before) + 1 < len(known)):
                best[end] = [*before, token]
    return best[-1] or []


def _begin_id(draft: LanguageModel) -> int | None:
    """The begin token, if the draft's tokenizer puts it before every text."""
    tokenizer: Any = draft.tokenizer
    begin = getattr(tokenizer, "bos_id", None)
    return begin if begin is not None and [*tokenizer.encode("")][:1] == [begin] else None


# --- the drafter, in jit --------------------------------------------------------------------------------------------


def _init(net: Model, settings: _Settings, params: _Params, batch: int, capacity: int) -> _State:
    cache = net.init_cache(batch, capacity * settings.slots_per_token)
    state = _State(cache, jnp.zeros((batch, net.vocab_size)), jnp.zeros(batch, jnp.int32))
    if settings.begin_id is None:
        return state
    begin = jnp.full((batch, 1), settings.begin_id, jnp.int32)
    return _read(net, params.draft, state, begin, jnp.ones(batch, jnp.int32))


def _observe(net: Model, settings: _Settings, params: _Params, state: _State, committed: Committed) -> _State:
    """Spells the committed tokens and reads them, as many windows of the committed width as the longest row needs."""
    maps, tokens = params.vocabularies, committed.tokens
    width = tokens.shape[1]
    slots = jnp.arange(width, dtype=jnp.int32)[None]
    real = slots < committed.count[:, None]
    if settings.begin_id is not None:  # read already: it must not come twice
        real = real & ((committed.start[:, None] + slots > 0) | (tokens != maps.begin))
    sizes = jnp.where(real, maps.starts[tokens + 1] - maps.starts[tokens], 0)
    ends = jnp.cumsum(sizes, axis=1)
    total = ends[:, -1]

    def step(carry):
        done, state = carry
        place = done + slots  # of draft tokens in the spelling of what was committed
        index = jnp.minimum(jnp.sum(ends[:, None, :] <= place[:, :, None], axis=-1, dtype=jnp.int32), width - 1)
        inside = place - jnp.take_along_axis(ends - sizes, index, axis=1)
        first = maps.starts[jnp.take_along_axis(tokens, index, axis=1)]
        count = jnp.clip(total - done, 0, width)
        where = jnp.clip(first + inside, 0, max(0, maps.spelling.shape[0] - 1))
        return done + width, _read(net, params.draft, state, maps.spelling[where], count)

    return lax.while_loop(lambda carry: jnp.any(carry[0] < total), step, (jnp.int32(0), state))[1]


def _read(net: Model, params: PyTree, state: _State, tokens: Array, count: Array) -> _State:
    """Appends ``count [B]`` draft tokens to the rows."""
    positions = state.read[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    last = jnp.maximum(count - 1, 0)
    out = net.apply(params, tokens, _inside(net, positions), None, state.cache, logits_at=last)
    read = state.read + count
    cache = out.cache._replace(lengths=jnp.minimum(read, _slots(state.cache)))
    return _State(cache, jnp.where(count[:, None] > 0, out.logits[:, 0], state.logits), read)


def _draft(
    net: Model, settings: _Settings, params: _Params, keys: Array, state: _State, text: Text, sampling: Sampling, n: int
) -> tuple[Proposal, _State]:
    maps, pending_at = params.vocabularies, text.lengths - 1
    depths = jnp.arange(n, dtype=jnp.int32)
    noise = uniform(at(keys, Role.DRAFT, pending_at), (n, 2))

    def pick(logits, drafted, depth):
        seen = (depths < depth)[None, None]
        probs = warp(logits[:, maps.draft_ids][:, None], sampling, text, drafted, seen, maps.target_ids)[:, 0]
        if settings.coupled:
            target_noise = gumbel(keys, pending_at + depth + 1, settings.target_size)
            column = argmax(jnp.log(probs) + target_noise[:, maps.target_ids])
        else:
            column = inverse_cdf(probs, noise[:, depth])
        return column, probs, jnp.where((depths == depth)[None], maps.target_ids[column][:, None], drafted)

    def forward(carry, depth):
        column, drafted, cache = carry
        positions = _inside(net, (state.read + depth - 1)[:, None])
        out = net.apply(params.draft, maps.draft_ids[column][:, None], positions, None, cache)
        column, probs, drafted = pick(out.logits[:, 0], drafted, depth)
        return (column, drafted, out.cache._replace(lengths=cache.lengths + 1)), probs

    column, probs, drafted = pick(state.logits, jnp.zeros((keys.shape[0], n), jnp.int32), jnp.int32(0))
    (_, drafted, cache), later = lax.scan(forward, (column, drafted, state.cache), depths[1:])
    laws = jnp.concatenate([probs[:, None], jnp.swapaxes(later, 0, 1)], axis=1)
    length = state.read[:, None] + depths[None]  # what the draft has read when it proposes
    longest = _slots(state.cache) if net.context_length is None else min(_slots(state.cache), net.context_length)
    valid = (state.read > 0)[:, None] & (length <= longest)
    law = None if settings.coupled else Sparse(maps.target_ids, laws)
    return Proposal(drafted, law, None, valid), state._replace(cache=cache._replace(lengths=state.cache.lengths))


def _slots(cache: KVCache) -> int:
    """How many tokens a row of the cache can hold; no end for a model that keeps none."""
    leaves = jax.tree.leaves(cache.k)
    return leaves[0].shape[-2] if leaves else 2**30


def _inside(net: Model, positions: Array) -> Array:
    """Positions past the context are never drafted from; they must not index past a table."""
    return positions if net.context_length is None else jnp.minimum(positions, net.context_length - 1)
