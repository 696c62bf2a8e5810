"""Rows and batches of texts: every token once, documents one after another, batches by seed and step."""

import numpy as np
import pytest

from specjax.train import generate, packing


def conversation(number, tokens, start):
    tokens = np.asarray(tokens, np.uint16)
    law = np.zeros((len(tokens), generate.TOP))
    return generate.Conversation(number, tokens, start, 0.0, law.astype(np.uint16), law.astype(np.float16))


@pytest.fixture(scope="module")
def made():
    """Texts whose tokens are all different: 1, 2, 3, ..."""
    rng, first, out = np.random.default_rng(0), 1, []
    for number in range(300):
        size = int(rng.integers(1, 40))
        out.append(conversation(number, range(first, first + size), int(rng.integers(0, size + 1))))
        first += size
    return out


def test_every_token_of_every_text_with_something_to_learn_is_packed_once(made):
    packed = packing.pack(made, 16)
    real = packed.documents >= 0
    here = packed.tokens[real].tolist()
    assert len(set(here)) == len(here)
    for text in made:
        for begin in range(0, len(text.tokens), 16):
            piece = text.tokens[begin : begin + 16].tolist()
            learnt = [t for i, t in enumerate(piece) if i and begin + i >= text.start]
            rows, columns = np.nonzero(np.isin(packed.tokens, piece) & real)
            if not learnt:
                assert rows.size == 0
                continue
            assert len(set(rows)) == 1 and packed.tokens[rows, columns].tolist() == piece
            assert (np.diff(columns) == 1).all() and len(set(packed.documents[rows, columns])) == 1
            assert packed.tokens[rows, columns][packed.counts[rows, columns]].tolist() == learnt
    assert not packed.counts[~real].any() and not packed.tokens[~real].any()


def test_documents_of_a_row_are_texts_one_after_another_and_padding_is_last(made):
    packed = packing.pack(made, 32)
    for row in packed.documents:
        count = int((row >= 0).sum())
        assert (row[count:] == -1).all() and row[0] == 0 and set(np.diff(row[:count])) <= {0, 1}
    assert (packed.documents >= 0).mean() > 0.9 and packed.documents.max() > 1
    assert not packed.counts[:, 0].any()


def test_texts_without_a_token_to_learn_are_counted_and_said():
    texts_ = [conversation(0, [1, 2, 3], 3), conversation(1, [4, 5], 1), conversation(2, range(6, 30), 2)]
    packed = packing.pack(texts_, 8)
    assert (packed.texts, packed.cut, packed.empty) == (2, 1, 1)
    assert "1 texts have no token to learn" in packed.report() and "2 texts (1 cut) in 4 rows of 8" in packed.report()
    with pytest.raises(ValueError, match="none of 1 texts"):
        packing.pack(texts_[:1], 8)


def test_a_batch_follows_from_seed_and_step_and_an_epoch_has_every_row_once(made):
    packed = packing.pack(made, 16)
    count = len(packed.tokens)
    one, two = packing.batches(packed, 7, seed=3), packing.batches(packed, 7, seed=3)
    steps = -(-2 * count // 7)
    seen = np.concatenate([one.rows(step) for step in range(steps)])
    assert sorted(seen[:count]) == sorted(seen[count : 2 * count]) == list(range(count))
    assert (seen[:count] != seen[count : 2 * count]).any()
    np.testing.assert_array_equal(two.at(steps - 1).tokens, packed.tokens[one.rows(steps - 1)])
    np.testing.assert_array_equal(next(two.since(5)).documents, one.at(5).documents)
    assert (packing.batches(packed, 7, seed=4).rows(0) != one.rows(0)).any()


def test_the_draft_vocabulary_is_what_answers_use_then_what_prompts_use():
    texts_ = [conversation(0, [9, 9, 9, 4, 4, 5], 3), conversation(1, [8, 5, 3], 1)]
    assert packing.vocabulary(texts_, 3, 12).tolist() == [3, 4, 5]
    assert packing.vocabulary(texts_, 4, 12).tolist() == [3, 4, 5, 9]
    assert packing.vocabulary(texts_, 7, 12).tolist() == [0, 1, 3, 4, 5, 8, 9]
    with pytest.raises(ValueError, match="the target has 12 tokens"):
        packing.vocabulary(texts_, 13, 12)
