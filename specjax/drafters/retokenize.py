"""A small language model of another vocabulary drafts text; the target's tokenizer turns it into draft tokens.

Unlike `specjax.drafters.translate` it is not limited to tokens that both vocabularies have, and the draft model reads
the text as its own tokenizer splits it. Both need Python between the rounds, see `specjax.drafters.host`. What the
target verifies are token ids: encoding may split a text in any way without harm to what is emitted.

Timor et al., Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies,
arXiv 2502.05202 (2025), algorithm SLEM; here with a greedy draft, so proposals are point masses.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.drafters.host import Rows, host
from specjax.models.language_model import LanguageModel, checked
from specjax.noise import argmax
from specjax.static import show, weak, whole
from specjax.types import Array, Drafter, KVCache, Model, PyTree

_GRAIN = 256  # slots by which caches grow
_WINDOW = 32  # draft tokens read per pass
_ANCHOR = 8  # tokens before the new text that are encoded or decoded with it: its first piece depends on them


def retokenize(
    draft: LanguageModel, target: LanguageModel, num_draft_tokens: int = 8, *, num_own_tokens: int | None = None
) -> Drafter:
    """Drafts greedily with a model of another vocabulary, by way of text. The rounds are run from Python.

    A row whose text the draft model's context cannot hold, or that ends in part of a character, is decoded plainly
    until it can be drafted for again.

    Args:
      draft: the small model, with its tokenizer.
      target: the model it drafts for, with its tokenizer; its weights are not used.
      num_draft_tokens: most tokens of the target per round, N.
      num_own_tokens: tokens the draft model writes per round; default N.

    Raises:
      ValueError: a model without tokenizer, an argument that is no language model or no whole number.
    """
    draft, target = checked("draft", draft), checked("target", target)
    for name, lm in (("draft", draft), ("target", target)):
        if lm.tokenizer is None:
            raise ValueError(f"the {name} model has no tokenizer: drafts are exchanged as text")
        if not all(hasattr(lm.tokenizer, part) for part in ("pieces", "special_ids")):
            raise ValueError(f"the {name} model's tokenizer has no `pieces` and `special_ids`: {show(lm.tokenizer)}")
    num_draft_tokens = whole("num_draft_tokens", num_draft_tokens, 1, "; drafter=None decodes plainly")
    own = num_draft_tokens if num_own_tokens is None else whole("num_own_tokens", num_own_tokens, 1)
    return host(functools.partial(_Writer, draft, target, own), num_draft_tokens, vocab_size=target.model.vocab_size)


class _Writer:
    """One generation: what the draft model has read, row by row, and its cache."""

    def __init__(self, draft: LanguageModel, target: LanguageModel, num_own_tokens: int):
        self.draft, self.target, self.own = draft, target, num_own_tokens
        ours: Any = draft.tokenizer
        self.begins = ours.bos_id is not None and [*ours.encode("")][:1] == [ours.bos_id]
        self.ends = {*draft.eos_ids, *([] if ours.eos_id is None else [ours.eos_id])}
        self.common = {ours.pieces[token] for token in ours.special_ids}
        self.cache: KVCache | None = None
        self.slots = 0
        self.read: list[list[int]] = []  # what each row of the cache holds

    def __call__(self, rows: Rows) -> list[list[int]]:
        texts = [None if row is None else self._text(row) for row in rows]
        tokenizer: Any = self.draft.tokenizer
        ids = [None if text is None else [*tokenizer.encode(text)] for text in texts]
        context = self.draft.model.context_length
        longest = max((len(row) for row in ids if row), default=0) + self.own
        fits = [bool(row) and (context is None or len(row) + self.own <= context) for row in ids]
        if not any(fits):
            return [[] for _ in rows]
        own = self._write([row if fit else None for row, fit in zip(ids, fits, strict=True)], longest)
        return [
            self._proposal(row, before, new) if fit else []
            for row, before, new, fit in zip(rows, ids, own, fits, strict=True)
        ]

    def _text(self, tokens: list[int]) -> str | None:
        """The text of a row for the draft model; None while it ends in part of a character."""
        theirs: Any = self.target.tokenizer
        kept = [t for t in tokens if t not in theirs.special_ids or theirs.pieces[t] in self.common]
        if self.begins and kept[:1] == [theirs.bos_id]:
            kept = kept[1:]  # the draft's tokenizer writes its own
        text = theirs.decode(kept, skip_special_tokens=False)
        return None if text.endswith("\ufffd") or not (text or self.begins) else text

    def _write(self, ids: list[list[int] | None], longest: int) -> list[list[int]]:
        """The draft model's greedy continuation of every row."""
        net, params, batch = weak(self.draft.model), self.draft.params, len(ids)
        if self.cache is None or longest > self.slots:
            self.slots = _GRAIN << max(0, (-(-longest // _GRAIN) - 1).bit_length())
            self.cache = self.draft.model.init_cache(batch, self.slots)
            self.read = [[] for _ in ids]
        # What comes behind these many slots is written over; the last token is read again for its logits.
        known = [len(old) if new is None else _common(old, new[:-1]) for old, new in zip(self.read, ids, strict=True)]
        logits = jnp.zeros((batch, self.draft.model.vocab_size))
        cache, done = self.cache, list(known)
        while any(new is not None and at < len(new) for at, new in zip(done, ids, strict=True)):
            parts = [[] if new is None else new[at : at + _WINDOW] for at, new in zip(done, ids, strict=True)]
            tokens = np.zeros((batch, _WINDOW), np.int32)
            for row, part in enumerate(parts):
                tokens[row, : len(part)] = part
            count = np.asarray([*map(len, parts)], np.int32)
            cache, logits = _read(net, params, cache, np.asarray(done, np.int32), tokens, count, logits)
            done = [at + len(part) for at, part in zip(done, parts, strict=True)]
        self.cache, drafted = _continue(net, params, cache, np.asarray(done, np.int32), logits, n=self.own)
        own = jax.device_get(drafted).tolist()
        rows = zip(self.read, ids, own, strict=True)
        self.read = [old if new is None else [*new, *mine[:-1]] for old, new, mine in rows]
        return own

    def _proposal(self, row: list[int] | None, ids: list[int] | None, own: list[int]) -> list[int]:
        """Target tokens of the text that the draft model wrote behind a row."""
        assert row is not None and ids is not None
        ours: Any = self.draft.tokenizer
        theirs: Any = self.target.tokenizer
        end = next((i for i, token in enumerate(own) if token in self.ends or token >= len(ours.pieces)), None)
        end_id = -1 if theirs.eos_id is None else theirs.eos_id
        ended = end is not None and own[end] in self.ends and end_id >= 0
        own = own[:end]
        before = ours.decode(ids[-_ANCHOR:], skip_special_tokens=False)
        after = ours.decode(ids[-_ANCHOR:] + own, skip_special_tokens=False)
        new, broken, _ = after[len(before) :].partition("\ufffd")  # a character that is not complete
        if not after.startswith(before):
            return []
        anchor = theirs.decode(row[-_ANCHOR:], skip_special_tokens=False)
        proposal = _suffix(theirs, anchor + new, new) or _suffix(theirs, new, new)
        if ended and not broken and (proposal or not new):
            proposal.append(end_id)
        return proposal


def _suffix(tokenizer: Any, text: str, ending: str) -> list[int]:
    """The tokens of ``text`` that make up its ending; none if a token reaches across its start."""
    ids: list[int] = [*tokenizer.encode(text, add_special_tokens=False)] if ending else []
    start, size, data = len(ids), 0, ending.encode()
    while start and size < len(data):
        start -= 1
        size += len(tokenizer.pieces[ids[start]])
    return ids[start:] if b"".join(tokenizer.pieces[token] for token in ids[start:]) == data else []


def _common(old: list[int], new: list[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


@functools.partial(jax.jit, static_argnames=("net",), donate_argnames=("cache",))
def _read(
    net: Model, params: PyTree, cache: KVCache, lengths: Array, tokens: Array, count: Array, logits: Array
) -> tuple[KVCache, Array]:
    """Reads ``tokens [B, W]`` behind the first ``lengths [B]`` slots; logits after the last real one of each row."""
    positions = _inside(net, lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None])
    cache = cache._replace(lengths=lengths)
    out = net.apply(params, tokens, positions, None, cache, logits_at=jnp.maximum(count - 1, 0))
    return out.cache, jnp.where(count[:, None] > 0, out.logits[:, 0], logits)


@functools.partial(jax.jit, static_argnames=("net", "n"), donate_argnames=("cache",))
def _continue(
    net: Model, params: PyTree, cache: KVCache, lengths: Array, logits: Array, *, n: int
) -> tuple[KVCache, Array]:
    """Greedy continuation [B, n]."""
    def step(carry, depth):
        token, cache = carry
        out = net.apply(params, token[:, None], _inside(net, (lengths + depth)[:, None]), None, cache)
        token = argmax(out.logits[:, 0])
        return (token, out.cache._replace(lengths=cache.lengths + 1)), token

    first = argmax(logits)
    carry = (first, cache._replace(lengths=lengths))
    (_, cache), later = lax.scan(step, carry, jnp.arange(n - 1, dtype=jnp.int32))
    return cache, jnp.concatenate([first[:, None], later.T], axis=1)


def _inside(net: Model, positions: Array) -> Array:
    """Rows that are not drafted for may lie past the context; a table must not be read there."""
    return positions if net.context_length is None else jnp.minimum(positions, net.context_length - 1)
