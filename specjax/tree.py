"""Draft topologies: parents -> depths, ancestors and the window mask.

Node n of N has ``parents[n]`` in -1 .. n - 1, where -1 is the pending token. Window index = node index + 1; the pending
token is window index 0. None stands for a chain.

>>> window_mask(np.array([-1, 0, 0]), 3).astype(int).tolist()
[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
>>> depths(np.array([-1, 0, 0, 1]), 4).tolist()
[0, 1, 2, 2, 3]
"""

import jax.numpy as jnp
import numpy as np

from specjax.types import Array


def chain(num_nodes: int) -> np.ndarray:
    """The parents of a chain: [-1, 0, .., N - 2]."""
    return np.arange(num_nodes, dtype=np.int32) - 1


def kary(*branching: int) -> np.ndarray:
    """Parents of a tree in which every node of depth d has branching[d] children, in breadth-first order.

    >>> kary(2, 1).tolist()
    [-1, -1, 0, 1]
    """
    if not branching or any(children < 1 for children in branching):
        raise ValueError(f"branching={branching}: give at least one depth, each with 1 or more children")
    parents: list[int] = []
    level = [-1]
    for children in branching:
        start = len(parents)
        parents += [node for node in level for _ in range(children)]
        level = list(range(start, len(parents)))
    return np.asarray(parents, np.int32)


def validate(parents) -> np.ndarray:
    """Returns static parents [N] as int32.

    Raises:
      ValueError: not one-dimensional integers, or a node whose parent is not an earlier node (a cycle, a forward
        reference, an index out of range).
    """
    array = np.asarray(parents)
    if array.ndim != 1 or not (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"parents must be a one-dimensional list of integers, got {parents!r}")
    wrong = np.flatnonzero((array < -1) | (array >= np.arange(array.size)))
    if wrong.size:
        node = int(wrong[0])
        raise ValueError(
            f"parents[{node}] = {int(array[node])}: the parent of node {node} must be -1 (the pending token) or an "
            f"earlier node 0..{node - 1}"
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
