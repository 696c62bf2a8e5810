"""A small language model drafts a chain, token by token, under the same warp as the target.

Leviathan et al., arXiv 2211.17192 (2023); Chen et al., arXiv 2302.01318 (2023); coupled drafts: Daliri et al.,
arXiv 2408.07978 (2024).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from specjax.drafters.checked import checked_pair
from specjax.models.language_model import LanguageModel
from specjax.noise import Role, at, inverse_cdf, target_draw, uniform
from specjax.static import bind
from specjax.types import Array, Committed, Drafter, KVCache, Model, Proposal, PyTree, Sampling, Text
from specjax.warp import warp

_REMEDY = "specjax.drafters.translate(draft, target) drafts across vocabularies"


class _State(NamedTuple):
    cache: KVCache  # every committed token, the pending one included
    logits: Array  # [B, V] after the pending token


def model(
    draft: LanguageModel, target: LanguageModel, num_draft_tokens: int = 4, *, coupled: bool = False,
    max_length: int | None = None,
) -> Drafter:
    """Drafts with another model of the same vocabulary.

    Args:
      draft: the small model.
      target: the model it drafts for; compared, not used.
      num_draft_tokens: chain length K.
      coupled: draw drafts with the noise the target will use (rule "match"): the text stays that of plain decoding
        with the same seed, and more of it is accepted. Proposals are then a function of context and noise, so they
        are point masses.
      max_length: longest text (prompt and output) that will be asked for; default the target's context.

    Raises:
      ValueError: different vocabularies or tokenizers, or a draft context shorter than max_length; names both facts.
        An argument that is no language model, or no whole number.
    """
    draft, target, num_draft_tokens = checked_pair(draft, target, num_draft_tokens, coupled, max_length)
    if draft.model.vocab_size != target.model.vocab_size:
        raise ValueError(
            f"the draft model has {draft.model.vocab_size} tokens and the target {target.model.vocab_size}: "
            f"both must have the same vocabulary; {_REMEDY}"
        )
    if draft.tokenizer is not None and target.tokenizer is not None:
        difference = draft.tokenizer.difference(target.tokenizer)
        if difference:
            raise ValueError(
                f"draft and target tokenizers differ ({difference}): both must have the same vocabulary; {_REMEDY}"
            )
    return Drafter(
        params=draft.params,
        init=bind(_init, draft.model),
        observe=bind(_observe, draft.model),
        draft=bind(_draft, draft.model, coupled),
        num_draft_tokens=num_draft_tokens,
        default_rule="match" if coupled else "rejection",
        context_length=draft.model.context_length,
        vocab_size=target.model.vocab_size,
    )


def _init(net: Model, params: PyTree, batch: int, capacity: int) -> _State:
    return _State(net.init_cache(batch, capacity), jnp.zeros((batch, net.vocab_size)))


def _observe(net: Model, params: PyTree, state: _State, committed: Committed) -> _State:
    """Reads the committed tokens; the logits after the pending one open the next draft."""
    positions = committed.start[:, None] + jnp.arange(committed.tokens.shape[1], dtype=jnp.int32)[None]
    last = jnp.maximum(committed.count - 1, 0)
    out = net.apply(params, committed.tokens, _inside(net, positions), None, state.cache, logits_at=last)
    cache = out.cache._replace(lengths=state.cache.lengths + committed.count)
    return _State(cache, jnp.where(committed.count[:, None] > 0, out.logits[:, 0], state.logits))


def _draft(
    net: Model, coupled: bool, params: PyTree, keys: Array, state: _State, text: Text, sampling: Sampling, n: int
) -> tuple[Proposal, _State]:
    pending_at = text.lengths - 1
    depths = jnp.arange(n, dtype=jnp.int32)
    noise = uniform(at(keys, Role.DRAFT, pending_at), (n, 2))

    def pick(logits, drafted, depth):
        seen = (depths < depth)[None, None]
        probs = warp(logits[:, None], sampling, text, drafted, seen)[:, 0]
        if coupled:
            token = target_draw(keys, pending_at + depth + 1, probs)
        else:
            token = inverse_cdf(probs, noise[:, depth])
        return token, probs, jnp.where((depths == depth)[None], token[:, None], drafted)

    def forward(carry, depth):
        token, drafted, cache = carry
        positions = _inside(net, (pending_at + depth)[:, None])
        out = net.apply(params, token[:, None], positions, None, cache)
        token, probs, drafted = pick(out.logits[:, 0], drafted, depth)
        cache = out.cache._replace(lengths=cache.lengths + 1)
        return (token, drafted, cache), (token, probs)

    drafted = jnp.zeros((keys.shape[0], n), jnp.int32)
    token, probs, drafted = pick(state.logits, drafted, jnp.int32(0))
    (_, drafted, cache), (_, later) = lax.scan(forward, (token, drafted, state.cache), depths[1:])
    laws = jnp.concatenate([probs[:, None], jnp.swapaxes(later, 0, 1)], axis=1)
    valid = jnp.ones((keys.shape[0], n), bool)
    if net.context_length is not None:
        valid = (pending_at[:, None] + 1 + depths[None]) < net.context_length
    proposal = Proposal(drafted, None if coupled else laws, None, valid)
    return proposal, state._replace(cache=cache._replace(lengths=state.cache.lengths))


def _inside(net: Model, positions: Array) -> Array:
    """Positions past the context belong to tokens that can never be committed; they must not index past a table."""
    return positions if net.context_length is None else jnp.minimum(positions, net.context_length - 1)
