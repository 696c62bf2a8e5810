"""The training loop and its texts: what is frozen stays, masks follow their tokens, mistakes are refused by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import LanguageModel
from specjax.drafters.eagle import EagleConfig
from specjax.drafters.medusa import MedusaConfig
from specjax.models.config import LlamaConfig
from specjax.static import bind
from specjax.train import config_for, distill, heads, params_for, texts
from specjax.types import ModelOutput
from tests.small import target

V, T = 5, 6


class Sizes:
    num_layers = 2


def _table_apply(params, tokens, positions, window_mask, cache, *, feature_layers=(), logits_at=None):
    """Logits by position, features one-hot of the position."""
    logits = jnp.broadcast_to(params["table"][None], (*tokens.shape, V))
    return ModelOutput(logits, jax.nn.one_hot(positions, T), cache)


def table_target() -> LanguageModel:
    table = jax.random.normal(jax.random.key(0), (T, V))
    model = target().model._replace(apply=bind(_table_apply), vocab_size=V)
    return LanguageModel(model, {"table": table, "embedding": jnp.zeros((T, V))}, config=Sizes())


MEDUSA = MedusaConfig(T, V, num_heads=2, num_layers=0)


def medusa_params():
    return {"heads": {i: {"blocks": {}, "projection": jnp.zeros((T, V))} for i in range(2)}}


@functools.partial(jax.jit, static_argnums=0)
def both_gradients(loss, params, weights, batch):
    return jax.grad(lambda p, w: loss(p, w, batch, jax.random.key(0))[0], argnums=(0, 1))(params, weights)


def gradient(counts):
    """Of both heads' projections; features are one-hot, so row r is the gradient at hidden row r."""
    lm = table_target()
    batch = distill.Batch(jnp.zeros((1, T), jnp.int32), jnp.asarray([counts]))
    found, _ = both_gradients(distill.head_loss(MEDUSA, lm), medusa_params(), lm.params, batch)
    return [np.abs(np.asarray(found["heads"][i]["projection"])).sum(1) > 0 for i in range(2)]


def test_a_mask_follows_its_token_at_every_depth():
    """Case 127: T=6, tokens 3, 4, 5 count. Head d at hidden row r is about token r + 2 + d."""
    first, second = gradient([False, False, False, True, True, True])
    assert first.tolist() == [False, True, True, True, False, False]
    assert second.tolist() == [True, True, True, False, False, False]


def test_an_empty_mask_has_no_gradient():
    assert not np.any(gradient([False] * T))


def test_nothing_frozen_moves_or_has_slots():
    """Case 133: steps leave the target's weights and `ids` bit for bit; the optimiser knows only what is trained."""
    params = {"weight": jnp.ones((3, 2)), "ids": jnp.arange(2), "head": jnp.ones((4, 5))}
    given, settings = {"table": jnp.full((7,), 2.0)}, distill.Optimiser(steps=3, learning_rate=0.1)
    training = distill.start(params, settings, frozen=("ids", "head"))
    shapes = {leaf.shape for leaf in jax.tree.leaves(training.slots)}
    assert shapes == {(), (3, 2)}
    trained, history = distill.fit(bind(_toy_loss), params, [{}] * 3, settings, given=given, frozen=("ids", "head"))
    assert trained["ids"] is not None and not np.array_equal(trained["weight"], params["weight"])
    for name in ("ids", "head"):
        np.testing.assert_array_equal(trained[name], params[name])
    np.testing.assert_array_equal(given["table"], 2.0)
    assert history["loss"].shape == (3,) and history["loss"][-1] < history["loss"][0]


def _toy_loss(params, given, batch, key):
    value = (params["weight"].sum() * given["table"].sum() * params["head"].sum()) ** 2 * 1e-6
    return value, {"alpha": value}


def test_no_gradient_reaches_the_target():
    lm = table_target()
    batch = distill.Batch(jnp.zeros((1, T), jnp.int32), jnp.ones((1, T), bool))
    config = MedusaConfig(T, V, num_heads=1, num_layers=1, shared=True)
    params = {"heads": {0: {"blocks": {0: {"weight": jnp.eye(T), "bias": jnp.zeros(T)}}}}}
    weights = {**lm.params, "embedding": jax.random.normal(jax.random.key(1), (T, V))}
    into_head, into_target = both_gradients(distill.head_loss(config, lm), params, weights, batch)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(into_target))
    assert any(np.any(leaf) for leaf in jax.tree.leaves(into_head))


def test_a_loss_that_is_not_finite_stops_the_run():
    params = {"weight": jnp.full((1, 1), jnp.nan), "head": jnp.ones((1, 1))}
    with pytest.raises(ValueError, match="nan at step 1: lower learning_rate"):
        distill.fit(bind(_toy_loss), params, [{}], distill.Optimiser(1), given={"table": jnp.ones(1)})


def test_too_few_batches_are_refused():
    params = {"weight": jnp.ones((3, 2)), "head": jnp.ones((4, 5))}
    with pytest.raises(ValueError, match="batches ended after 1 of 2 steps"):
        distill.fit(bind(_toy_loss), params, [{}], distill.Optimiser(2), given={"table": jnp.ones(1)})


# --- texts


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
        (lambda p: config_for("hydra", target()), "kind='hydra': choose one of 'medusa', 'eagle', 'mtp', 'dflash'"),
        (lambda p: config_for("medusa", target(), draft_vocab_size=9), "drafts from the whole vocabulary: 0"),
        (lambda p: params_for(EagleConfig(ONE, (1,), draft_vocab_size=3), target()), "give ids"),
        (lambda p: heads.laws(MEDUSA, {}, {"embedding": None}, jnp.zeros((1, 4)), None, depth=3), "drafts 2 tokens"),
        (lambda p: heads.laws("x", {}, {}, jnp.zeros((1, 4)), None), "give the configuration of a head"),
        (lambda p: distill.head_loss(MEDUSA, target()), "does not say num_layers"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_with_the_remedy(call, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        call(tmp_path)


ONE = LlamaConfig(V, T, 8, 1, 1, 1)
