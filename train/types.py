"""What the parts of training hand to each other."""

from collections.abc import Callable
from typing import NamedTuple

from specjax.types import Array


class Batch(NamedTuple):
    """Rows of one width, each one text from its beginning or several packed one after another."""

    tokens: Array  # [B, T] int32
    counts: Array  # [B, T] bool: the token is to be learnt
    documents: Array | None = None  # [B, T] int32 text of its row it belongs to, -1: padding; None: one a row


class Mean(NamedTuple):
    """A mean before the division, so that means of parts add up to the mean of the whole."""

    total: Array  # [] float32
    weight: Array  # [] float32: what was summed, usually tokens

    def value(self) -> Array:
        """total / weight, 0 where nothing was summed."""
        return self.total / (self.weight + (self.weight == 0).astype(self.weight.dtype))


# (params, given, batch, key) -> (total, metrics): what is minimised, summed over the tokens of the batch and not yet
# divided, and what to report; metrics["loss"] is Mean(total, weight), by whose weight gradients are divided.
Loss = Callable[..., tuple[Array, dict[str, Mean]]]
