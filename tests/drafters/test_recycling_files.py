"""Looked-up laws on disk, what a drafter was made for, and drafters that come with specjax."""

import json

import jax
import numpy as np
import pytest

import specjax
from specjax import drafters
from specjax.drafters import RecyclingConfig, shipped
from specjax.drafters.checkpoint import MADE_FOR, load_drafter, save_drafter
from specjax.models import LlamaConfig
from specjax.models.identity import fingerprint
from tests.drafters.parallel_world import small_target
from tests.models.tiny import TINY_MODELS


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.fixture(scope="module")
def tables(target):
    return tables_for(target)


def tables_for(target):
    rng, size = np.random.default_rng(0), target.model.vocab_size
    probs = np.full((60, 4), 0.2, np.float32)
    return drafters.build_tables([(rng.integers(0, size, 60), rng.integers(0, size, (60, 4)), probs)], size)


@pytest.fixture
def saved(target, tables, tmp_path):
    save_drafter(tmp_path / "own", RecyclingConfig(num_draft_tokens=5), tables, target="tiny", made_for=target)
    return tmp_path / "own"


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_tables_come_back_bit_for_bit_with_their_settings(target, tables, saved):
    drafter = load_drafter(saved, target)
    assert drafter.num_draft_tokens == 5 and same(drafter.params, (tables.unigram, tables.bigram))
    assert drafter._replace(params=()) == drafters.recycling(target, 5, tables)._replace(params=())
    assert load_drafter(saved, target, num_draft_tokens=3).num_draft_tokens == 3


def test_a_training_run_is_taken_by_its_own_directory(target, tables, tmp_path):
    save_drafter(tmp_path / "run" / "drafter", RecyclingConfig(), tables)
    assert same(load_drafter(tmp_path / "run", target).params, (tables.unigram, tables.bigram))


def test_a_drafter_made_for_another_target_is_refused_until_it_is_asked_for(target, saved):
    other = target._replace(params=jax.tree.map(lambda x: x + 1, target.params))
    assert fingerprint(other) != fingerprint(target)
    with pytest.raises(ValueError, match=r"made for tiny .*any_target=True"):
        load_drafter(saved, other)
    assert load_drafter(saved, other, any_target=True).num_draft_tokens == 5


def test_the_drafter_of_an_int8_targets_floats_is_refused_with_what_to_do(tmp_path):
    whole, small = (specjax.load(TINY_MODELS / "llama_tied_sharded", quantize=kind) for kind in (None, "int8"))
    save_drafter(tmp_path / "own", RecyclingConfig(), tables_for(whole), target="tiny", made_for=whole)
    with pytest.raises(ValueError, match=r"made for tiny .*its int8 weights were made from, .*any_target=True"):
        load_drafter(tmp_path / "own", small)
    assert load_drafter(tmp_path / "own", whole) and load_drafter(tmp_path / "own", small, any_target=True)


def test_what_is_damaged_or_of_another_version_is_refused_by_name(target, saved):
    settings = json.loads((saved / "recycling.json").read_text())
    for change in ({"format": 2}, {"beam": 3}):
        (saved / "recycling.json").write_text(json.dumps({**settings, **change}))
        with pytest.raises(ValueError, match=r"recycling\.json has format"):
            load_drafter(saved, target)
    (saved / "recycling.json").write_text(json.dumps(settings))
    (saved / "tables.npz").write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match="damaged"):
        load_drafter(saved, target)
    with pytest.raises(ValueError, match="reads none"):
        load_drafter(saved, target, feature_layers=(1,))


def test_nothing_is_replaced_unasked(target, tables, saved):
    before = (saved / MADE_FOR).read_text()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_drafter(saved, RecyclingConfig(), tables)
    assert (saved / MADE_FOR).read_text() == before
    save_drafter(saved, RecyclingConfig(num_draft_tokens=2), tables, overwrite=True)
    assert not (saved / MADE_FOR).exists() and load_drafter(saved, target).num_draft_tokens == 2


def test_an_unknown_name_says_which_there_are(target):
    with pytest.raises(FileNotFoundError, match="name of a model that a drafter comes with"):
        specjax.load_drafter("no-such-model", target)
    assert shipped.directory("../data") is None


@pytest.mark.parametrize("field", [{"windows": (4,)}, {"embedding_scale": 2.0}, {"logit_softcap": 30.0}])
def test_layers_of_a_head_that_would_not_run_as_they_say_are_refused(field):
    one = LlamaConfig(16, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1, **field)
    for make in (
        lambda: drafters.EagleConfig(one, (1,)), lambda: drafters.MTPConfig(one, (1,)),
        lambda: drafters.DFlashConfig(one, (1,), mask_token_id=0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"layers.{next(iter(field))}"):
            make()
