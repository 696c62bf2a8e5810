"""Topologies, merged trees, trees grown best-first, and what a round tells a drafter about its whole window."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Proposal, tree
from specjax.drafters.grow import Candidates, best_first
from specjax.static import bind
from tests.small import PROMPTS, V, advance, begin, logits_of, target, tree_scripted

# --- builders


@pytest.mark.parametrize("parents", [tree.kary(2, 2), tree.comb(3, 2), tree.choices([(0,), (1,), (0, 0)]), [-1, 0, 0]])
def test_ranks_and_levels_describe_the_topology(parents):
    parents = tree.validate(parents)
    depth = [len(list(_ancestors(parents, node))) for node in range(len(parents))]
    for level, nodes in enumerate(tree.levels(parents), start=1):
        assert nodes.tolist() == [n for n, d in enumerate(depth) if d == level]
    for node, rank in enumerate(tree.ranks(parents)):
        assert rank == [n for n in range(len(parents)) if parents[n] == parents[node]].index(node)


def _ancestors(parents, node):
    while node >= 0:
        node = int(parents[node])
        yield node


def test_a_comb_is_a_chain_with_a_column_below_each_of_its_nodes():
    parents = tree.comb(3, 4)
    assert parents[:4].tolist() == [-1, 0, 1, 2]
    assert parents[4:8].tolist() == [0, 1, 2, 3] and parents[8:].tolist() == [4, 5, 6, 7]
    assert tree.comb(1, 5).tolist() == tree.chain(5).tolist()


def test_choices_stand_in_the_order_of_their_ranks():
    parents = tree.choices([(1,), (0, 1), (0,), (2,), (0, 0), (0, 0, 0)])
    assert parents.tolist() == [-1, -1, -1, 0, 0, 3]
    assert tree.ranks(parents).tolist() == [0, 1, 2, 0, 1, 0]


@pytest.mark.parametrize(
    "paths", [[(0,), (0,)], [(0,), (1, 0)], [(1,)], [()], [(0,), (0, -1)], [3], None, ["a"], [(0.5,)]]
)
def test_choices_without_parent_or_earlier_sibling_are_refused(paths):
    with pytest.raises(ValueError, match="choices"):
        tree.choices(paths)


@pytest.mark.parametrize(("levels", "width"), [(0, 2), (2, 0), (True, 2), (1.5, 2)])
def test_combs_without_size_are_refused(levels, width):
    with pytest.raises(ValueError, match=r"levels|width"):
        tree.comb(levels, width)


@pytest.mark.parametrize("branching", [(), (0,), (2, -1), (2.0,), ("a",), (True,), ([3, 2],), (10,) * 6])
def test_children_that_cannot_be_counted_are_refused(branching):
    with pytest.raises(ValueError, match=r"^branching"):
        tree.kary(*branching)


@pytest.mark.parametrize("parents", [5, None, "dynamic", [[0], [1, 2]], [0.5], [5], [-1, 1], tree.Dynamic])
def test_parents_that_are_none_are_refused(parents):
    with pytest.raises(ValueError, match=r"parents of a tree must be .*Dynamic|the parent of node \d must be -1"):
        tree.validate(parents)


# --- merging


def paths_of(tokens, parents, valid):
    """The set of token paths that a tree offers, and how often each is offered."""
    offered = []
    for node in range(len(tokens)):
        line = [node, *(n for n in _ancestors(parents, node) if n >= 0)]
        if all(valid[n] for n in line):
            offered.append(tuple(int(tokens[n]) for n in reversed(line)))
    return offered


@pytest.mark.parametrize("seed", range(6))
def test_case_87_a_merged_tree_offers_every_path_of_both_and_each_once(seed):
    """Two trees over a tiny vocabulary share many prefixes."""
    rng = np.random.default_rng(seed)
    proposals = []
    for parents in ([-1, 0, 1], [-1, -1, 0, 1, 1]):
        tokens = rng.integers(0, 2, (4, len(parents)))
        for node in range(len(parents)):  # siblings are distinct in each of them
            for twin in range(node):
                same = (parents[twin] == parents[node]) & (tokens[:, twin] == tokens[:, node])
                tokens[:, node] = np.where(same, 2 + twin, tokens[:, node])
        valid = rng.random((4, len(parents))) < 0.8
        proposals.append(Proposal(jnp.asarray(tokens), None, np.asarray(parents, np.int32), jnp.asarray(valid)))
    merged = jax.jit(tree.merge)(*(p._replace(parents=jnp.asarray(p.parents)) for p in proposals))
    for row in range(4):
        wanted = set()
        for p in proposals:
            wanted |= set(paths_of(p.tokens[row], p.parents, np.asarray(p.valid[row])))
        offered = paths_of(merged.tokens[row], np.asarray(merged.parents[row]), np.asarray(merged.valid[row]))
        assert set(offered) == wanted and len(offered) == len(wanted)
        assert (np.asarray(merged.parents[row]) < np.arange(8)).all()


def test_drawn_nodes_are_not_merged():
    nodes = jnp.zeros((1, 1), jnp.int32)
    drawn = Proposal(nodes, jnp.ones((1, 1, 3)) / 3, None, nodes == 0)
    with pytest.raises(ValueError, match="point masses"):
        tree.merge(drawn, drawn)


# --- best first

LAWS = np.random.default_rng(0).dirichlet(np.ones(4), (2, 3))  # [B, depth, V]: independent of the path


def _expand(index, tokens, parents):
    depth, node = jnp.zeros(2, jnp.int32), jnp.full(2, index, jnp.int32)
    for _ in range(3):
        node = jnp.where(node < 0, -1, parents[jnp.arange(2), node])
        depth = depth + (node >= 0).astype(jnp.int32)
    law = jnp.asarray(LAWS, jnp.float32)[jnp.arange(2), jnp.minimum(depth + 1, 2)]
    logp = jnp.where((depth < 2)[:, None], jnp.log(law), -jnp.inf)
    return Candidates(jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32)[None], (2, 4)), logp)


@pytest.mark.parametrize("size", [1, 5, 30])
def test_the_grown_tree_holds_the_likeliest_paths(size):
    """Checked against all 84 paths over four tokens and three depths, sorted."""
    root = Candidates(jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32)[None], (2, 4)), jnp.log(jnp.asarray(LAWS[:, 0])))
    root = root._replace(logp=root.logp.astype(jnp.float32))
    tokens, parents, valid = jax.jit(lambda root: best_first(root, _expand, size))(root)
    assert bool(valid.all())
    for row in range(2):
        paths = {
            path: np.prod([LAWS[row, d, t] for d, t in enumerate(path)])
            for depth in (1, 2, 3) for path in itertools.product(range(4), repeat=depth)
        }  # fmt: skip
        likeliest = sorted(paths, key=lambda path: -paths[path])[:size]
        assert set(paths_of(tokens[row], np.asarray(parents[row]), [True] * size)) == set(likeliest)


def test_a_grown_tree_ends_where_there_are_no_candidates():
    root = Candidates(jnp.asarray([[3, 1], [2, 0]]), jnp.asarray([[-0.1, -jnp.inf], [-jnp.inf, -jnp.inf]]))
    nothing = Candidates(jnp.zeros((2, 2), jnp.int32), jnp.full((2, 2), -jnp.inf))
    tokens, parents, valid = best_first(root, lambda *_: nothing, 3)
    assert valid.tolist() == [[True, False, False], [False] * 3] and tokens[0, 0] == 3
    assert (np.asarray(parents) < np.arange(3)).all()


# --- the window that a drafter may ask for


def _keep_window(params, state, committed):
    window = committed.window
    width = state[0].shape[1]
    pad = ((0, 0), (0, width - window.tokens.shape[1]))
    return (
        jnp.pad(window.tokens, pad), jnp.pad(window.valid, pad), jnp.pad(window.top.ids, (*pad, (0, 0))),
        jnp.pad(window.top.probs, (*pad, (0, 0))),
    )  # fmt: skip


def _no_window(params, batch, capacity):
    none = jnp.zeros((batch, 8), jnp.int32)
    return none, none.astype(bool), jnp.zeros((batch, 8, 3), jnp.int32), jnp.zeros((batch, 8, 3))


def test_a_window_holds_rejected_nodes_and_what_the_target_would_say_after_each():
    """Prefill chunks and rounds; the laws are those of each node's own path."""
    lm, parents = target(), [-1, -1, 0, 1]
    prompts = PROMPTS[:2]
    base = tree_scripted(np.tile(np.arange(64) % V, (2, 1)), parents, np.asarray([[0, 1, 0, 2], [3, 0, 1, 0]]))
    drafter = base._replace(init=bind(_no_window), observe=bind(_keep_window), window_top=3)
    state = begin(lm, prompts, drafter)
    for row, prompt in enumerate(prompts):
        tokens, valid, ids, probs = (np.asarray(leaf[row]) for leaf in state.drafter)
        assert valid.tolist() == [i < len(prompt) for i in range(8)]
        assert tokens[valid].tolist() == list(prompt)
        for i in range(len(prompt)):
            assert_top(prompt[: i + 1], ids[i], probs[i])
    after, _ = advance(lm, drafter, state)
    for row, prompt in enumerate(prompts):
        tokens, valid, ids, probs = (np.asarray(leaf[row]) for leaf in after.drafter)
        assert valid[:5].all() and tokens[0] == prompt[-1]
        for node, path in enumerate([[1], [2], [1, 3], [2, 4]]):
            assert_top([*prompt, *tokens[path]], ids[node + 1], probs[node + 1])


def assert_top(text, ids, probs):
    lm = target()
    tokens = jnp.asarray([[*text, *[0] * (16 - len(text))]])
    logits = np.asarray(logits_of(lm.model, lm.params, tokens))[0, len(text) - 1]
    law = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    assert ids.tolist() == np.argsort(-law, kind="stable")[:3].tolist()
    np.testing.assert_allclose(probs, law[ids], rtol=1e-4)


@pytest.mark.parametrize("rule", ["rejection", "match", specjax.Typical()])
def test_a_tree_without_nodes_is_a_plain_step(rule):
    """Case 91: what a narrower window leaves of a tree in which nothing was found."""
    target_probs = np.broadcast_to(np.asarray([0.0, 0.3, 0.7], np.float32), (4000, 1, 3))
    nothing = np.zeros((4000, 0), np.int32)
    keys = specjax.row_keys(range(4000))
    got, chain = (
        specjax.accept(rule, keys, Proposal(nothing, None, parents, nothing.astype(bool)), target_probs)
        for parents in (nothing, None)
    )
    np.testing.assert_array_equal(got.next_token, chain.next_token)
    assert not np.asarray(got.num_accepted).any() and abs(np.mean(np.asarray(got.next_token) == 2) - 0.7) < 0.04
    if rule != "rejection":
        return
    base = tree_scripted(np.zeros((2, 64), int), [-1, -1], np.zeros((2, 2), int))
    silent = base._replace(draft=bind(_silent, base.draft), widths=(0,))
    state, info = advance(target(), silent, begin(target(), PROMPTS[:2], silent), rule=rule)
    plain, _ = advance(target(), None, begin(target(), PROMPTS[:2]))
    assert info.count.tolist() == [1, 1] and state.text.tokens.tolist() == plain.text.tokens.tolist()


def _silent(draft, *args):
    proposal, state = draft(*args)
    return proposal._replace(valid=jnp.zeros_like(proposal.valid)), state


def test_case_159_a_wide_tree_of_point_masses_needs_no_law_per_node():
    """64 nodes at V = 49,152: beyond the target's own laws, verification needs a few rows, not 64."""
    batch, nodes, vocab = 1, 64, 49_152
    shape = jax.ShapeDtypeStruct
    proposal = Proposal(
        shape((batch, nodes), jnp.int32), None, shape((batch, nodes), jnp.int32), shape((batch, nodes), bool)
    )
    sparse = proposal._replace(probs=specjax.Sparse(shape((512,), jnp.int32), shape((batch, nodes, 512), jnp.float32)))
    keys = jax.eval_shape(lambda: specjax.row_keys([0]))
    for rule, case in (("rejection", proposal), ("match", proposal), ("rejection", sparse)):
        fn = jax.jit(specjax.accept, static_argnums=0)
        compiled = fn.lower(rule, keys, case, shape((batch, nodes + 1, vocab), jnp.float32)).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 16 * vocab * 4, rule
