"""The baseline: plain decoding is the same loop, warp and cache with a drafter that never drafts."""


from specjax.types import Array, Committed, Drafter, PyTree, Sampling, Text


def _init(params: PyTree, batch: int, capacity: int) -> tuple:
    return ()


def _observe(params: PyTree, state: tuple, committed: Committed) -> tuple:
    return ()


def _draft(params: PyTree, keys: Array, state: tuple, text: Text, sampling: Sampling, n: int):
    raise AssertionError("rounds of the baseline have no draft tokens")


def plain() -> Drafter:
    """The drafter of plain decoding: N = 0, windows of one token."""
    return Drafter(params=(), init=_init, observe=_observe, draft=_draft, num_draft_tokens=0)
