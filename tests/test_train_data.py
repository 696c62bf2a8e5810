"""The target's own text: what is written is what the target says, and what is kept is what it meant."""

import json
import shutil
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import sharding
from specjax.train import data, features, generate, packing, sources, tables, texts
from specjax.types import Sampling
from tests.models import tiny
from tests.small import logits_of
from tests.test_sharding import alone as many_tokens
from tests.test_sharding import collectives

SLOTS = 32
TEMPLATE = "<|user|>a{% for m in messages %}{{ m.content }}<|stop|>{% endfor %}bc"
SELF = sources.SelfSynthesis(turn_tokens=4, answer_tokens=12, starters=("ab", "d"))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A Llama of two layers with a tokenizer, a chat template and an end, and laws that are not all but certain."""
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    weights = {name: 0.3 * array for name, array in tiny.tensors().items()}
    tiny.write_gguf(path, tiny.gguf_tensors(weights), **{"tokenizer.chat_template": TEMPLATE})
    return specjax.load(path)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    lines = ['"ab"', '{"prompt": "cde"}', '{"question": "d 1"}', '{"turns": ["abab", "x"]}', '"123"', '"e"', '"fg"']
    path.write_text("\n".join(lines))
    return str(path)


def write(target, directory, **changes):
    settings = {"tokens": 240, "source": SELF, "batch": 3, "slots": SLOTS, "shard_size": 4}
    return data.write_corpus(target, directory, **({"steps": 4, "progress": False} | settings | changes))


@pytest.fixture(scope="module")
def corpus(target, tmp_path_factory):
    return write(target, tmp_path_factory.mktemp("whole") / "c")


@pytest.fixture(scope="module")
def answered(target, prompts, tmp_path_factory):
    """Prompts, answered greedily."""
    source = sources.Prompts(prompts, answer_tokens=12, temperatures=((0.0, 1.0),))
    return write(target, tmp_path_factory.mktemp("answered"), tokens=10_000, source=source)


def contents(corpus):
    return [{name: array.tolist() for name, array in corpus.shard(i).items()} for i in range(corpus.shards)]


# --- what is written


def test_greedy_answers_are_those_of_generate(target, answered):
    found = list(answered.conversations())
    assert len(found) == 7
    given = [text.tokens[: text.start].tolist() for text in found]
    expected = specjax.generate(target, given, max_new_tokens=12).tokens
    assert [text.tokens[text.start :].tolist() for text in found] == [list(answer) for answer in expected]
    assert {len(text.tokens) for text in found} != {max(len(text.tokens) for text in found)}


def test_a_target_on_a_mesh_writes_the_same_in_parts(target, corpus, tmp_path, monkeypatch):
    """No device holds the whole target; rows and key heads of the cache, and the rows of all else, are shared out. What
    is refused names the mesh."""
    mesh, seen, run = sharding.make_mesh(2, 2), [], generate.run

    def look(state):
        arrays = state.cache.k[0], state.top_ids, state.rows.text
        seen.append([{shard.data.shape for shard in array.addressable_shards} for array in arrays])
        return state

    def spy(model, steps, params, key, template, state):
        return look(run(model, steps, params, key, template, look(state)))

    monkeypatch.setattr(generate, "run", spy)
    placed = sharding.place(mesh, target)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(placed.params))
    for device in mesh.devices.flat:
        shards = [s for leaf in jax.tree.leaves(placed.params) for s in leaf.addressable_shards if s.device == device]
        assert sum(shard.data.nbytes for shard in shards) < 0.6 * total
    assert contents(write(placed, tmp_path / "c", batch=4)) == contents(corpus)
    assert all(found == [{(2, 1, SLOTS, 8)}, {(2, SLOTS, generate.TOP)}, {(2, SLOTS)}] for found in seen)
    with pytest.raises(ValueError, match="a batch of 3 rows cannot be shared out over data=2: give a multiple of 2"):
        write(placed, tmp_path / "d")


@pytest.mark.full
def test_no_law_is_gathered_where_text_is_written_on_a_mesh():
    lm = sharding.place(sharding.make_mesh(2, 4), many_tokens())
    template = generate.Template(jnp.array([3, 4]), jnp.array([7]), jnp.int32(20))
    state = generate.begin(lm.model, 8, 64, lm.params, jnp.array([1, 2]))
    run = generate.run.lower(lm.model, 8, lm.params, jax.random.key(0), template, state).compile()
    found = collectives(run.as_text())
    # What shards of the vocabulary would put together for one row of each of the four texts of a device.
    assert found and all(size < 4 * lm.model.vocab_size for _, size in found)


def test_every_prompt_is_answered_once_through_the_chat_template(target, prompts, answered):
    given = sorted(text.tokens[: text.start].tolist() for text in answered.conversations())
    assert given == sorted(target.encode_chat(text) for text in ("ab", "cde", "d 1", "abab", "123", "e", "fg"))


def test_laws_are_the_softmax_of_the_logits_at_every_place_and_temperature(target, corpus):
    found = [text for text in corpus.conversations() if text.temperature > 0][:4]
    padded = np.zeros((len(found), SLOTS), np.int32)
    for row, text in zip(padded, found, strict=True):
        row[: len(text.tokens)] = text.tokens
    logits = np.asarray(logits_of(target.model, target.params, jnp.asarray(padded)), np.float64)
    laws = np.exp(logits - logits.max(-1, keepdims=True))
    laws /= laws.sum(-1, keepdims=True)
    for law, text in zip(laws, found, strict=True):
        law = law[: len(text.tokens)]
        np.testing.assert_allclose(text.top_probs, np.sort(law)[:, ::-1][:, : generate.TOP], atol=1e-3)
        own = np.take_along_axis(law, text.top_ids.astype(int), 1)
        np.testing.assert_allclose(text.top_probs, own, atol=1e-3)


def test_a_conversation_is_a_turn_the_template_and_an_answer_each_within_its_limit(target, corpus):
    before, after = sources.taken_apart(target)
    starters = [target.tokenizer.encode(text) for text in SELF.starters]
    starts = set()
    for text in corpus.conversations():
        tokens, end = text.tokens.tolist(), text.start - len(after)
        assert tokens[: len(before)] == before and tokens[end : text.start] == after
        said = tokens[len(before) : end]
        begun = next((ids for ids in starters if said[: len(ids)] == ids), [])
        assert 1 <= len(said) <= SELF.turn_tokens + len(begun) and not set(said) & set(target.eos_ids)
        answer = tokens[text.start :]
        assert 1 <= len(answer) <= 12 and not set(answer[:-1]) & set(target.eos_ids)
        assert len(answer) == 12 or answer[-1] in target.eos_ids
        starts.add(bool(begun))
    assert starts == {True, False}


def test_a_conversation_depends_on_its_number_alone(target, corpus, tmp_path):
    other = write(target, tmp_path / "c", batch=5, steps=3)
    assert contents(other) == contents(corpus)
    assert contents(write(target, tmp_path / "d", seed=1, tokens=10)) != contents(corpus)[:1]


def test_a_text_is_read_as_it_is(target, tmp_path):
    rows = [*np.random.default_rng(0).integers(0, 40, (3, 20)).tolist(), [3] * 40]
    texts.save(tmp_path / "t.npz", texts.join(rows, [5, 0, 20, 34]))
    found = list(write(target, tmp_path / "c", source=sources.Text(str(tmp_path / "t.npz"))).conversations())
    assert [text.tokens.tolist() for text in found] == [*rows[:3], [3] * 32, [3] * 8]
    assert [text.start for text in found] == [5, 0, 20, 32, 2]
    assert all((text.top_probs[:, 0] > 0).all() for text in found)


def test_draws_of_a_turn_follow_the_nucleus_that_warp_keeps():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(1, 12)) * 2, jnp.float32)
    count = 4000
    many = jnp.broadcast_to(logits, (count, 12))
    one = specjax.make_sampling(1, 12)._replace(temperature=jnp.array([0.8]), top_p=jnp.array([0.7]))
    assert isinstance(one, Sampling)
    law = np.asarray(specjax.warp(logits[:, None], one)[0, 0])

    def fill(value, kind=jnp.int32):
        return jnp.full(count, value, kind)

    rows = generate.Rows(
        jnp.zeros((count, 32), jnp.int32), fill(1), fill(32), fill(1), fill(9), fill(32), fill(0.0, jnp.float32),
        fill(0.8, jnp.float32), fill(0.7, jnp.float32), jnp.arange(count, dtype=jnp.uint32),
    )  # fmt: skip
    top, ids, _ = generate._law(many)
    drawn = generate._draw(
        jax.random.key(0), rows, many, top[:, :1], ids[:, 0], jnp.array([-1]), fill(3), fill(True, bool)
    )
    seen = np.bincount(np.asarray(drawn), minlength=12)
    assert not seen[law == 0].any() and (law == 0).any() and (law > 0).sum() > 2
    expected = law[law > 0] * count
    assert ((seen[law > 0] - expected) ** 2 / expected).sum() < 30  # a few degrees of freedom


def test_logits_that_are_not_finite_are_refused(target):
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, target.params)
    plan = generate.Plan(0, [3, 4], 8)
    with pytest.raises(ValueError, match="not finite"):
        list(generate.converse(target._replace(params=broken), [plan], batch=3, slots=SLOTS, steps=4))


# --- shards


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(target, corpus, tmp_path, monkeypatch):
    assert corpus.shards >= 3
    real, written = data.write_shard, []

    def dies(path, *rest):
        if len(written) == 2:
            path.with_name(f".{path.name}.part").write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(path)
        real(path, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data, "write_shard", dies)
        write(target, tmp_path)
    assert data.read_corpus(tmp_path).shards == 2
    assert contents(data.read_corpus(tmp_path)) == contents(corpus)[:2]
    again = write(target, tmp_path)
    assert contents(again) == contents(corpus)
    assert json.loads((tmp_path / "manifest.json").read_text()) == json.loads(
        (corpus.directory / "manifest.json").read_text()
    )


def test_nothing_is_written_when_there_is_enough(target, corpus, monkeypatch):
    monkeypatch.setattr(generate, "converse", None)
    assert write(target, corpus.directory).shards == corpus.shards


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 5}, "seed 0 there, 5 now"),
        ({"slots": 40}, "slots 32 there, 40 now"),
        ({"source": SELF._replace(turn_tokens=5)}, "source"),
        ({"shard_size": 5}, "shard_size 4 there, 5 now"),
    ],
)
def test_a_directory_of_other_settings_is_refused(target, corpus, changes, words):
    with pytest.raises(ValueError, match=words):
        write(target, corpus.directory, **changes)


def test_a_directory_of_another_target_is_refused(target, corpus):
    changed = target._replace(params=jax.tree.map(lambda leaf: leaf * 1.5, target.params))
    with pytest.raises(ValueError, match=f"target '{data.fingerprint(target)}' there"):
        write(changed, corpus.directory)


def test_the_fingerprint_is_of_the_checkpoint_and_not_of_its_type(target):
    narrow = target._replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target.params))
    assert data.fingerprint(narrow) == data.fingerprint(target)
    assert data.fingerprint(target._replace(tokenizer=None)) != data.fingerprint(target)


def test_too_small_a_disk_is_refused_before_anything_is_made(target, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"5\.1 MB are needed and 0\.0 MB are free"):
        write(target, tmp_path / "c", tokens=150_000)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['"fine"', "", "{broken"], "p.jsonl, line 3: not JSON"),
        (['"fine"', "[]"], "line 2: give a string"),
        (['{"prompt": 3}'], "line 1: give a string"),
        (['{"category": "x"}'], "line 1: give a string, or an object with prompt or question or turns"),
        ([""], "has no prompt in it"),
    ],
)
def test_a_broken_line_is_named(lines, words, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=words):
        sources.read_prompts(str(path))


def test_a_damaged_shard_is_named(corpus, tmp_path):
    shutil.copytree(corpus.directory, tmp_path / "c")
    (tmp_path / "c" / "shard-00001.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"shard-00001\.npz is damaged"):
        list(data.read_corpus(tmp_path / "c").conversations())


def test_no_corpus_is_told_from_one_that_has_no_shard_yet(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        data.read_corpus(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match="no complete shard"):
        data.read_corpus(tmp_path)


def test_tables_are_summed_over_all_laws_but_the_openings_and_what_is_held_out(corpus):
    assert corpus.opening == 1
    built = tables.build_tables(corpus, every=3)
    assert built.num_laws == sum(len(text.tokens) - 1 for text in packing.texts_of(corpus, every=3))
    kept = [(t.tokens, t.top_ids, np.where(np.arange(len(t.tokens))[:, None] < 1, 0, t.top_probs))
            for t in corpus.conversations() if t.number % 3 != 2]  # fmt: skip
    expected = specjax.drafters.build_tables(kept, corpus.vocab_size)
    np.testing.assert_array_equal(built.bigram, expected.bigram)
    assert f"{built.num_laws} laws" in tables.report(built)


def test_tables_are_made_to_fit_a_file_size_by_leaving_out_the_rarest_contexts(corpus, answered, tmp_path):
    built = tables.build_tables(corpus, answered)
    limit = 0.8 * tables.file_size(built)
    small = tables.build_tables(corpus, answered, megabytes=limit / 1e6)
    small.save(tmp_path / "t.npz")
    assert 0.4 * limit < (tmp_path / "t.npz").stat().st_size <= limit + 300
    assert 0 < tables.num_contexts(small)[1] < tables.num_contexts(built)[1]
    np.testing.assert_array_equal(small.unigram, built.unigram)
    with pytest.raises(ValueError, match=r"megabytes=0\.0001: tables with a single"):
        tables.build_tables(corpus, megabytes=1e-4)
    with pytest.raises(ValueError, match="all of one target"):
        tables.build_tables(corpus, answered._replace(manifest={"target": "other"}))


# --- what is held out


def test_what_is_held_out_is_neither_trained_on_nor_counted(corpus):
    train = list(packing.texts_of(corpus, every=3))
    held = list(packing.texts_of(corpus, every=3, held_out=True))
    assert {text.number for text in held} == {2, 5, 8, 11}.union(range(14, corpus.shards * 4, 3))
    assert sorted(text.number for text in train + held) == list(range(corpus.shards * 4))


# --- cached features


def test_cached_features_are_those_of_each_text_alone_and_a_stopped_run_goes_on(target, corpus, tmp_path, monkeypatch):
    packed = packing.pack(packing.texts_of(corpus), 48)
    real, calls = features._read, []

    def dies(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    size = features._size(target, (1, 3))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(features, "_size", lambda *rest: size)
        patch.setattr(features, "_read", dies)
        features.cache_features(target, packed, (1, 3), tmp_path, batch=2, progress=False)
    kept = features.cache_features(target, packed, (1, 3), tmp_path, batch=2, progress=False)
    row = int(packed.documents.max(1).argmax())
    found = np.asarray(kept.of(np.array([row])).astype(jnp.float32))[0]
    for number in range(packed.documents[row].max() + 1):
        places = np.flatnonzero(packed.documents[row] == number)
        alone = np.zeros((1, SLOTS), np.int32)
        alone[0, : len(places)] = packed.tokens[row, places]
        positions = jnp.arange(SLOTS, dtype=jnp.int32)[None]
        out = target.model.apply(target.params, jnp.asarray(alone), positions, None, None, feature_layers=(1, 3))
        np.testing.assert_allclose(found[places], out.features[0, : len(places)], rtol=0.01, atol=0.01)
    placed = sharding.place(sharding.make_mesh(2, 2), target)
    ours = features.cache_features(placed, packed, (1, 3), tmp_path / "mesh", batch=2, progress=False)
    rows = np.arange(len(packed.tokens))
    np.testing.assert_allclose(*(np.asarray(some.of(rows), np.float32) for some in (ours, kept)), rtol=0.01, atol=0.01)
    with pytest.raises(ValueError, match=r"layers \[1, 3\] there, \[2\] now"):
        features.cache_features(target, packed, (2,), tmp_path, progress=False)


def test_features_that_do_not_fit_on_the_disk_are_refused(target, corpus, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="features"):
        packed = packing.pack(packing.texts_of(corpus), 48)
        features.cache_features(target, packed, (1, 3), tmp_path / "features", progress=False)
    assert not (tmp_path / "features").exists()
