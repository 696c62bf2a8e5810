"""Exact one-round laws of the accept rules, and of rules that are known to be wrong.

A *block* is what one round emits: the accepted draft tokens and the residual or bonus token. Three levels:

- ``outcomes_*``: given one proposal as arrays, the law over (accepted window path, next token);
- ``blocks_*``: the drafter's randomness summed out too, the law over blocks, for laws p and q given as functions of
  the drafted prefix;
- `tests.oracle.joint.completed` extends blocks by the target, to be compared with plain decoding.

Window index = node index + 1; the pending token is window index 0. p is the target's law, q the draft's.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tests.oracle.joint import Law

Blocks = dict[tuple[int, ...], float]
Outcomes = dict[tuple[tuple[int, ...], int], float]  # (accepted window indices without the root, next token)


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """norm(max(p - q, 0)); p itself where nothing is left (p <= q everywhere, so p == q)."""
    rest = np.maximum(p - q, 0)
    return rest / rest.sum() if rest.sum() > 0 else p


def one_hot(token: int, size: int) -> np.ndarray:
    """A point mass."""
    return np.eye(size)[token]


def children(parents: Sequence[int], node: int) -> list[int]:
    """Children of a node (-1: the pending token) in draft order."""
    return [n for n, parent in enumerate(parents) if parent == node]


def chain_parents(n: int) -> list[int]:
    """The parents of a chain."""
    return list(range(-1, n - 1))


def node_law(probs, node: int, token: int, vocab: int) -> np.ndarray:
    """q of a node; None is a point mass."""
    return one_hot(token, vocab) if probs is None else np.asarray(probs[node], np.float64)


# --- rejection: recursive over siblings, chains are trees without siblings


def outcomes_rejection(
    tokens, probs, parents, valid, target, *, update_p: bool = True, correction: Callable | None = None
) -> Outcomes:
    """Leviathan/Chen/SpecInfer rejection for tokens [N], probs [N, V] or None, target [N + 1, V] in window order.

    The wrong forms: ``update_p=False`` never reduces the law when a sibling fails; ``correction(p, residual)`` returns
    the law of the token after the last sibling failed.
    """
    target = np.asarray(target, np.float64)
    parents = chain_parents(len(tokens)) if parents is None else parents
    outcomes: Outcomes = defaultdict(float)

    def visit(path: tuple[int, ...], mass: float):
        node = path[-1] - 1 if path else -1
        p = law = target[node + 1]
        judged = False
        for child in children(parents, node):
            if not valid[child] or mass == 0:
                continue
            token = tokens[child]
            q = node_law(probs, child, token, len(p))
            keep = min(1.0, law[token] / q[token]) if q[token] > 0 else float(law[token] > 0)
            if law[token] == 0:
                keep = 0.0
            visit((*path, child + 1), mass * keep)
            mass *= 1 - keep
            judged = True
            if update_p and mass > 0:
                law = residual(law, q)
        if mass > 0:
            if judged and correction is not None:
                law = correction(p, law)
            for token in np.flatnonzero(law):
                outcomes[path, int(token)] += mass * law[token]

    visit((), 1.0)
    return dict(outcomes)


# --- block verification


def block_weights(tokens, probs, target) -> tuple[np.ndarray, np.ndarray]:
    """P_0..P_K and h_1..h_K of Sun et al. (arXiv 2403.10444) for a chain of K valid drafts."""
    target = np.asarray(target, np.float64)
    k, vocab = len(tokens), target.shape[1]
    weight = np.ones(k + 1)
    for i in range(k):
        q = node_law(probs, i, tokens[i], vocab)
        ratio = target[i, tokens[i]] / q[tokens[i]] if q[tokens[i]] > 0 else 0.0
        weight[i + 1] = min(weight[i] * ratio, 1.0)
    accept = np.zeros(k)
    for i in range(1, k):
        q = node_law(probs, i, tokens[i], vocab)
        rest = np.maximum(weight[i] * target[i] - q, 0).sum()
        below = rest + 1 - weight[i]
        accept[i - 1] = rest / below if below > 0 else 1.0
    if k:
        accept[k - 1] = weight[k]
    return weight, accept


def outcomes_block(tokens, probs, valid, target) -> Outcomes:
    """Block verification of a chain; only the leading valid drafts exist."""
    target = np.asarray(target, np.float64)
    k = int(np.cumprod(np.asarray(valid, int)).sum()) if len(valid) else 0
    weight, accept = block_weights(tokens[:k], probs, target)
    outcomes: Outcomes = defaultdict(float)
    mass = 1.0
    for n in range(k, -1, -1):  # the largest i with u_i < h_i
        keep = accept[n - 1] if n else 1.0
        law = target[n]
        if n < k:
            rest = np.maximum(weight[n] * target[n] - node_law(probs, n, tokens[n], target.shape[1]), 0)
            if mass * keep > 0:
                law = rest / rest.sum() if rest.sum() > 0 else target[n]
        for token in np.flatnonzero(law):
            if mass * keep > 0:
                outcomes[tuple(range(1, n + 1)), int(token)] += mass * keep * law[token]
        mass *= 1 - keep
    return dict(outcomes)


# --- match


def outcomes_match(tokens, parents, valid, target) -> Outcomes:
    """Draw the target's own token, go on while a valid child (the first of equals) has it."""
    target = np.asarray(target, np.float64)
    parents = chain_parents(len(tokens)) if parents is None else parents
    outcomes: Outcomes = defaultdict(float)

    def visit(path: tuple[int, ...], mass: float):
        node = path[-1] - 1 if path else -1
        for token in np.flatnonzero(target[node + 1]):
            share = mass * target[node + 1, token]
            hits = [c for c in children(parents, node) if valid[c] and tokens[c] == token]
            if hits:
                visit((*path, hits[0] + 1), share)
            else:
                outcomes[path, int(token)] += share

    visit((), 1.0)
    return dict(outcomes)


def accepted_mass(p: np.ndarray, q: np.ndarray) -> float:
    """alpha = sum min(p, q), the probability that a draft from q survives."""
    return float(np.minimum(p, q).sum())


# --- proposals: every way a drafter can fill a topology, with its probability


def proposals(kind: str, parents: Sequence[int], q: Law) -> Iterator[tuple[float, list[int], list[np.ndarray] | None]]:
    """(probability, tokens, laws) of each proposal. ``q`` sees the drafted path above a node.

    "iid": siblings drawn independently. "distinct": drawn without replacement, each law renormalised on what is left.
    "top": the most probable tokens in order, the laws are point masses (None).
    """
    vocab = len(q(()))

    def extend(node: int, tokens: list[int], laws: list[np.ndarray], mass: float):
        if node == len(parents):
            yield mass, tokens, None if kind == "top" else laws
            return
        law = q(path_tokens(parents, tokens, parents[node]))
        older = [tokens[n] for n in range(node) if parents[n] == parents[node]]
        if kind == "top":
            rank = np.lexsort((np.arange(vocab), -law))
            law = one_hot(rank[len(older)], vocab)
        elif kind == "distinct":
            law = np.where(np.isin(np.arange(vocab), older), 0, law)
            law = law / law.sum()
        elif kind != "iid":
            raise ValueError(kind)
        for token in np.flatnonzero(law):
            yield from extend(node + 1, [*tokens, int(token)], [*laws, law], mass * law[token])

    yield from extend(0, [], [], 1.0)


def path_tokens(parents, tokens, node: int) -> tuple[int, ...]:
    """Tokens from the top of the proposal down to ``node``."""
    path = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return tuple(reversed(path))


def target_rows(parents, tokens, p: Law) -> np.ndarray:
    """Target laws [N + 1, V] in window order."""
    return np.stack([p(path_tokens(parents, tokens, node)) for node in range(-1, len(tokens))])


def blocks(kind: str, parents: Sequence[int], p: Law, q: Law, rule: Callable[..., Outcomes]) -> Blocks:
    """The law over blocks of one round: ``rule(tokens, probs, parents, valid, target)`` averaged over proposals."""
    result: Blocks = defaultdict(float)
    for mass, tokens, laws in proposals(kind, parents, q):
        outcomes = rule(tokens, laws, parents, [True] * len(tokens), target_rows(parents, tokens, p))
        for (path, token), share in outcomes.items():
            result[*(tokens[i - 1] for i in path), token] += mass * share
    return dict(result)


def rejection_rule(tokens, probs, parents, valid, target) -> Outcomes:
    """`outcomes_rejection` as a rule of `blocks`."""
    return outcomes_rejection(tokens, probs, parents, valid, target)


def block_rule(tokens, probs, parents, valid, target) -> Outcomes:
    """`outcomes_block` as a rule of `blocks`."""
    assert list(parents) == chain_parents(len(tokens))
    return outcomes_block(tokens, probs, valid, target)


def match_rule(tokens, probs, parents, valid, target) -> Outcomes:
    """`outcomes_match` as a rule of `blocks`."""
    return outcomes_match(tokens, parents, valid, target)


# --- negative controls: each is a published bug. Same signature as the rules above.


def wrong_resample_from_p(tokens, probs, parents, valid, target) -> Outcomes:
    """Case 6: the correction is drawn from p instead of the residual."""
    return outcomes_rejection(tokens, probs, parents, valid, target, correction=lambda p, law: p)


def wrong_siblings_against_first_p(tokens, probs, parents, valid, target) -> Outcomes:
    """Case 85: p is not reduced between siblings."""
    return outcomes_rejection(tokens, probs, parents, valid, target, update_p=False)


def wrong_q(change: Callable[[np.ndarray | None, int], np.ndarray]) -> Callable[..., Outcomes]:
    """Cases 1, 4, 97: the ratio and the residual use ``change(q, node)``, not the law the token was drawn from."""

    def rule(tokens, probs, parents, valid, target):
        laws = [change(None if probs is None else probs[n], n) for n in range(len(tokens))]
        return outcomes_rejection(tokens, laws, parents, valid, target)

    return rule


def wrong_epsilon_in_residual(epsilon: float) -> Callable[..., Outcomes]:
    """Case 9: the residual is floored before it is normalised."""

    def rule(tokens, probs, parents, valid, target):
        def floored(p, law):
            q = node_law(probs, 0, tokens[0], len(p))
            rest = np.maximum(p - q, epsilon)
            return rest / rest.sum()

        return outcomes_rejection(tokens, probs, parents, valid, target, correction=floored)

    return rule


def wrong_shared_uniform(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Case 7: the uniform that rejected also drives the inverse CDF of the residual, K = 1. The law of one token."""
    law = np.zeros(len(p))
    cdf = np.concatenate([[0.0], np.cumsum(residual(p, q))])
    for token in np.flatnonzero(q):
        keep = min(1.0, p[token] / q[token])
        law[token] += q[token] * keep
        # u is uniform on [keep, 1): its share of each slice of the CDF.
        overlap = np.clip(cdf[1:], keep, 1) - np.clip(cdf[:-1], keep, 1)
        law += q[token] * overlap
    return law


def wrong_drop_by_own_probability(threshold: float) -> Callable[..., Outcomes]:
    """A drafted token below the threshold is not offered: whether it is judged depends on the token itself."""

    def rule(tokens, probs, parents, valid, target):
        keep = [ok and probs[n][tokens[n]] >= threshold for n, ok in enumerate(valid)]
        return outcomes_rejection(tokens, probs, parents, keep, target)

    return rule


def wrong_count_accepted(tokens, probs, parents, valid, target) -> Outcomes:
    """Case 12: accepted flags are summed instead of the leading run being counted (chains)."""
    target = np.asarray(target, np.float64)
    k = len(tokens)
    keep = []
    for i in range(k):
        q = node_law(probs, i, tokens[i], target.shape[1])
        keep.append(min(1.0, target[i, tokens[i]] / q[tokens[i]]))
    outcomes: Outcomes = defaultdict(float)
    for flags in itertools.product((0, 1), repeat=k):
        mass = float(np.prod([a if f else 1 - a for a, f in zip(keep, flags)]))
        n = sum(flags)
        law = target[n]
        if n < k:
            law = residual(law, node_law(probs, n, tokens[n], target.shape[1]))
        for token in np.flatnonzero(law):
            if mass > 0:
                outcomes[tuple(range(1, n + 1)), int(token)] += mass * law[token]
    return dict(outcomes)


def wrong_lockstep(tokens, probs, parents, valid, target, *, neighbour: float) -> Outcomes:
    """A neighbour that rejects its first token with probability 1 - ``neighbour`` cuts this row there too, and the
    row's token is replaced by a draw from its residual although it had been accepted."""
    outcomes: Outcomes = defaultdict(float)
    for (path, token), share in outcomes_rejection(tokens, probs, parents, valid, target).items():
        if not path:
            outcomes[path, token] += share
            continue
        outcomes[path, token] += share * neighbour
        law = residual(np.asarray(target[0]), node_law(probs, 0, tokens[0], len(target[0])))
        for other in np.flatnonzero(law):
            outcomes[(), int(other)] += share * (1 - neighbour) * law[other]
    return dict(outcomes)
