"""The accept rules: which prefix (or tree path) of a proposal is kept, and which token follows it.

In the maths p is the target's law, q the law a node was drawn from given its earlier siblings; both warped.
Each rule is exact: the emitted tokens are distributed as if the target had written them alone.

rejection  accept node x when u q(x) < p(x), else replace p by norm(max(p - q, 0)) and try the next sibling; the token
           after the last accepted node is drawn from what p has become. Leviathan et al., Fast Inference from
           Transformers via Speculative Decoding, arXiv 2211.17192 (2023); Chen et al., Accelerating Large Language
           Model Decoding with Speculative Sampling, arXiv 2302.01318 (2023); trees: Miao et al., SpecInfer, arXiv
           2305.09781 (2024).
block      judges all prefixes of a chain together; never shorter in expectation than rejection. Sun et al., Block
           Verification Accelerates Speculative Decoding, arXiv 2403.10444 (2024).
match      draws the target's own token from target noise and follows the draft while it is equal. The text depends on
           (row key, position) alone, not on drafter, K or batch. Daliri et al., Coupling without Communication and
           Drafter-Invariant Speculative Decoding, arXiv 2408.07978 (2024).

One rule is not exact, and its type says so: `Typical`.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from specjax import rows, tree
from specjax.noise import Role, accept_uniforms, argmax, at, inverse_cdf, target_draw, uniform
from specjax.proposal import as_arrays, check_keys, check_proposal
from specjax.static import bind, show
from specjax.types import Acceptance, Array, Proposal, Sparse


class Typical(NamedTuple):
    """LOSSY rule: every node that is plausible by itself is accepted, the longest such path is kept.

    A node x is plausible where p(x) > min(threshold, alpha * exp(-H(p))), H the entropy of the warped law p. The token
    after the path is drawn from p. The text does not follow the target's law (except at temperature 0, where only the
    argmax is plausible if threshold < 1); `Generation.lossless` is False. Cai et al., Medusa, arXiv 2401.10774 (2024).
    """

    threshold: float = 0.09
    alpha: float = 0.3


Rule = str | Typical


def check_rule(rule: Rule) -> Rule:
    """``rule`` if it is one.

    Raises:
      ValueError: an unknown name; a `Typical` with thresholds outside 0 .. 1.
    """
    if isinstance(rule, str) and rule in RULES:
        return rule
    if isinstance(rule, Typical):
        for name, value in rule._asdict().items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise ValueError(f"Typical: {name}={show(value)} must be a number from 0 to 1")
        return rule
    raise ValueError(f"rule={show(rule)}: choose one of {sorted(RULES)}, or specjax.Typical(), which is lossy")


def accept(
    rule: Rule, keys: Array, proposal: Proposal, target_probs: Array, positions: Array | None = None
) -> Acceptance:
    """Decides one round. Usable alone, with nothing but arrays, of numpy or JAX.

    Args:
      rule: "rejection", "block" (chains only) or "match"; `Typical` is lossy.
      keys: [B] typed keys of the rows.
      proposal: N nodes; see `Proposal`.
      target_probs: [B, 1 + N, V] warped target laws: row 0 after the pending token, row n + 1 after node n. Values are
        not checked: laws are not negative and sum to 1. A row that starts with NaN has no law and judges nothing; a
        token outside [0, V) is not judged either.
      positions: [B] absolute position of the pending token, default 0. Rounds of one text must differ in it.

    Returns:
      `Acceptance`: path [B, 1 + N], num_accepted [B], next_token [B].

    Raises:
      ValueError: an unknown rule, a tree given to "block", keys of another type than threefry.
      AssertionError: shapes that do not belong together (chex).
    """
    check_rule(rule)
    if rule == "block" and proposal.parents is not None:
        raise ValueError("rule='block' judges chains (parents=None), this proposal is a tree: use 'rejection'")
    check_keys(keys)
    target_probs = jnp.asarray(target_probs)
    proposal = as_arrays(proposal)
    if target_probs.ndim != 3:
        raise ValueError(f"target_probs has shape {target_probs.shape}: give [B, 1 + N, V]")
    batch, width, _ = target_probs.shape
    check_proposal(proposal, target_probs.shape)
    chex.assert_shape(keys, (batch,), custom_message="keys: one per row of target_probs")
    proposal = proposal._replace(valid=proposal.valid & _judgeable(proposal, target_probs))
    if positions is None:
        positions = jnp.zeros(batch, jnp.int32)
    positions = jnp.asarray(positions)
    chex.assert_shape(positions, (batch,), custom_message="positions: one per row of target_probs")
    decide = bind(_typical, rule) if isinstance(rule, Typical) else RULES[rule]
    path, num_accepted, next_token = decide(keys, proposal, target_probs, positions)
    chex.assert_shape(path, (batch, width))
    chex.assert_shape([num_accepted, next_token], (batch,))
    return Acceptance(path.astype(jnp.int32), num_accepted.astype(jnp.int32), next_token.astype(jnp.int32))


def _judgeable(proposal: Proposal, target_probs: Array) -> Array:
    """[B, N]: the row that judges the node has a law, and so has the draft. A NaN compares as false and wins every
    argmax: judged by one, a node would be taken or refused for no reason."""
    lawful = ~jnp.isnan(target_probs[:, :, 0])
    if proposal.parents is None:
        above = lawful[:, :-1]
    else:
        batch, nodes = proposal.tokens.shape
        above = jnp.take_along_axis(lawful, tree.broadcast_parents(proposal.parents, batch, nodes) + 1, axis=1)
    known = (proposal.tokens >= 0) & (proposal.tokens < target_probs.shape[-1])
    return above & known & ~jnp.isnan(_draft_mass(proposal))


def residual(p: Array, q: Array) -> Array:
    """norm(max(p - q, 0)) along the last axis; p where rounding left the residual no mass."""
    rest = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(rest, axis=-1, keepdims=True)
    return jnp.where(mass > 0, rest / jnp.where(mass > 0, mass, 1.0), p)


def _draft_law(proposal: Proposal, node: Array, vocab: int) -> Array:
    """q of ``node [B]`` as [B, V]."""
    law = proposal.probs
    if law is None:
        return (jnp.arange(vocab)[None] == rows.take(proposal.tokens, node)[:, None]).astype(jnp.float32)
    if isinstance(law, Sparse):
        return rows.add(jnp.zeros((node.shape[0], vocab)), rows.take(law.probs, node), rows.take(_ids(law), node))
    return rows.take(law, node)


def _ids(law: Sparse) -> Array:
    return jnp.broadcast_to(law.ids[None, None] if law.ids.ndim == 1 else law.ids, law.probs.shape)


def _draft_mass(proposal: Proposal) -> Array:
    """q(x) of each node's own token, [B, N]."""
    law, tokens = proposal.probs, proposal.tokens
    if law is None:
        return jnp.ones(tokens.shape)
    if isinstance(law, Sparse):
        return jnp.sum(jnp.where(_ids(law) == tokens[..., None], law.probs, 0.0), axis=-1)
    return jnp.take_along_axis(law, tokens[..., None], axis=-1)[..., 0]


def _own_mass(target_probs: Array, proposal: Proposal) -> Array:
    """p(x) of each chain node's token under the row that judges it, [B, N]."""
    return jnp.take_along_axis(target_probs[:, :-1], proposal.tokens[..., None], axis=-1)[..., 0]


def _draw(keys: Array, positions: Array, weights: Array) -> Array:
    return inverse_cdf(weights, uniform(at(keys, Role.RESIDUAL, positions), (2,)))


def _chain_path(num_accepted: Array, width: int) -> Array:
    return jnp.minimum(jnp.arange(width)[None], num_accepted[:, None])


def _rejection(keys: Array, proposal: Proposal, target_probs: Array, positions: Array):
    if proposal.parents is None or target_probs.shape[1] == 1:
        return _reject_chain(keys, proposal, target_probs, positions)
    return _reject_tree(keys, proposal, target_probs, positions)


def _reject_chain(keys: Array, proposal: Proposal, target_probs: Array, positions: Array):
    """All nodes of a chain at once: the leading run of u q(x) < p(x), then one residual."""
    _, width, vocab = target_probs.shape
    u = accept_uniforms(keys, positions, width - 1)
    kept = proposal.valid & (u * _draft_mass(proposal) < _own_mass(target_probs, proposal))
    num_accepted = _leading(kept)
    law = rows.take(target_probs, num_accepted)
    if width > 1:
        judged = jnp.minimum(num_accepted, width - 2)
        rejected = num_accepted < _leading(proposal.valid)
        law = jnp.where(rejected[:, None], residual(law, _draft_law(proposal, judged, vocab)), law)
    return _chain_path(num_accepted, width), num_accepted, _draw(keys, positions, law)


def _leading(flags: Array) -> Array:
    """Length of the leading run of true entries."""
    size = flags.shape[-1]
    return jnp.min(jnp.where(flags, size, jnp.arange(size, dtype=jnp.int32)[None]), axis=-1, initial=size)


class _Walk(NamedTuple):
    last: Array  # [B] window index of the last accepted node
    count: Array  # [B] accepted nodes
    path: Array  # [B, T]

    def step(self, moved: Array, index: Array) -> "_Walk":
        """Appends window ``index`` where ``moved [B]``."""
        last = jnp.where(moved, index, self.last)
        count = self.count + moved.astype(jnp.int32)
        slots = jnp.arange(self.path.shape[1])[None]
        return _Walk(last, count, jnp.where(slots >= count[:, None], last[:, None], self.path))


def _start(batch: int, width: int) -> _Walk:
    zero = jnp.zeros(batch, jnp.int32)
    return _Walk(zero, zero, jnp.zeros((batch, width), jnp.int32))


def _reject_tree(keys: Array, proposal: Proposal, target_probs: Array, positions: Array):
    """Nodes in draft order; ``law`` is what the next token must follow once earlier siblings were rejected."""
    batch, width, vocab = target_probs.shape
    parents = tree.broadcast_parents(proposal.parents, batch, width - 1)
    u = accept_uniforms(keys, positions, width - 1)
    draft_mass = _draft_mass(proposal)

    def judge(carry, node):
        walk, law = carry
        token = proposal.tokens[:, node]
        candidate = proposal.valid[:, node] & (parents[:, node] + 1 == walk.last)
        kept = candidate & (u[:, node] * draft_mass[:, node] < rows.take(law, token))
        rest = residual(law, _draft_law(proposal, jnp.broadcast_to(node, (batch,)), vocab))
        law = jnp.where((candidate & ~kept)[:, None], rest, law)
        law = jnp.where(kept[:, None], target_probs[:, node + 1], law)
        return (walk.step(kept, node + 1), law), None

    start = (_start(batch, width), target_probs[:, 0])
    (walk, law), _ = lax.scan(judge, start, jnp.arange(width - 1, dtype=jnp.int32))
    return walk.path, walk.count, _draw(keys, positions, law)


def _block(keys: Array, proposal: Proposal, target_probs: Array, positions: Array):
    """P_i = min(P_{i-1} p(x_i)/q(x_i), 1); stop at the largest i with u_i < h_i."""
    batch, width, vocab = target_probs.shape
    num_nodes = width - 1
    length = _leading(proposal.valid)
    own, drafted = _own_mass(target_probs, proposal), _draft_mass(proposal)

    def extend(prefix, ratio):
        prefix = jnp.minimum(prefix * ratio, 1.0)
        return prefix, prefix

    ratios = own / jnp.where(drafted > 0, drafted, 1.0)
    _, prefixes = lax.scan(extend, jnp.ones(batch), ratios.T)
    prefixes = jnp.concatenate([jnp.ones((1, batch)), prefixes]).T  # [B, T], P_0 .. P_N
    h = prefixes[:, 1:]
    if num_nodes > 1:
        # S_i belongs to prefix i < K and looks at the law of the next draft, node i.
        mass = _excess(prefixes[:, 1:-1], target_probs[:, 1:-1], proposal)
        below = mass + 1.0 - prefixes[:, 1:-1]
        inner = jnp.where(below > 0, mass / jnp.where(below > 0, below, 1.0), 1.0)
        last = jnp.arange(1, num_nodes)[None] == length[:, None]
        h = jnp.concatenate([jnp.where(last, prefixes[:, 1:-1], inner), h[:, -1:]], axis=1)
    lengths = jnp.arange(1, width, dtype=jnp.int32)[None]
    passed = (accept_uniforms(keys, positions, num_nodes) < h) & (lengths <= length[:, None])
    num_accepted = jnp.max(jnp.where(passed, lengths, 0), axis=-1, initial=0)
    law = rows.take(target_probs, num_accepted)
    if num_nodes:
        scaled = rows.take(prefixes, num_accepted)[:, None] * law
        rest = residual(scaled, _draft_law(proposal, jnp.minimum(num_accepted, num_nodes - 1), vocab))
        law = jnp.where((num_accepted < length)[:, None], rest, law)
    return _chain_path(num_accepted, width), num_accepted, _draw(keys, positions, law)


def _excess(prefixes: Array, p: Array, proposal: Proposal) -> Array:
    """sum_x max(P_i p(x) - q(x), 0) for i = 1 .. N - 1, where q is the law of node i: [B, N - 1]."""
    law = proposal.probs
    if law is None:
        own = jnp.take_along_axis(p, proposal.tokens[:, 1:, None], axis=-1)[..., 0]
        return prefixes * jnp.maximum(jnp.sum(p, axis=-1) - own, 0.0)
    if isinstance(law, Sparse):
        ids = _ids(law)[:, 1:]
        at_ids = jnp.take_along_axis(p, ids, axis=-1)
        gain = jnp.maximum(prefixes[..., None] * at_ids - law.probs[:, 1:], 0.0) - prefixes[..., None] * at_ids
        return jnp.maximum(prefixes * jnp.sum(p, axis=-1) + jnp.sum(gain, axis=-1), 0.0)
    return jnp.sum(jnp.maximum(prefixes[..., None] * p - law[:, 1:], 0.0), axis=-1)


def _match(keys: Array, proposal: Proposal, target_probs: Array, positions: Array):
    """Walks down while some child equals the target's own draw; noise is made only for the rows that are reached."""
    batch, width, _ = target_probs.shape
    parents = tree.broadcast_parents(proposal.parents, batch, width - 1)
    nodes = jnp.arange(1, width, dtype=jnp.int32)

    def descend(carry):
        walk, active, token, depth = carry
        own = target_draw(keys, positions + depth + 1, rows.take(target_probs, walk.last))
        token = jnp.where(active, own, token)
        child = proposal.valid & (parents + 1 == walk.last[:, None]) & (proposal.tokens == token[:, None])
        child = jnp.min(jnp.where(child, nodes[None], width), axis=-1, initial=width)
        active = active & (child < width)
        return walk.step(active, child), active, token, depth + 1

    def more(carry):
        return jnp.any(carry[1])

    start = (_start(batch, width), jnp.ones(batch, bool), jnp.zeros(batch, jnp.int32), jnp.int32(0))
    walk, _, token, _ = lax.while_loop(more, descend, start)
    return walk.path, walk.count, token


def _typical(rule: Typical, keys: Array, proposal: Proposal, target_probs: Array, positions: Array):
    """The deepest node that is plausible like all its ancestors; the first one among equals."""
    batch, width, _ = target_probs.shape
    slots = jnp.arange(width, dtype=jnp.int32)
    entropy = jnp.sum(jax.scipy.special.entr(target_probs), axis=-1)  # [B, T]
    bar = jnp.minimum(rule.threshold, rule.alpha * jnp.exp(-entropy))
    above = tree.broadcast_parents(proposal.parents, batch, width - 1) + 1
    mass = rows.take(target_probs, above, proposal.tokens)
    plausible = proposal.valid & (mass > jnp.take_along_axis(bar, above, axis=1))
    plausible = jnp.concatenate([jnp.ones((batch, 1), bool), plausible], axis=1)
    ancestors = jnp.broadcast_to(jnp.asarray(tree.window_mask(proposal.parents, width - 1)), (batch, width, width))
    whole = jnp.all(plausible[:, None] | ~ancestors, axis=-1)
    depth = jnp.where(whole, jnp.sum(ancestors, axis=-1, dtype=jnp.int32) - 1, -1)
    best = argmax(depth)
    count = rows.take(depth, best)
    on_path = rows.take(ancestors, best)
    path = jnp.sort(jnp.where(on_path, slots[None], best[:, None]), axis=-1)  # ancestors come before their descendants
    return path, count, _draw(keys, positions, rows.take(target_probs, best))


RULES = {"rejection": _rejection, "block": _block, "match": _match}
