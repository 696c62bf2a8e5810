"""Choosing the number of draft tokens: what is lost at most, what is found, and that the law stays the target's."""

import dataclasses
import functools
import importlib
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import specjax
from specjax import Adaptive, Fixed, Heuristic, drafters, loop, request, sharding
from specjax.adaptive import Outcome, Pace, checked
from specjax.drafters.late import DELAY, Late
from specjax.round import RUNNING
from specjax.theory import CostModel, cost_model
from tests.doubles import hash_lm, sampled
from tests.drafters import parallel_world as world
from tests.exactness.harness import PROMPT, THRESHOLD, assert_law, histogram, p_value, target_laws
from tests.oracle.hashlm import HashConfig
from tests.oracle.warp import Options
from tests.small import PROMPTS, draft_source, run, target

SIZES = (0, 2, 4)
CHEAP = CostModel(SIZES, (1.0, 1.1, 1.2), (0.0, 0.1, 0.2))
DEAR = CostModel(SIZES, (1.0, 2.5, 5.0), (0.0, 1.0, 2.0))
NO_DRAFT = (0.0, 0.0, 0.0)


def policy(costs=CHEAP, **settings) -> Adaptive:
    return Adaptive(**{"tiers": SIZES, "costs": costs, **settings})


# --- decisions


def oracle_speeds(costs: CostModel, acceptance):
    """Tokens per time, term by term."""
    return [
        (1 + sum(np.prod(acceptance[: i + 1], dtype=np.float64) for i in range(size))) / (verify + draft)
        for size, verify, draft in zip(*costs)
    ]


def test_the_best_number_of_draft_tokens_is_that_of_the_most_expected_tokens_per_time():
    rng, best = np.random.default_rng(0), set()
    for _ in range(200):
        costs = CostModel((0, 1, 3, 8), *(tuple(np.cumsum(rng.uniform(0, top, 4)) + 0.01) for top in (0.6, 0.3)))
        acceptance = rng.uniform(0, 1, 8)
        expected = oracle_speeds(costs, acceptance)
        assert list(costs.tokens_per_second(acceptance).values()) == pytest.approx(expected)
        assert costs.best(acceptance) == costs.sizes[int(np.argmax(expected))]
        best.add(costs.best(acceptance))
    assert best == {0, 1, 3, 8}
    assert costs.tokens_per_second([0.5, None, 0.5]).keys() == {0, 1}  # beyond what was judged nothing is known
    assert CHEAP.seconds((0, 1, 3)) == pytest.approx((1.0, 1.1, 1.3))


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
        outcome = Outcome(
            jnp.int32(tier), size, jnp.full(rows, size), jnp.asarray(accepted, jnp.int32), jnp.ones(rows, bool)
        )
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
    accepted, going = rng.integers(0, 5, 16), rng.random(16) < 0.8
    start, four = policy().init(), jnp.full(16, 4, jnp.int32)
    paces = [
        update(still, start, Outcome(jnp.int32(2), jnp.int32(4), four, jnp.asarray(accepted[o]), jnp.asarray(going[o])))
        for o in (np.arange(16), rng.permutation(16))
    ]
    jax.tree.map(np.testing.assert_array_equal, *paces)
    np.testing.assert_array_equal(paces[0].judged[2], [np.sum((accepted >= depth) & going) for depth in range(4)])
    np.testing.assert_array_equal(paces[0].accepted[2], [np.sum((accepted > depth) & going) for depth in range(4)])


def test_rounds_in_which_nothing_was_found_cost_the_search_alone():
    still, start = policy(None), policy().init()
    nothing, one = jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
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
    out = run("close", 4, prompts=PROMPTS[:2], max_new_tokens=[40, 20], adaptive=policy(tiers=(0, 4)))
    assert loop.compiled_programs()["decode"] == before["decode"] + 1  # plain decoding's
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
def test_a_mesh_chooses_the_same():
    """Rows on eight devices, which all must choose the same tier: its sums are of whole numbers."""
    sharded = importlib.import_module("tests.test_sharding")
    options = sharded.options() | {"drafter": drafters.ngram(4, min_ngram=1), "adaptive": policy(tiers=(0, 4))}
    alone, split = (
        specjax.generate(lm, sharded.PROMPTS, **options)
        for lm in (sharded.alone(), sharding.place(sharding.make_mesh(8, 1), sharded.alone()))
    )
    assert alone.tokens == split.tokens == sharded.text()
    jax.tree.map(np.testing.assert_array_equal, alone.stats.counts, split.stats.counts)


# --- exactness

CONFIG, LENGTH, ROWS = HashConfig(3), 4, 5000
MODEL, PARAMS = hash_lm(CONFIG, seed=0)
Q = np.array([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.25, 0.35, 0.4]])
LAW_OPTIONS = [Options(), Options(temperature=0.6)]
# Restless: no margin and hardly a memory, so that a row's own last round decides.
RESTLESS = Adaptive(tiers=(0, 2), costs=CostModel((0, 2), (1.0, 1.5), (0.0, 0.0)), decay=0.3, margin=0.0, allowance=9.0)


@functools.partial(jax.jit, static_argnums=0)
def alone(drafter, params, pace, keys, temperature, peeks):
    """Tokens of every row, each a batch of its own: its own past alone decides whether it drafts next. And how often
    each tier was used. If it ``peeks``, the draft is made first, as the round will make it, and a round whose draft
    begins with 0 is a plain one."""
    policy = dataclasses.replace(RESTLESS, costs=None)
    drafter = drafter._replace(params=params)
    program, weights = loop.split(MODEL, PARAMS, drafter, "rejection", False, policy)
    limits, base = specjax.no_limits(LENGTH, 1), specjax.make_sampling(1, 3)

    def one(key, temperature):
        tokens = jnp.zeros((1, 12), jnp.int32).at[0, : len(PROMPT)].set(jnp.asarray(PROMPT))
        start = jnp.full(1, len(PROMPT), jnp.int32)
        text, sampling = specjax.Text(tokens, start, start), base._replace(temperature=temperature[None])
        state = loop.start(program.prefill(), weights, text, key[None], limits, chunk=4)

        def body(carry):
            state, used = carry
            proposal, _ = drafter.draft(params, state.keys, state.drafter, state.text, sampling, 2)
            spoilt = jnp.where(proposal.tokens[0, 0] == 0, 0, 1)
            tier = jnp.where(peeks, spoilt, state.pace.tier)
            state = state._replace(pace=state.pace._replace(tier=tier))
            return loop.step(program, weights, state, sampling, limits)[0], used.at[tier].add(1)

        carry = state._replace(pace=pace), jnp.zeros(2, jnp.int32)
        state, used = lax.while_loop(lambda carry: carry[0].finish[0] == RUNNING, body, carry)
        return state.text.tokens[0, len(PROMPT) : len(PROMPT) + LENGTH], used

    return jax.vmap(one)(keys, temperature)


def sample_alone(seed, peeks=False):
    """Histograms of both laws, and rounds by tier [2 * ROWS, 2]."""
    drafter = sampled(Q, num_draft_tokens=2)
    keys = specjax.row_keys(seed * 2 * ROWS + np.arange(2 * ROWS))
    temperature = jnp.repeat(jnp.asarray([o.temperature for o in LAW_OPTIONS], jnp.float32), ROWS)
    tokens, used = alone(drafter._replace(params=()), drafter.params, RESTLESS.init(), keys, temperature, peeks)
    return np.stack([histogram(row, 3) for row in np.asarray(tokens).reshape(2, ROWS, LENGTH)]), np.asarray(used)


def test_the_joint_law_is_the_targets_while_rows_switch_by_their_past_and_not_if_they_peek():
    """And a policy that decides by the drawn token is caught: negative control."""
    laws, used = target_laws(CONFIG, 0, LAW_OPTIONS, LENGTH), []

    def sample(seed):
        counts, tiers = sample_alone(seed)
        used.append(tiers)
        return counts

    assert_law(sample, laws, LAW_OPTIONS)
    assert (used[0] > 0).mean(0).min() > 0.2, "both tiers must be used"
    assert (used[0] > 0).all(1).mean() > 0.2, "and rows must switch"
    counts, _ = sample_alone(0, peeks=True)
    assert max(p_value(c, law) for c, law in zip(counts, laws, strict=True)) < THRESHOLD / 1000


# --- measured costs


def test_costs_are_measured_once_and_kept_by_what_they_depend_on(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    costs = importlib.import_module("specjax.costs")
    calls, clock = [], itertools.count()

    def measure(lm, drafter, batch, sizes):
        calls.append((batch, sizes))
        return CostModel(sizes, tuple(1.0 + size + next(clock) for size in sizes), tuple(0.5 for _ in sizes))

    monkeypatch.setattr(costs, "_measure", measure)
    first = cost_model(target(), draft_source("ngram", 4), sizes=(4, 2))
    assert cost_model(target(), draft_source("ngram", 4), sizes=(0, 2, 4)) == first and len(calls) == 1
    (file,) = (tmp_path / "costs").iterdir()
    file.write_text(json.dumps({"verify": [1.0], "draft": "?"}))  # half of something else
    again = cost_model(target(), draft_source("ngram", 4), sizes=(2, 4))
    assert again != first and cost_model(target(), draft_source("ngram", 4), sizes=(2, 4)) == again
    cost_model(target(), draft_source("ngram", 4), sizes=(2, 4), batch=2)
    cost_model(target(), draft_source("close", 4))
    half = target()._replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), target().params))
    cost_model(half, draft_source("ngram", 4), sizes=(2, 4))
    assert calls[2:] == [(2, (0, 2, 4)), (1, (0, 1, 2, 4)), (1, (0, 2, 4))]
    with pytest.raises(ValueError, match="costs"):
        first.seconds((5,))


# --- refusals


@pytest.mark.parametrize("wrong", [
    3, "yes", Adaptive(tiers=(0, 5)), Adaptive(tiers=(2, 2)), Adaptive(tiers=()), Adaptive(tiers=("2",)),
    Adaptive(costs=(1.0,)), Adaptive(costs=CostModel((0, 2), (1.0, 1.0), (0.0, 0.0))), Adaptive(decay=2.0),
    Adaptive(costs=CostModel((1, 4), (1.0, 1.0), (0.0, 0.0))), Adaptive(costs=CHEAP._replace(draft=(0.0,))),
    Adaptive(max_loss=0.0), Adaptive(margin="big"), Heuristic(tiers=(0, 2)), Heuristic(start=0), Fixed(9), Fixed(-1),
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=r"^(adaptive|costs)"):
        checked(wrong, 4)


def test_what_cannot_be_adaptive_is_refused():
    with pytest.raises(ValueError, match="adaptive=True with slots=2"):
        run("ngram", 4, adaptive=True, slots=2)
    python = drafters.host(lambda rows: [[1]] * len(rows), 4)
    with pytest.raises(ValueError, match="adaptive=True: this drafter drafts in Python"):
        specjax.generate(target(), PROMPTS[0], drafter=python, adaptive=True)
    with pytest.raises(ValueError, match="Python"):
        cost_model(target(), python)
    with pytest.raises(ValueError, match="adaptive=True without a drafter"):
        specjax.generate(target(), PROMPTS[0], adaptive=True)
    assert checked(True, 0) is None is checked(False, 4)
    assert [checked(True, 5).sizes, checked(Heuristic(), 2).sizes] == [(0, 2, 4, 5), (1, 2)]
