"""Token texts: files, windows, batches; mistakes are refused by name."""

import numpy as np
import pytest

from specjax.train import texts


def test_windows_hold_one_text_each_and_count_what_is_learnt():
    made = texts.windows(texts.join([[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]], [2, 0]), 4, least=1)
    assert made.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0], [8, 9, 10, 0]]
    assert made.counts.tolist() == [[False, False, True, True], [True, True, True, False], [True, True, True, False]]


def test_batches_show_every_window_once_before_any_twice():
    every = texts.windows(texts.join([[i, i, i] for i in range(6)]), 3)
    source = texts.batches(every, 2, seed=3)
    seen = [sorted(int(x) for _ in range(3) for x in np.asarray(next(source).tokens)[:, 0]) for _ in range(2)]
    assert seen == [[0, 1, 2, 3, 4, 5]] * 2


def test_frequent_ids_ascend():
    made = texts.join([[7, 7, 7, 2, 2, 5, 4]])
    assert texts.frequent(made, 3, 9).tolist() == [2, 4, 7]


def test_texts_come_back_from_their_file(tmp_path):
    made = texts.join([[1, 49151, 3], [4]], [1, 0])
    texts.save(tmp_path / "new" / "a", made)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["a"]
    for ours, theirs in zip(made, texts.load(tmp_path / "new" / "a"), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def _bad_file(path, **arrays):
    np.savez(path, **arrays)
    return path


def _cut(path):
    path.write_bytes(path.read_bytes()[:100])
    return path


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: texts.load(_bad_file(p / "x.npz", tokens=np.arange(3))), "has no lengths, offsets"),
        (lambda p: texts.load(_cut(_bad_file(p / "z.npz", tokens=np.arange(3)))), "z.npz is not an .npz file"),
        (lambda p: texts.load(_bad_file(p / "y.npz", tokens=np.arange(3), offsets=[0], lengths=[4])), "its 3 tokens"),
        (lambda p: texts.windows(texts.join([[1, 2]]), 8), "no text has 8 tokens to learn"),
        (lambda p: texts.batches(texts.windows(texts.join([[1] * 9]), 9), 2), "1 windows, fewer than a batch of 2"),
        (lambda p: texts.frequent(texts.join([[1]]), 9, 8), "the target has 8 tokens"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_with_the_remedy(call, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        call(tmp_path)
