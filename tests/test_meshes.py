"""What the core does, on meshes of every kind: one device, rows alone, parts of the target alone, both."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import Heuristic, LanguageModel, drafters, engine, loop, sharding, tree
from specjax.drafters import DFlashConfig, MedusaConfig, MTPConfig
from specjax.drafters.eagle import EagleConfig, eagle, fresh_params
from specjax.models import llama
from specjax.models.config import LlamaConfig
from specjax.models.nnx import from_nnx
from specjax.static import bind
from specjax.train import initial, students, trainer
from specjax.train.evaluate import Prompt, evaluate
from specjax.train.settings import Settings
from specjax.train.types import Batch, Mean
from tests.doubles import hash_lm
from tests.oracle.hashlm import HashConfig
from tests.small import ToyTokenizer
from tests.test_sharding import PROMPTS, parts
from tests.train_world import drawn

MESHES = [(1, 1), (8, 1), (1, 8), (2, 4)]
V = 64
CONFIG = LlamaConfig(V, 32, 64, 1, 8, 8, max_position_embeddings=256)
HEAD = EagleConfig(CONFIG, (0, 1))


@functools.cache
def alone() -> LanguageModel:
    model, params = from_nnx(llama.Llama(CONFIG, rngs=nnx.Rngs(3)))
    return LanguageModel(model, jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params), config=CONFIG)


def close(lm: LanguageModel) -> LanguageModel:
    """A draft model that often agrees, and lies where the target lies."""
    def noisy(x):
        noise = np.random.default_rng(x.size).normal(size=x.shape).astype(np.float32)
        return x + jax.device_put(0.05 * noise * np.asarray(x).std(), x.sharding)

    return lm._replace(params=jax.tree.map(noisy, lm.params))


@functools.cache
def head():
    return fresh_params(HEAD, rngs=nnx.Rngs(5))


def trained(name: str, lm: LanguageModel, **how):
    """A head as training begins with it: a copy of the target's last layer, which is often right."""
    config = STUDENTS[name]
    return getattr(drafters, name)(config, initial.params_for(config, alone()), lm, **how)


class Bytes(ToyTokenizer):
    """A byte for every id, from ``first`` on."""

    special_ids = frozenset((0, 1))

    def __init__(self, size: int, first: int):
        super().__init__((b"<s>", b"</s>", *(bytes([first + i]) for i in range(size - 2))))


def translated(lm: LanguageModel):
    """A draft model that has half of the target's vocabulary, under other ids."""
    draft = LanguageModel(*hash_lm(HashConfig(V // 2), seed=5), Bytes(V // 2, 48))
    return drafters.translate(draft, lm._replace(tokenizer=Bytes(V, 40)), 3)


STUDENTS = {
    "medusa": MedusaConfig(32, V, 2), "eagle": HEAD, "mtp": MTPConfig(CONFIG, (1,)),
    "dflash": DFlashConfig(CONFIG, (0, 1), 0, 3),
}  # fmt: skip

WAYS = {
    "draft model": lambda lm: {"temperature": 1.0, "drafter": drafters.model(close(lm), lm, 3)},
    "tree": lambda lm: {"temperature": 1.0, "drafter": eagle(HEAD, head(), lm, tree=tree.kary(2, 2))},
    "cascade": lambda lm: {"drafter": drafters.cascade(drafters.ngram(2, min_ngram=1), drafters.recycling(lm, 2))},
    "medusa": lambda lm: {"drafter": trained("medusa", lm, tree=tree.kary(2, 2))},
    "mtp": lambda lm: {"temperature": 1.0, "drafter": trained("mtp", lm)},
    "dflash": lambda lm: {"temperature": 1.0, "drafter": trained("dflash", lm)},
    "lookahead": lambda lm: {"drafter": drafters.lookahead(width=2, ngram=3, candidates=2, keys=64)},
    "translate": lambda lm: {"temperature": 1.0, "drafter": translated(lm)},
}


def decoded(lm, way):
    return specjax.generate(lm, PROMPTS, max_new_tokens=10, prefill_chunk=8, **WAYS[way](lm))


@functools.cache
def expected(way):
    return decoded(alone(), way)


CHOSEN = [
    *(("draft model", shape) for shape in MESHES), ("tree", (2, 4)), ("cascade", (2, 4)), ("medusa", (2, 4)),
    ("mtp", (1, 8)), ("dflash", (8, 1)), ("lookahead", (8, 1)), ("translate", (2, 4)),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("way, shape", CHOSEN)
def test_a_mesh_decodes_the_same(way, shape):
    """Draft model and its cache in parts too, drawn chains; trees of a head that every device has; lookups; every
    other source on one mesh of eight."""
    lm = sharding.place(sharding.make_mesh(*shape), alone())
    assert parts(lm.params["layers"][0]["qkv"]) == {(96 // shape[1], 32)}
    out = decoded(lm, way)
    assert out.tokens == expected(way).tokens and out.stats.tau > 1
    jax.tree.map(np.testing.assert_array_equal, out.stats.counts, expected(way).stats.counts)
    if way == "draft model":  # the same program
        how = {"max_new_tokens": 10, "temperatures": (1.0,), "prefill_chunk": 8}
        (row,) = evaluate(lm, WAYS[way](lm)["drafter"], [Prompt(prompt) for prompt in PROMPTS], **how)
        assert (row.emitted, row.rounds, row.tau) == (out.stats.emitted, out.stats.rounds, out.stats.tau)


@functools.cache
def plain(temperature):
    """One program of one device: what greedy text, and text under "match", must be."""
    return specjax.generate(alone(), PROMPTS, max_new_tokens=10, prefill_chunk=8, temperature=temperature).tokens


def quick(shape, *cases):
    """Cases of which those on one mesh belong to the quick run."""
    return [case if case[0] == shape else pytest.param(*case, marks=pytest.mark.full) for case in cases]


STREAMED = {
    "lookup": lambda lm: drafters.ngram(3, min_ngram=1),
    "suffix": lambda lm: drafters.suffix(3),
    "recycling": lambda lm: drafters.recycling(lm, 3),
    "coupled": lambda lm: drafters.model(close(lm), lm, 3, coupled=True),
}


SOURCES = [((1, 1), "lookup"), ((8, 1), "coupled"), ((1, 8), "recycling"), ((2, 4), "suffix")]


@pytest.mark.parametrize("shape, source", quick((8, 1), *SOURCES))
def test_a_mesh_streams_the_same_at_the_pace_of_one_device(shape, source, monkeypatch):
    """Round by round, in tiers: one row, whole in every part of a batch; its cache lies in parts by key heads."""
    seen, step = [], loop.step

    def spy(*args):
        state, info = step(*args)
        seen.append((parts(state.cache.k[0]), parts(state.text.tokens)))
        return state, info

    monkeypatch.setattr(loop, "step", spy)
    lm = sharding.place(sharding.make_mesh(*shape), alone())._replace(tokenizer=Letters())
    drafter, policy = STREAMED[source](lm)._replace(widths=()), Heuristic((1, 3), 3)
    temperature = 1.0 if source == "coupled" else 0.0
    how = {"rule": "match", "temperature": temperature, "max_new_tokens": 10, "prefill_chunk": 8}
    for row in range(3):
        stream = specjax.stream(lm, PROMPTS[row], drafter=drafter, seed=row, adaptive=policy, **how)
        "".join(stream)
        assert stream.result.tokens == [plain(temperature)[row]]
    assert len(seen) < 30 and all(found == ({(1, 8 // shape[1], 256, 4)}, {(1, 256)}) for found in seen)


class Letters(ToyTokenizer):
    """A letter for every id."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(48 + i) for i in ids)


JUDGED = [((1, 1), "match", 1.0), ((8, 1), "block", 0.0), ((1, 8), "rejection", 0.0)]


@pytest.mark.parametrize("shape, rule, temperature", quick((1, 8), *JUDGED))
def test_slots_on_a_mesh_say_the_same(shape, rule, temperature, monkeypatch):
    """`Engine` behind ``slots=``, with a draft model whose cache lies where the target's does; once in tiers."""
    made, for_request = [], engine.for_request
    monkeypatch.setattr(engine, "for_request", lambda *args, **how: made.append(for_request(*args, **how)) or made[0])
    lm = sharding.place(sharding.make_mesh(*shape), alone())
    drafter, policy = drafters.model(close(lm), lm, 2)._replace(widths=()), Heuristic((1, 2)) if shape[0] > 1 else False
    how = {"max_new_tokens": 10, "prefill_chunk": 8, "slots": 8, "rule": rule, "temperature": temperature}
    how["adaptive"] = policy
    out = specjax.generate(lm, [*PROMPTS, *PROMPTS[:2]], seed=[*range(8), 0, 1], drafter=drafter, **how)
    assert out.tokens == plain(temperature) + plain(temperature)[:2]
    state = made[0]._state.state
    for cache in (state.cache, state.drafter.cache):
        assert parts(cache.k[0]) == {(8 // shape[0], 8 // shape[1], 256, 4)}


# --- training


def together(losses, params, given, batch, key):
    """Students side by side: one program, one reading of the target."""
    found = {name: loss(params[name], given, batch, key) for name, loss in losses}
    total = sum(total for total, _ in found.values())
    return total, {"loss": Mean(total, batch.counts.sum(dtype="float32"))} | {
        name: metrics["loss"] for name, (_, metrics) in found.items()
    }


def batches(step):
    rng = np.random.default_rng([5, step])
    return Batch(rng.integers(0, V, (8, 12)).astype(np.int32), rng.random((8, 12)) < 0.8)


def learnt(lm, mesh=None):
    """Three steps of every student; a large eps, for the size of a gradient to show."""
    params = {name: drawn(jax.eval_shape(lambda config=config: initial.params_for(config, alone())), 5, 0.1)
              for name, config in STUDENTS.items()} | {"draft model": close(alone()).params}  # fmt: skip
    losses = [(name, students.loss_of(student, lm, depth=2)) for name, student in STUDENTS.items()]
    losses.append(("draft model", students.loss_of(alone()._replace(model=lm.model), lm)))
    settings = Settings(steps=3, warmup=1, learning_rate=0.1, eps=1.0, log_every=3)
    loss = bind(together, tuple(losses))
    return trainer.fit(loss, params, batches, settings, given=lm.params, mesh=mesh, progress=False)


@functools.cache
def learnt_alone():
    return learnt(alone())


@pytest.mark.full
@pytest.mark.parametrize("shape", MESHES[1:])
def test_every_student_learns_the_same_on_a_mesh(shape):
    mesh = sharding.make_mesh(*shape)
    here, there = learnt_alone(), learnt(sharding.place(mesh, alone()), mesh)
    for name in ("loss", "gradient_norm", "draft model", *STUDENTS):
        assert here.history[name][0] != here.history[name][-1]
        np.testing.assert_allclose(there.history[name], here.history[name], rtol=1e-5, err_msg=name)
    for ours, theirs in zip(jax.tree.leaves(there.params), jax.tree.leaves(here.params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    for name in ("eagle", "draft model"):
        assert parts(there.params[name]["layers"][0]["o"]) == {(32, 32 // shape[1])}
