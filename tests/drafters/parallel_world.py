"""What the tests of Medusa and of block drafters share: targets with features that tell, laws, negative controls."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import LanguageModel
from specjax.static import bind
from specjax.types import Model, ModelOutput, Proposal
from tests.doubles import hash_lm
from tests.exactness.harness import THRESHOLD, assert_law, emit, histogram, p_value, target_laws
from tests.oracle.hashlm import HashConfig
from tests.oracle.warp import Options
from tests.small import V, _no_cache

CONFIG, LENGTH, ROWS = HashConfig(3), 4, 4000
OPTIONS = [Options(temperature=0.0), Options(), Options(temperature=0.7, top_p=0.9)]
TREE = (-1, -1, 0, 0, 1, 2)  # three levels
DYNAMIC = specjax.tree.Dynamic(5, width=2, depth=3)
HIDDEN, LAYERS = CONFIG.width, CONFIG.num_layers


# --- targets


@functools.cache
def target(vocab_size: int = 3, seed: int = 0) -> LanguageModel:
    """A hash model that also says how many layers it has and where its embedding is."""
    config = HashConfig(vocab_size)
    model, params = hash_lm(config, seed)
    return LanguageModel(model, {**params, "embedding": params["embed"]}, config=config)


def small_target() -> LanguageModel:
    """The target of `tests.small`, with what heads refer to."""
    return target(V, 1)


class Layers(NamedTuple):
    """All that heads ask a target's configuration."""

    num_layers: int = 4


def telling_target(logits, hidden: int, kind: str = "where") -> LanguageModel:
    """Logits [S, V] by position, and features that tell: "where" is one-hot of the row's position (size ``hidden``),
    "tag" has layer * 100 + position in every entry."""
    logits = jnp.asarray(logits, jnp.float32)
    model = Model(_no_cache, bind(_telling_apply, hidden, kind), logits.shape[1])
    return LanguageModel(model, {"logits": logits, "embedding": jnp.zeros((logits.shape[1], hidden))}, config=Layers())


def _telling_apply(
    hidden, kind, params, tokens, positions, window_mask, cache, *, feature_layers=(), logits_at=None
) -> ModelOutput:
    def feature(layer):
        if kind == "where":
            return jax.nn.one_hot(positions, hidden)
        return jnp.broadcast_to((positions + 100 * layer)[..., None], (*positions.shape, hidden)).astype(jnp.float32)

    features = jnp.concatenate([feature(k) for k in feature_layers] or [jnp.zeros((*tokens.shape, 0))], axis=-1)
    if logits_at is not None:
        positions = jnp.take_along_axis(positions, logits_at[:, None], axis=1)
    return ModelOutput(params["logits"][jnp.minimum(positions, len(params["logits"]) - 1)], features, cache)


# --- laws


@functools.cache
def laws():
    return target_laws(CONFIG, 0, OPTIONS, LENGTH)


def counts(drafter, rule, seed, rows=ROWS):
    lm = target()
    tokens, rounds = emit(lm.model, lm.params, drafter, rule, OPTIONS, LENGTH, rows, seed)
    return np.stack([histogram(row, 3) for row in tokens]), rounds


def check_law(drafter, rule, several_rounds=0.1):
    """The joint law of the next tokens is plain decoding's, in texts that took more than one round."""
    rounds = []

    def sample(seed):
        got, taken = counts(drafter, rule, seed)
        rounds.append(taken)
        return got

    assert_law(sample, laws(), OPTIONS)
    assert (rounds[0] >= 2).mean() > several_rounds
    assert (rounds[0] < LENGTH).mean() > several_rounds, "hardly a draft was accepted"


def assert_caught(drafter, rule="rejection"):
    got, _ = counts(drafter, rule, 0)
    worst = min(p_value(c, law) for c, law in zip(got, laws(), strict=True))
    assert worst < THRESHOLD * 1e-3, f"a biased proposal passed with p = {worst:.1e}"


# --- wrong on purpose


def own_probability(drafter):
    """Ends a chain before a token that was drawn with little probability: the cut knows the token it is about."""
    return drafter._replace(draft=bind(_cut_by_own_probability, drafter.draft))


def _cut_by_own_probability(draft, params, keys, state, text, sampling, n):
    proposal, state = draft(params, keys, state, text, sampling, n)
    probs = proposal.probs.probs if isinstance(proposal.probs, specjax.Sparse) else proposal.probs
    likely = jnp.take_along_axis(probs, proposal.tokens[..., None], axis=2)[..., 0] >= 0.4
    return proposal._replace(valid=proposal.valid & jnp.cumprod(likely, axis=1).astype(bool)), state


def better_of_two(drafter):
    """A dynamic choice among drawn nodes: the likelier of two draws, said to be drawn from the law of each."""
    return drafter._replace(draft=bind(_better_of_two, drafter.draft), num_draft_tokens=1)


def _better_of_two(draft, params, keys, state, text, sampling, n):
    other = jax.vmap(jax.random.fold_in)(keys, jnp.full(keys.shape, 77))
    first, second = (draft(params, k, state, text, sampling, n)[0] for k in (keys, other))
    probs = first.probs
    def likely(proposal):
        return jnp.take_along_axis(probs, proposal.tokens[..., None], axis=2)[..., 0]
    tokens = jnp.where(likely(second) > likely(first), second.tokens, first.tokens)
    return Proposal(tokens, probs, None, first.valid), state


# --- what is proposed


@functools.partial(jax.jit, static_argnums=(0, 1))
def draft(fn, n, params, keys, state, text, sampling):
    return fn(params, keys, state, text, sampling, n)


def proposal_of(drafter, state, sampling=None, n=None) -> Proposal:
    """What the drafter proposes in a `specjax.State`, as numpy; greedy unless told otherwise."""
    n = drafter.num_draft_tokens if n is None else n
    if sampling is None:
        sampling = specjax.make_sampling(state.finish.shape[0], drafter.vocab_size)
    return jax.device_get(draft(drafter.draft, n, drafter.params, state.keys, state.drafter, state.text, sampling)[0])


def likeliest(logits, width, depth, count, pending=0, bonus=None) -> list[tuple[int, ...]]:
    """The ``count`` likeliest paths below the pending token, by brute force over all of them.

    Args:
        logits: [D, V] numpy; ``bonus [V, V]`` is added below a token, row = token above.
    """
    found = []

    def extend(path, logp, above):
        if path:
            found.append((logp, path))
        if len(path) == depth:
            return
        here = logits[len(path)] + (0 if bonus is None else bonus[above])
        here = here - here.max() - np.log(np.exp(here - here.max()).sum())
        for token in np.argsort(-here, kind="stable")[:width]:
            extend((*path, int(token)), logp + here[token], int(token))

    extend((), 0.0, pending)
    return [path for _, path in sorted(found, key=lambda item: -item[0])][:count]


def paths(proposal: Proposal, row: int) -> list[tuple[int, ...]]:
    """The path of tokens down to every node of one row."""
    size = proposal.tokens.shape[1]
    parents = np.arange(size) - 1 if proposal.parents is None else proposal.parents
    parents = np.broadcast_to(parents, proposal.tokens.shape)[row]
    result: list[tuple[int, ...]] = []
    for node in range(size):
        above = result[parents[node]] if parents[node] >= 0 else ()
        result.append((*above, int(proposal.tokens[row, node])))
    return result
