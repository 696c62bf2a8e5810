"""A small world for behaviour tests: a toy tokenizer, tiny language models that share it, drivers for single rounds.

Every model is built from equal hashable parts, so all tests of a process share compiled programs.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import LanguageModel, State, drafters
from specjax.static import bind
from specjax.types import Drafter, KVCache, Model, ModelOutput, Proposal, Sampling, Text
from tests.doubles import _init, _observe, hash_lm, scripted
from tests.oracle.hashlm import HashConfig

CAPACITY, CHUNK = 64, 8


# --- a tokenizer whose pieces may be parts of characters

PIECES = (
    b"<s>", b"</s>", b"a", b"b", b"ab", b" ", b"c", b"\xc3", b"\xa9", b"\xe2\x82\xac", b"\xe2", b"\x82", b"\xac",
    b"d", b"e", b"\n",
)  # fmt: skip
BOS, EOS = 0, 1
V = len(PIECES)


class ToyTokenizer:
    """Bytes pieces; "é" takes two tokens, "€" one or three."""

    def __init__(self, pieces: Sequence[bytes] = PIECES, bos_id: int | None = BOS):
        self.pieces, self.bos_id, self.eos_id = tuple(pieces), bos_id, EOS

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            ids.append(max((i for i, p in enumerate(self.pieces) if data.startswith(p)), key=self._length))
            data = data[self._length(ids[-1]) :]
        return ids

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        kept = [self.pieces[i] for i in ids if not (skip_special_tokens and i in (BOS, EOS))]
        return b"".join(kept).decode("utf-8", errors="replace")

    def difference(self, other: "ToyTokenizer") -> str | None:
        if self.pieces == other.pieces:
            return None
        where = next(i for i, (a, b) in enumerate(zip(self.pieces, other.pieces)) if a != b)
        return f"id {where} is {self.pieces[where]!r} and {other.pieces[where]!r}"

    def _length(self, token: int) -> int:
        return len(self.pieces[token])


# --- language models


@functools.cache
def target() -> LanguageModel:
    """A target whose logits depend on every token and position before, through its cache. No end ids."""
    return LanguageModel(*hash_lm(HashConfig(V), seed=1), ToyTokenizer())


@functools.cache
def close() -> LanguageModel:
    """A draft model that often agrees with `target` and never quite."""
    lm = target()
    rng = np.random.default_rng(5)
    params = {k: x + jnp.asarray(0.12 * x.std() * rng.normal(size=x.shape), x.dtype) for k, x in lm.params.items()}
    return lm._replace(params=params)


def position_lm(logits, tokenizer: Any = None, context_length: int | None = None) -> LanguageModel:
    """A model whose logits are a table [S, V] by position: after position i, row i. Greedy text can be dictated."""
    logits = jnp.asarray(logits, jnp.float32)
    model = Model(_no_cache, _position_apply, logits.shape[1], context_length)
    return LanguageModel(model, logits, tokenizer)


def _no_cache(batch: int, capacity: int) -> KVCache:
    return KVCache((), (), jnp.zeros(batch, jnp.int32))


def _position_apply(params, tokens, positions, window_mask, cache, *, feature_layers=(), logits_at=None):
    if logits_at is not None:
        positions = jnp.take_along_axis(positions, logits_at[:, None], axis=1)
    return ModelOutput(params[positions], jnp.zeros((*tokens.shape, 0)), cache)


def dictated(text: Sequence[int], vocab_size: int, size: int = CAPACITY, sharpness: float = 20.0) -> np.ndarray:
    """Logits for `position_lm` under which ``text`` (by absolute position, the prompt's included) is near certain."""
    logits = np.zeros((size, vocab_size), np.float32)
    logits[np.arange(len(text) - 1), list(text[1:])] = sharpness
    return logits


def table_positions_lm(config: HashConfig, context_length: int) -> LanguageModel:
    """A `hash_lm` that looks its positions up in a table of ``context_length`` entries; past its end lies NaN."""
    model, params = hash_lm(config)
    apply = bind(_looked_up, model.apply)
    params = {"net": params, "positions": jnp.arange(context_length, dtype=jnp.float32)}
    return LanguageModel(Model(model.init_cache, apply, config.vocab_size, context_length), params)


def _looked_up(apply, params, tokens, positions, *args, **kwargs):
    found = jnp.take(params["positions"], positions, mode="fill", fill_value=jnp.nan)
    return apply(params["net"], tokens, found, *args, **kwargs)


# --- drafter doubles beyond those of tests.doubles


def oracle(tokens, num_draft_tokens: int, vocab_size: int = V, **how) -> Drafter:
    """Always right where ``tokens [S] or [B, S]`` is what the target says, see `tests.doubles.scripted`."""
    return scripted(tokens, vocab_size, num_draft_tokens, **how)


class _TreeScript(NamedTuple):
    tokens: Any  # [B, S] right continuation by position
    shift: Any  # [B, N] added to the right token of each node, modulo V; 0 is right


def tree_scripted(tokens, parents: Sequence[int], shift, vocab_size: int = V) -> Drafter:
    """A tree whose node at depth d proposes the token of position pending + d, shifted where ``shift [B, N]`` says."""
    params = _TreeScript(jnp.asarray(tokens, jnp.int32), jnp.asarray(shift, jnp.int32))
    return Drafter(params, bind(_init), bind(_observe), bind(_tree_draft, tuple(parents), vocab_size), len(parents))


def _tree_draft(parents, vocab, params, keys, state, text, sampling, n):
    depth = []
    for parent in parents[:n]:
        depth.append(1 + (depth[parent] if parent >= 0 else 0))
    ahead = jnp.minimum(text.lengths[:, None] - 1 + jnp.asarray(depth, jnp.int32)[None], params.tokens.shape[1] - 1)
    tokens = (jnp.take_along_axis(params.tokens, ahead, axis=1) + params.shift[:, :n]) % vocab
    return Proposal(tokens, None, np.asarray(parents[:n], np.int32), jnp.ones(tokens.shape, bool)), state


def flipped(inner: Drafter, slot, vocab_size: int = V) -> Drafter:
    """``inner`` drafts, and its greedy proposal is spoilt at slot[b] (none if negative): acceptances are dictated."""
    params = (inner.params, jnp.asarray(slot, jnp.int32))
    return inner._replace(
        params=params, init=bind(_of_inner, inner.init), observe=bind(_of_inner, inner.observe),
        draft=bind(_flipped_draft, inner.draft, vocab_size), default_rule="match",
    )  # fmt: skip


def _of_inner(fn, params, *args):
    return fn(params[0], *args)


def _flipped_draft(draft, vocab, params, keys, state, text, sampling, n):
    proposal, state = draft(params[0], keys, state, text, sampling, n)
    spoilt = jnp.arange(n)[None] == params[1][:, None]
    tokens = jnp.where(spoilt, (proposal.tokens + 1) % vocab, proposal.tokens)
    return proposal._replace(tokens=tokens, probs=None), state


# --- requests

PROMPTS = [
    [2, 5, 13, 2, 5, 4, 9], [3], [6, 6, 2], [1], [8, 9, 8, 9, 8], [4, 4, 4, 4, 4, 4, 4, 4, 4], [0, 12, 7], [10, 2],
]  # fmt: skip
BUDGET = 40


def draft_source(name: str, k: int) -> specjax.Drafter | None:
    """Drafters by name; those of the same name and k are equal, so they share compiled programs."""
    return {
        "none": lambda: None,
        "ngram": lambda: drafters.ngram(k, max_ngram=3, min_ngram=1),
        "close": lambda: drafters.model(close(), target(), k),
        "self": lambda: drafters.model(target(), target(), k),
        "coupled": lambda: drafters.model(close(), target(), k, coupled=True),
        "self-coupled": lambda: drafters.model(target(), target(), k, coupled=True),
    }[name]()


def run(name="none", k=3, prompts=None, *, rule="match", max_new_tokens=BUDGET, **options) -> specjax.Generation:
    prompts = PROMPTS if prompts is None else prompts
    drafter = draft_source(name, k)
    return specjax.generate(target(), prompts, drafter=drafter, rule=rule, max_new_tokens=max_new_tokens, **options)


# --- rounds one at a time, through the public functions


def padded(prompts: Sequence[Sequence[int]], capacity: int = CAPACITY, fill: int = 0) -> Text:
    tokens = np.full((len(prompts), capacity), fill, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    return Text(jnp.asarray(tokens), lengths, lengths)


def begin(lm: LanguageModel, prompts, drafter: Drafter | None = None, *, chunk=CHUNK, seeds=None, text=None) -> State:
    """The state after prefill."""
    drafter = specjax.plain() if drafter is None else drafter
    text = padded(prompts) if text is None else text
    keys = specjax.row_keys(range(len(prompts)) if seeds is None else seeds)
    return _prefill(lm.model, drafter._replace(params=()), chunk, lm.params, drafter.params, text, keys)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _prefill(model, drafter, chunk, params, drafter_params, text, keys):
    return specjax.prefill(model, params, drafter._replace(params=drafter_params), text, keys, chunk=chunk)


def advance(
    lm: LanguageModel, drafter: Drafter | None, state: State, *, n: int | None = None, rule: str = "match",
    sampling: Sampling | None = None, budget=1000,
) -> tuple[State, specjax.Round]:  # fmt: skip
    """One round."""
    drafter = specjax.plain() if drafter is None else drafter
    batch = state.finish.shape[0]
    sampling = specjax.make_sampling(batch, lm.model.vocab_size) if sampling is None else sampling
    limits = specjax.no_limits(budget, batch)
    static = lm.model, drafter._replace(params=()), rule, n
    return _round(*static, lm.params, drafter.params, state, sampling, limits)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _round(model, drafter, rule, n, params, drafter_params, state, sampling, limits):
    drafter = drafter._replace(params=drafter_params)
    return specjax.round(model, params, drafter, rule, state, sampling, limits, num_draft_tokens=n)


def emitted(state: State) -> list[list[int]]:
    """Generated tokens of each row."""
    text = jax.device_get(state.text)
    rows = zip(text.tokens, text.prompt_lengths, text.lengths, strict=True)
    return [tokens[start:end].tolist() for tokens, start, end in rows]


@functools.partial(jax.jit, static_argnums=0)
def _reread(model, params, tokens):
    batch, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (batch, width))
    return model.apply(params, tokens, positions, None, model.init_cache(batch, width))


def logits_of(model: Model, params, tokens) -> jax.Array:
    """[B, S, V]: whole texts in one pass."""
    return _reread(model, params, tokens).logits


def assert_cache_is_fresh(model: Model, params, cache: KVCache, text: Text, lengths) -> None:
    """The first ``lengths [B]`` slots are what one pass over the text writes; and ``cache.lengths`` says so."""
    np.testing.assert_array_equal(cache.lengths, lengths)
    fresh = _reread(model, params, text.tokens).cache
    real = np.arange(text.tokens.shape[1])[None, None, :, None] < np.asarray(lengths)[:, None, None, None]
    for kept, read in zip(jax.tree.leaves((cache.k, cache.v)), jax.tree.leaves((fresh.k, fresh.v)), strict=True):
        np.testing.assert_allclose(np.where(real, kept, 0), np.where(real, read, 0), atol=1e-5)


def assert_invariants(lm: LanguageModel, state: State, before: State | None = None, draft=None) -> None:
    """What holds after every round; ``draft`` is that of a model drafter, whose cache holds the pending token too."""
    lengths = np.asarray(state.text.lengths)
    assert_cache_is_fresh(lm.model, lm.params, state.cache, state.text, lengths - 1)
    if draft is not None:
        assert_cache_is_fresh(draft.model, draft.params, state.drafter.cache, state.text, lengths)
    if before is not None:
        committed = np.arange(state.text.tokens.shape[1])[None] < np.asarray(before.text.lengths)[:, None]
        np.testing.assert_array_equal(
            np.where(committed, state.text.tokens, 0), np.where(committed, before.text.tokens, 0)
        )
        assert (lengths >= np.asarray(before.text.lengths)).all()
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), before)


def poisoned(cache: KVCache) -> KVCache:
    """NaN in every slot that holds nothing."""
    def poison(layer):
        unused = jnp.arange(layer.shape[2])[None, None, :, None] >= cache.lengths[:, None, None, None]
        return jnp.where(unused, jnp.nan, layer)

    return cache._replace(k=jax.tree.map(poison, cache.k), v=jax.tree.map(poison, cache.v))


def shares_memory(a: Any, b: Any) -> bool:
    """Whether any buffer of one tree is also in the other."""
    pointers = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(a) if x.size}
    return any(x.unsafe_buffer_pointer() in pointers for x in jax.tree.leaves(b) if x.size)


