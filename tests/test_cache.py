"""The cache alone: writes never clamp, rollback is exact, accepted paths are compacted. Then requests at its edge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import cache as kv
from specjax.types import KVCache
from tests.oracle.hashlm import HashConfig
from tests.small import CAPACITY, CHUNK, V, begin, oracle, padded, position_lm, table_positions_lm, target

LAYERS, BATCH, SLOTS, HEADS, DIM = 2, 3, 12, 2, 4


def numbered(stacked: bool, lengths) -> KVCache:
    """A cache in which every entry of every slot has a value of its own."""
    empty = kv.init(
        num_layers=LAYERS, batch=BATCH, capacity=SLOTS, num_kv_heads=HEADS, head_dim=DIM, stacked=stacked
    )
    values = np.arange(2 * LAYERS * BATCH * HEADS * SLOTS * DIM, dtype=np.float32)
    k, v = values.reshape(2, LAYERS, BATCH, HEADS, SLOTS, DIM)
    if not stacked:
        k, v = tuple(k), tuple(v)
    return empty._replace(k=jax.tree.map(jnp.asarray, k), v=jax.tree.map(jnp.asarray, v), lengths=jnp.array(lengths))


def layers(cache: KVCache) -> np.ndarray:
    """[2 L, B, H, S, D]"""
    return np.concatenate([np.stack(cache.k), np.stack(cache.v)])


@pytest.mark.parametrize("length", [6, 7, 8, 11])
def test_a_write_past_the_end_is_dropped_and_no_committed_slot_changes(length):
    """Case 31: dynamic_update_slice would move the whole window back onto slots 4 and 5."""
    layer = jnp.arange(8.0).reshape(1, 1, 8, 1)
    window = jnp.full((1, 4, 1, 1), 100.0)
    written = kv.write(layer, window, jnp.array([length]))[0, 0, :, 0]
    np.testing.assert_array_equal(written, np.where(np.arange(8) < length, np.arange(8.0), 100.0))


def test_rows_are_written_at_their_own_lengths():
    """Case 51: one offset for a ragged batch."""
    layer = jnp.zeros((3, 1, 8, 1))
    written = kv.write(layer, jnp.ones((3, 2, 1, 1)), jnp.array([0, 3, 7]))[:, 0, :, 0]
    assert [np.flatnonzero(row).tolist() for row in written] == [[0, 1], [3, 4], [7]]


@pytest.mark.parametrize("stacked", [False, True])
def test_crop_never_grows_never_goes_below_zero_and_is_exact_at_both_ends(stacked):
    """Case 37: 0 is empty, not 'keep everything'; more than there is keeps what there is; negative is 0."""
    cache = numbered(stacked, [3, 3, 3])
    assert kv.crop(cache, jnp.array([0, 3, 5])).lengths.tolist() == [0, 3, 3]
    assert kv.crop(cache, jnp.array([-1, -9, 2])).lengths.tolist() == [0, 0, 2]


@pytest.mark.parametrize("stacked", [False, True])
def test_crop_then_append_equals_having_appended_at_once(stacked):
    """Cases 37 and 38, for every cache layout offered: rollback is real."""
    rng = np.random.default_rng(0)
    kept, dropped, added = (rng.normal(size=(BATCH, 4, HEADS, DIM)).astype(np.float32) for _ in range(3))

    def append(cache, window):
        put = lambda layer: kv.write(layer, jnp.asarray(window), cache.lengths)
        many = jax.vmap(put) if stacked else lambda each: tuple(map(put, each))
        return kv.commit(cache._replace(k=many(cache.k), v=many(cache.v)), None, jnp.full(BATCH, 4))

    start = numbered(stacked, [0, 0, 0])
    direct = append(append(start, kept), added)
    for left in range(5):
        lengths = jnp.array([left, 4, 0])
        rolled = append(kv.crop(append(append(start, kept), dropped), lengths), added)
        expected = np.array([left + 4, 8, 4])
        np.testing.assert_array_equal(rolled.lengths, expected)
        for row, before in enumerate([left, 4, 0]):
            got = layers(rolled)[:, row, :, : before + 4]
            old, new = layers(direct)[:, row, :, :before], layers(direct)[:, row, :, 4:8]
            np.testing.assert_array_equal(got, np.concatenate([old, new], axis=2))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_commit_gathers_the_accepted_path_to_consecutive_slots_even_where_moves_overlap(stacked, seed):
    """Case 88: every increasing path through a window of 6, rows at different lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, SLOTS - 6, BATCH)
    cache = numbered(stacked, lengths)
    before = layers(cache)
    for _ in range(12):
        counts = rng.integers(0, 7, BATCH)  # 0: a row that had finished
        path = np.zeros((BATCH, 6), np.int32)
        for row, count in enumerate(counts):
            kept = np.sort(rng.permutation(np.arange(1, 6))[: max(count - 1, 0)])
            path[row] = np.pad(np.append(0, kept), (0, 6 - len(kept) - 1), mode="edge")
        after = kv.commit(cache, jnp.asarray(path), jnp.asarray(counts))
        np.testing.assert_array_equal(after.lengths, lengths + counts)
        for row, count in enumerate(counts):
            start = lengths[row]
            np.testing.assert_array_equal(layers(after)[:, row, :, :start], before[:, row, :, :start])
            want = before[:, row][:, :, start + path[row, :count]]
            np.testing.assert_array_equal(layers(after)[:, row, :, start : start + count], want)


def test_a_committed_chain_moves_nothing():
    """Case 88: a chain only advances lengths."""
    cache = numbered(False, [1, 2, 3])
    after = kv.commit(cache, None, jnp.array([0, 2, 5]))
    np.testing.assert_array_equal(layers(after), layers(cache))
    assert after.lengths.tolist() == [1, 4, 8]


def test_a_cache_that_cannot_hold_the_text_is_refused():
    """Cases 38 and 39: a ring of 8 slots could not roll back a round that wrapped, so it is not accepted."""
    lm = target()
    ring = lm.model._replace(init_cache=lambda batch, capacity: lm.model.init_cache(batch, 8))
    with pytest.raises(ValueError, match=r"8 slots.*S = 64"):
        specjax.prefill(ring, lm.params, specjax.plain(), padded([[1, 2]]), specjax.row_keys([0]), chunk=CHUNK)


PROMPT, CONTEXT, K = [2, 5, 3, 2, 5], 24, 4


@pytest.fixture(scope="module")
def bounded():
    """A target whose positions end at CONTEXT (NaN lies beyond), and the same without that end."""
    free = table_positions_lm(HashConfig(V), 3 * CONTEXT)
    params = {**free.params, "positions": free.params["positions"][:CONTEXT]}
    return free._replace(model=free.model._replace(context_length=CONTEXT), params=params), free


@pytest.mark.parametrize("room", [-5, -1, 0])
def test_texts_that_just_fit_equal_plain_decoding_with_room_to_spare(bounded, room):
    """Case 31: prompt + max_new + K may pass the end of the context, the text may not; no window reads past it."""
    lm, free = bounded
    budget = CONTEXT - len(PROMPT) + room
    plain = specjax.generate(free, [PROMPT], max_new_tokens=budget)
    script = np.zeros((1, CAPACITY), np.int32)
    script[0, : len(PROMPT) + budget] = PROMPT + plain.tokens[0]
    out = specjax.generate(lm, [PROMPT], drafter=oracle(script, K), max_new_tokens=budget)
    assert out.tokens == plain.tokens
    assert out.finish_reasons == ["length"]
    assert out.stats.accepted > 0


def test_a_text_that_cannot_fit_is_refused_before_compute_with_the_numbers(bounded):
    """Cases 31 and 149."""
    budget = CONTEXT - len(PROMPT) + 1
    with pytest.raises(ValueError, match=rf"prompt 0 has 5 tokens and max_new_tokens is {budget}.*{CONTEXT}.*truncate"):
        specjax.generate(bounded[0], [PROMPT], drafter=specjax.drafters.ngram(K), max_new_tokens=budget)


@pytest.mark.parametrize("budget", [CONTEXT - len(PROMPT) + 1, 100, 2**31 - 1])
def test_truncated_texts_end_at_the_context_and_say_capacity(bounded, budget):
    """Cases 31 and 149: never 'stop', never one token over."""
    lm, free = bounded
    fits = CONTEXT - len(PROMPT)
    plain = specjax.generate(free, [PROMPT], max_new_tokens=fits)
    out = specjax.generate(lm, [PROMPT], max_new_tokens=budget, on_capacity="truncate")
    assert out.tokens == plain.tokens
    assert out.finish_reasons == ["capacity"]


def test_a_prompt_as_long_as_the_context_leaves_no_room(bounded):
    """Case 149."""
    full = (PROMPT * 5)[:CONTEXT]
    out = specjax.generate(bounded[0], [full], max_new_tokens=3, on_capacity="truncate")
    assert out.tokens == [[]] and out.finish_reasons == ["capacity"]
    with pytest.raises(ValueError, match="shorten the prompt"):
        specjax.generate(bounded[0], [[*full, 1]], max_new_tokens=3, on_capacity="truncate")


def test_a_long_prompt_needs_no_more_slots_than_its_chunks():
    """Case 31: capacity is rounded up for few compiled sizes, not to a common multiple of odd chunks."""
    for chunk in (1, 7, 64, 100, 1001):
        slots = specjax.loop.capacity(300, chunk)
        assert slots >= 300 and slots % chunk == 0 and slots <= 512 + chunk


def test_long_texts_are_read_in_larger_chunks_and_texts_of_one_capacity_in_equal_ones():
    def chunk(*lengths, **options):
        made = specjax.request.make(target(), [[1] * length for length in lengths], max_new_tokens=50, **options)
        assert made is not None and made.text.tokens.shape[1] % made.chunk == 0
        return made.chunk

    assert [chunk(length) for length in (1, 200, 300, 420, 500, 2000)] == [64, 64, 128, 128, 256, 256]
    assert [chunk(*[500] * rows) for rows in (1, 2, 3, 4, 5, 300)] == [256, 128, 64, 64, 64, 64]
    assert [chunk(500, prefill_chunk=size) for size in (8, 512, 4097)] == [8, 512, 768]  # a cache never grows for it
    reader = specjax.drafters.recycling(V, 2)  # without tables, it wants the logits of the whole prompt
    assert chunk(500, drafter=reader) == 64


def test_the_models_cache_and_a_drafters_cache_are_different_buffers():
    """Case 42: self-drafting with one set of weights; giving one cache away leaves the other valid."""
    lm = target()
    state = begin(lm, [PROMPT], specjax.drafters.model(lm, lm, K))
    for leaf in jax.tree.leaves(state.cache):
        leaf.delete()
    assert np.isfinite(np.asarray(state.drafter.cache.k[0])).all()
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(lm.params))


def test_a_model_without_a_cache_needs_none():
    """Case 39: only what is cached has to be rolled back."""
    logits = np.eye(V, dtype=np.float32)[np.arange(40) % V]
    assert specjax.generate(position_lm(logits), [[1]], max_new_tokens=3).tokens == [[0, 1, 2]]
