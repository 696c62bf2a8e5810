"""Choosing the number of draft tokens: what is lost at most, what is found, and that the text stays the target's."""

import dataclasses
import functools
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Adaptive, Fixed, Heuristic, drafters, loop, request, sharding
from specjax.adaptive import Outcome, Pace, checked
from specjax.drafters.late import DELAY, Late
from specjax.round import RUNNING
from specjax.theory import CostModel
from tests.drafters import parallel_world as world
from tests.small import PROMPTS, V, draft_source, position_lm, run, target

SIZES = (0, 2, 4)
CHEAP = CostModel(SIZES, (1.0, 1.1, 1.2), (0.0, 0.1, 0.2))
DEAR = CostModel(SIZES, (1.0, 2.5, 5.0), (0.0, 1.0, 2.0))
NO_DRAFT = (0.0, 0.0, 0.0)


def policy(costs=CHEAP, **settings) -> Adaptive:
    return Adaptive(**{"tiers": SIZES, "costs": costs, **settings})


# --- decisions


@functools.partial(jax.jit, static_argnums=0)
def update(policy, pace, outcome):
    """Of a policy without costs, which are in its state: one program for all of them."""
    return policy.update(pace, outcome)


def play(policy, accept, rounds=400, rows=1):
    """Size, account and accepted tokens of each round while ``accept(round, size)`` of them are accepted [rows]."""
    pace, still, sizes, balance, taken = policy.init(), policy, [], [], []
    if isinstance(policy, Adaptive):
        still = dataclasses.replace(policy, costs=None)
    for i in range(rounds):
        tier = policy.choose(pace)
        sizes.append(policy.sizes[int(tier)])
        size, accepted = jnp.int32(sizes[-1]), np.broadcast_to(accept(i, sizes[-1]), rows)
        taken.append(accepted.mean())
        accepted = jnp.asarray(accepted, jnp.int32)
        outcome = Outcome(jnp.int32(tier), size, jnp.full(rows, size), accepted, accepted + 1)
        pace = update(still, pace, outcome)
        balance.append(float(pace.balance) if isinstance(pace, Pace) else 0.0)
    return sizes, balance, taken


def time_of(costs, sizes):
    """In plain rounds."""
    return float(np.sum(np.asarray(costs.seconds(tuple(sizes))) / costs.seconds((0,))[0]))


def chain(rng, acceptance):
    """Draft tokens accepted one after another with this probability."""
    return lambda i, size: int(np.cumprod(rng.random(size) < acceptance).sum())


@pytest.mark.parametrize("costs", [CHEAP, DEAR, CostModel(SIZES, (1.0, 1.02, 1.05), NO_DRAFT)])
def test_whatever_is_accepted_the_loss_against_plain_decoding_is_bounded(costs):
    """128 rounds lose at most one part in a hundred and two plain rounds, 2.6%, by any run of acceptances."""
    rng = np.random.default_rng(1)
    worst = []
    for accept in (
        lambda i, size: 0, chain(rng, 0.3), chain(rng, 0.6), lambda i, size: size if i < 40 else 0,
        lambda i, size: size if i // 8 % 2 else 0, lambda i, size: size if size < 4 else 0,
    ):  # fmt: skip
        sizes, balance, accepted = play(policy(costs), accept, 128)
        plain, took = 128 + sum(accepted), time_of(costs, sizes)
        assert took <= 1.01 * plain + 2 + 1e-3 and min(balance) >= -1e-4
        worst.append(took / plain)
    assert max(worst) <= 1.03


def test_where_nothing_is_accepted_drafts_are_still_tried_now_and_then_and_found_good_again():
    sizes, *_ = play(policy(), lambda i, size: size if i < 60 or i >= 260 else 0, 400)
    assert np.mean(np.asarray(sizes[20:60]) == 4) > 0.9
    bad = np.asarray(sizes[90:260])
    assert 0 < np.count_nonzero(bad) < 0.1 * len(bad)
    assert np.mean(np.asarray(sizes[-60:]) == 4) > 0.9


@pytest.mark.parametrize(("acceptance", "costs", "best"), [
    (0.9, CHEAP, 4), (0.05, CHEAP, 0), (0.95, DEAR, 0), (0.5, CostModel(SIZES, (1.0, 1.1, 1.7), NO_DRAFT), 2),
])  # fmt: skip
def test_the_best_tier_is_found_and_kept(acceptance, costs, best):
    assert costs.best([acceptance] * 4) == best
    sizes, *_ = play(policy(costs), chain(np.random.default_rng(2), acceptance), 300)
    assert np.mean(np.asarray(sizes[30:]) == best) > 0.75


def test_the_choice_stays_where_it_is_unless_another_is_faster_by_the_margin():
    """Two tiers whose speeds are close do not take turns."""
    costs = CostModel(SIZES, (1.0, 1.0, 1.29), NO_DRAFT)
    lengths = np.random.default_rng(1).geometric(0.25, (400, 8)) - 1

    def moves(margin):
        sizes, *_ = play(policy(costs, margin=margin), lambda i, size: np.minimum(lengths[i], size), rows=8)
        return np.count_nonzero(np.diff(sizes))

    assert moves(0.1) < 0.5 * moves(0.0)


def test_the_sum_over_rows_decides_and_not_their_order():
    rng, still = np.random.default_rng(3), policy(None)
    emitted = rng.integers(0, 6, 16)  # 0: no part in it
    accepted = np.maximum(emitted - rng.integers(0, 2, 16), 0)  # all of them: an end cut the block
    start, four = policy().init(), jnp.full(16, 4, jnp.int32)
    rows = jnp.asarray([accepted, emitted], jnp.int32)
    paces = [
        update(still, start, Outcome(jnp.int32(2), jnp.int32(4), four, *rows[:, order]))
        for order in (np.arange(16), rng.permutation(16))
    ]
    jax.tree.map(np.testing.assert_array_equal, *paces)
    np.testing.assert_array_equal(paces[0].judged[2], [np.sum(emitted > depth) for depth in range(4)])
    np.testing.assert_array_equal(paces[0].accepted[2], [np.sum(accepted > depth) for depth in range(4)])


def test_rounds_in_which_nothing_was_found_cost_the_search_alone():
    still, start = policy(None), policy().init()
    nothing, one = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    after = update(still, start, Outcome(jnp.int32(2), jnp.int32(0), nothing, nothing, one))
    assert float(jnp.sum(after.judged)) == 0 == float(after.rounds[2])
    np.testing.assert_allclose([after.spent[2], after.balance], [0.2, 2 - 0.2 + 0.01], rtol=1e-5)


def test_heuristic_adds_two_or_takes_one():
    six = Heuristic(tiers=(1, 2, 3, 4, 5, 6), start=3)
    assert play(six, lambda i, size: size if i < 2 else 0, 9)[0] == [3, 5, 6, 5, 4, 3, 2, 1, 1]
    assert play(Heuristic(tiers=(1, 2, 4)), lambda i, size: size - 1, 5)[0] == [4, 2, 2, 1, 1]
    assert play(Fixed(2), lambda i, size: 0, 3)[0] == [2, 2, 2]


# --- decoding


def test_a_drafter_that_reads_late_knows_everything_when_it_drafts():
    """Plain rounds for longer than anything waits, then drafts, by one program: costs are data. The target drafts for
    itself, so that a token it had not read would show as a rejection."""
    made = request.make(target(), PROMPTS[:2], drafter=draft_source("self", 4), max_new_tokens=[DELAY + 9, DELAY + 4],
                        rule="match", adaptive=policy(DEAR, tiers=(0, 4)))  # fmt: skip
    assert made is not None
    state, _ = loop.decode(made.program, made.weights, made.start(), made.sampling, made.limits)
    assert isinstance(state.drafter, Late) and state.drafter.waiting.count.tolist() == [9, 4]
    assert np.sum(state.counts.proposed) == 0
    state = state._replace(finish=jnp.full(2, RUNNING, jnp.int32), pace=policy(tiers=(0, 4)).init())
    limits = made.limits._replace(max_new_tokens=jnp.asarray([DELAY + 25, DELAY + 20], jnp.int32))
    before = loop.compiled_programs()
    state, _ = loop.decode(made.program, made.weights, state, made.sampling, limits)
    assert loop.compiled_programs() == before
    plain = run("none", prompts=PROMPTS[:2], max_new_tokens=[DELAY + 25, DELAY + 20]).tokens
    for row, (tokens, start) in enumerate(zip(plain, (7, 1))):
        assert state.text.tokens[row, start : start + len(tokens)].tolist() == tokens
    counts = jax.tree.map(np.asarray, state.counts)
    assert counts.proposed.min() >= 8 and np.array_equal(counts.judged_at, counts.accepted_at)
    # And under the usual settings, still the same program: another drafter of the same shape, now and then wrong.
    before = loop.compiled_programs()
    out = run("close", 4, prompts=PROMPTS[:2], max_new_tokens=[40, 20], adaptive=policy(tiers=(0, 4)))
    assert loop.compiled_programs() == before
    assert out.tokens == [tokens[:size] for tokens, size in zip(plain, (40, 20))] and out.stats.accepted > 0


@pytest.mark.full
@pytest.mark.parametrize("name", ["recycling", "eagle"])
def test_text_is_that_of_plain_decoding_by_measured_costs_and_by_others(name, tmp_path, monkeypatch):
    """Drafters that learn from the target's windows and from its features; greedy and sampled rows."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    lm, eagle = world.small_target(), importlib.import_module("tests.drafters.test_eagle")
    drafter = drafters.recycling(lm, 4) if name == "recycling" else eagle.made(eagle.CONFIGS["EAGLE-3"])[0]
    options = {"rule": "match", "max_new_tokens": 24, "eos_ids": [], "temperature": [0.0, 0.8]}
    plain = specjax.generate(lm, PROMPTS[:2], **options).tokens
    for costs in (None, CHEAP):
        out = specjax.generate(lm, PROMPTS[:2], drafter=drafter, adaptive=policy(costs, tiers=(0, 4)), **options)
        assert out.tokens == plain
    assert out.stats.proposed > 0
    (stored,) = (json.loads(file.read_text()) for file in (tmp_path / "costs").iterdir())
    assert stored["sizes"] == [0, 1, 2, 4] and min(stored["verify"]) > 0


@pytest.mark.full
def test_a_stream_says_what_generate_says_with_one_program_and_one_transfer_per_round(monkeypatch):
    options = {"drafter": draft_source("ngram", 4), "max_new_tokens": 30}
    plain = run("none", prompts=[PROMPTS[0]], max_new_tokens=30).tokens
    list(specjax.stream(target(), PROMPTS[0], adaptive=policy(tiers=(0, 4)), **options))
    before, calls, get = loop.compiled_programs(), [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: calls.append(1) or get(x))
    stream = specjax.stream(target(), PROMPTS[0], adaptive=policy(DEAR, tiers=(0, 4)), **options)
    list(stream)
    assert stream.result.tokens == plain and loop.compiled_programs() == before
    assert len(calls) <= stream.result.stats.rounds + 3


@pytest.mark.full
@pytest.mark.parametrize("shape", [(8, 1), (2, 4)])
def test_a_mesh_chooses_the_same(shape):
    """Rows on several devices, which all must choose the same tier: its sums are of whole numbers."""
    sharded = importlib.import_module("tests.test_sharding")
    options = sharded.options() | {"drafter": drafters.ngram(4, min_ngram=1), "adaptive": policy(tiers=(0, 4))}
    alone, split = (
        specjax.generate(lm, sharded.PROMPTS, **options)
        for lm in (sharded.alone(), sharding.place(sharding.make_mesh(*shape), sharded.alone()))
    )
    assert alone.tokens == split.tokens == sharded.text()
    jax.tree.map(np.testing.assert_array_equal, alone.stats.counts, split.stats.counts)


# --- refusals

SHORT = CostModel((0, 2), (1.0, 1.0), (0.0, 0.0))
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("make, settings", [
    *((Adaptive, {"tiers": wrong})
      for wrong in ((), (2, 2), ("2",), (2.0,), (-1, 2), (True,), 3, "02", {0, 2}, (None,))),
    *((Adaptive, {name: wrong}) for name in ("decay", "margin", "max_loss", "allowance")
      for wrong in (-0.1, NAN, INF, "big", None, True, (0.5,))),
    (Adaptive, {"decay": 1.1}), (Adaptive, {"margin": 2}), (Adaptive, {"max_loss": 0.0}),
    (Adaptive, {"allowance": 1e7}),
    *((Adaptive, {"costs": wrong}) for wrong in ((1.0,), 2.0, "x", CHEAP._replace(draft=(0.0,)))),
    (Adaptive, {"tiers": (0, 4), "costs": SHORT}),
    *((Heuristic, {"tiers": wrong}) for wrong in ((0, 2), (), (2, 2), (1.0,), "12", 4)),
    *((Heuristic, {"start": wrong}) for wrong in (0, -1, 1.0, "2", NAN, True)),
    (Heuristic, {"tiers": (1, 2), "start": 3}), (Heuristic, {"tiers": (2, 4), "start": 1}),
    *((Fixed, {"num_draft_tokens": wrong}) for wrong in (-1, 1.0, "2", None, True, (2,))),
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name_where_they_are_written(make, settings):
    with pytest.raises(ValueError, match=rf"^(adaptive\.{[*settings][-1]}|costs)") as caught:
        make(**settings)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("wrong, named", [
    (3, "adaptive=3"), ("yes", "adaptive='yes'"), (1, "adaptive=1"), (Adaptive, "adaptive=.*Adaptive"),
    (Adaptive(tiers=(0, 5)), r"adaptive\.tiers=.*4"), (Heuristic(tiers=(1, 5)), r"adaptive\.tiers="),
    (Heuristic(start=9), r"adaptive\.start=9.*1 to 4"), (Fixed(9), r"adaptive\.num_draft_tokens=9.*4"),
    (Adaptive(costs=SHORT), "adaptive.costs=.*0..2"),
])  # fmt: skip
def test_what_this_drafter_cannot_do_is_refused_by_name(wrong, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        checked(wrong, 4)


def test_arrays_and_lists_are_welcome_as_settings():
    made = Adaptive(tiers=[4, np.int64(0)], max_loss=np.float32(0.5), decay=jnp.float32(0.5))
    assert made == Adaptive(tiers=(0, 4), max_loss=0.5, decay=0.5) and hash(made) == hash(dataclasses.replace(made))
    with pytest.raises(ValueError, match=r"adaptive\.costs=None"):
        made.init()


def test_an_engine_measures_after_all_is_checked(monkeypatch):
    monkeypatch.setattr(request, "cost_model", None)  # not to be called
    for wrong in ({"capacity": 0}, {"max_biases": -1}, {"capacity": 99}):
        given = {"capacity": 40, "drafter": draft_source("ngram", 2), "slots": 2, "adaptive": True, **wrong}
        with pytest.raises(ValueError, match=next(iter(wrong))):
            specjax.Engine(position_lm(np.zeros((8, V)), context_length=64), **given)


def test_what_cannot_be_adaptive_is_refused():
    with pytest.raises(ValueError, match="adaptive='fast': give"):
        run("ngram", 4, adaptive="fast", slots=2)
    python = drafters.host(lambda rows: [[1]] * len(rows), 4)
    with pytest.raises(ValueError, match="adaptive=True: this drafter drafts in Python"):
        specjax.generate(target(), PROMPTS[0], drafter=python, adaptive=True)
    with pytest.raises(ValueError, match="adaptive=True without a drafter"):
        specjax.generate(target(), PROMPTS[0], adaptive=True)
    with pytest.raises(ValueError, match="adaptive=True without a drafter"):
        specjax.generate(target(), PROMPTS[0], adaptive=True, drafter=specjax.plain())
    with pytest.raises(ValueError, match="adaptive=True without a drafter"):
        specjax.Engine(target(), slots=1, capacity=8, adaptive=True)
    served = specjax.Engine(target(), slots=1, capacity=8, drafter=draft_source("ngram", 2))
    with pytest.raises(TypeError, match="adaptive is fixed when an Engine is made"):
        served.insert([1], adaptive=True)
    with pytest.raises(ValueError, match=r"adaptive\.num_draft_tokens=9.*4"):
        specjax.generate(target(), [], slots=2, drafter=draft_source("ngram", 4), adaptive=Fixed(9))
    few = CostModel((0, 2), (1.0, 1.0), (0.0, 0.0))
    with pytest.raises(ValueError, match=r"are of 0..2 draft tokens, not of 4: give tiers of at most 2"):
        checked(Adaptive(costs=few), 4)
    assert checked(Adaptive(costs=few, tiers=(0, 2)), 4).sizes == (0, 2)
    assert checked(False, 4) is None
    assert [checked(True, 5).sizes, checked(Heuristic(), 2).sizes] == [(0, 2, 4, 5), (1, 2)]
