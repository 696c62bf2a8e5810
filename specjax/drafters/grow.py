"""Trees grown best-first: again and again the most probable candidate becomes a node, and its own children candidates.

The shape is a function of the context, the arrays are static. Nodes are top choices, hence point masses.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from specjax.noise import argmax
from specjax.types import Array


class Candidates(NamedTuple):
    """What may stand below a node, distinct ids."""

    ids: Array  # [B, C] int32
    logp: Array  # [B, C] log-probability given the node above; -inf: no candidate


class _Grown(NamedTuple):
    tokens: Array  # [B, N] nodes
    parents: Array  # [B, N]
    valid: Array  # [B, N]
    ids: Array  # [B, (1 + N) C] candidates below the root, then below each node
    open: Array  # [B, (1 + N) C] summed log-probability of the path, -inf: none, or taken


def best_first(
    root: Candidates, expand: Callable[[Array, Array, Array], Candidates], num_nodes: int, min_logp: float = -math.inf
) -> tuple[Array, Array, Array]:
    """Grows a tree of ``num_nodes`` nodes.

    Args:
      root: candidates [B, C] below the pending token.
      expand: ``(index [], tokens [B, N], parents [B, N]) -> Candidates [B, C]`` below node ``index``, the one that was
        just added to every row.
      num_nodes: N, static.
      min_logp: nodes whose path has less are not valid; they come last.

    Returns:
      tokens [B, N], parents [B, N] (parents before children, siblings in falling probability), valid [B, N].
    """
    batch, size = root.ids.shape
    zero = jnp.zeros((batch, num_nodes), jnp.int32)
    later = ((0, 0), (0, num_nodes * size))
    start = _Grown(
        zero, zero - 1, zero.astype(bool), jnp.pad(root.ids, later),
        jnp.pad(root.logp, later, constant_values=-jnp.inf),
    )  # fmt: skip
    rows = jnp.arange(batch)

    def add(index, tree: _Grown) -> _Grown:
        best = argmax(tree.open)
        score = tree.open[rows, best]
        tree = tree._replace(
            tokens=tree.tokens.at[:, index].set(tree.ids[rows, best]),
            parents=tree.parents.at[:, index].set(best // size - 1),
            valid=tree.valid.at[:, index].set((score > -jnp.inf) & (score >= min_logp)),
            open=tree.open.at[rows, best].set(-jnp.inf),
        )
        below = expand(index, tree.tokens, tree.parents)
        place = (index + 1) * size
        return tree._replace(
            ids=lax.dynamic_update_slice_in_dim(tree.ids, below.ids, place, axis=1),
            open=lax.dynamic_update_slice_in_dim(tree.open, score[:, None] + below.logp, place, axis=1),
        )

    grown = lax.fori_loop(0, num_nodes, add, start)
    return grown.tokens, grown.parents, grown.valid
