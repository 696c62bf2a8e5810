"""Several draft sources as one: who speaks, under which law, and what each part gets to see."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Drafter, LanguageModel, Proposal, Sparse, drafters
from specjax.drafters.cascade import cascade
from specjax.drafters.suffix import suffix
from specjax.loop import compiled_programs
from specjax.static import bind
from tests.doubles import hash_lm, sampled
from tests.exactness.harness import assert_hash_law
from tests.oracle.hashlm import HashConfig
from tests.oracle.warp import Options
from tests.small import PROMPTS, V, advance, begin, close, padded, run, target

X = -1  # not proposed


# --- parts that say what they are told


def says(rows, *, law=None, parents=None, rule="match", **fields) -> Drafter:
    """Proposes ``rows [B, N]``, X where nothing, with ``law [B, N, ..]``; its state counts how often it was asked."""
    tokens = jnp.asarray(rows, jnp.int32)
    draft = bind(_says, None if parents is None else tuple(parents))
    return Drafter((tokens, law), _count, _observe, draft, tokens.shape[1], default_rule=rule, **fields)


def _count(params, batch, capacity):
    return jnp.zeros(batch, jnp.int32)


def _observe(params, state, committed):
    return state


def _says(parents, params, keys, state, text, sampling, n):
    tokens, law = params
    if isinstance(law, Sparse):
        law = Sparse(law.ids if law.ids.ndim == 1 else law.ids[:, :n], law.probs[:, :n])
    elif law is not None:
        law = law[:, :n]
    topology: Any = None if parents is None else np.asarray(parents[:n], np.int32)
    return Proposal(jnp.maximum(tokens, 0)[:, :n], law, topology, tokens[:, :n] != X), state + 1


def ask(drafter, n=None, batch=2):
    """The proposal and how often each part was asked."""
    sampling = specjax.make_sampling(batch, V)
    keys, text = specjax.row_keys(range(batch)), padded([[1, 2]] * batch)
    state = drafter.init(drafter.params, batch, 64)
    n = drafter.num_draft_tokens if n is None else n
    proposal, state = drafter.draft(drafter.params, keys, state, text, sampling, n)
    return proposal, [int(part[0]) for part in state]


def shown(proposal):
    return np.where(proposal.valid, proposal.tokens, X).tolist()


def test_each_row_takes_the_first_part_that_says_anything():
    proposal, asked = ask(cascade(says([[X, X], [5, X]]), says([[X], [6]]), says([[7, 8, 9], [7, 8, 9]])))
    assert shown(proposal) == [[7, 8, 9], [5, X, X]]
    assert proposal.probs is None and proposal.parents is None and asked == [1, 1, 1]


def test_a_later_part_is_not_asked_when_no_row_needs_it():
    proposal, asked = ask(cascade(says([[4, X], [5, X]]), says([[7], [7]])))
    assert shown(proposal) == [[4, X], [5, X]] and asked == [1, 0]
    assert shown(ask(cascade(says([[X], [X]]), says([[X, X], [X, X]])))[0]) == [[X, X], [X, X]]  # all silent


def test_fewer_nodes_than_a_part_has_are_cut():
    assert shown(ask(cascade(says([[4, 5], [X, X]]), says([[7, 8, 9]] * 2)), n=1)[0]) == [[4], [7]]
    assert shown(ask(cascade(says([[4, 5]] * 2), says([[7, 8, 9]] * 2), merged=True), n=4)[0]) == [[4, 5, 7, 8]] * 2


def test_a_chain_beside_a_tree_is_a_tree():
    """Case 89: chain rows keep a chain's parents; equal static trees stay static."""
    mixed, _ = ask(cascade(says([[4, 5, 6], [X, X, X]]), says([[7, 8]] * 2, parents=[-1, -1])))
    assert shown(mixed) == [[4, 5, 6], [7, 8, X]]
    assert mixed.parents.tolist() == [[-1, 0, 1], [-1, -1, -1]]
    same, _ = ask(cascade(says([[X, X], [4, 5]], parents=[-1, -1]), says([[7, 8]] * 2, parents=[-1, -1])))
    assert isinstance(same.parents, np.ndarray) and same.parents.tolist() == [-1, -1]
    assert shown(same) == [[7, 8], [4, 5]]


def test_a_part_with_no_node_under_the_pending_token_says_nothing():
    """A valid node below an invalid one is never reached, so it is no reason to keep the others silent."""
    tree = says([[X, 5], [4, X]], parents=[-1, 0])
    assert shown(ask(cascade(tree, says([[7, 8]] * 2)))[0]) == [[7, 8], [4, X]]


LAW = jnp.asarray(np.random.default_rng(0).dirichlet(np.ones(V), (2, 1)), jnp.float32)


def test_point_masses_beside_drawn_nodes_are_one_hot():
    """Case 97: looked-up tokens never carry another part's law."""
    looked_up = says([[4, 5], [X, X]])
    dense, _ = ask(cascade(looked_up, says([[7], [8]], law=LAW, rule="rejection")))
    assert shown(dense) == [[4, 5], [8, X]]
    np.testing.assert_array_equal(dense.probs[0], np.eye(V)[[4, 5]])
    np.testing.assert_array_equal(dense.probs[1, 0], LAW[1, 0])
    ids = jnp.asarray([8, 7, 3], jnp.int32)
    for own in (ids, jnp.broadcast_to(ids, (2, 1, 3))):
        law = Sparse(own, jnp.full((2, 1, 3), 1 / 3))
        sparse, _ = ask(cascade(looked_up, says([[7], [8]], law=law, rule="rejection")))
        assert sparse.probs.ids.shape == sparse.probs.probs.shape == (2, 2, 3)
        assert sparse.probs.probs[0].tolist() == [[1, 0, 0]] * 2 and sparse.probs.ids[0, :, 0].tolist() == [4, 5]
        assert sparse.probs.ids[1, 0].tolist() == [8, 7, 3]
        np.testing.assert_allclose(sparse.probs.probs[1, 0], 1 / 3)
        both, _ = ask(cascade(says([[X], [6]], law=law, rule="rejection"), says([[7], [8]], law=LAW, rule="rejection")))
        np.testing.assert_array_equal(both.probs[0, 0], LAW[0, 0])
        np.testing.assert_allclose(both.probs[1, 0], np.isin(np.arange(V), [8, 7, 3]) / 3, atol=1e-7)


def test_merged_nodes_that_repeat_a_sibling_are_one_node():
    """Case 87: 4 5 and 4 6 share the 4; 9 stands beside it."""
    merged, asked = ask(cascade(says([[4, 5]] * 2), says([[4, 6, 9], [9, X, 4]], parents=[-1, 0, -1]), merged=True))
    assert asked == [1, 1] and merged.parents.shape == (2, 5)
    for row, expected in enumerate(([(4,), (4, 5), (4, 6), (9,)], [(4,), (4, 5), (9,)])):
        below = {-1: ()}
        for node in np.flatnonzero(merged.valid[row]):
            below[int(node)] = (*below[int(merged.parents[row, node])], int(merged.tokens[row, node]))
        assert sorted(below.values())[1:] == expected


def test_fields_follow_from_the_parts():
    looked_up, drawn = drafters.ngram(7), says([[7, 8, 9]], law=LAW[:1], rule="rejection", context_length=50)
    both = cascade(looked_up, drawn)
    assert (both.num_draft_tokens, both.default_rule, both.context_length) == (7, "rejection", 50)
    assert both.widths == (3,)  # when the lookup is silent, three nodes; there is always something
    assert cascade(looked_up, suffix(7)).widths == (0, 4)
    merged = cascade(says([[7, 8, 9]], context_length=60, vocab_size=V), drafters.ngram(4), merged=True)
    assert (merged.num_draft_tokens, merged.default_rule, merged.context_length) == (7, "match", 60)
    assert merged.widths == (3,) and merged.vocab_size == V
    assert cascade(drafters.ngram(2), suffix(4), merged=True).widths == (0, 2)


class _Heard:
    """Sums over everything observed, so that two drafters can be asked whether they saw the same."""

    @staticmethod
    def part(layers, top) -> Drafter:
        observe = bind(_hear, top)
        draft = bind(_says, None)
        params = (jnp.full((2, 1), X, jnp.int32), None)
        return Drafter(params, bind(_silence, 8 * len(layers)), observe, draft, 1, tuple(layers), window_top=top)


def _silence(size, params, batch, capacity):
    return jnp.zeros((batch, size)), jnp.zeros(batch, jnp.int32)


def _hear(top, params, state, committed):
    features, ids = state
    real = jnp.arange(committed.tokens.shape[1])[None] < committed.count[:, None]
    weight = jnp.where(real, committed.tokens + 1, 0)
    features = features + jnp.sum(committed.features * weight[..., None].astype(jnp.float32), axis=1)
    if top:
        assert committed.window.top.ids.shape[-1] == committed.window.top.probs.shape[-1] == top
        ids = ids + jnp.sum(jnp.where(committed.window.valid[..., None], committed.window.top.ids, 0), axis=(1, 2))
    else:
        assert committed.window is None
    return features, ids


def test_every_part_sees_what_it_would_see_alone():
    """Case 101: features are cut where one part's layers end and the next one's begin."""
    width = begin(target(), PROMPTS[:2], _Heard.part((), 0)).drafter[0].shape[1] + HashConfig(V).width
    assert width == 8, "the double counts on a model of this width"
    wanted = [((2,), 1), ((), 0), ((1, 0), 3)]
    together = cascade(*(_Heard.part(*each) for each in wanted))
    assert together.feature_layers == (2, 1, 0) and together.window_top == 3
    state, _ = advance(target(), together, begin(target(), PROMPTS[:2], together), n=0)
    for each, seen in zip(wanted, state.drafter):
        alone = _Heard.part(*each)
        expected, _ = advance(target(), alone, begin(target(), PROMPTS[:2], alone), n=0)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), seen, expected.drafter)
        assert seen[0].size == 0 or np.abs(seen[0]).min() > 0


def pair():
    return cascade(drafters.ngram(4, min_ngram=1), drafters.model(close(), target(), 2))


def test_greedy_text_is_that_of_plain_decoding():
    """Ragged batch; equal cascades compile once."""
    assert specjax.generate(target(), PROMPTS, drafter=pair(), max_new_tokens=40).tokens == run().tokens
    before = compiled_programs()
    assert specjax.generate(target(), PROMPTS, drafter=pair(), max_new_tokens=40).tokens == run().tokens
    assert compiled_programs() == before


MODEL, PARAMS = hash_lm(HashConfig(3), seed=0)
DRAFT = LanguageModel(*hash_lm(HashConfig(3, num_layers=1), seed=5))
Q = np.array([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.25, 0.35, 0.4]])
OPTIONS = [Options(), Options(temperature=0.0), Options(temperature=0.7, top_p=0.9)]


def lookup():
    return drafters.ngram(2, min_ngram=1, max_ngram=2)


FORMS = {
    "model": lambda: cascade(lookup(), drafters.model(DRAFT, LanguageModel(MODEL, PARAMS), 3)),
    "sparse": lambda: cascade(lookup(), sampled(Q, num_draft_tokens=3, sparse="rows")),
    "tree": lambda: cascade(lookup(), sampled(Q, [-1, -1, 0, 1], kind="distinct")),
    "merged": lambda: cascade(lookup(), suffix(3, branching=True), sampled(Q, [-1, -1], kind="top"), merged=True),
}
QUICK = {("merged", "rejection")}
PROGRAMS = [
    pytest.param(form, rule, marks=[] if (form, rule) in QUICK else pytest.mark.full)
    for form in FORMS for rule in ("rejection", "match", "block") if rule != "block" or form in ("model", "sparse")
]  # fmt: skip


@pytest.mark.parametrize(("form", "rule"), PROGRAMS)
def test_four_tokens_follow_the_law_of_plain_decoding(form, rule):
    """Cases 87 and 97: looked-up nodes beside drawn ones, and merged ones that say the same."""
    assert_hash_law(MODEL, PARAMS, FORMS[form](), rule, OPTIONS, (1, 2, 0, 1))


def test_parts_that_do_not_go_together_are_refused():
    """Static settings fail where they are given, naming the part."""
    drawn = drafters.model(close(), target())
    for parts, options, message in (
        ([], {}, r"cascade has 0 drafters"),
        ([drafters.ngram()], {}, r"cascade has 1 drafters: give two or more"),
        ([drafters.ngram(), drafters.suffix], {}, r"part 1 is <module|part 1 is <function"),
        ([drafters.ngram(), drafters.host(list)], {}, r"part 1 drafts in Python"),
        ([specjax.plain(), drafters.ngram()], {}, r"part 0 drafts nothing"),
        ([drafters.ngram(), drawn], {"merged": True}, r"part 1 draws its nodes"),
        ([drafters.ngram(), drawn], {"merged": 1}, r"merged=1: must be True or False"),
        ([says([[1]], vocab_size=4), says([[1]], vocab_size=5)], {}, r"vocabularies of \[4, 5\]"),
    ):
        with pytest.raises(ValueError, match=message):
            cascade(*parts, **options)
    lying = says([[7]] * 2, law=LAW)  # its rule says point masses
    with pytest.raises(ValueError, match=r"merge joins point masses"):
        ask(cascade(lying, says([[7]] * 2), merged=True))
