"""Proposals from laws that one pass gives for all depths at once: what Medusa heads and block drafters share.

The laws of a block are marginals: depth d does not know which tokens stand above it, unless a low-rank Markov term
adds what the token just above says. A chain is drawn from them token by token, left to right, so the law in the
proposal is the one each token was drawn from. Trees take top children, functions of the context: point masses.

A confidence cut ends a path where the head expects a rejection. It is computed from the pass and, with a Markov term,
from the token above: from the context and strict ancestors, never from the token it decides about. A cut that looks at
a drawn token's own probability biases the text.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import tree as topology
from specjax.drafters.grow import Candidates, best_first
from specjax.models.language_model import LanguageModel
from specjax.noise import Role, at, inverse_cdf, target_draw, top_k, uniform
from specjax.static import show, whole
from specjax.types import Array, Proposal, Sampling, Sparse, Text
from specjax.warp import warp


class Markov(NamedTuple):
    """Low-rank term of the token above: adds ``above[token] @ out`` to the logits."""

    above: Array  # [V, R]
    out: Array  # [R, M]


class Confidence(NamedTuple):
    """Log-odds that a position is accepted, [B, D], plus ``above[token above] @ weight`` of the Markov term."""

    odds: Array  # [B, D]
    weight: Array | None  # [R]
    least: float  # log-odds under which a path ends


class Laws(NamedTuple):
    """What one pass says: entry d is about the token d + 1 positions after the pending one."""

    logits: Array  # [B, D, M]
    ids: Array | None = None  # [M] target ids of the columns of a reduced vocabulary, ascending; None: all
    markov: Markov | None = None
    confidence: Confidence | None = None


class Form(NamedTuple):
    """How proposals are made. Static, hashable."""

    parents: tuple[int, ...] | None  # of a static tree
    dynamic: topology.Dynamic | None
    num_nodes: int
    depth: int  # laws that are needed
    coupled: bool = False

    @property
    def default_rule(self) -> str:
        drawn = self.parents is None and self.dynamic is None and not self.coupled
        return "rejection" if drawn else "match"


def form(tree: Any, num_draft_tokens: Any, coupled: Any, num_laws: int, num_columns: int, what: str) -> Form:
    """Checks what a factory was asked for.

    Args:
      tree: None (a drawn chain), static parents [N], or a `specjax.tree.Dynamic`.
      num_draft_tokens: chain length, None: as long as there are laws. Of a tree, None or its number of nodes.
      coupled: draw a chain with the target's noise.
      num_laws: D, depths the pass has laws for.
      num_columns: M, size of the vocabulary drafted from.
      what: what there are ``num_laws`` of, for messages.

    Raises:
      ValueError: a tree that is deeper than there are laws or wider than the vocabulary, or another number of nodes.
    """
    if not isinstance(coupled, bool):
        raise ValueError(f"coupled={show(coupled)}: must be True or False")
    if tree is None:
        count = num_laws if num_draft_tokens is None else whole("num_draft_tokens", num_draft_tokens, 1)
        if count > num_laws:
            raise ValueError(f"num_draft_tokens={count}, but there are {num_laws} {what}: ask for {num_laws} or fewer")
        return Form(None, None, count, count, coupled)
    if coupled:
        raise ValueError("coupled=True draws a chain: give tree=None, or coupled=False for a tree of top children")
    if isinstance(tree, topology.Dynamic):
        tree = topology.Dynamic(*(whole(f"tree.{name}", value, 1) for name, value in tree._asdict().items()))
        made = Form(None, tree, tree.num_nodes, tree.depth)
        width = tree.width
    else:
        parents = topology.validate(tree)
        if not parents.size:
            raise ValueError("tree=[] has no nodes; drafter=None decodes plainly")
        made = Form(tuple(parents.tolist()), None, parents.size, len(topology.levels(parents)))
        width = int(topology.ranks(parents).max()) + 1
    if made.depth > num_laws:
        raise ValueError(f"tree is {made.depth} levels deep, but there are {num_laws} {what}: a level needs one each")
    if width > num_columns:
        raise ValueError(f"tree has up to {width} children below a node, but there are {num_columns} draft tokens")
    if num_draft_tokens is not None and whole("num_draft_tokens", num_draft_tokens, 1) != made.num_nodes:
        raise ValueError(f"num_draft_tokens={num_draft_tokens}, but the tree has {made.num_nodes} nodes: leave it out")
    return made


def propose(form: Form, laws: Laws, keys: Array, text: Text, sampling: Sampling, vocab_size: int, n: int) -> Proposal:
    """A proposal of the first ``n`` nodes of the form.

    Args:
      form: see `form`.
      laws: of at least the depths that n nodes reach.
      keys, text, sampling, n: as a drafter's ``draft`` gets them.
      vocab_size: V.
    """
    if form.parents is not None:
        return _static(form.parents[:n], laws, text)
    if form.dynamic is not None:
        return _dynamic(form.dynamic, laws, text, n)
    return _chain(form.coupled, laws, keys, text, sampling, vocab_size, n)


def pending_token(text: Text) -> Array:
    """[B]."""
    return jnp.take_along_axis(text.tokens, text.lengths[:, None] - 1, axis=1)[:, 0]


def below(laws: Laws, depth: Array, tokens: Array) -> tuple[Array, Array]:
    """Logits [B, P, M] under tokens [B, P] that stand at ``depth [B]``, 0 for the pending token, and [B, P] whether the
    path may go on."""
    depth = jnp.minimum(depth, laws.logits.shape[1] - 1)
    logits = jnp.take_along_axis(laws.logits, depth[:, None, None], axis=1)
    logits = jnp.broadcast_to(logits, (*tokens.shape, logits.shape[-1]))
    latent = None if laws.markov is None else jnp.take(laws.markov.above, tokens, axis=0, mode="clip")
    if latent is not None and laws.markov is not None:
        logits = logits + _product("bpr,mr->bpm", latent, laws.markov.out)
    if laws.confidence is None:
        return logits, jnp.ones(tokens.shape, bool)
    odds = jnp.broadcast_to(jnp.take_along_axis(laws.confidence.odds, depth[:, None], axis=1), tokens.shape)
    if laws.confidence.weight is not None and latent is not None:
        odds = odds + _product("bpr,r->bp", latent, laws.confidence.weight)
    return logits, odds >= laws.confidence.least


def _product(subscripts: str, x: Array, weight: Array) -> Array:
    return jnp.einsum(
        subscripts, x.astype(weight.dtype), weight, preferred_element_type=jnp.float32, precision="highest"
    )


def _tokens(laws: Laws, columns: Array) -> Array:
    return columns if laws.ids is None else laws.ids[columns]


def _chain(
    coupled: bool, laws: Laws, keys: Array, text: Text, sampling: Sampling, vocab_size: int, n: int
) -> Proposal:
    pending_at, depths = text.lengths - 1, jnp.arange(n, dtype=jnp.int32)
    noise = uniform(at(keys, Role.DRAFT, pending_at), (n, 2))
    rows = jnp.arange(keys.shape[0])

    def step(carry, depth):
        token, drafted, valid = carry
        logits, sure = below(laws, jnp.broadcast_to(depth, token.shape), token[:, None])
        probs = warp(logits, sampling, text, drafted, (depths < depth)[None, None], laws.ids)[:, 0]
        lawful = jnp.all(jnp.isfinite(probs), axis=-1)  # nothing in a reduced vocabulary may be allowed
        probs = jnp.where(lawful[:, None], probs, 0.0)
        if coupled:
            every = probs
            if laws.ids is not None:
                every = jnp.zeros((*rows.shape, vocab_size)).at[rows[:, None], laws.ids[None]].set(probs)
            token = target_draw(keys, pending_at + depth + 1, every)
        else:
            token = _tokens(laws, inverse_cdf(probs, noise[:, depth]))
        valid = valid & sure[:, 0] & lawful
        return (token, jnp.where((depths == depth)[None], token[:, None], drafted), valid), (probs, valid)

    start = pending_token(text), jnp.zeros((keys.shape[0], n), jnp.int32), jnp.ones(keys.shape[0], bool)
    (_, drafted, _), (probs, valid) = lax.scan(step, start, depths)
    probs, valid = jnp.swapaxes(probs, 0, 1), jnp.swapaxes(valid, 0, 1)
    if coupled:
        return Proposal(drafted, None, None, valid)
    return Proposal(drafted, probs if laws.ids is None else Sparse(laws.ids, probs), None, valid)


def _static(parents: tuple[int, ...], laws: Laws, text: Text) -> Proposal:
    """Child r of a node is the r-th most probable token below it."""
    ranks, batch = topology.ranks(parents), text.lengths.shape[0]
    tokens: list[Any] = [None] * len(parents)
    valid: list[Any] = [None] * len(parents)
    root, known = (pending_token(text), jnp.ones(batch, bool)), laws.markov is None
    for level, nodes in enumerate(topology.levels(parents)):
        # Without a Markov term all nodes of a level have the same children, whatever their tokens.
        above = [-1] if known else sorted({parents[node] for node in nodes})
        standing = jnp.stack([root[0] if node < 0 else tokens[node] for node in above])
        top, sure = lax.map(functools.partial(_children, laws, level, int(ranks[nodes].max()) + 1), standing)
        for node in nodes:
            place = 0 if known else above.index(parents[node])
            tokens[node] = top[place, :, ranks[node]]
            valid[node] = (root[1] if parents[node] < 0 else valid[parents[node]]) & sure[place]
    line = parents == tuple(range(-1, len(parents) - 1))
    topo: Any = None if line else np.asarray(parents, np.int32)
    return Proposal(jnp.stack(tokens, axis=1), None, topo, jnp.stack(valid, axis=1))


def _children(laws: Laws, level: int, count: int, above: Array) -> tuple[Array, Array]:
    """The ``count`` likeliest tokens [B, count] below tokens [B] of a level, and whether the path may go on [B]. One
    parent at a time: laws over the vocabulary for all of them at once would be large."""
    logits, sure = below(laws, jnp.full(above.shape, level, jnp.int32), above[:, None])
    return _tokens(laws, top_k(logits[:, 0], count)[1]), sure[:, 0]


def _dynamic(spec: topology.Dynamic, laws: Laws, text: Text, n: int) -> Proposal:
    """The n likeliest paths, by the product of their probabilities."""
    batch = text.lengths.shape[0]

    def candidates(depth: Array, token: Array) -> Candidates:
        logits, sure = below(laws, depth, token[:, None])
        top, columns = top_k(jax.nn.log_softmax(logits[:, 0]), spec.width)
        open_here = sure & (depth < spec.depth)[:, None]
        return Candidates(_tokens(laws, columns), jnp.where(open_here, top, -jnp.inf))

    def expand(index: Array, tokens: Array, parents: Array) -> Candidates:
        depth, node = jnp.zeros(batch, jnp.int32), jnp.broadcast_to(index, batch)
        for _ in range(spec.depth):
            depth = depth + (node >= 0).astype(jnp.int32)
            above = jnp.take_along_axis(parents, jnp.maximum(node, 0)[:, None], axis=1)[:, 0]
            node = jnp.where(node >= 0, above, -1)
        if table is None:
            return candidates(depth, tokens[:, index])
        here = jnp.minimum(depth, spec.depth - 1)[:, None, None]
        ids, logp = (jnp.take_along_axis(x, here, axis=1)[:, 0] for x in table)
        return Candidates(ids, jnp.where((depth < spec.depth)[:, None], logp, -jnp.inf))

    table = None
    if laws.markov is None:  # the candidates of a depth are known before any node is
        levels = [candidates(jnp.full(batch, level, jnp.int32), pending_token(text)) for level in range(spec.depth)]
        table = tuple(jnp.stack(parts, axis=1) for parts in zip(*levels, strict=True))
    root = candidates(jnp.zeros(batch, jnp.int32), pending_token(text))
    tokens, parents, valid = best_first(root, expand, n)
    return Proposal(tokens, None, parents, valid)


# --- heads and the target they belong to


def sizes(target: LanguageModel) -> tuple[int, int]:
    """Hidden size and number of layers of the target.

    Raises:
      ValueError: a target whose config does not say (``num_layers``), or without ``params["embedding"]`` [V, E].
    """
    layers = getattr(target.config, "num_layers", None)
    if layers is None or not isinstance(target.params, dict) or "embedding" not in target.params:
        raise ValueError(
            f"target={show(target)}: heads read its config.num_layers and params['embedding'] [V, E]; give what "
            "specjax.load returns, or a LanguageModel with both"
        )
    return int(target.params["embedding"].shape[-1]), int(layers)


def projection(target: LanguageModel) -> Array:
    """What the target's hidden states are multiplied with, [V, E]: its head, or the tied embedding. Not a copy."""
    return target.params.get("head", target.params["embedding"])


def check_fit(what: str, facts: dict[str, tuple[Any, Any]]) -> None:
    """Refuses heads made for another target: ``facts`` has (the heads', the target's) per name.

    Raises:
      ValueError: naming the fact and both values.
    """
    for name, (ours, theirs) in facts.items():
        if ours != theirs:
            raise ValueError(f"{what} has {name} {ours} and the target {theirs}: it was made for another target")


def named(what: str, params: Any) -> dict[str, Any]:
    """Weights by name, as a dict of its own.

    Raises:
      ValueError: anything else.
    """
    if not isinstance(params, Mapping):
        raise ValueError(f"params={show(params)}: give the weights of the {what} head as a dict")
    return dict(params)


def check_params(what: str, params: Any, expected: Any) -> None:
    """Refuses weights that are not those of the configuration: names and shapes.

    Raises:
      ValueError: naming the weight.
    """

    def shapes(tree):
        leaves = jax.tree_util.tree_flatten_with_path(named(what, tree))[0]
        return {jax.tree_util.keystr(path, simple=True, separator="/"): np.shape(leaf) for path, leaf in leaves}

    have, want = shapes(params), shapes(expected)
    for name in sorted(want.keys() | have.keys()):
        if have.get(name) != want.get(name):
            state = f"has shape {have[name]}" if name in have else "is missing"
            needs = "knows no such weight" if name not in want else f"needs {want[name]}"
            raise ValueError(f"{what} weight {name} {state}, the configuration {needs}")
