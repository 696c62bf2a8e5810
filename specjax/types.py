"""The types everything else is written in. Imports nothing of specjax.

Dimensions: B rows, N draft nodes, T = 1 + N window, V vocabulary, S cache slots, L layers,
H key/value heads, D head dim, E features, A drafted tokens a law is conditioned on.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Array = jax.Array
PyTree = Any


class KVCache(NamedTuple):
    """Fixed-shape key/value cache. Slots at or past ``lengths`` are scratch: nothing attends to them later.

    Our bfloat16 models keep the bits of bfloat16 in uint16, see `specjax.cache.write`.
    """

    k: tuple[Array, ...] | Array  # L arrays [B, H, S, D], or one [L, B, H, S, D] when layers are scanned
    v: tuple[Array, ...] | Array
    lengths: Array  # [B] int32, committed entries of each row


class ModelOutput(NamedTuple):
    """What one forward pass returns."""

    logits: Array  # [B, T, V] float32, or [B, 1, V] when logits_at was given
    features: Array  # [B, T, E] the hidden states named by feature_layers, concatenated; E = 0 for none
    cache: KVCache  # the window written to slots lengths .. lengths + T - 1; ``lengths`` unchanged


class Model(NamedTuple):
    """A language model as pure functions. Anything that fits this is a target or a draft model.

    ``apply(params, tokens [B, T], positions [B, T], window_mask, cache, *, feature_layers=(), logits_at=None)``
    reads the window and returns a `ModelOutput`. ``window_mask`` covers the window only ([T, T] or [B, T, T]
    bool, row sees column; None is causal); committed slots are always visible. ``logits_at [B]`` limits the
    head to one window row per batch row. ``feature_layers`` names residual streams: k is the stream after k
    layers (0 the embeddings, L the last layer before the final norm), L + 1 is what the head reads.
    """

    init_cache: Callable[[int, int], KVCache]  # (batch, capacity) -> KVCache
    apply: Callable[..., ModelOutput]
    vocab_size: int
    context_length: int | None = None  # positions the model was made for; None: no limit
    layout: Any = None  # where it lies, if it is on a mesh: see `specjax.sharding.on_mesh`


class Sampling(NamedTuple):
    """Per-row sampling parameters, all traced: changing a value never recompiles."""

    temperature: Array  # [B] float32, 0 is greedy
    top_k: Array  # [B] int32, 0 is off
    top_p: Array  # [B] float32, 1 is off
    min_p: Array  # [B] float32, 0 is off
    repetition_penalty: Array  # [B] float32, 1 is off
    presence_penalty: Array  # [B] float32, 0 is off
    frequency_penalty: Array  # [B] float32, 0 is off
    min_new_tokens: Array  # [B] int32, eos ids have no probability before this many emitted tokens
    eos_ids: Array  # [C] int32, padded with -1
    bias_ids: Array  # [B, M] int32, padded with V
    bias: Array  # [B, M] float32, -inf bans


class Text(NamedTuple):
    """Prompt and committed tokens. The last one is the pending token."""

    tokens: Array  # [B, S] int32
    lengths: Array  # [B] int32
    prompt_lengths: Array  # [B] int32


class Sparse(NamedTuple):
    """A law over few candidates: ids distinct within a law, padding has probability 0."""

    ids: Array  # [M] (one reduced vocabulary) or [B, N, M] int32
    probs: Array  # [B, N, M] float32


class Proposal(NamedTuple):
    """Draft nodes, parents before children, siblings in the order they were drawn.

    ``probs`` is the law of node n GIVEN its earlier siblings (a drafter that draws without replacement has
    already zeroed and renormalised). None: every node is a point mass, a deterministic function of the context.
    """

    tokens: Array  # [B, N] int32
    probs: Array | Sparse | None  # [B, N, V]
    parents: Array | None  # [N] or [B, N] int32 node indices, -1 is the pending token; None: a chain
    valid: Array  # [B, N] bool; an invalid node is never judged, nor is anything below it


class Acceptance(NamedTuple):
    """The random decision of one round."""

    path: Array  # [B, T] window indices kept, 0 first; entries past num_accepted repeat the last one
    num_accepted: Array  # [B] accepted draft tokens
    next_token: Array  # [B] residual or bonus token


class Window(NamedTuple):
    """All that the target read in one pass, rejected nodes too, and what it would have said next: for drafters that
    learn from it."""

    tokens: Array  # [B, T]
    parents: Array | None  # [N] or [B, N] node indices as in `Proposal`, -1 is window row 0; None: a chain
    valid: Array  # [B, T] bool, the row holds a token (not padding, not a row of the batch that has finished)
    start: Array  # [B] absolute position of row 0
    top: Sparse  # [B, T, M] the M likeliest next tokens under softmax(logits), likeliest first


class Committed(NamedTuple):
    """What a prefill chunk or a round added to the text, right-padded to a fixed width W."""

    tokens: Array  # [B, W]
    features: Array  # [B, W, E] target features that predicted each token (zeros for the very first token)
    count: Array  # [B] how many of them are real
    start: Array  # [B] absolute position of the first
    window: Window | None = None  # if the drafter asked for it, see `Drafter.window_top`


class Drafter(NamedTuple):
    """A draft source: pure functions and their parameters.

    ``observe`` sees every committed token once, prompt chunks and rounds alike, the pending token included, also
    after rounds in which nothing was drafted. A drafter never sees unverified tokens and never rolls back.
    State leaves have a leading axis B.
    """

    params: PyTree  # () for lookups
    init: Callable[[PyTree, int, int], PyTree]  # (params, batch, capacity) -> state
    observe: Callable[[PyTree, PyTree, Committed], PyTree]  # (params, state, committed) -> state
    draft: Callable[..., tuple[Proposal, PyTree]]  # (params, keys, state, text, sampling, n) -> (Proposal, state)
    num_draft_tokens: int  # N: sizes the window and the cache headroom
    feature_layers: tuple[int, ...] = ()  # target hidden states it reads, see Model
    default_rule: str = "match"  # "rejection" for drafters whose proposals carry probabilities
    context_length: int | None = None  # longest text it can draft for; None: no limit
    widths: tuple[int, ...] = ()  # numbers of nodes below N worth a window of their own, for drafters that often
    #   propose less: a round uses the narrowest window that holds every valid node
    window_top: int = 0  # M: candidates per row in `Committed.window`; 0: no window is wanted
    prompt_window: bool = True  # the rows of the prompt too, which costs the target's head over all of them
    vocab_size: int | None = None  # vocabulary of the target it was made for; None: any
    host: Callable[[], Callable[[list[list[int] | None]], PyTree]] | None = None  # for sources that need Python: called
    #   once per generation, gives a function from the rows' token ids (None: finished) to the drafter's state, which
    #   is called before every round. The rounds are then run from Python, one transfer each
