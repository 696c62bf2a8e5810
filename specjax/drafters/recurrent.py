"""Heads that draft one token after another, each from the token and the hidden state before it: what EAGLE and
multi-token prediction share.

A head keeps keys and values of its own. In ``observe`` it reads every committed token beside the target's hidden state
that predicted it (token t + 1 with the state of t), so its committed slots never hold a guess; slot i is token i. The
very first token has no such state: its slot is never looked at, and nothing is drafted before the second token.

Drafting continues from what the head said of the pending token, feeding its own hidden states back. Draft nodes go to
scratch slots behind the committed ones, in the order they are fed; each sees the committed slots, its ancestors and
itself. The next ``observe`` writes over them.

With several modules the node at depth d is fed to module d (the pending token to module 0), beside what module d - 1
said of its parent. Module d then reads the shallower nodes once more, as it will read them when they are committed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import tree as topology
from specjax.drafters.parallel import Form, form
from specjax.models.attention import Reach, reach
from specjax.noise import Role, at, inverse_cdf, target_draw, top_k, uniform
from specjax.static import bind
from specjax.types import Array, Committed, Drafter, KVCache, Proposal, PyTree, Sampling, Sparse, Text
from specjax.warp import warp

ANY_DEPTH = 2**16  # of a head that is fed its own hidden state again and again


class Head(NamedTuple):
    """A recurrent head as pure, hashable functions. ``params`` is the drafter's; E is the head's hidden size."""

    init_cache: Callable[[PyTree, int, int], KVCache]  # (params, batch, capacity), of one module
    fuse: Callable[[PyTree, Array], Array]  # (params, target features [B, W, F]) -> what module 0 is fed, [B, W, E]
    step: Callable[..., tuple[Array, KVCache]]  # (params, module, tokens [B, W], hidden [B, W, E], positions [B, W],
    #   slots: Reach, cache) -> hidden [B, W, E], cache: the window is written behind cache.lengths, which stay
    logits: Callable[[PyTree, int, Array], Array]  # (params, module, hidden [B, W, E]) -> [B, W, M]
    ids: Callable[[PyTree], Array | None]  # target ids [M] of the columns, ascending; None: column i is token i
    hidden_size: int  # E
    num_columns: int  # M
    vocab_size: int  # V, the target's
    num_modules: int = 1


class State(NamedTuple):
    """What is known of the committed tokens, the pending one included."""

    caches: tuple[KVCache, ...]  # one per module
    hidden: tuple[Array, ...]  # [B, E] what each module said of the pending token
    logits: Array  # [B, M] of module 0 after the pending token


def drafter(
    head: Head, params: PyTree, *, feature_layers: tuple[int, ...], num_draft_tokens: Any = None, tree: Any = None,
    coupled: Any = False, context_length: int | None = None,
) -> Drafter:  # fmt: skip
    """A drafter around a head.

    Args:
      head, params: see `Head`.
      feature_layers: target hidden states it reads.
      num_draft_tokens: chain length, default 4. A tree has its own number of nodes.
      tree: None draws a chain from the head's laws, each warped like the target's (rule "rejection"). Static parents
        take the top tokens after each node as its children, by rank. `specjax.tree.Dynamic` expands the ``width``
        likeliest nodes of each level and keeps the ``num_nodes`` likeliest of all (EAGLE-2).
      coupled: draw the chain with the target's own noise (rule "match").
      context_length: longest text the head was made for.

    Raises:
      ValueError: a tree deeper than there are modules, wider than the vocabulary, or with more nodes than candidates.
    """
    depth = ANY_DEPTH if head.num_modules == 1 else head.num_modules
    if tree is None and num_draft_tokens is None:
        num_draft_tokens = min(4, depth)
    made = form(tree, num_draft_tokens, coupled, depth, head.num_columns, "modules")
    fed = made.num_nodes
    if made.dynamic is not None:
        spec = made.dynamic
        fed, candidates = spec.width * (spec.depth - 1), spec.width + (spec.depth - 1) * spec.width**2
        if spec.num_nodes > candidates:
            raise ValueError(
                f"tree.num_nodes={spec.num_nodes}, but width={spec.width} and depth={spec.depth} give only "
                f"{candidates} candidates: ask for fewer nodes, or a wider or deeper tree"
            )
    return Drafter(
        params=params,
        init=bind(_init, head, max(0, fed - made.num_nodes)),
        observe=bind(_observe, head),
        draft=bind(_draft, head, made, context_length),
        num_draft_tokens=made.num_nodes,
        feature_layers=feature_layers,
        default_rule=made.default_rule,
        context_length=context_length,
        vocab_size=head.vocab_size,
    )


# --- what is committed


def _init(head: Head, scratch: int, params: PyTree, batch: int, capacity: int) -> State:
    """``scratch``: slots needed beyond the N that every text leaves free."""
    caches = tuple(head.init_cache(params, batch, capacity + scratch) for _ in range(head.num_modules))
    nothing = jnp.zeros((batch, head.hidden_size))
    return State(caches, (nothing,) * head.num_modules, jnp.zeros((batch, head.num_columns)))


def _observe(head: Head, params: PyTree, state: State, committed: Committed) -> State:
    """Reads the committed tokens beside the target's features; module d beside what module d - 1 said one token ago."""
    count, width = committed.count, committed.tokens.shape[1]
    last, some = jnp.maximum(count - 1, 0)[:, None, None], (count > 0)[:, None]
    hidden, logits = head.fuse(params, committed.features), state.logits
    caches, ends = [], []
    for module, (cache, end) in enumerate(zip(state.caches, state.hidden, strict=True)):
        positions = cache.lengths[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        slots = _slots(None, cache, width, module)
        out, cache = head.step(params, module, committed.tokens, hidden, positions, slots, cache)
        newest = jnp.take_along_axis(out, last, axis=1)
        if module == 0:
            logits = jnp.where(some, head.logits(params, 0, newest)[:, 0], logits)
        caches.append(cache._replace(lengths=cache.lengths + count))
        ends.append(jnp.where(some, newest[:, 0], end))
        hidden = jnp.concatenate([end[:, None], out[:, :-1]], axis=1)
    return State(tuple(caches), tuple(ends), logits)


def _slots(mask: Array | None, cache: KVCache, width: int, module: int) -> Reach:
    """What a window behind the committed slots may see: `reach`, without the first tokens, which no module could read
    as it was trained: token 0 has no hidden state of the target, token 1 none of module 0, and so on."""
    capacity = jax.tree.leaves(cache.k)[0].shape[-2]
    slots = reach(mask, cache.lengths, width, capacity)
    return slots._replace(visible=slots.visible & (jnp.arange(capacity) > module)[None, None])


# --- drafting


def _draft(
    head: Head, form: Form, context_length: int | None, params: PyTree, keys: Array, state: State, text: Text,
    sampling: Sampling, n: int,
) -> tuple[Proposal, State]:  # fmt: skip
    if form.parents is not None:
        proposal, caches = _static(head, form.parents[:n], params, state)
    elif form.dynamic is not None:
        proposal, caches = _dynamic(head, form.dynamic, params, state, n)
    else:
        proposal, caches = _chain(head, form.coupled, params, keys, state, text, sampling, n)
    valid = proposal.valid & (text.lengths > 1)[:, None]
    if context_length is not None:
        depths = jnp.atleast_2d(jnp.asarray(topology.depths(proposal.parents, n)))[:, 1:]
        valid = valid & (text.lengths[:, None] - 1 + depths < context_length)
    return proposal._replace(valid=valid), state._replace(caches=caches)


def _tokens(ids: Array | None, columns: Array) -> Array:
    return columns if ids is None else ids[columns]


class _Fed(NamedTuple):
    """Draft nodes that were fed to the head, in the order of their slots."""

    tokens: Array  # [B, O]
    parents: Array  # [B, O] indices among them, -1 is the pending token
    hidden: Array  # [B, 1 + O, E] what the module that was fed last said of the pending token and of each node
    caches: tuple[KVCache, ...]


def _root(state: State) -> _Fed:
    none = jnp.zeros((state.logits.shape[0], 0), jnp.int32)
    return _Fed(none, none, state.hidden[0][:, None], state.caches)


def _feed(
    head: Head, params: PyTree, state: State, fed: _Fed, level: int, tokens: Array, parents: Array
) -> tuple[_Fed, Array]:
    """Feeds the nodes of depth ``level`` -> logits [B, W, M] after each.

    Args:
      tokens: [B, W].
      parents: [B, W] indices among the nodes fed before, -1 is the pending token.
    """
    before, module = fed.tokens.shape[1], level if head.num_modules > 1 else 0
    tokens = jnp.concatenate([fed.tokens, tokens], axis=1)
    parents = jnp.concatenate([fed.parents, parents], axis=1)
    total, start = tokens.shape[1], before if module == 0 else 0
    cache = fed.caches[module]
    mask = jnp.asarray(topology.window_mask(parents, total))
    depth = jnp.sum(mask, axis=-1, dtype=jnp.int32)[:, 1:] - 1
    slots = _slots(mask[:, 1:, 1:], cache, total, module)
    hidden = jnp.take_along_axis(fed.hidden, (parents + 1)[:, start:, None], axis=1)
    out, written = head.step(
        params, module, tokens[:, start:], hidden, (cache.lengths[:, None] - 1 + depth)[:, start:],
        slots._replace(visible=slots.visible[:, start:]), cache._replace(lengths=cache.lengths + start),
    )  # fmt: skip
    known = fed.hidden if module == 0 else state.hidden[module][:, None]
    caches = list(fed.caches)
    caches[module] = written._replace(lengths=cache.lengths)
    logits = head.logits(params, module, out[:, before - start :])
    return _Fed(tokens, parents, jnp.concatenate([known, out], axis=1), tuple(caches)), logits


def _chain(
    head: Head, coupled: bool, params: PyTree, keys: Array, state: State, text: Text, sampling: Sampling, n: int
) -> tuple[Proposal, tuple[KVCache, ...]]:
    """Every token is drawn from the law in the proposal: the head's, warped like the target's."""
    ids, batch, pending_at = head.ids(params), keys.shape[0], text.lengths - 1
    depths = jnp.arange(n, dtype=jnp.int32)
    noise = uniform(at(keys, Role.DRAFT, pending_at), (n, 2))

    def pick(logits, drafted, valid, depth):
        probs = warp(logits[:, None], sampling, text, drafted, (depths < depth)[None, None], ids)[:, 0]
        lawful = jnp.all(jnp.isfinite(probs), axis=-1)  # perhaps nothing of a reduced vocabulary is allowed
        probs = jnp.where(lawful[:, None], probs, 0.0)
        if coupled:
            every = probs
            if ids is not None:
                every = jnp.zeros((batch, head.vocab_size)).at[:, ids].set(probs)
            token = target_draw(keys, pending_at + depth + 1, every)
        else:
            token = _tokens(ids, inverse_cdf(probs, noise[:, depth]))
        return token, jnp.where((depths == depth)[None], token[:, None], drafted), valid & lawful, probs

    token, drafted, valid, probs = pick(
        state.logits, jnp.zeros((batch, n), jnp.int32), jnp.ones(batch, bool), jnp.int32(0)
    )
    if head.num_modules > 1:
        fed, laws, valids = _root(state), [probs], [valid]
        for depth in range(1, n):
            parent = jnp.full((batch, 1), depth - 2, jnp.int32)
            fed, logits = _feed(head, params, state, fed, depth, token[:, None], parent)
            token, drafted, valid, probs = pick(logits[:, 0], drafted, valid, jnp.int32(depth))
            laws, valids = [*laws, probs], [*valids, valid]
        laws, valids, caches = jnp.stack(laws, axis=1), jnp.stack(valids, axis=1), fed.caches
    else:
        def forward(carry, depth):
            token, hidden, drafted, valid, cache = carry
            slots = _slots(None, cache, 1, 0)
            out, cache = head.step(params, 0, token[:, None], hidden, cache.lengths[:, None], slots, cache)
            token, drafted, valid, probs = pick(head.logits(params, 0, out)[:, 0], drafted, valid, depth)
            return (token, out, drafted, valid, cache._replace(lengths=cache.lengths + 1)), (probs, valid)

        carry = (token, state.hidden[0][:, None], drafted, valid, state.caches[0])
        (_, _, drafted, _, cache), (later, valid_later) = lax.scan(forward, carry, depths[1:])
        laws = jnp.concatenate([probs[:, None], jnp.swapaxes(later, 0, 1)], axis=1)
        valids = jnp.concatenate([valid[:, None], jnp.swapaxes(valid_later, 0, 1)], axis=1)
        caches = (cache._replace(lengths=state.caches[0].lengths),)
    if coupled:
        return Proposal(drafted, None, None, valids), caches
    return Proposal(drafted, laws if ids is None else Sparse(ids, laws), None, valids), caches


def _static(
    head: Head, parents: tuple[int, ...], params: PyTree, state: State
) -> tuple[Proposal, tuple[KVCache, ...]]:
    """Child r of a node is the r-th likeliest token after it. Only nodes that have children are fed."""
    ids, ranks, batch = head.ids(params), topology.ranks(parents), state.logits.shape[0]
    children = np.bincount(np.asarray(parents) + 1, minlength=len(parents) + 1)[1:]
    tokens: list[Any] = [None] * len(parents)
    below = {-1: _tokens(ids, top_k(state.logits, int(np.sum(np.asarray(parents) < 0)))[1])}
    place, fed = {-1: -1}, _root(state)
    for level, nodes in enumerate(topology.levels(parents), start=1):
        for node in nodes:
            tokens[node] = below[parents[node]][:, ranks[node]]
        inner = [int(node) for node in nodes if children[node]]
        if inner:
            place |= {node: len(place) - 1 + i for i, node in enumerate(inner)}
            above = jnp.asarray([[place[parents[node]] for node in inner]] * batch, jnp.int32)
            inner_tokens = jnp.stack([tokens[node] for node in inner], axis=1)
            fed, logits = _feed(head, params, state, fed, level, inner_tokens, above)
            top = _tokens(ids, top_k(logits, int(children[inner].max()))[1])
            below |= {node: top[:, i] for i, node in enumerate(inner)}
    line = parents == tuple(range(-1, len(parents) - 1))
    topo: Any = None if line else np.asarray(parents, np.int32)
    return Proposal(jnp.stack(tokens, axis=1), None, topo, jnp.ones((batch, len(parents)), bool)), fed.caches


def _dynamic(
    head: Head, spec: topology.Dynamic, params: PyTree, state: State, n: int
) -> tuple[Proposal, tuple[KVCache, ...]]:
    """EAGLE-2: from level to level the ``width`` likeliest nodes are fed; then the n likeliest of all candidates stay.

    Likely is the product of the head's probabilities along the path. It falls on the way down, and among equals the
    node that was found first wins, so the ancestors of a node that stays do too.
    """
    ids, width, batch = head.ids(params), spec.width, state.logits.shape[0]
    score, columns = top_k(jax.nn.log_softmax(state.logits), width)
    tokens, scores = [_tokens(ids, columns)], [score]
    parents = [jnp.full((batch, width), -1, jnp.int32)]  # of candidates, among candidates
    chosen = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (batch, width))
    below, chosen_tokens, fed = parents[0], tokens[0], _root(state)
    for level in range(1, spec.depth):
        fed, logits = _feed(head, params, state, fed, level, chosen_tokens, below)
        logp, columns = top_k(jax.nn.log_softmax(logits), width)
        first = width + (level - 1) * width**2  # index of this level's first candidate
        scores.append((score[:, :, None] + logp).reshape(batch, -1))
        tokens.append(_tokens(ids, columns).reshape(batch, -1))
        parents.append(jnp.repeat(chosen, width, axis=1))
        score, best = top_k(scores[-1], width)
        chosen, below = first + best, (level - 1) * width + best // width
        chosen_tokens = jnp.take_along_axis(tokens[-1], best, axis=1)
    every = jnp.concatenate(scores, axis=1)
    kept = jnp.sort(top_k(every, n)[1], axis=1)  # candidates stand level by level: parents first, likeliest first
    rows = jnp.arange(batch)[:, None]
    place = jnp.cumsum(jnp.zeros(every.shape, jnp.int32).at[rows, kept].set(1), axis=1) - 1
    above = jnp.take_along_axis(jnp.concatenate(parents, axis=1), kept, axis=1)
    above = jnp.where(above < 0, -1, jnp.take_along_axis(place, jnp.maximum(above, 0), axis=1))
    kept_tokens = jnp.take_along_axis(jnp.concatenate(tokens, axis=1), kept, axis=1)
    valid = jnp.isfinite(jnp.take_along_axis(every, kept, axis=1))
    return Proposal(kept_tokens, None, above, valid), fed.caches
