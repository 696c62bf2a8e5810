"""Draft topologies: parents -> depths, ancestors and the window mask.

Node n of N has ``parents[n]`` in -1 .. n - 1, where -1 is the pending token. Window index = node index + 1; the pending
token is window index 0. None stands for a chain.

>>> window_mask(np.array([-1, 0, 0]), 3).astype(int).tolist()
[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
>>> depths(np.array([-1, 0, 0, 1]), 4).tolist()
[0, 1, 2, 2, 3]
"""

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.static import show, whole
from specjax.types import Array, Proposal

MOST = 1 << 16  # nodes; a window of one row


class Dynamic(NamedTuple):
    """A tree whose shape is chosen in every round, within static sizes.

    Only exact for nodes that are a function of the context (top children): choosing among *drawn* nodes by their own
    probabilities biases the text.
    """

    num_nodes: int  # N, nodes that are verified
    width: int = 4  # children considered below a node, and nodes expanded per level
    depth: int = 4  # levels


def chain(num_nodes: int) -> np.ndarray:
    """The parents of a chain: [-1, 0, .., N - 2]."""
    return np.arange(num_nodes, dtype=np.int32) - 1


def kary(*branching: int) -> np.ndarray:
    """Parents of a tree in which every node of depth d has branching[d] children, in breadth-first order.

    Raises:
      ValueError: no depth, children that are no whole number of 1 or more, a tree of more than 65536 nodes.

    >>> kary(2, 1).tolist()
    [-1, -1, 0, 1]
    """
    if not branching:
        raise ValueError("branching=(): give at least one depth, each with 1 or more children")
    branching = tuple(whole(f"branching[{depth}]", children, 1) for depth, children in enumerate(branching))
    most = sum(int(size) for size in itertools.accumulate(branching, operator.mul))
    if most > MOST:
        raise ValueError(f"branching={show(branching)}: the tree would have {show(most)} nodes, at most {MOST}")
    parents: list[int] = []
    level = [-1]
    for children in branching:
        start = len(parents)
        parents += [node for node in level for _ in range(children)]
        level = list(range(start, len(parents)))
    return np.asarray(parents, np.int32)


def comb(levels: int, width: int) -> np.ndarray:
    """Parents of ``width`` columns: level 0 is a chain along them, and each column goes on downwards, level by level.

    >>> comb(2, 3).tolist()
    [-1, 0, 1, 0, 1, 2]
    """
    levels, width = whole("levels", levels, 1), whole("width", width, 1)
    return np.concatenate([chain(width), *(np.arange(width) + level * width for level in range(levels - 1))]).astype(
        np.int32
    )


def choices(paths: Sequence[Sequence[int]]) -> np.ndarray:
    """Parents of a tree given as in Medusa: each node by the ranks on its way down, ``(0, 2)`` the third child of the
    first child. Nodes come out sorted by depth, then by path, so that siblings stand in the order of their ranks.

    Raises:
      ValueError: no list of paths, a path twice, an empty one, or one whose parent or earlier sibling is missing.

    >>> choices([(0,), (0, 0), (1,), (0, 1)]).tolist()
    [-1, -1, 0, 0]
    """
    try:
        order = sorted((tuple(map(operator.index, path)) for path in paths), key=lambda path: (len(path), path))
    except TypeError:
        raise ValueError(f"choices={show(paths)}: give a list of paths, each a tuple of ranks, as (0, 2)") from None
    index = {path: node for node, path in enumerate(order)}
    if len(index) != len(order):
        raise ValueError(f"choices={show(paths)}: a path is given twice")
    for path in order:
        needed = [path[:-1]] if len(path) > 1 else []
        needed += [(*path[:-1], path[-1] - 1)] if path and path[-1] > 0 else []
        if not path or min(path) < 0 or any(other not in index for other in needed):
            raise ValueError(
                f"choices: {show(path)} needs ranks of 0 or more, its parent and its earlier siblings {show(needed)}"
            )
    return np.asarray([index.get(path[:-1], -1) for path in order], np.int32)


def ranks(parents) -> np.ndarray:
    """Place of each node among its siblings, 0 for the first. Static parents [N]; None-free.

    >>> ranks([-1, -1, 0, 0, 1]).tolist()
    [0, 1, 0, 1, 0]
    """
    parents = validate(parents)
    return np.asarray([np.sum(parents[:node] == parents[node]) for node in range(len(parents))], np.int32)


def levels(parents) -> list[np.ndarray]:
    """Node indices of depth 1, 2, .. of static parents [N].

    >>> [level.tolist() for level in levels([-1, -1, 0, 0])]
    [[0, 1], [2, 3]]
    """
    parents = validate(parents)
    depth = depths(parents, len(parents))[1:]
    return [np.flatnonzero(depth == d) for d in range(1, int(depth.max(initial=0)) + 1)]


def validate(parents) -> np.ndarray:
    """Returns static parents [N] as int32.

    Raises:
      ValueError: not one-dimensional integers, or a node whose parent is not an earlier node (a cycle, a forward
        reference, an index out of range).
    """
    try:
        array = np.asarray(parents)
    except ValueError:  # lists of several lengths
        array = np.zeros((1, 1))
    if array.ndim != 1 or not (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
        raise ValueError(
            f"the parents of a tree must be a one-dimensional list of integers, got {show(parents)}: see "
            "specjax.tree.kary, and specjax.tree.Dynamic(num_nodes, width, depth) for a shape that is chosen"
        )
    wrong = np.flatnonzero((array < -1) | (array >= np.arange(array.size)))
    if wrong.size:
        node = int(wrong[0])
        raise ValueError(
            f"parents[{node}] = {int(array[node])}: the parent of node {node} must be -1 (the pending token)"
            + (f" or an earlier node 0..{node - 1}" if node else "")
        )
    return array.astype(np.int32)


def window_mask(parents, num_nodes: int):
    """Ancestor-or-self mask over the window: [T, T] or [B, T, T] bool, row sees column.

    Static (numpy) parents give a numpy mask; traced ones a traced mask. None is a chain.
    """
    if parents is None:
        return np.tri(num_nodes + 1, dtype=bool)
    xp = np if isinstance(parents, np.ndarray) else jnp
    above = xp.concatenate([xp.zeros((*parents.shape[:-1], 1), xp.int32), parents + 1], axis=-1)
    same = xp.broadcast_to(xp.eye(num_nodes + 1, dtype=bool), (*above.shape, num_nodes + 1))
    step = above[..., :, None] == xp.broadcast_to(xp.arange(num_nodes + 1), same.shape)  # row -> parent, root -> root
    reach = (step | same).astype(xp.int32)
    for _ in range(max(1, num_nodes.bit_length())):  # squaring doubles the distance covered
        reach = xp.minimum(xp.matmul(reach, reach), 1)
    return reach.astype(bool)


def depths(parents, num_nodes: int):
    """Depth of each window index, [T] or [B, T]: 0 for the pending token."""
    mask = window_mask(parents, num_nodes)
    return mask.sum(axis=-1).astype("int32") - 1


def broadcast_parents(parents, batch: int, num_nodes: int) -> Array:
    """Parents as [B, N] int32."""
    if parents is None:
        parents = chain(num_nodes)
    return jnp.broadcast_to(jnp.asarray(parents, jnp.int32), (batch, num_nodes))


def merge(first: Proposal, second: Proposal) -> Proposal:
    """Both proposals under one root: a node of the second that repeats a sibling in the first is folded into it, so
    that its children go on below the one that is kept. Point masses only.

    Raises:
      ValueError: a proposal with probabilities; merged, they would no longer be given earlier siblings.
    """
    if first.probs is not None or second.probs is not None:
        raise ValueError("merge joins point masses (probs=None): a drawn node has a law given its own siblings only")
    batch, split = first.tokens.shape
    size = split + second.tokens.shape[1]
    tokens = jnp.concatenate([first.tokens, second.tokens], axis=1)
    below = broadcast_parents(second.parents, batch, size - split)
    parents = jnp.concatenate(
        [broadcast_parents(first.parents, batch, split), jnp.where(below < 0, -1, below + split)], axis=1
    )
    valid = jnp.concatenate([first.valid, second.valid], axis=1)
    rows, nodes = jnp.arange(batch), jnp.arange(size, dtype=jnp.int32)

    def fold(node, carry):
        parents, valid = carry
        twin = valid & (tokens == tokens[:, node][:, None]) & (parents == parents[:, node][:, None])
        twin = twin & (nodes[None] < node)
        other = jnp.min(jnp.where(twin, nodes[None], size), axis=1)
        doubled = valid[:, node] & (other < size)
        parents = jnp.where(doubled[:, None] & (parents == node), other[:, None], parents)
        return parents, valid.at[rows, node].set(valid[:, node] & ~doubled)

    parents, valid = lax.fori_loop(split, size, fold, (parents, valid))
    return Proposal(tokens, None, parents, valid)
