"""What students learn: which places count, what stays as it is, packed rows, draft models, text of their own."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import LanguageModel
from specjax.drafters import checkpoint
from specjax.drafters.dflash import DFlashConfig
from specjax.drafters.medusa import MedusaConfig
from specjax.models.config import LlamaConfig
from specjax.static import bind
from specjax.train import draft_lm, heads, initial, students
from specjax.train.types import Batch
from specjax.types import Model, ModelOutput
from tests.drafters.parallel_world import proposal_of
from tests.small import _no_cache, begin
from tests.train_world import drawn, language_model

V, E, T = 12, 8, 6
SIZES = LlamaConfig(V, E, 16, 2, 2, 1, tie_embeddings=True, max_position_embeddings=64)
IDS = np.array([0, 1, 2, 4, 5, 8, 11])


@functools.cache
def target() -> LanguageModel:
    return language_model(SIZES)


def head_for(config, **how):
    """A head of random weights."""
    lm = target()
    params = drawn(jax.eval_shape(lambda: initial.params_for(config, lm, ids=IDS, **how)), 5, 0.3)
    return {**params, "ids": jnp.asarray(IDS, jnp.int32)} if "ids" in params else params


@functools.partial(jax.jit, static_argnums=0)
def learn(loss, params, weights, batch):
    """(total, metrics), gradients of the student's and the target's weights."""
    trained = {name: leaf for name, leaf in params.items() if name != "ids"}
    fixed = {name: leaf for name, leaf in params.items() if name == "ids"}

    def of(trained, weights):
        return loss({**trained, **fixed}, weights, batch, jax.random.key(0))

    return jax.value_and_grad(of, argnums=(0, 1), has_aux=True)(trained, weights)


def moved(tree) -> set[str]:
    """Names of top-level weights with a gradient."""
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))
    return {name for name, leaves in tree.items() if any(np.any(leaf) for leaf in jax.tree.leaves(leaves))}


# --- which places count: features are one-hot of the position, so row r of a gradient is that of hidden row r


class Layers:
    num_layers = 2


def _table_apply(params, tokens, positions, window_mask, cache, *, feature_layers=(), logits_at=None):
    logits = jnp.broadcast_to(params["table"][None], (*tokens.shape, V))
    return ModelOutput(logits, jax.nn.one_hot(positions, T), cache)


def table_target() -> LanguageModel:
    params = {"table": jax.random.normal(jax.random.key(0), (T, V)), "embedding": jnp.zeros((T, V))}
    return LanguageModel(Model(_no_cache, bind(_table_apply), V), params, config=Layers())


MEDUSA = MedusaConfig(T, V, num_heads=2, num_layers=0)


def medusa_rows(counts, documents=None):
    """Per head, which hidden rows have a gradient; and the loss."""
    lm, projection = table_target(), jnp.zeros((V, T))
    params = {"heads": {i: {"blocks": {}, "projection": projection} for i in range(2)}}
    documents = None if documents is None else jnp.asarray([documents])
    batch = Batch(jnp.zeros((1, T), jnp.int32), jnp.asarray([counts]), documents)
    (_, metrics), (grads, _) = learn(students.head_loss(MEDUSA, lm), params, lm.params, batch)
    rows = [np.abs(np.asarray(grads["heads"][i]["projection"])).sum(0) > 0 for i in range(2)]
    return [row.astype(int).tolist() for row in rows], metrics


def test_a_mask_follows_its_token_at_every_depth():
    """Case 127: T=6, tokens 3, 4, 5 count. Head d at hidden row r is about token r + 2 + d: rows before the span learn
    its first token, and the stale right edge learns nothing."""
    rows, metrics = medusa_rows([False, False, False, True, True, True])
    assert rows == [[0, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert metrics["alpha"].weight == metrics["alpha_2"].weight == 3
    np.testing.assert_allclose(metrics["loss"].weight, 3 + 0.8 * 3)


def test_no_pair_of_row_and_token_crosses_from_one_text_to_the_next():
    # Positions begin anew, so the texts share the one-hot features of their positions: 0, 1, 2 and 0, 1, and padding.
    rows, metrics = medusa_rows([True] * T, [0, 0, 0, 0, 1, -1])
    assert rows == [[1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert (metrics["alpha"].weight, metrics["alpha_2"].weight) == (2, 1)


def test_an_empty_mask_has_no_loss_and_no_gradient():
    """Case 129."""
    rows, metrics = medusa_rows([False] * T)
    assert not np.any(rows) and all(mean.value() == 0 == mean.weight for mean in metrics.values())


# --- what stays, and rows of several texts


def texts_in(rows, width=10):
    tokens, documents = np.zeros((len(rows), width), np.int32), np.full((len(rows), width), -1, np.int32)
    for row, texts in enumerate(rows):
        at = 0
        for number, text in enumerate(texts):
            tokens[row, at : at + len(text)], documents[row, at : at + len(text)] = text, number
            at += len(text)
    return Batch(jnp.asarray(tokens), jnp.asarray(documents >= 0), jnp.asarray(documents))


ONE, TWO = [3, 1, 4, 1, 5, 9], [2, 6, 5, 3]


def assert_same_sums(ours, theirs):
    for name, mean in ours.items():
        np.testing.assert_allclose(mean.total, theirs[name].total, rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(mean.weight, theirs[name].weight, rtol=1e-5, err_msg=name)


def test_the_target_and_a_head_left_to_it_stay_and_packed_texts_give_the_sums_of_the_texts():
    """Case 133: nothing but the head's own weights has a gradient; a head left to the target is none of them."""
    config = initial.config_for("eagle", target(), draft_vocab_size=len(IDS))
    params = head_for(config, own_head=False)
    loss = students.head_loss(config, target(), loss="hybrid", depth=1)
    (total, alone), (grads, given) = learn(loss, params, target().params, texts_in([[ONE], [TWO]]))
    assert not moved(given) and moved(grads) == set(params) - {"ids"} == {"fc", "fc_norm", "layers", "norm"}
    (_, packed), (again, _) = learn(loss, params, target().params, texts_in([[TWO, ONE], []]))
    assert_same_sums(packed, alone)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), again, grads)
    np.testing.assert_allclose(total, alone["loss"].total)
    assert alone["alpha"].weight == len(ONE) - 2 + len(TWO) - 2 and 0 < alone["alpha"].value() < 1


def test_a_confidence_head_learns_and_disturbs_nobody():
    config = initial.config_for(
        "dflash", target(), num_draft_tokens=1, markov_rank=2, confidence=True, confidence_with_markov=True
    )
    params = head_for(config)
    loss = bind(_confidence_only, students.head_loss(config, target(), anchors=3))
    (_, metrics), (grads, given) = learn(loss, params, target().params, texts_in([[ONE], [TWO]]))
    assert moved(grads) == {"confidence", "confidence_bias"} and not moved(given)
    assert metrics["confidence"].weight == metrics["alpha"].weight > 0


def _confidence_only(loss, *arguments):
    _, metrics = loss(*arguments)
    return metrics["confidence"].total, metrics


def test_blocks_begin_where_a_token_is_learnt_next_and_elsewhere_only_if_there_is_room():
    counts = jnp.zeros((2, 10), bool).at[0, 4].set(True).at[1, 7:9].set(True)
    batch = Batch(jnp.zeros((2, 10), jnp.int32), counts)
    places = [np.asarray(students._places(5, batch, jax.random.key(seed))) for seed in range(8)]
    assert all({3, 6, 7} < set(found.tolist()) <= set(range(1, 10)) and len(set(found)) == 5 for found in places)
    assert len({tuple(found) for found in places}) > 1 and students._places(0, batch, jax.random.key(0)) is None


def test_equal_losses_are_one_program():
    config = initial.config_for("medusa", target())
    one, two = (students.head_loss(dataclasses.replace(config), target(), depth=2) for _ in range(2))
    assert one == two and hash(one) == hash(two) and one != students.head_loss(config, target(), depth=1)
    assert students.loss_of(target(), target()) == students.draft_lm_loss(target(), target())


# --- heads left to the target, on disk


@pytest.mark.parametrize("format", checkpoint.FORMATS)
def test_a_head_left_to_the_target_is_gathered_at_load(tmp_path, format):
    config = initial.config_for("eagle", target(), draft_vocab_size=len(IDS))
    own = head_for(config)
    params = {name: leaf for name, leaf in own.items() if name != "head"}
    checkpoint.save_drafter(tmp_path / "small", config, params, format=format)
    drafter = checkpoint.load_drafter(tmp_path / "small", target())
    np.testing.assert_array_equal(drafter.params["weights"]["head"], target().params["embedding"][IDS])
    assert "head" not in checkpoint.read(tmp_path / "small")[1]
    if format == "speculators":
        file = tmp_path / "small" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "specjax_head": "mine"}))
        with pytest.raises(ValueError, match="specjax_head = 'mine': only 'target' is known"):
            checkpoint.read(tmp_path / "small")
        file.write_text(json.dumps({**json.loads(file.read_text()), "specjax_head": None}))
        with pytest.raises(ValueError, match=r"lm_head\.weight"):
            checkpoint.read(tmp_path / "small")


def test_eagle_begins_with_the_late_stream_of_the_recipe():
    config = LlamaConfig(V, E, 16, 30, 2, 1)
    made = initial.config_for("eagle", LanguageModel(target().model, {}, config=config))
    assert made.feature_layers == (2, 15, 27, 31) and made.fc_norm
    config = initial.config_for("eagle", target())
    made = initial._eagle(config, head_for(config), target(), None)
    assert config.feature_layers == (1, 3)
    np.testing.assert_array_equal(made["fc"], np.concatenate([np.eye(E), np.zeros((E, E))], axis=1))
    # The stream goes in as large as it is: normed, and multiplied with what its root mean square usually is.
    rows = np.asarray(made["fc_norm"][0])
    features = heads.read(target(), (np.arange(32)[None] * V // 32).astype(np.int32), (1,)).features[0]
    np.testing.assert_allclose(rows, np.median(np.sqrt((np.asarray(features) ** 2).mean(-1))), rtol=1e-5)


# --- draft models


def test_a_pruned_model_has_the_layers_it_was_given():
    assert draft_lm.spread(3, 30) == (0, 14, 29) and draft_lm.spread(2, 2) == (0, 1) and draft_lm.spread(1, 5) == (4,)
    lm = draft_lm.prune(target(), (1,))
    assert lm.config == dataclasses.replace(SIZES, num_layers=1) and list(lm.params["layers"]) == [0]
    assert lm.params["layers"][0] is target().params["layers"][1]
    assert lm.params["embedding"] is target().params["embedding"]
    every = draft_lm.prune(target(), 2)
    assert every.model == target().model and every.config == SIZES


def test_a_pruned_model_learns_on_packed_texts_as_on_the_texts():
    draft = draft_lm.prune(target(), 1)
    loss = students.draft_lm_loss(draft, target(), loss="js")
    (_, alone), (grads, given) = learn(loss, draft.params, target().params, texts_in([[ONE], [TWO]]))
    (_, packed), _ = learn(loss, draft.params, target().params, texts_in([[TWO, ONE], []]))
    assert_same_sums(packed, alone)
    assert alone["loss"].weight == len(ONE) - 1 + len(TWO) - 1 and alone["loss"].value() > 0
    assert moved(grads) == set(draft.params) and not moved(given)


def test_a_saved_draft_model_is_a_drafter(tmp_path):
    draft = draft_lm.prune(target(), 1)
    specjax.models.save(tmp_path / "draft", draft)
    drafter = specjax.load_drafter(tmp_path / "draft", target(), num_draft_tokens=2)
    jax.tree.map(np.testing.assert_array_equal, drafter.params, draft.params)
    assert drafter == specjax.drafters.model(draft, target(), 2)._replace(params=drafter.params)
    with pytest.raises(ValueError, match="holds no head, it reads none"):
        specjax.load_drafter(tmp_path / "draft", target(), feature_layers=(1,))


@pytest.mark.full
def test_a_draft_model_drafts_as_it_learns():
    """Case 138: laws without a cache are those drafted."""
    draft = draft_lm.prune(target(), 1)
    drafter = specjax.drafters.model(draft, target(), 2)
    sampling = specjax.make_sampling(1, V, temperature=1.0)
    proposal = proposal_of(drafter, begin(target(), [ONE], drafter), sampling)
    text = np.asarray([ONE + proposal.tokens[0].tolist()])
    positions = np.arange(text.shape[1])[None]
    logits = draft.model.apply(draft.params, text, positions, None, None).logits
    np.testing.assert_allclose(proposal.probs[0], jax.nn.softmax(logits[0, len(ONE) - 1 : -1]), atol=1e-5)


def test_a_fresh_model_has_the_sizes_asked_for():
    made = []

    def params():
        made.append(draft_lm.fresh(target(), hidden_size=12, num_layers=1, intermediate_size=20))
        return made[0].params

    weights = jax.eval_shape(params)  # compiles nothing
    lm = made[0]._replace(params=weights)
    assert (lm.config.hidden_size, lm.config.num_heads, lm.config.head_dim) == (12, 3, 4)
    assert lm.params["layers"][0]["down"].shape == (12, 20) and lm.params["embedding"].shape == (V, 12)
    assert "head" not in lm.params and lm.model.vocab_size == V


def greedy(lm, prompts, *, max_new_tokens, temperature=0.0, seed=None):
    """Counts on from the prompt; a stand-in for `specjax.generate`."""
    assert temperature == 0 and seed in (None, [6, 7]) and "layers" in lm.params
    made = [[(prompt[-1] + 1 + step) % V for step in range(max_new_tokens)] for prompt in prompts]
    return specjax.Generation(None, [text[: 5 - row] for row, text in enumerate(made)], [], None, None, None)


@pytest.mark.parametrize("generate", [greedy, pytest.param(specjax.generate, marks=pytest.mark.full)])
def test_text_of_its_own_takes_the_place_of_every_other_batch(generate, monkeypatch):
    monkeypatch.setattr(draft_lm, "generate", generate)
    draft = target()
    rows = np.random.default_rng(0).integers(0, V, (2, 8)).astype(np.int32)
    given = Batch(jnp.asarray(rows), jnp.ones((2, 8), bool), jnp.zeros((2, 8), jnp.int32))
    rewrite = draft_lm.on_policy(draft._replace(params=None), every=2, given=3, temperature=0.0)
    first, second = (rewrite(step, given, draft.params) for step in (2, 3))
    assert first is given and second.tokens.shape == (2, 8)
    assert rewrite(3, given._replace(documents=None), draft.params).documents is None
    made = generate(draft, [row[:3].tolist() for row in rows], max_new_tokens=5).tokens
    for row, text in enumerate(made):
        size = len(text)
        assert second.tokens[row].tolist() == rows[row, :3].tolist() + text + [0] * (5 - size)
        assert second.counts[row].tolist() == [False] * 3 + [True] * size + [False] * (5 - size)
        assert second.documents[row].tolist() == [0] * (3 + size) + [-1] * (5 - size)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: students.head_loss(MEDUSA, LanguageModel(target().model, {})), "does not say num_layers"),
        (lambda: students.head_loss(MEDUSA, target(), depth=3), "depth=3: this head drafts 2 tokens ahead"),
        (lambda: students.head_loss("x", target()), "give the configuration of a head"),
        (lambda: students.head_loss(MEDUSA, target(), anchors=4), "only DFlash"),
        (lambda: students.head_loss(MEDUSA, target(), decay=0), "decay=0: must be a number above 0"),
        (lambda: students.head_loss(MEDUSA, target(), loss="kl"), "loss='kl': choose one of"),
        (lambda: students.draft_lm_loss(target(), table_target()._replace(
            model=Model(_no_cache, bind(_table_apply), V + 1))), f"has {V} tokens and the target {V + 1}"),
        (lambda: draft_lm.prune(target(), (0, 2)), "layers=.0, 2.: give different ones of 0 to 1"),
        (lambda: draft_lm.prune(target(), (1, 1)), "give different ones"),
        (lambda: draft_lm.prune(target(), 3), "layers=3: the target has 2"),
        (lambda: draft_lm.prune(table_target(), 1), "a model with a LlamaConfig"),
        (lambda: draft_lm.fresh(target(), hidden_size=8, num_layers=1, colour=3), "colour=3: no field"),
        (lambda: draft_lm.own_text(target(), [[1, 2]], 2), "leave no room"),
        (lambda: initial.config_for("hydra", target()), "kind='hydra': choose one of 'medusa'"),
        (lambda: initial.config_for("eagle1", target(), draft_vocab_size=9), "drafts from the whole vocabulary: 0"),
        (lambda: initial.config_for("dflash", target(), rank=9), "rank=9: a dflash head has layers"),
        (lambda: initial.params_for(initial.config_for("eagle", target(), draft_vocab_size=3), target()), "give ids"),
        (lambda: heads.laws(DFlashConfig(SIZES, (1,), 0), {}, {}, jnp.zeros((1, 4)), None, depth=9),
         "drafts 7 tokens ahead"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_with_the_remedy(call, words):
    with pytest.raises(ValueError, match=words):
        call()
