"""What is checked about a proposal and its keys before anything is decided, and its first nodes."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import tree
from specjax.types import Array, Proposal, Sparse


def as_arrays(proposal: Proposal) -> Proposal:
    """A proposal of numpy arrays or lists as JAX arrays; static parents stay static."""
    if not isinstance(proposal, Proposal):
        kind = type(proposal).__name__
        raise ValueError(f"proposal is a {kind}: give specjax.Proposal(tokens, probs, parents, valid)")
    tokens, probs, valid = proposal.tokens, proposal.probs, proposal.valid
    parents: Any = proposal.parents
    if isinstance(parents, (list, tuple)):
        parents = np.asarray(parents)
    return Proposal(jnp.asarray(tokens), jax.tree.map(jnp.asarray, probs), parents, jnp.asarray(valid, bool))


def check_keys(keys: Array) -> None:
    """Refuses keys whose bits depend on how they are batched (rbg under vmap) and raw uint32 keys."""
    if not hasattr(keys, "dtype"):
        raise ValueError(f"keys is a {type(keys).__name__}: give typed keys [B], specjax.row_keys(seeds)")
    if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) and "fry" in str(keys.dtype):
        chex.assert_rank(keys, 1)
        return
    raise ValueError(f"keys have dtype {keys.dtype}: give typed threefry keys [B], jax.random.key(seed) per row")


def check_proposal(proposal: Proposal, target_shape: tuple[int, ...]) -> None:
    """Shapes of a proposal against target_probs [B, 1 + N, V] (or anything with that shape)."""
    batch, width, vocab = target_shape
    nodes = (batch, width - 1)
    for name in ("tokens", "valid"):
        chex.assert_shape(getattr(proposal, name), nodes, custom_message=f"proposal.{name} is [B, N]")
    if not jnp.issubdtype(proposal.tokens.dtype, jnp.integer):
        raise ValueError(f"proposal.tokens have dtype {proposal.tokens.dtype}: give token ids, integers")
    if isinstance(proposal.probs, Sparse):
        chex.assert_shape(proposal.probs.probs, (*nodes, None), custom_message="Sparse.probs is [B, N, M]")
        size = proposal.probs.probs.shape[-1]
        shape = (size,) if proposal.probs.ids.ndim == 1 else (*nodes, size)
        chex.assert_shape(proposal.probs.ids, shape, custom_message="Sparse.ids is [M] or [B, N, M]")
    elif proposal.probs is not None:
        chex.assert_shape(proposal.probs, (*nodes, vocab), custom_message="proposal.probs is [B, N, V]")
    if isinstance(proposal.parents, np.ndarray) and proposal.parents.ndim == 1:
        tree.validate(proposal.parents)
    if proposal.parents is not None:
        shape = nodes if proposal.parents.ndim == 2 else nodes[1:]
        chex.assert_shape(proposal.parents, shape, custom_message="proposal.parents is [N] or [B, N]")


def first_nodes(proposal: Proposal, nodes: int) -> Proposal:
    """The first ``nodes`` nodes: a chain's prefix, or a tree's, since parents come before children."""
    probs = proposal.probs
    if isinstance(probs, Sparse):
        probs = Sparse(probs.ids if probs.ids.ndim == 1 else probs.ids[:, :nodes], probs.probs[:, :nodes])
    elif probs is not None:
        probs = probs[:, :nodes]
    parents = None if proposal.parents is None or not nodes else proposal.parents[..., :nodes]
    return Proposal(proposal.tokens[:, :nodes], probs, parents, proposal.valid[:, :nodes])
