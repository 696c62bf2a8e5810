"""Decoding on a mesh: the same text, with weights and cache really in parts and no logits gathered."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import specjax
from specjax import LanguageModel, drafters, loop, request, sharding, slots
from specjax.drafters import DFlashConfig, EagleConfig
from specjax.drafters.dflash import fresh_params as dflash_params
from specjax.drafters.eagle import fresh_params as eagle_params
from specjax.models import llama
from specjax.models.config import LlamaConfig
from specjax.models.nnx import from_nnx
from tests.models.tiny import write_directory

WHOLE = [(1, 1), (8, 1)]  # meshes on which the target is whole
V = 2048
CONFIG = LlamaConfig(V, 32, 64, 2, 8, 4, max_position_embeddings=256)
PROMPTS = [[1 + row, 5, 1 + row, 5, 9, 1 + row] for row in range(8)]
BUDGET, DRAFTS = 12, 3


@functools.cache
def alone() -> LanguageModel:
    model, params = from_nnx(llama.Llama(CONFIG, rngs=nnx.Rngs(3)))
    return LanguageModel(model, jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params), config=CONFIG)


def options():
    return {"drafter": drafters.ngram(DRAFTS, min_ngram=1), "max_new_tokens": BUDGET, "prefill_chunk": 8}


@functools.cache
def text():
    return specjax.generate(alone(), PROMPTS, **options()).tokens


def parts(x):
    return {shard.data.shape for shard in x.addressable_shards}


def collectives(program: str) -> list[tuple[str, int]]:
    """Kind and elements of the result of each collective of a compiled program: of an all-to-all all parts, else the
    largest, for the compiler puts several into one."""
    lines = re.findall(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", program)
    sizes = [(kind, [elements(shape) for shape in re.findall(r"\[([\d,]*)\]", result)]) for result, kind in lines]
    return [(kind, sum(parts) if kind == "all-to-all" else max(parts)) for kind, parts in sizes]


def elements(shape: str) -> int:
    return int(np.prod([int(n) for n in shape.split(",") if n]))


@pytest.mark.parametrize("data, model", [(1, 8), (2, 4), *(pytest.param(*m, marks=pytest.mark.full) for m in WHOLE)])
def test_a_mesh_says_the_same_with_weights_and_cache_in_parts(data, model):
    """Cases 139-146. Four key heads: over eight shards the cache is whole on each."""
    lm = sharding.place(sharding.make_mesh(data, model), alone())
    layer = lm.params["layers"][0]
    assert parts(layer["qkv"]) == {(64 // model, 32)} and parts(layer["o"]) == {(32, 32 // model)}
    assert parts(layer["gate_up"]) == {(128 // model, 32)} and parts(layer["down"]) == {(32, 64 // model)}
    assert parts(lm.params["head"]) == parts(lm.params["embedding"]) == {(V // model, 32)}
    out = specjax.generate(lm, PROMPTS, **options())
    assert out.tokens == text() and out.stats.tau > 1

    made = request.make(lm, PROMPTS, **options())
    state = loop.start(made.program.prefill(), made.weights, made.text, made.keys, made.limits, chunk=8)
    heads = 4 // model if 4 % model == 0 else 4
    assert parts(state.cache.k[0]) == {(8 // data, heads, 256, 4)}
    lowered = loop.decode.lower(made.program, made.weights, state, made.sampling, made.limits)
    found = collectives(lowered.compile().as_text())
    assert bool(found) == (data * model > 1)
    # A device that holds whole key heads goes on with what it holds of q, k, v, gate and up.
    assert 4 % model or "collective-permute" not in dict(found)
    # What shards of the vocabulary would put together for one row of each text, and one layer of the cache.
    law, layer = 8 // data * V, 8 // data * heads * 256 * 4
    assert all(size < min(law, layer) for _, size in found)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_loading_onto_a_mesh_puts_each_matrix_in_parts(tmp_path, scan_layers):
    """Case 139: straight to where they stay, stacked layers too."""
    directory = write_directory(tmp_path / "tiny")
    mesh = sharding.make_mesh(2, 2)
    lm, whole = (specjax.load(directory, scan_layers=scan_layers, mesh=m) for m in (mesh, None))
    layer = lm.params["layers"] if scan_layers else lm.params["layers"][1]
    front = (2,) if scan_layers else ()
    assert parts(layer["down"]) == {(*front, 20, 14)} and parts(lm.params["head"]) == {(20, 20)}
    assert lm.model == sharding.on_mesh(mesh, whole.model)
    for ours, theirs in zip(jax.tree.leaves(lm.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_what_a_mesh_does_not_divide_is_whole_or_refused_with_the_numbers():
    mesh = sharding.make_mesh(2, 4)
    assert sharding.spec(mesh, ("hidden", "vocab"), (32, 63)) == PartitionSpec(None, None)
    assert sharding.spec(mesh, sharding.CACHE, (8, 2, 64, 4)) == PartitionSpec("data", None, None, None)
    assert sharding.spec(mesh, sharding.CACHE, (2, 8, 4, 64, 4)) == PartitionSpec(None, "data", "model", None, None)
    assert sharding.spec(mesh, ("hidden", "vocab"), (32, 64), sharding.Rules(vocab=None)) == PartitionSpec(None, None)
    for changes, words in (
        ({"num_heads": 6, "num_kv_heads": 2}, "mesh=2,4: num_heads=6 .* model=4; with 8 devices model may be 1 or 2"),
        ({"intermediate_size": 30}, "intermediate_size=30 .* model=4"),
    ):
        with pytest.raises(ValueError, match=words):
            sharding.place(mesh, alone()._replace(config=dataclasses.replace(CONFIG, **changes)))
    with pytest.raises(ValueError, match="intermediate_size=30") as error:
        sharding.refuse(mesh, dataclasses.replace(CONFIG, intermediate_size=30))
    assert "specjax.sharding.Rules(ffn=None)" in error.value.__notes__[0] and "specjax" not in str(error.value)
    kept = sharding.place(mesh, alone(), sharding.Rules(ffn=None)).params["layers"][0]
    assert parts(kept["gate_up"]) == {kept["gate_up"].shape} and parts(kept["o"]) == {(32, 8)}
    with pytest.raises(ValueError, match="a batch of 3 rows cannot be shared out over data=2: give a multiple of 2"):
        sharding.place(mesh, alone()).model.init_cache(3, 64)
    with pytest.raises(ValueError, match="mesh='x': must have the automatic axes"):
        specjax.load("smollm2-135m-instruct", mesh="x")


def head_of(kind: str):
    """Configuration and weights of a head for `alone`."""
    sizes, make = dataclasses.replace(CONFIG, num_layers=1), {"eagle": EagleConfig, "dflash": DFlashConfig}[kind]
    config = make(sizes, (0, 2), draft_vocab_size=512, **({"mask_token_id": 0} if kind == "dflash" else {}))
    params = {"eagle": eagle_params, "dflash": dflash_params}[kind](config, rngs=nnx.Rngs(5))
    return config, {**params, "ids": np.arange(0, V, 4, dtype=np.int32)}


@pytest.mark.parametrize("kind", ["eagle", pytest.param("dflash", marks=pytest.mark.full)])
def test_a_loaded_head_lies_in_parts_where_its_target_does_and_the_text_is_the_same(tmp_path, kind):
    specjax.save_drafter(tmp_path / "head", *head_of(kind))
    mesh = sharding.make_mesh(2, 4)
    lm = sharding.place(mesh, alone())
    drafter = specjax.load_drafter(tmp_path / "head", target=lm, num_draft_tokens=DRAFTS)
    weights = drafter.params["weights"] if kind == "eagle" else drafter.params.net
    layer = weights["layers"][0]
    assert parts(weights["fc"]) == {(32, 16)} and parts(weights["head"]) == {(128, 32)}
    assert parts(layer["qkv"]) == {(16, 64 if kind == "eagle" else 32)} and parts(layer["o"]) == {(32, 8)}
    assert parts(layer["gate_up"]) == {(32, 32)} and parts(layer["down"]) == {(32, 16)}
    if kind == "eagle":
        assert weights["embedding"] is lm.params["embedding"]
    assert sharding.place_drafter(mesh, drafter) == drafter  # once is enough

    made = request.make(lm, PROMPTS, **{**options(), "drafter": drafter})
    state = loop.start(made.program.prefill(), made.weights, made.text, made.keys, made.limits, chunk=8)
    own = state.drafter.caches[0] if kind == "eagle" else state.drafter
    assert parts(own.k[0]) == {(4, 1, own.k[0].shape[2], 4)}
    assert kind != "eagle" or parts(state.drafter.logits) == {(4, 128)}
    compiled = loop.decode.lower(made.program, made.weights, state, made.sampling, made.limits).compile()
    found = collectives(compiled.as_text())
    # At most one draft law of each row, which lies across the shards of the vocabulary; a cache is twice as large.
    assert found and all(size <= 4 * 512 for _, size in found)
    ended = compiled(made.weights, state, made.sampling, made.limits)[0].text
    start = len(PROMPTS[0])
    assert np.asarray(ended.tokens)[:, start : start + BUDGET].tolist() == text()


def test_a_draft_model_lies_in_parts_and_what_is_there_already_stays(tmp_path):
    mesh = sharding.make_mesh(2, 4)
    lm = sharding.place(mesh, alone())
    small = write_directory(tmp_path / "small")
    for drafter in (
        sharding.place_drafter(mesh, drafters.model(alone(), lm, 2)),
        drafters.model(specjax.load(small, mesh=mesh), specjax.load(small, mesh=mesh), 2),
    ):
        assert not drafter.params["layers"][0]["down"].is_fully_replicated
        assert drafter.params["final_norm"].is_fully_replicated
    own = drafters.model(lm, lm, 2)
    kept = sharding.place_drafter(mesh, own).params
    assert all(a is b for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(own.params), strict=True))


def test_a_drafter_elsewhere_than_its_target_is_refused_with_both_meshes():
    two, four = sharding.make_mesh(1, 2), sharding.make_mesh(1, 4)
    lm, small = sharding.place(two, alone()), sharding.place(four, alone())
    for drafter in (drafters.model(small, lm, 2), sharding.place_drafter(four, drafters.ngram())):
        with pytest.raises(ValueError, match=r"drafter lies on a mesh data=1, model=4 of .* target on a mesh data=1"):
            specjax.generate(lm, PROMPTS, drafter=drafter)
    with pytest.raises(ValueError, match=r"placed on a mesh data=1, model=4 of .* before, and mesh=a mesh data=1, mod"):
        sharding.place_drafter(two, sharding.place_drafter(four, drafters.ngram()))


def test_what_is_placed_and_where_must_be_given():
    mesh, lookup = sharding.make_mesh(1, 2), drafters.ngram()
    for call, words in (
        (lambda: sharding.place(None, alone()), "mesh=None: give what specjax.sharding.make_mesh returns"),
        (lambda: sharding.place_drafter(None, lookup), "mesh=None: give what"),
        (lambda: sharding.place_drafter(mesh, None), "drafter=None is not a drafter"),
        (lambda: sharding.place_drafter(mesh, alone()), r"is not a drafter: .* place\(mesh, lm\) is for models"),
        (lambda: sharding.place(mesh, lookup), r"is not a language model: place_drafter\(mesh, drafter\) is for draft"),
        (lambda: sharding.place(mesh, None), "lm=None is not a language model: specjax.load returns one"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_slots_on_a_mesh_say_the_same_and_a_row_is_put_in_without_a_collective(monkeypatch, caplog):
    """Case 146: rows come and go in slots that lie on two data replicas; nothing is compiled after the first ones."""
    lm, given = sharding.place(sharding.make_mesh(2, 4), alone()), options()
    budget, made, insert = given.pop("max_new_tokens"), [], slots.insert

    def spy(*args, **static):
        made.append((jax.tree.map(lambda x: shape_of(x) if isinstance(x, jax.Array) else x, args), static))
        return insert(*args, **static)

    monkeypatch.setattr(slots, "insert", spy)
    engine = specjax.Engine(lm, slots=4, capacity=32, **given)
    for row in range(2):  # the second request meets slots that a step has left
        engine.insert(PROMPTS[row], max_new_tokens=budget)
        engine.step()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for row in range(2, 6):
            engine.insert(PROMPTS[row], max_new_tokens=budget)
        tokens = {event.id: event.result.tokens[0] for event in engine.events() if event.result}
    assert [tokens[row] for row in range(6)] == text()[:6]
    assert not [record for record in caplog.records if "XLA compilation" in record.getMessage()]
    state = engine._state.state
    assert parts(state.cache.k[0]) == {(2, 1, 256, 4)} and parts(state.text.tokens) == {(2, 256)}
    args, static = made[-1]
    assert collectives(insert.lower(*args, **static).compile().as_text()) == []
    with pytest.raises(ValueError, match="a batch of 3 rows cannot be shared out over data=2: give a multiple of 2"):
        specjax.Engine(lm, slots=3, capacity=32, **given)


def shape_of(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


@pytest.mark.full
def test_a_vocabulary_that_the_mesh_does_not_divide_is_whole_and_says_the_same():
    """Nothing is padded: an id past the vocabulary does not exist."""
    config = dataclasses.replace(CONFIG, vocab_size=643, num_layers=1)
    model, params = from_nnx(llama.Llama(config, rngs=nnx.Rngs(3)))
    lm = LanguageModel(model, jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params), config=config)
    placed = sharding.place(sharding.make_mesh(2, 4), lm)
    assert parts(placed.params["head"]) == {(643, 32)} and parts(placed.params["layers"][0]["o"]) == {(32, 8)}
    how = {**options(), "temperature": 1.0}
    out = specjax.generate(placed, PROMPTS, **how)
    assert out.tokens == specjax.generate(lm, PROMPTS, **how).tokens
    assert max(map(max, out.tokens)) < 643
