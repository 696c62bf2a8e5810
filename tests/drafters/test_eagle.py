"""EAGLE heads: numbers against an oracle for every variant, what is drafted; bad heads cost time, never text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import loop
from specjax.drafters import recurrent
from specjax.drafters.eagle import Eagle, EagleConfig, eagle, fresh_params, head_of, sources
from specjax.models import LlamaConfig, llama_params
from tests.drafters import parallel_world as world
from tests.drafters import recurrent_oracle as oracle
from tests.drafters.parallel_world import DYNAMIC, TREE, paths, proposal_of
from tests.drafters.recurrent_oracle import LAYERS, SMALL
from tests.small import PROMPTS, V, advance, begin, dictated

# A reduced vocabulary that lacks the first and the last token; streams are numbered by the layers applied.
IDS = [1, 2, 3, 5, 6, 7, 8, 10, 11, 13, 14]
BASE = EagleConfig(LAYERS, (0, 1, 3), draft_vocab_size=len(IDS))
CONFIGS = {
    "EAGLE-3": BASE,
    "norm_before_residual": dataclasses.replace(BASE, norm_before_residual=True),
    "norm_before_fc": dataclasses.replace(BASE, norm_before_fc=True),
    "fc_norm": dataclasses.replace(BASE, fc_norm=True),
    "norm_output": dataclasses.replace(BASE, norm_output=True),
    "two layers, whole vocabulary": EagleConfig(dataclasses.replace(LAYERS, num_layers=2), (2,)),
    "qk_norm, biases": dataclasses.replace(BASE, layers=dataclasses.replace(LAYERS, qk_norm=True, attention_bias=True)),
    "EAGLE-1": EagleConfig(LAYERS, (3,), version=1),
    "EAGLE-1 with a bias": EagleConfig(LAYERS, (3,), version=1, fc_bias=True),
}
QUICK = ("EAGLE-3",)
TEXTS = [PROMPTS[0], PROMPTS[4]]  # 7 and 5 tokens
FORMS = {"chain": {}, "tree": {"tree": TREE}, "dynamic": {"tree": DYNAMIC}, "coupled": {"coupled": True}}


def made(config, lm=None, seed=0, **how):
    """(drafter, tensors under their names in files): random weights, embedding and head its own."""
    lm = world.small_target() if lm is None else lm
    tensors = oracle.random_tensors(sources(config), seed)
    params = llama_params.fill(sources(config), lambda name, shape: tensors[name])
    if config.draft_vocab_size:
        params["ids"] = jnp.asarray(IDS, jnp.int32)
    return eagle(config, params, lm, **how), tensors


def ids_of(config):
    return np.asarray(IDS) if config.draft_vocab_size else np.arange(V)


def after(config, tensors, lm, text):
    """path of drafted tokens -> the oracle's logits, over draft tokens."""
    features = oracle.features_of(lm, [text], config.feature_layers)[0, :-1]
    logits = oracle.eagle_logits(config, tensors)
    return lambda path: logits(text, features, path)


# --- numbers


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CONFIGS]
)
def test_drawn_laws_are_those_of_the_oracle(name):
    """Cases 98, 103 and 104: from the text through prefill and three steps of a chain, every norm and residual, each
    token beside the hidden state before it, the second step on the first one's own. Rows of several lengths."""
    config, lm = CONFIGS[name], world.small_target()
    drafter, tensors = made(config)
    state = begin(lm, TEXTS, drafter)
    proposal = proposal_of(drafter, state, specjax.make_sampling(2, V, temperature=1.0))
    laws = proposal.probs.probs if config.draft_vocab_size else proposal.probs
    if config.draft_vocab_size:
        np.testing.assert_array_equal(proposal.probs.ids, IDS)
    for row, text in enumerate(TEXTS):
        logits = after(config, tensors, lm, text)
        for depth in range(4):
            expected = np.exp(oracle.log_softmax(logits(proposal.tokens[row, :depth])))
            np.testing.assert_allclose(laws[row, depth], expected, atol=5e-5)
            assert proposal.tokens[row, depth] in ids_of(config)


@pytest.mark.parametrize("name", ["EAGLE-3", pytest.param("EAGLE-1", marks=pytest.mark.full)])
def test_nodes_of_a_tree_see_their_ancestors_only(name):
    """Cases 82 and 83."""
    config, lm = CONFIGS[name], world.small_target()
    drafter, tensors = made(config)
    logits = [after(config, tensors, lm, text) for text in TEXTS]
    oracle.assert_nodes_see_their_ancestors_only(head_of(config), drafter, begin(lm, TEXTS, drafter), logits)


@pytest.mark.parametrize("name", ["EAGLE-1", pytest.param("EAGLE-3", marks=pytest.mark.full)])
def test_static_tree_nodes_are_the_top_tokens_below_their_path(name):
    """Nodes may be given depth first."""
    config, lm = CONFIGS[name], world.small_target()
    parents = [-1, 0, 1, 0, -1, 4, 5, 5, 2]
    drafter, tensors = made(config, tree=parents)
    state = begin(lm, TEXTS, drafter)
    proposal = proposal_of(drafter, state)
    assert proposal.probs is None and proposal.valid.all()
    for row, text in enumerate(TEXTS):
        logits, ids = after(config, tensors, lm, text), ids_of(config)
        columns = {int(token): column for column, token in enumerate(ids)}
        expected = oracle.static_paths(lambda path, f=logits, i=ids: f([i[c] for c in path]), parents)
        assert [tuple(columns[t] for t in path) for path in paths(proposal, row)] == expected


def test_dynamic_tree_keeps_the_likeliest_nodes():
    """EAGLE-2 by brute force, down to the last level. Parents come first."""
    config, lm = CONFIGS["EAGLE-3"], world.small_target()
    spec = specjax.tree.Dynamic(24, width=3, depth=4)  # of 30 candidates
    drafter, tensors = made(config, tree=spec)
    state = begin(lm, TEXTS, drafter)
    proposal, ids = proposal_of(drafter, state), ids_of(config)
    for row, text in enumerate(TEXTS):
        logits = after(config, tensors, lm, text)
        found = oracle.dynamic_paths(lambda path, f=logits: f([ids[c] for c in path]), *spec)
        assert set(paths(proposal, row)) == {tuple(int(ids[c]) for c in path) for path in found}
        assert (proposal.parents[row] < np.arange(24)).all() and proposal.valid[row].all()


@pytest.mark.full
@pytest.mark.parametrize("shape", ["chain", "tree", "dynamic"])
def test_a_round_may_ask_for_fewer_nodes(shape):
    """The first ones of a chain or a static tree; the likeliest of a dynamic one."""
    lm = world.small_target()
    drafter, _ = made(CONFIGS["EAGLE-3"], **FORMS[shape])
    state = begin(lm, TEXTS, drafter)
    whole, part = proposal_of(drafter, state), proposal_of(drafter, state, n=2)
    assert part.tokens.shape == part.valid.shape == (2, 2)
    for row in range(2):
        assert set(paths(part, row)) <= set(paths(whole, row))
        assert shape == "dynamic" or paths(part, row) == paths(whole, row)[:2]


@pytest.mark.parametrize("shape", ["dynamic", pytest.param("chain", marks=pytest.mark.full)])
def test_case_44_the_draft_cache_holds_true_features_after_every_round(shape):
    """Chunked prefill of ragged prompts, then rounds that keep some drafts: as one pass over the target's features."""
    lm = world.small_target()
    drafter, _ = made(CONFIGS["EAGLE-3"], **FORMS[shape])
    state = begin(lm, PROMPTS, drafter)
    for _ in range(3):
        state, _ = advance(lm, drafter, state)
        oracle.assert_state_is_fresh(lm, drafter, state)
    assert int(np.sum(state.text.lengths - state.text.prompt_lengths)) > 3 * len(PROMPTS)  # drafts were kept


def test_nothing_is_drafted_before_the_second_token():
    """The first token has no hidden state of the target beside it; nor is its slot ever looked at."""
    lm = world.small_target()
    drafter, _ = made(BASE)
    state = begin(lm, [[3], [3, 5]], drafter)
    assert proposal_of(drafter, state).valid.tolist() == [[False] * 4, [True] * 4]
    k, v = jax.tree.map(lambda x: x.at[:, :, 0].set(1e6), (state.drafter.caches[0].k, state.drafter.caches[0].v))
    caches = (state.drafter.caches[0]._replace(k=k, v=v),)
    other = state._replace(drafter=state.drafter._replace(caches=caches))
    np.testing.assert_array_equal(proposal_of(drafter, other).tokens, proposal_of(drafter, state).tokens)


# --- heads that know


def flat_layers(size):
    return LlamaConfig(V, size, 4, 1, 2, 1, max_position_embeddings=64)


def silent(config):
    """Weights of EAGLE-1 whose layer adds nothing: the hidden state is what fc makes of its input."""
    nothing = jnp.zeros((V, config.layers.hidden_size))
    return {**jax.tree.map(jnp.zeros_like, fresh_params(config)), "embedding": nothing, "head": nothing}


NEXT = [(5 * token + 3) % V for token in range(V)]  # a permutation


def following(start, count):
    text = [start]
    while len(text) < count:
        text.append(NEXT[text[-1]])
    return text


@pytest.mark.parametrize("how", [
    {"num_draft_tokens": 3},
    *[pytest.param({"tree": tree}, marks=pytest.mark.full) for tree in (specjax.tree.Dynamic(3, 2, 3), (-1, 0, 1, -1))],
])  # fmt: skip
def test_case_103_draft_one_is_a_function_of_the_pending_token(how):
    """A head that copies its token, and says what follows it: everything is accepted (case 108, the other half)."""
    config = EagleConfig(flat_layers(V), (5,), version=1)
    params = silent(config)
    params["embedding"] = jnp.eye(V)
    params["fc"] = params["fc"].at[:, :V].set(jnp.eye(V))  # [embedding, hidden]
    params["head"] = 20 * jax.nn.one_hot(jnp.asarray(NEXT), V).T
    text = following(2, 32)
    lm = world.telling_target(dictated(text, V, 32, sharpness=50.0), V)
    drafter = eagle(config, params, lm, **how)
    out = specjax.generate(lm, [text[:2], text[:5]], drafter=drafter, max_new_tokens=16, eos_ids=[])
    assert out.tokens == [text[2:18], text[5:21]]
    assert out.stats.rounds == 2 * 4 and out.stats.tau == 4


@pytest.mark.parametrize(("shift", "right"), [(1, True), pytest.param(0, False, marks=pytest.mark.full)])
def test_case_104_each_step_goes_on_from_the_hidden_state_of_the_last(shift, right):
    """A head that reads positions: the target's hidden state is one-hot of where it was, and each step moves it on by
    one. Fed the same state again it would say the same token thrice; one that does not move is the control."""
    size, text = 32, [2, 9, 4, 13, 7, 3, 3, 11, 6, 15, 2, 8, 5, 5, 12, 14, 10, 4, 9, 6, 7, 13, 2, 3, 8, 11, 12, 15]
    text += [6, 4, 10, 9]
    config = EagleConfig(flat_layers(size), (5,), version=1)
    params = silent(config)
    params["fc"] = params["fc"].at[:, size:].set(jnp.eye(size, k=-shift))
    params["head"] = 20 * jax.nn.one_hot(jnp.asarray([*text[1:], 0]), V).T  # state at position p: what follows p
    lm = world.telling_target(dictated(text, V, 32, sharpness=50.0), size)
    out = specjax.generate(
        lm, [text[:3], text[:6]], drafter=eagle(config, params, lm, num_draft_tokens=3), max_new_tokens=16, eos_ids=[]
    )
    assert out.tokens == [text[3:19], text[6:22]]
    assert (out.stats.tau == 4) if right else out.stats.acceptance_rate < 0.3


# --- laws and texts

SMALL3 = EagleConfig(SMALL, (0, 2), draft_vocab_size=2)  # two of three tokens can be drafted
SMALL1 = EagleConfig(SMALL, (3,), version=1)


def small(config, **how):
    params = fresh_params(config, rngs=nnx.Rngs(1))
    params = jax.tree.map(lambda x: 20 * x if x.ndim > 1 else x, params)
    if config.draft_vocab_size:
        params["ids"] = jnp.asarray([0, 2], jnp.int32)
    return eagle(config, params, world.target(), **how)


LAWS = [(SMALL3, "chain", "rejection"), (SMALL1, "dynamic", "match"), (SMALL1, "chain", "rejection"),
        (SMALL3, "chain", "block"), (SMALL3, "tree", "rejection"), (SMALL1, "dynamic", "rejection"),
        (SMALL3, "coupled", "match")]


@pytest.mark.parametrize(("config", "shape", "rule"), [
    *LAWS[:2], *[pytest.param(*item, marks=pytest.mark.full) for item in LAWS[2:]],
])  # fmt: skip
def test_random_heads_leave_the_law_alone(config, shape, rule):
    """Case 108, one half: heads that know nothing. Greedy, T = 1 and T = 0.7 with top-p 0.9 side by side. A tree is as
    wide as there are draft tokens."""
    how = {"tree": (-1, -1, 0, 0, 1)} if shape == "tree" else FORMS[shape]
    world.check_law(small(config, **how), rule)


@pytest.mark.parametrize("shape", ["dynamic", *[pytest.param(s, marks=pytest.mark.full) for s in ("chain", "tree")]])
def test_greedy_text_of_a_ragged_batch_is_that_of_plain_decoding(shape):
    lm = world.small_target()
    plain = specjax.generate(lm, PROMPTS, max_new_tokens=20, eos_ids=[])
    drafter, _ = made(CONFIGS["EAGLE-3"], **FORMS[shape])
    out = specjax.generate(lm, PROMPTS, drafter=drafter, max_new_tokens=20, eos_ids=[])
    assert out.tokens == plain.tokens and out.stats.proposed > 0 and out.lossless


def test_freshly_built_equal_drafters_compile_once():
    lm = world.small_target()

    def run(seed):
        drafter, _ = made(dataclasses.replace(BASE), seed=seed, **FORMS["dynamic"])
        specjax.generate(lm, PROMPTS, drafter=drafter, max_new_tokens=20, eos_ids=[])
        return loop.compiled_programs()

    assert run(0) == run(1)


# --- weights and refusals


def test_what_the_target_has_is_referenced_and_not_copied():
    lm = world.target()
    drafter = small(SMALL1)
    weights = drafter.params["weights"]
    assert weights["embedding"] is lm.params["embedding"] and weights["head"] is lm.params["head"]
    assert small(SMALL3).params["weights"]["head"] is not lm.params["head"]
    assert drafter.feature_layers == (3,) and drafter.default_rule == "rejection"
    assert small(SMALL1, coupled=True).default_rule == small(SMALL1, tree=DYNAMIC).default_rule == "match"
    assert small(SMALL1, tree=DYNAMIC).num_draft_tokens == 5


def test_random_weights_have_the_shapes_of_the_table():
    for config in CONFIGS.values():
        params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda c=config: Eagle(c))))
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params)
        assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), llama_params.abstract(sources(config)))


def refuse(message, config=BASE, lm=None, ids=IDS, params=None, **how):
    lm = world.small_target() if lm is None else lm
    if params is None:
        params = fresh_params(config)
        params |= {"ids": jnp.asarray(ids)} if config.draft_vocab_size else {}
    with pytest.raises(ValueError, match=message):
        eagle(config, params, lm, **how)


def test_heads_of_another_target_are_refused_with_both_facts():
    """Cases 101, 107 and 121."""
    refuse(r"vocabulary of 16 tokens.*target one of 3", lm=world.target())
    refuse(r"hidden size 10 and the target 8", dataclasses.replace(BASE, target_hidden_size=10))
    late = dataclasses.replace(BASE, feature_layers=(0, 4))
    refuse(r"target layers \[0, 4\], and the target has 2.*last to read is 3", late)
    refuse(r"ids has 16, outside the target's vocabulary of 16", ids=[*IDS[:-1], 16])
    refuse(r"ids has -1, outside", ids=[-1, *IDS[1:]])
    refuse(r"ascending order", ids=[*IDS[:-2], 14, 13])
    refuse(r"EAGLE weight ids has shape \(10,\).*needs \(11,\)", ids=IDS[:-1])
    lm = world.small_target()
    bare = lm._replace(params={name: weight for name, weight in lm.params.items() if name != "embedding"})
    refuse(r"no embedding of its own and the target no params\['embedding'\]", lm=bare)
    bounded = lm._replace(model=lm.model._replace(context_length=65))
    refuse(r"texts of 64 tokens and they may have 65: pass max_length=64", lm=bounded)
    assert made(BASE, bounded, max_length=64)[0].context_length == 64


def test_weights_that_are_not_the_configuration_s_are_refused_by_name():
    params = {**fresh_params(BASE), "ids": jnp.asarray(IDS)}
    refuse(r"weight norm is missing", params={k: v for k, v in params.items() if k != "norm"})
    refuse(r"weight input_norm has shape \(24,\), the configuration knows no such weight",
           params={**params, "input_norm": jnp.ones(24)})
    refuse(r"weight fc has shape \(24, 8\), the configuration needs \(8, 24\)", params={**params, "fc": params["fc"].T})


@pytest.mark.parametrize(("change", "message"), [
    ({"version": 2}, "version=2: 1"),
    ({"feature_layers": ()}, "feature_layers=.*one layer or more"),
    ({"feature_layers": (-1,)}, "feature_layers=-1"),
    ({"version": 1, "draft_vocab_size": 0}, "EAGLE-1 reads one layer"),
    ({"fc_bias": True}, "EAGLE-3 has no such variant"),
    ({"version": 1, "feature_layers": (3,), "norm_output": True, "draft_vocab_size": 0}, "EAGLE-1 has no such variant"),
    ({"draft_vocab_size": 17}, "target has 16 tokens"),
    ({"layers": None}, "give a LlamaConfig"),
])  # fmt: skip
def test_configurations_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **change)


def test_forms_that_cannot_be_are_refused():
    """Case 89, and trees wider than the draft vocabulary or larger than what is looked at."""
    refuse("parent of node 1", tree=[-1, 1])
    refuse(r"12 children below a node, but there are 11", tree=[-1] * 12)
    refuse(r"num_nodes=7, but width=2 and depth=2 give only 6", tree=specjax.tree.Dynamic(7, 2, 2))
    refuse("coupled=True draws a chain", tree=[-1], coupled=True)
    refuse("num_draft_tokens=0", num_draft_tokens=0)
    assert recurrent.ANY_DEPTH > 1000


@pytest.mark.full
def test_positions_past_the_context_are_not_drafted():
    """Case 43 at the end of a text: as many valid nodes as the context has room for."""
    lm = world.small_target()
    config = dataclasses.replace(BASE, layers=dataclasses.replace(LAYERS, max_position_embeddings=8))
    drafter, _ = made(config, max_length=8)
    state = begin(lm, [PROMPTS[0], PROMPTS[7]], drafter)  # 7 and 2 tokens
    assert proposal_of(drafter, state).valid.sum(1).tolist() == [1, 4]
