"""Recycling: the tree that is proposed is the one the laws seen so far give, and nothing else."""

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import LanguageModel, drafters
from specjax.drafters.recycling import backoff, mix
from specjax.drafters.tables import UNIT, Law, build_tables, look_up
from specjax.loop import compiled_programs
from specjax.types import Committed, Sparse, Window
from tests.doubles import hash_lm, table_lm
from tests.exactness.harness import assert_law, emit, histogram, target_laws
from tests.oracle.hashlm import HashConfig
from tests.oracle.warp import Options
from tests.small import PROMPTS, V, advance, begin, emitted, logits_of, padded, run, target

C = 4
WEIGHTS = (0.0, 0.1, 0.3, 0.7, 0.7)
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_numbers():
    """Every test draws the same numbers, alone or after others."""
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


# --- an oracle: dictionaries and a heap


class Oracle:
    """What one row knows and would propose."""

    def __init__(self, tables: dict | None = None):
        self.own, self.tables = {}, tables or {}

    def see(self, context, ids, probs):
        self.own[tuple(int(t) for t in context)] = quantised(ids[:C], probs[:C])

    def law(self, context):
        for order in (2, 1):
            for known in (self.own, self.tables):
                if len(context) >= order and tuple(context[-order:]) in known:
                    return known[tuple(context[-order:])]
        return {}

    def candidates(self, text, context):
        law, (matched, token) = dict(self.law(context)), copied(text, context)
        weight = WEIGHTS[matched]
        law = {t: p * (1 - weight) for t, p in law.items()}
        if weight:
            law[token] = law.get(token, 0.0) + weight
        return law

    def tree(self, text, n, eos=(), least=0.0):
        """[(parent, token)]"""
        nodes, heap = [], []

        def push(parent, context, score):
            if context[-1] not in eos:
                for token, p in self.candidates(text, context).items():
                    heapq.heappush(heap, (-score * p, parent, token, context))

        push(-1, tuple(text), 1.0)
        while heap and len(nodes) < n:
            score, parent, token, context = heapq.heappop(heap)
            if score < 0 and -score >= least:
                nodes.append((parent, token))
                push(len(nodes) - 1, (*context, token), -score)
        return nodes


def quantised(ids, probs):
    units = np.round(np.asarray(probs) * UNIT)
    return {int(t): u / UNIT for t, u in zip(ids, units, strict=True) if u > 0}


def copied(text, context):
    """(tokens that match, 0..4; what followed): the longest, then the most recent."""
    best = (0, None)
    for end in range(len(text) - 1):
        run = 0
        while run < min(4, end + 1, len(context)) and text[end - run] == context[-1 - run]:
            run += 1
        if run >= max(best[0], 1):
            best = (run, text[end + 1])
    return best


# --- the drafter, a call at a time


def some_laws(*shape, vocab=V):
    ids = np.argsort(RNG.random((*shape, vocab)), axis=-1)[..., :C].astype(np.int32)
    probs = -np.sort(-RNG.dirichlet(np.ones(C + 1), shape)[..., :C], axis=-1)
    return ids, probs.astype(np.float32)


def window_of(tokens, laws, start, parents=None, valid=None):
    tokens = jnp.asarray(tokens, jnp.int32)
    valid = jnp.ones(tokens.shape, bool) if valid is None else jnp.asarray(valid)
    return Window(tokens, parents, valid, start, Sparse(*map(jnp.asarray, laws)))


@functools.partial(jax.jit, static_argnums=0)
def _observe(drafter, params, state, committed):
    return drafter.observe(params, state, committed)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draft(drafter, n, params, state, text, sampling):
    keys = specjax.row_keys(range(text.lengths.shape[0]))
    return drafter.draft(params, keys, state, text, sampling, n)[0]


def observe(drafter, state, tokens, laws, counts, start):
    """A prompt chunk [B, W]."""
    counts = jnp.asarray(counts, jnp.int32)
    valid = np.arange(np.shape(tokens)[1])[None] < np.asarray(counts)[:, None]
    starts = jnp.full(len(tokens), start, jnp.int32)
    features = jnp.zeros((*np.shape(tokens), 0))
    committed = Committed(jnp.asarray(tokens), features, counts, starts, window_of(tokens, laws, starts, valid=valid))
    return _observe(drafter._replace(params=()), drafter.params, state, committed)


def propose(drafter, state, texts, n=6, *, eos_ids=(), fill=0):
    """[(parent, token)] per row."""
    sampling = specjax.make_sampling(len(texts), V, eos_ids=eos_ids)
    proposal = _draft(drafter._replace(params=()), n, drafter.params, state, padded(texts, 64, fill), sampling)
    assert proposal.probs is None
    trees = []
    for tokens, parents, valid in zip(proposal.tokens, proposal.parents, proposal.valid, strict=True):
        tokens, parents, valid = np.asarray(tokens), np.asarray(parents), np.asarray(valid)
        assert (np.diff(valid.astype(int)) <= 0).all()  # no gaps
        trees.append([(int(p), int(t)) for p, t in zip(parents[valid], tokens[valid], strict=True)])
    return trees


def after_prompts(drafter, texts, laws, width=32):
    """The state after prompts in one chunk."""
    tokens = np.zeros((len(texts), width), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    state = drafter.init(drafter.params, len(texts), 64)
    return observe(drafter, state, tokens, laws, [len(text) for text in texts], 0)


def knows(state, row, context):
    """The ids of the law of a context in the row's own tables, most probable first; None: there is none."""
    table = state.bigram if len(context) == 2 else state.unigram
    law = look_up(table, jnp.asarray([context], jnp.int32), jnp.asarray([row], jnp.int32))
    return np.asarray(law.ids)[0].tolist() if np.asarray(law.probs).any() else None


# --- what is proposed


def oracle_of(static, text, ids, probs):
    oracle = Oracle(static)
    for i in range(len(text)):
        oracle.see(text[i : i + 1], ids[i], probs[i])
        if i:
            oracle.see(text[i - 1 : i + 1], ids[i], probs[i])
    return oracle


@pytest.mark.parametrize("with_tables", [False, True])
def test_the_tree_is_what_the_laws_seen_so_far_give(with_tables):
    """Eight rows against the oracle, node for node: own laws before those of the tables, two tokens before one,
    copies mixed in, best first. Case 87: siblings are distinct."""
    tables, static = None, {}
    if with_tables:
        written = [(RNG.integers(0, V, 12), *some_laws(12)) for _ in range(4)]
        tables = build_tables(written, V)
        for table, order in ((tables.unigram, 1), (tables.bigram, 2)):
            for entry in table.reshape(-1, table.shape[-1]):
                if entry[order + C]:
                    probs = entry[order + C :] / UNIT
                    static[tuple(entry[:order].tolist())] = quantised(entry[order : order + C], probs)
    drafter = drafters.recycling(V, 6, tables)
    texts = [RNG.integers(0, 5, length).tolist() for length in (30, 28, 17, 9, 4, 3, 2, 1)]  # few tokens: many copies
    ids, probs = some_laws(8, 32)
    state = after_prompts(drafter, texts, (ids, probs))
    trees = propose(drafter, state, texts)
    for row, text in enumerate(texts):
        oracle = oracle_of(static, text, ids[row], probs[row])
        assert trees[row] == oracle.tree(text, 6), row
        assert len(set(trees[row])) == len(trees[row])
    assert sum(map(len, trees)) >= 36
    if with_tables:
        likely = propose(drafters.recycling(V, 6, tables, min_prob=0.2), state, texts)
        assert likely == [tree[: len(kept)] for tree, kept in zip(trees, likely)] and sum(map(len, likely)) < 30
        assert all(kept == oracle_of(static, text, ids[row], probs[row]).tree(text, 6, least=0.2)
                   for row, (text, kept) in enumerate(zip(texts, likely)))  # fmt: skip


def test_nothing_known_nothing_proposed():
    """Case 91: no made-up id 0. Without tables a row starts empty; what does not follow from it is not there."""
    drafter = drafters.recycling(V, 6)
    state = drafter.init(drafter.params, 3, 64)
    assert propose(drafter, state, [[5], [0, 0, 3], [1, 2, 3, 4]]) == [[], [], []]


def test_copies_alone_are_a_chain_up_to_the_end_of_the_text():
    """Case 92: nothing past the text there is; the suffix does not match itself. Case 94: the longest match, then
    the most recent."""
    drafter = drafters.recycling(V, 6)
    texts = [[1, 2, 3, 4, 1, 2], [7, 7, 7], [1, 2, 3, 5, 2, 3, 6, 1, 2, 3], [1, 2, 5, 1, 2, 6, 1, 2], [1, 2, 3]]
    state = drafter.init(drafter.params, len(texts), 64)
    chains = [[token for _, token in tree] for tree in propose(drafter, state, texts)]
    assert chains == [[3, 4, 1, 2, 3, 4], [7] * 6, [5, 2, 3, 6, 1, 2], [6, 1, 2, 6, 1, 2], []]


def test_nothing_is_proposed_below_an_end_id():
    """Case 69: the end id itself may be a node, a leaf."""
    drafter = drafters.recycling(V, 6)
    text = [RNG.integers(0, 4, 30).tolist()]
    laws = some_laws(1, 32)
    state = after_prompts(drafter, text, laws)
    free = propose(drafter, state, text)[0]
    inner = (token for parent, token in free if any(p == free.index((parent, token)) for p, _ in free))
    end = next(token for token in inner if token != text[0][-1])  # below an end that is pending nothing is proposed
    ended = propose(drafter, state, text, eos_ids=[end])[0]
    leaves = [i for i, (_, token) in enumerate(ended) if token == end]
    assert leaves and not any(parent in leaves for parent, _ in ended)


def test_padding_and_neighbours_are_no_context():
    """Case 96, and privacy: any padding, any neighbour with any laws, the same proposal as alone."""
    drafter = drafters.recycling(V, 6)
    texts = [RNG.integers(0, 5, length).tolist() for length in (20, 12, 7)]
    ids, probs = some_laws(3, 32)
    alone = []
    for row, text in enumerate(texts):
        state = after_prompts(drafter, [text] * 3, (np.stack([ids[row]] * 3), np.stack([probs[row]] * 3)))
        alone.append(propose(drafter, state, [text] * 3)[0])
    state = after_prompts(drafter, texts, (ids, probs))
    for fill in (0, 3, 9):
        assert propose(drafter, state, texts, fill=fill) == alone
    other = after_prompts(drafter, [texts[0], *texts[:2]], (ids[[0, 0, 2]], probs[[0, 2, 1]]))
    assert propose(drafter, other, [texts[0], *texts[:2]])[0] == alone[0]


# --- what is learnt


def test_rows_of_rejected_nodes_are_learnt_from():
    """All nodes are rejected; the laws behind them are known all the same, each under its own path's context."""
    drafter = drafters.recycling(V, 4)
    state = after_prompts(drafter, [[9, 8], [9, 8]], some_laws(2, 32))
    window = np.array([[8, 3, 5, 6, 7]] * 2)  # below the pending 8: 3 and 5; below 3: 6; below 6: 7
    parents = jnp.asarray([[-1, -1, 0, 2]] * 2)
    ids, probs = some_laws(2, 5)
    valid = np.array([[True] * 5, [True, True, False, False, False]])
    tokens = jnp.asarray([[2, 0, 0, 0, 0]] * 2)
    committed = Committed(
        tokens, jnp.zeros((2, 5, 0)), jnp.ones(2, jnp.int32), jnp.full(2, 2, jnp.int32),
        window_of(window, (ids, probs), jnp.full(2, 1, jnp.int32), parents, valid),
    )  # fmt: skip
    state = _observe(drafter._replace(params=()), drafter.params, state, committed)
    for i, context in enumerate(([9, 8], [8, 3], [8, 5], [3, 6], [6, 7])):
        assert knows(state, 0, context) == ids[0, i].tolist()
        assert knows(state, 0, context[1:]) == ids[0, i].tolist()
        assert knows(state, 1, context) == (ids[1, i].tolist() if i < 2 else None)
    assert np.asarray(state.recent).tolist() == [[8, 2]] * 2
    assert knows(state, 0, [8, 2]) is None  # the new pending token has not been read


def test_a_chunk_that_begins_with_the_token_before_it_is_no_round():
    """The window of a prompt chunk stands behind what was read, that of a round on its last token."""
    drafter = drafters.recycling(V, 1)
    state = after_prompts(drafter, [[9, 8]], some_laws(1, 2), width=2)
    ids, probs = some_laws(1, 2)
    state = observe(drafter, state, np.asarray([[8, 3]]), (ids, probs), [2], 2)
    assert knows(state, 0, [8, 8]) == ids[0, 0].tolist() and knows(state, 0, [8, 3]) == ids[0, 1].tolist()


def test_the_latest_law_of_a_context_is_proposed():
    drafter = drafters.recycling(V, 1)
    ids, probs = some_laws(1, 32)
    ids[0, 1], ids[0, 3] = [5, 6, 7, 8], [9, 10, 11, 12]
    state = after_prompts(drafter, [[1, 2, 1, 2]], (ids, probs))
    assert knows(state, 0, [1, 2]) == [9, 10, 11, 12] == knows(state, 0, [2])
    assert knows(state, 0, [2, 1]) == ids[0, 2].tolist()


def test_what_the_loop_has_read_is_known():
    """Prompt chunks, the seam between them, and rounds: every pair of committed tokens that the target has read."""
    lm, drafter = target(), drafters.recycling(V, 3)
    prompts = [[2, 5, 13, 2, 6, 4, 9, 3, 7, 8, 11, 10, 12], [3], [6, 6, 2]]
    state = begin(lm, prompts, drafter)
    best = np.argsort(-np.asarray(logits_of(lm.model, lm.params, state.text.tokens)), axis=-1)[..., :C]
    for row, prompt in enumerate(prompts):
        singles = {(token,): best[row, i].tolist() for i, token in enumerate(prompt)}
        pairs = {tuple(prompt[i - 1 : i + 1]): best[row, i].tolist() for i in range(1, len(prompt))}
        known = [(knows(state.drafter, row, list(context)), ids) for context, ids in (singles | pairs).items()]
        assert all(got in (None, ids) for got, ids in known)  # None: fell on one slot with a later one of its chunk
        assert sum(got is not None for got, _ in known) >= 0.8 * len(known)
        if len(prompt) > 8:
            assert knows(state.drafter, row, prompt[7:9]) == pairs[tuple(prompt[7:9])]  # across the seam
    for _ in range(3):
        state, _ = advance(lm, drafter, state)
    for row, (prompt, new) in enumerate(zip(prompts, emitted(state), strict=True)):
        text = prompt + new
        assert np.asarray(state.drafter.recent)[row].tolist() == text[-2:]
        pairs = [knows(state.drafter, row, text[i - 1 : i + 1]) for i in range(1, len(text) - 1)]
        assert sum(got is None for got in pairs) <= 0.1 * len(pairs)


def test_mixtures_fold_what_they_share_and_backoff_takes_what_is_known():
    a = Law(jnp.asarray([[3, 1]]), jnp.asarray([[0.5, 0.25]]))
    b = Law(jnp.asarray([[1, 7, 3]]), jnp.asarray([[1.0, 0.0, 0.0]]))
    got = mix([(a, jnp.asarray([0.8])), (b, jnp.asarray([0.2]))])
    assert got.ids.tolist() == [[3, 1, 1, 7, 3]]
    np.testing.assert_allclose(np.exp(np.asarray(got.logp)), [[0.4, 0.4, 0, 0, 0]], rtol=1e-6)
    none = Law(jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2)))
    assert backoff([none, b]).ids.tolist() == [[1, 7, 3]]
    assert backoff([a, b]).ids.tolist() == [[3, 1, 0]]  # padded to the wider one
    assert not backoff([none, none]).probs.any()


# --- through the loop


def garbage():
    """Tables that have nothing to do with the target."""
    return build_tables([(RNG.integers(0, V, 64), *some_laws(64)) for _ in range(4)], V)


def test_greedy_text_is_that_of_plain_decoding():
    """Ragged batch; T=0 and `match` at T=1; with and without tables, good or bad (case 108). Equal settings compile
    once, and other tables of the same size do not compile again."""
    programs = []
    for settings, tables in (({}, None), ({}, garbage()), ({"temperature": 1.0}, garbage())):
        plain, drafter = run(**settings), drafters.recycling(target(), 5, tables)
        out = specjax.generate(target(), PROMPTS, drafter=drafter, max_new_tokens=40, **settings)
        assert out.tokens == plain.tokens and out.lossless
        programs.append(compiled_programs())
    assert programs[1] == programs[2]


def test_a_target_of_pairs_is_learnt_by_heart():
    """Case 108: a dead drafter would pass the tests of exactness. This target depends on its last token only, so that
    tables distilled from it are always right, and a row without tables is right as soon as the text comes round."""
    logits = RNG.normal(size=(V, V)).astype(np.float32) * 4
    logits[np.arange(V), np.arange(1, V + 1) % V] = 16  # greedy text: counting
    lm = LanguageModel(table_lm(V), jnp.asarray(logits))
    order = np.argsort(-logits, axis=1)[:, :C]
    probs = np.take_along_axis(np.asarray(jax.nn.softmax(logits, axis=1)), order, axis=1)
    tokens = np.arange(3 * V) % V
    tables = build_tables([(tokens, order[tokens], probs[tokens])], V)
    taus = {}
    for name, given in (("tables", tables), ("none", None)):
        drafter = drafters.recycling(lm, 4, given)
        taus[name] = specjax.generate(lm, [[3], [9]], drafter=drafter, max_new_tokens=40).stats.tau
    assert taus["tables"] == 5 and 2 < taus["none"] < 5


MODEL, PARAMS = hash_lm(HashConfig(3), seed=0)
OPTIONS = [Options(), Options(temperature=0.0), Options(temperature=0.7, top_p=0.9)]
TEXT = np.array([0, 1, 1, 2, 0, 2, 1, 0, 0])
THREE = build_tables([(TEXT, np.argsort(RNG.random((9, 3)), axis=1), np.sort(RNG.dirichlet([1] * 3, 9))[:, ::-1])], 3)
FORMS = {"without tables": None, "with tables": THREE}
PROGRAMS = [
    pytest.param(form, rule, marks=[] if (form, rule) == ("with tables", "rejection") else pytest.mark.full)
    for form in FORMS for rule in ("rejection", "match")
]  # fmt: skip


@pytest.mark.parametrize(("form", "rule"), PROGRAMS)
def test_four_tokens_follow_the_law_of_plain_decoding(form, rule):
    """Cases 87 and 97: nodes are point masses, whatever the sampler, though what is proposed depends on rounds before
    and what was rejected in them."""
    drafter = drafters.recycling(3, 3, FORMS[form], candidates=3, min_prob=0.1 if form == "with tables" else 0.0)

    def sample(seed):
        tokens, rounds = emit(MODEL, PARAMS, drafter, rule, OPTIONS, 4, 5000, seed)
        assert (rounds >= 2).mean() > 0.3
        return np.stack([histogram(rows, 3) for rows in tokens])

    assert_law(sample, target_laws(HashConfig(3), 0, OPTIONS, 4), OPTIONS)


# --- bad input


def test_settings_that_make_no_sense_are_refused():
    """Static settings fail where they are given, by name."""
    for arguments, message in (
        ({"vocab_size": 0}, r"vocab_size=0.*or give the target"),
        ({"vocab_size": "smollm2"}, r"vocab_size='smollm2'"),
        ({"num_draft_tokens": 0}, r"num_draft_tokens=0.*1 or more"),
        ({"candidates": 0}, r"candidates=0"),
        ({"candidates": 17}, r"candidates=17: the vocabulary has only 16"),
        ({"copy_weights": (0, 0, 1)}, r"copy_weights=.*5 numbers"),
        ({"copy_weights": (0, 0, 0, 0, 1.5)}, r"copy_weights="),
        ({"copy_weights": 0.5}, r"copy_weights=0\.5: must be 5 numbers"),
        ({"copy_weights": "abcde"}, r"copy_weights='abcde': must be 5 numbers"),
        ({"tables": THREE._replace(vocab_size=V, bigram=None)}, r"tables: the table of 2-token contexts has"),
        ({"tables": "tables.npz"}, r"tables is a str: give what build_tables or load_tables"),
        ({"tables": THREE}, r"tables are of a vocabulary of 3 tokens and the target has 16"),
    ):
        with pytest.raises(ValueError, match=message):
            drafters.recycling(**{"vocab_size": V} | arguments)


def test_a_target_of_another_vocabulary_is_refused():
    """Case 121."""
    with pytest.raises(ValueError, match="17 tokens and this one has 16"):
        specjax.generate(target(), [[1]], drafter=drafters.recycling(V + 1), max_new_tokens=2)


def test_a_tree_is_refused_by_block():
    with pytest.raises(ValueError, match=r"rule='block' judges chains"):
        specjax.generate(target(), [[1]], drafter=drafters.recycling(V, 5), rule="block", max_new_tokens=2)
