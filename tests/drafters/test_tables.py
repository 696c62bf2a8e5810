"""Hash tables of laws: what was written is found, what was not is not, whatever collides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.tables import UNIT, Tables, build_tables, empty, load_tables, look_up, num_buckets, place, write

RNG = np.random.default_rng(0)


def law(count, candidates=3, vocab=50):
    """Random laws [count, C], most probable first."""
    ids = np.stack([RNG.permutation(vocab)[:candidates] for _ in range(count)]).astype(np.int32)
    probs = -np.sort(-RNG.dirichlet(np.ones(candidates + 1), count)[:, :candidates], axis=1)
    return ids, probs.astype(np.float32)


def written(table, contexts, ids, probs, valid=None):
    """One row's table after one call."""
    valid = np.ones(len(contexts), bool) if valid is None else valid
    return _write(table, *(jnp.asarray(x)[None] for x in (np.asarray(contexts, np.int32), ids, probs, valid)))


_write, _look_up = jax.jit(write), jax.jit(look_up)


def found(table, context):
    """(ids, probs) of one context in a table of one row."""
    got = _look_up(table, jnp.asarray([context], jnp.int32), jnp.zeros(1, jnp.int32))
    return np.asarray(got.ids)[0], np.asarray(got.probs)[0]


@pytest.mark.parametrize("vocab", [50, 1 << 17])
def test_what_was_written_is_found_and_nothing_else(vocab):
    """Both widths of integers; probabilities to 1 / 65535; room enough that nothing is lost."""
    contexts = RNG.permutation(vocab)[:40].reshape(20, 2)
    ids, probs = law(20, vocab=vocab)
    table = written(empty(1, 1024, 2, 3, vocab), contexts, ids, probs)
    for context, names, values in zip(contexts, ids, probs, strict=True):
        got, mass = found(table, context)
        np.testing.assert_array_equal(got, names)
        np.testing.assert_allclose(mass, values, atol=1 / UNIT)
        assert not found(table, context[::-1])[1].any()


def test_the_latest_law_of_a_context_wins():
    """Within a call and between calls; what is not valid is not written."""
    ids, probs = law(4)
    table = written(empty(1, 4, 2, 3, 50), [[1, 2], [3, 4], [1, 2], [3, 4]], ids, probs, np.array([1, 1, 1, 0], bool))
    np.testing.assert_array_equal(found(table, [1, 2])[0], ids[2])
    np.testing.assert_array_equal(found(table, [3, 4])[0], ids[1])
    table = written(table, [[1, 2]], ids[3:], probs[3:])
    np.testing.assert_array_equal(found(table, [1, 2])[0], ids[3])
    np.testing.assert_array_equal(found(table, [3, 4])[0], ids[1])


def test_a_context_that_collides_is_never_taken_for_another():
    """A single bucket of four: the fifth context replaces one of them and finds its own law; absent ones find none."""
    ids, probs = law(5)
    table = empty(1, 1, 1, 3, 50)
    for i in range(4):
        table = written(table, [[i]], ids[i : i + 1], probs[i : i + 1])
    for i in range(4):
        np.testing.assert_array_equal(found(table, [i])[0], ids[i])
    assert not found(table, [4])[1].any()
    table = written(table, [[4]], ids[4:], probs[4:])
    np.testing.assert_array_equal(found(table, [4])[0], ids[4])
    kept = [i for i in range(4) if found(table, [i])[1].any()]
    assert len(kept) == 3
    for i in kept:
        np.testing.assert_array_equal(found(table, [i])[0], ids[i])


def test_two_new_contexts_of_one_call_may_fall_on_one_slot_and_the_later_stays():
    ids, probs = law(5)
    table = written(empty(1, 1, 1, 3, 50), [[i] for i in range(5)], ids, probs)
    kept = [i for i in range(5) if found(table, [i])[1].any()]
    for i in kept:
        np.testing.assert_array_equal(found(table, [i])[0], ids[i])
    _, ways = place(np.arange(5)[:, None], 1)
    assert kept == sorted({int(way): i for i, way in enumerate(ways)}.values())


def test_context_zero_is_a_context_and_a_row_without_a_law_is_not_written():
    """Token 0 looks like a free entry's key; NaN logits arrive as probabilities of 0."""
    ids, probs = law(2)
    table = empty(1, 1, 2, 3, 50)
    assert not found(table, [0, 0])[1].any()
    table = written(table, [[0, 0], [0, 1]], ids, probs * np.array([[1], [0]], np.float32))
    np.testing.assert_array_equal(found(table, [0, 0])[0], ids[0])
    assert not found(table, [0, 1])[1].any()


def test_rows_have_tables_of_their_own():
    ids, probs = law(2)
    contexts, valid = jnp.zeros((2, 1, 2), jnp.int32), jnp.asarray([[True], [False]])
    table = _write(empty(2, 4, 2, 3, 50), contexts, jnp.asarray(ids)[:, None], jnp.asarray(probs)[:, None], valid)
    got = _look_up(table, contexts[:, 0], jnp.arange(2))
    assert np.asarray(got.probs).any(axis=1).tolist() == [True, False]


def summed(texts, order):
    """Oracle: mean law per context, as a dict of dicts."""
    laws, counts = {}, {}
    for tokens, ids, probs in texts:
        for i in range(order - 1, len(tokens)):
            if probs[i, 0] > 0:
                context = tuple(int(t) for t in tokens[i - order + 1 : i + 1])
                counts[context] = counts.get(context, 0) + 1
                one = laws.setdefault(context, {})
                for token, p in zip(ids[i], probs[i], strict=True):
                    one[int(token)] = one.get(int(token), 0.0) + float(p)
    return {context: {t: p / counts[context] for t, p in one.items()} for context, one in laws.items()}


def some_texts(count=6, length=40, vocab=12):
    texts = []
    for _ in range(count):
        ids, probs = law(length, 5, vocab)
        probs[RNG.random(length) < 0.1] = 0  # positions without a law
        texts.append((RNG.integers(0, vocab, length), ids, probs))
    return texts


def test_built_tables_hold_the_mean_law_of_every_context():
    texts = some_texts()
    tables = build_tables(iter(texts), 12, candidates=4)
    assert tables.num_laws == sum((probs[:, 0] > 0).sum() for _, _, probs in texts)
    for order, table in ((1, tables.unigram), (2, tables.bigram)):
        expected, missing = summed(texts, order), 0
        for context, one in expected.items():
            got = look_up(jnp.asarray(table), jnp.asarray([context], jnp.int32))
            ids, probs = np.asarray(got.ids)[0], np.asarray(got.probs)[0]
            if not probs.any():
                missing += 1  # its bucket was full
                continue
            best = sorted(one.values(), reverse=True)[:4]
            np.testing.assert_allclose(probs[: len(best)], best, atol=2 / UNIT)
            for token, p in zip(ids[: len(best)], probs, strict=False):
                np.testing.assert_allclose(p, one[int(token)], atol=2 / UNIT)
        assert missing <= 0.05 * len(expected)
        assert (table[..., order + 4] > 0).sum() == len(expected) - missing


def test_the_most_frequent_contexts_are_kept():
    ids, probs = law(9, 4, 12)
    tokens = np.array([1, 2, 1, 2, 1, 2, 3, 4, 5])
    tables = build_tables([(tokens, ids, probs)], 12, max_contexts=2)
    assert (tables.bigram[..., 2 + 4] > 0).sum() == 2
    for context in ((1, 2), (2, 1)):
        assert np.asarray(look_up(jnp.asarray(tables.bigram), jnp.asarray([context], jnp.int32)).probs).any()


def test_tables_are_half_empty_and_powers_of_two():
    for entries in (1, 2, 7, 8, 9, 1000, 104_000):
        buckets = num_buckets(entries)
        assert buckets & (buckets - 1) == 0 and 4 * buckets >= 2 * entries - 1 and (buckets == 1 or buckets < entries)


def test_saved_tables_come_back(tmp_path):
    tables = build_tables(some_texts(2), 12)
    tables.save(tmp_path / "laws.npz")
    again = load_tables(tmp_path / "laws.npz")
    assert (again.vocab_size, again.num_laws) == (12, tables.num_laws)
    for a, b in zip(tables[:2], again[:2], strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype == np.uint16
    np.savez(tmp_path / "other.npz", tokens=np.zeros(3))
    with pytest.raises(ValueError, match=r"other\.npz.*lacks.*'bigram'"):
        load_tables(tmp_path / "other.npz")
    np.savez(tmp_path / "old.npz", format=99, **tables._asdict())
    with pytest.raises(ValueError, match="format 99"):
        load_tables(tmp_path / "old.npz")


def test_files_that_are_no_tables_are_refused_by_name(tmp_path):
    """Whatever numpy and zip would say; and nothing half-written lies about."""
    tables = build_tables(some_texts(2), 12)
    tables.save(tmp_path / "whole.npz")
    data = (tmp_path / "whole.npz").read_bytes()
    spoilt = bytearray(data)
    for at in range(200, 260):
        spoilt[at] ^= 0x5A
    for name, content in (("cut", data[:300]), ("empty", b""), ("text", b"hello"), ("spoilt", bytes(spoilt))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"path='.*{name}': damaged, or no tables of specjax.*build them anew"):
            load_tables(tmp_path / name)
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"array\.npy'.*lacks"):
        load_tables(tmp_path / "array.npy")
    np.savez(tmp_path / "flat.npz", format=1, **tables._replace(unigram=np.zeros(3))._asdict())
    with pytest.raises(ValueError, match=r"flat\.npz'.*1-token contexts has shape \(3,\)"):
        load_tables(tmp_path / "flat.npz")
    np.savez(tmp_path / "smaller.npz", format=1, **tables._replace(vocab_size=3)._asdict())
    with pytest.raises(ValueError, match=r"smaller\.npz': damaged, token \d+ of a vocabulary of 3"):
        load_tables(tmp_path / "smaller.npz")
    with pytest.raises(FileNotFoundError, match=r"nothing\.npz': no such file"):
        load_tables(tmp_path / "nothing.npz")
    with pytest.raises(ValueError, match="is a directory"):
        load_tables(tmp_path)
    before = sorted(tmp_path.iterdir())
    for wrong in (None, 1, ""):
        with pytest.raises(ValueError, match="give the path"):
            load_tables(wrong)
        with pytest.raises(ValueError, match="give the path"):
            tables.save(wrong)
    with pytest.raises(OSError):
        tables.save(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_texts_that_cannot_be_summed_are_refused():
    ids, probs = law(3, 4, 12)
    good = (np.array([1, 2, 3]), ids, probs)
    for texts, options, message in (
        ([], {}, "texts is empty"),
        ([(good[0], ids, probs * 0)], {}, "no law"),
        ([good, (good[0][:2], ids, probs)], {}, r"texts\[1\] has tokens \(2,\).*must be \[L\]"),
        ([(np.array([1, 2, 12]), ids, probs)], {}, r"texts\[0\] has tokens outside 0\.\.11"),
        ([(good[0], ids - 20, probs)], {}, r"top_ids outside"),
        (None, {}, "texts=None"),
        ([good[:2]], {}, r"(?s)texts\[0\] is .*tokens, top_ids, top_probs"),
        ([(good[0] * 1.0, ids, probs)], {}, r"texts\[0\] has tokens of type float64"),
        ([good, (good[0], ids[:, :1], probs[:, :1])], {}, r"texts\[1\] has M = 1"),
        ([(good[0], ids, -probs)], {}, r"texts\[0\] has top_probs outside 0\.\.1"),
        ([good], {"candidates": 0}, "candidates=0"),
        ([good], {"max_contexts": 0}, "max_contexts=0"),
    ):
        with pytest.raises(ValueError, match=message):
            build_tables(texts, 12, **options)
    with pytest.raises(ValueError, match="vocab_size=4194304"):
        build_tables([good], 1 << 22)
    assert isinstance(build_tables([good], 12), Tables)
