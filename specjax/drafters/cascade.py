"""Several draft sources as one: the first that has something to say, or all of them merged into one tree.

A lookup costs next to nothing and is often right where text repeats itself; a head or model always has an idea. The
one behind the other: He et al., REST, arXiv 2311.08252 (2023), and Hu et al., SAM Decoding, arXiv 2411.10666 (2024).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import tree
from specjax.static import bind, show
from specjax.types import Array, Committed, Drafter, Proposal, PyTree, Sampling, Sparse, Text, Window

TRACED = "traced"  # parents that differ by row


def cascade(*parts: Drafter, merged: bool = False) -> Drafter:
    """Drafts with the first of ``parts`` that proposes anything, row by row, or with all of them.

    Every part observes the text. A later part drafts only in rounds in which some row needs it.

    Args:
      parts: two or more drafters, the cheapest first.
      merged: ask all parts and join their nodes to one tree, in which what two of them say is one node. For point
        masses only: a law of drawn siblings is not one of the merged siblings. Takes as many nodes as all parts
        together, and rules for trees.

    Raises:
      ValueError: fewer than two parts, or one that is no drafter or drafts in Python; parts made for different
        vocabularies; merged parts that draw from laws.
    """
    if not isinstance(merged, bool):
        raise ValueError(f"merged={show(merged)}: must be True or False")
    for place, part in enumerate(parts):
        if not isinstance(part, Drafter):
            raise ValueError(f"part {place} is {show(part)}: give drafters such as specjax.drafters.ngram()")
        if part.num_draft_tokens < 1:
            raise ValueError(f"part {place} drafts nothing (num_draft_tokens=0): leave it out")
        if part.host is not None:
            raise ValueError(f"part {place} drafts in Python between the rounds: such a source can only draft alone")
        if merged and part.default_rule != "match":
            raise ValueError(
                f"merged=True joins point masses, and part {place} draws its nodes (its rule is "
                f"{part.default_rule!r}): use merged=False, or a form of it that is a function of the context"
            )
    if len(parts) < 2:
        raise ValueError(f"cascade has {len(parts)} drafters: give two or more, or use the one alone")
    drawn = [part.default_rule for part in parts if part.default_rule != "match"]
    sizes = [part.num_draft_tokens for part in parts]
    bare = tuple(part._replace(params=()) for part in parts)
    return Drafter(
        params=tuple(part.params for part in parts),
        init=bind(_init, bare),
        observe=bind(_observe, bare),
        draft=bind(_merged if merged else _first, bare),
        num_draft_tokens=sum(sizes) if merged else max(sizes),
        feature_layers=tuple(layer for part in parts for layer in part.feature_layers),
        default_rule="rejection" if drawn else "match",
        context_length=min((part.context_length for part in parts if part.context_length is not None), default=None),
        widths=_widths(parts, merged),
        window_top=max(part.window_top for part in parts),
        prompt_window=any(part.window_top and part.prompt_window for part in parts),
        vocab_size=_vocab_size(parts),
    )


def _vocab_size(parts: tuple[Drafter, ...]) -> int | None:
    sizes = {part.vocab_size for part in parts if part.vocab_size is not None}
    if len(sizes) > 1:
        raise ValueError(f"the parts were made for vocabularies of {sorted(sizes)} tokens: all must be the same")
    return sizes.pop() if sizes else None


def _widths(parts: tuple[Drafter, ...], merged: bool) -> tuple[int, ...]:
    """Windows worth having: the narrowest that every part can do with, and where one part's nodes end."""
    narrowest = [min(part.widths, default=part.num_draft_tokens) for part in parts]
    sizes = [part.num_draft_tokens for part in parts]
    if merged:  # silent parts leave the nodes of those before them
        ends = np.cumsum(sizes).tolist()
        found = {ends[i] for i in range(len(parts)) if all(part.widths for part in parts[i + 1 :])}
        found |= {sum(narrowest)} if all(part.widths for part in parts) else set()
        least, longest = 0, ends[-1]
    else:
        found = {max(narrowest), *sizes, *(width for part in parts for width in part.widths)}
        least, longest = max(narrowest), max(sizes)
    return tuple(sorted(width for width in found if least <= width < longest))


def _init(parts: tuple[Drafter, ...], params: PyTree, batch: int, capacity: int) -> PyTree:
    return tuple(part.init(own, batch, capacity) for part, own in zip(parts, params))


def _observe(parts: tuple[Drafter, ...], params: PyTree, state: PyTree, committed: Committed) -> PyTree:
    """Each part sees the features and candidates it asked for, as if it were alone; only the candidates of the prompt
    come to all that take any, if one asked for them."""
    layers = sum(len(part.feature_layers) for part in parts)
    size = committed.features.shape[-1] // max(layers, 1)
    states, start = [], 0
    for part, own, before in zip(parts, params, state):
        end = start + size * len(part.feature_layers)
        seen = committed._replace(
            features=committed.features[..., start:end], window=_narrowed(committed.window, part.window_top)
        )
        states.append(part.observe(own, before, seen))
        start = end
    return tuple(states)


def _narrowed(window: Window | None, top: int) -> Window | None:
    if window is None or not top:
        return None
    return window._replace(top=Sparse(window.top.ids[..., :top], window.top.probs[..., :top]))


def _merged(
    parts: tuple[Drafter, ...], params: PyTree, keys: Array, state: PyTree, text: Text, sampling: Sampling, n: int
) -> tuple[Proposal, PyTree]:
    states, proposal = [], None
    for part, own, before in zip(parts, params, state):
        share = min(part.num_draft_tokens, n)
        n -= share
        if share:
            nodes, before = part.draft(own, keys, before, text, sampling, share)
            proposal = nodes if proposal is None else tree.merge(proposal, nodes)
        states.append(before)
    assert proposal is not None  # n is 1 or more
    return proposal, tuple(states)


def _first(
    parts: tuple[Drafter, ...], params: PyTree, keys: Array, state: PyTree, text: Text, sampling: Sampling, n: int
) -> tuple[Proposal, PyTree]:
    """Who speaks depends on the nodes at depth 1 being there at all, hence on the context, never on a drawn token."""
    states, said, silent = [], [], jnp.ones(text.lengths.shape[0], bool)
    for part, own, before in zip(parts, params, state):
        share = min(part.num_draft_tokens, n)
        asked = (keys, text, sampling, share)
        nodes, before = _ask(part, own, before, asked, jnp.any(silent) if said else None)
        states.append(before)
        said.append((_padded(nodes, n), silent))
        top = np.arange(share) == 0 if nodes.parents is None else nodes.parents == -1
        top = jnp.asarray(top)
        silent = silent & ~jnp.any(nodes.valid & (top[None] if top.ndim == 1 else top), axis=1)
    proposals = _alike([nodes for nodes, _ in said])
    chosen = proposals[0]
    for nodes, needed in zip(proposals[1:], (needed for _, needed in said[1:])):
        chosen = jax.tree.map(lambda new, old, needed=needed: _by_row(needed, new, old), nodes, chosen)
    return chosen, tuple(states)


def _by_row(flag: Array, yes: Any, no: Any) -> Any:
    if isinstance(yes, np.ndarray):  # static parents, the same in all parts
        return yes
    return jnp.where(flag.reshape(-1, *[1] * (yes.ndim - 1)), yes, no)


def _ask(part: Drafter, params: PyTree, state: PyTree, asked: tuple, needed: Array | None) -> tuple[Proposal, PyTree]:
    """The part's proposal; where ``needed`` is false nothing is computed and nothing proposed."""
    keys, text, sampling, n = asked
    if needed is None:
        return part.draft(params, keys, state, text, sampling, n)
    kinds = []

    def speak(state):
        proposal, state = part.draft(params, keys, state, text, sampling, n)
        static = proposal.parents is None or isinstance(proposal.parents, np.ndarray)
        kinds.append(proposal.parents if static else TRACED)
        return proposal._replace(parents=None) if static else proposal, state

    shapes, _ = jax.eval_shape(speak, state)
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    # A loop of at most one step: unlike `lax.cond` it copies no cache.
    start = (needed, (blank, state))
    proposal, state = lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(needed), speak(c[1][1])), start)[1]
    return proposal if kinds[0] is TRACED else proposal._replace(parents=kinds[0]), state


def _padded(proposal: Proposal, n: int) -> Proposal:
    """The same nodes and invalid ones up to n."""
    size = proposal.tokens.shape[1]
    more = n - size
    if not more:
        return proposal

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)])

    law = proposal.probs
    if isinstance(law, Sparse):
        law = Sparse(law.ids if law.ids.ndim == 1 else pad(law.ids), pad(law.probs))
    elif law is not None:
        law = pad(law)
    parents: Any = proposal.parents
    if isinstance(parents, np.ndarray):
        parents = np.concatenate([parents, np.full((*parents.shape[:-1], more), -1, np.int32)], axis=-1)
    elif parents is not None:
        wide = [(0, 0)] * (parents.ndim - 1)
        parents = jnp.pad(parents, [*wide, (0, more)], constant_values=-1)
    return Proposal(pad(proposal.tokens), law, parents, pad(proposal.valid))


def _alike(proposals: list[Proposal]) -> list[Proposal]:
    """Proposals of one structure: all chains or all [B, N] trees, all without laws or with laws of one shape."""
    first = proposals[0].parents
    static = all(isinstance(p.parents, np.ndarray) and np.array_equal(p.parents, np.asarray(first)) for p in proposals)
    if not static and any(p.parents is not None for p in proposals):
        sizes = proposals[0].tokens.shape
        proposals = [p._replace(parents=tree.broadcast_parents(p.parents, *sizes)) for p in proposals]
    laws = [p.probs for p in proposals]
    if all(law is None for law in laws):
        return proposals
    dense = [law for law in laws if law is not None and not isinstance(law, Sparse)]
    if dense:
        vocab = dense[0].shape[-1]
        return [p._replace(probs=_dense(p, vocab)) for p in proposals]
    width = max(law.probs.shape[-1] for law in laws if isinstance(law, Sparse))
    return [p._replace(probs=_sparse(p, width)) for p in proposals]


def _dense(proposal: Proposal, vocab: int) -> Array:
    """The laws as [B, N, V]."""
    law = proposal.probs
    if law is None:
        return (proposal.tokens[..., None] == jnp.arange(vocab, dtype=jnp.int32)[None, None]).astype(jnp.float32)
    if not isinstance(law, Sparse):
        return law
    batch, nodes, size = law.probs.shape
    ids = jnp.broadcast_to(law.ids[None, None] if law.ids.ndim == 1 else law.ids, (batch, nodes, size))
    rows, columns = jnp.arange(batch)[:, None, None], jnp.arange(nodes)[None, :, None]
    return jnp.zeros((batch, nodes, vocab)).at[rows, columns, ids].add(law.probs, mode="drop")


def _sparse(proposal: Proposal, width: int) -> Sparse:
    """The laws as `Sparse` [B, N, width]; that of a point mass is one-hot at its token."""
    law, (batch, nodes) = proposal.probs, proposal.tokens.shape
    if not isinstance(law, Sparse):
        ids, probs = proposal.tokens[..., None], jnp.ones((batch, nodes, 1))
    else:
        ids = jnp.broadcast_to(law.ids[None, None] if law.ids.ndim == 1 else law.ids, law.probs.shape)
        probs = law.probs
    more = [(0, 0), (0, 0), (0, width - ids.shape[-1])]
    return Sparse(jnp.pad(ids, more), jnp.pad(probs, more))
