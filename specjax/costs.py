"""What rounds cost on this machine, measured, and the number of draft tokens that this makes best.

A round of n draft tokens takes verify(n) + draft(n); with the acceptance a_i of draft token i given that the ones
before were accepted it emits E = 1 + a_1 + a_1 a_2 + .. + a_1 .. a_n tokens (Leviathan et al., Fast Inference from
Transformers via Speculative Decoding, arXiv 2211.17192, 2023, with a measured cost of verification).
"""

import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import noise, processes
from specjax.drafters.checked import checked_drafter
from specjax.drafters.late import DELAY, late
from specjax.models.fetch import cache_dir
from specjax.models.language_model import LanguageModel, checked
from specjax.options import host, is_int, make_sampling
from specjax.static import Bound, real, show, whole
from specjax.types import Array, Committed, Drafter, Sparse, Text, Window

CAPACITY = 512  # slots of the caches that are measured, half of them filled
REPEATS = 7  # of every measurement, taken in turn; the median counts


class CostModel(NamedTuple):
    """Time of a round by number of draft tokens, in seconds or any unit; straight lines between the numbers."""

    sizes: tuple[int, ...]  # ascending, the first is 0
    verify: tuple[float, ...]  # the target reads a window of 1 + n tokens
    draft: tuple[float, ...]  # the drafter drafts n tokens and reads what was committed; of 0 tokens, it only reads

    def seconds(self, sizes: Sequence[int]) -> tuple[float, ...]:
        """Time of a round of each of these numbers of draft tokens.

        Raises:
          ValueError: numbers outside the measured range; costs that are no positive numbers, one per size.
        """
        known, verify, draft = _checked(self)
        wanted = _counts(sizes)
        if wanted and max(wanted) > known[-1]:
            raise ValueError(f"costs={show(self)} are of 0..{known[-1]} draft tokens, not of {show(sizes)}")
        return tuple(float(x) for x in np.interp(wanted, known, np.add(verify, draft)))

    def tokens_per_second(self, acceptance: Sequence[float | None]) -> dict[int, float]:
        """Expected tokens per second and row for each measured number of draft tokens that has acceptances.

        Args:
          acceptance: a_1 .. a_N, for instance ``stats.per_position``; it ends before the first None.

        Raises:
          ValueError: an acceptance that is no probability; as `seconds`.
        """
        given = host(acceptance)
        if not isinstance(given, list):
            raise ValueError(f"acceptance={show(acceptance)}: give a list, as stats.per_position is")
        chain = [
            real(f"acceptance[{i}]", a, 0, 1, "a probability, 0 to 1")
            for i, a in enumerate(itertools.takewhile(lambda a: a is not None, given))
        ]
        sizes = [size for size in _checked(self).sizes if size <= len(chain)]
        emitted = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(chain))])
        return {size: float(emitted[size]) / time for size, time in zip(sizes, self.seconds(sizes))}

    def best(self, acceptance: Sequence[float | None]) -> int:
        """The measured number of draft tokens of the most `tokens_per_second`; 0 where speculation does not pay."""
        speeds = self.tokens_per_second(acceptance)
        return max(speeds, key=lambda size: speeds[size])


def _counts(sizes: Any) -> list[int]:
    given = host(sizes)
    if not isinstance(given, list):
        raise ValueError(f"sizes={show(sizes)}: give a list of numbers of draft tokens")
    return [whole("sizes", size, 0) for size in given]


def _checked(costs: CostModel) -> CostModel:
    """The same as plain numbers."""
    sizes = host(costs.sizes)
    whole_ones = isinstance(sizes, list) and all(map(is_int, sizes))
    if not whole_ones or sizes[:1] != [0] or any(b <= a for a, b in itertools.pairwise(sizes)):
        raise ValueError(f"costs.sizes={show(costs.sizes)}: must be ascending numbers of draft tokens, the first 0")

    def times(name: str, least: float, words: str) -> tuple[float, ...]:
        values = host(getattr(costs, name))
        if not isinstance(values, list) or len(values) != len(sizes):
            raise ValueError(f"costs.{name}={show(values)}: must be {len(sizes)} times, one for each of costs.sizes")
        return tuple(real(f"costs.{name}[{i}]", value, least, math.inf, words) for i, value in enumerate(values))

    verify = times("verify", sys.float_info.min, "a time: finite, and more than 0")
    return CostModel(tuple(sizes), verify, times("draft", 0, "a time: finite, and 0 or more"))


def cost_model(
    lm: LanguageModel,
    drafter: Drafter,
    *,
    batch: int = 1,
    sizes: Sequence[int] | None = None,
    refresh: bool = False,
    progress: Callable[[int, int], Any] | None = None,
) -> CostModel:
    """Measures the target's windows and the drafter on this machine, once.

    Two programs are compiled for each size, which takes most of the time: seconds for a small model, minutes for one of
    many layers on a CPU. Measuring itself takes some passes of each.

    The result is kept in specjax's cache directory (``$SPECJAX_CACHE``) by model, dtype, devices, batch, drafter and
    version of jax. Accept rules and samplers are not measured.

    Args:
      lm, drafter: what will decode.
      batch: rows B.
      sizes: numbers of draft tokens to measure, besides 0. None: 1, 2, 4, .. and the drafter's own.
      refresh: measure again.
      progress: called with (programs compiled, programs) while they are, from (0, programs) on; not where the costs
        are known.

    Raises:
      ValueError: no model, no drafter or one for another target, sizes out of the drafter's range, batch no whole
        number above 0, a drafter that needs Python.
    """
    lm, batch = checked("lm", lm), whole("batch", batch, 1)
    drafter = checked_drafter(drafter, lm)
    most = drafter.num_draft_tokens
    if not isinstance(refresh, bool):
        raise ValueError(f"refresh={show(refresh)}: must be True or False")
    if drafter.host is not None:
        raise ValueError("a drafter that drafts in Python between the rounds cannot be measured alone")
    if sizes is None:
        sizes = [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]
    wanted = tuple(sorted({0, *_counts(sizes)}))
    if wanted[-1] > most:
        raise ValueError(f"sizes={show(sizes)}: give numbers of draft tokens, 0 to the drafter's {most}")
    path = cache_dir() / "costs" / f"{_key(lm, drafter, batch, wanted)}.json"
    found = None if refresh else _read(path, wanted)
    known = processes.each(int(found is not None))
    if found is None or not all(known):  # all measure together, or none
        found = _measure(lm, drafter, batch, wanted, progress)
        _write(path, found)
    return _agreed(found)


def _agreed(costs: CostModel) -> CostModel:
    """What the first process measured: all must choose the same tiers."""
    if jax.process_count() == 1:
        return costs
    from jax.experimental import multihost_utils

    verify, draft = multihost_utils.broadcast_one_to_all(np.asarray([costs.verify, costs.draft], np.float32))
    return costs._replace(verify=tuple(verify.tolist()), draft=tuple(draft.tolist()))


def _measure(
    lm: LanguageModel, drafter: Drafter, batch: int, sizes: tuple[int, ...], progress: Callable[[int, int], Any] | None
) -> CostModel:
    """Medians of measurements taken in turn, so that a slow moment of the machine meets all of them."""
    calls = [_reader(lm, drafter, batch, size) for size in sizes]
    calls += [_draftsman(lm, drafter, batch, size) for size in sizes]
    times = np.zeros((REPEATS, len(calls)))
    for repeat in range(-1, REPEATS):  # the first time compiles
        for i, call in enumerate(calls):
            if progress is not None and repeat < 0:
                progress(i, len(calls))
            begin = time.perf_counter()
            jax.block_until_ready(call())
            times[max(repeat, 0), i] = time.perf_counter() - begin
    median = np.median(times, axis=0)
    verify, draft = median[: len(sizes)], median[len(sizes) :]
    if reads_late(lm, drafter):
        draft[0] /= DELAY
    return CostModel(sizes, tuple(verify.tolist()), tuple(draft.tolist()))


def features_of(lm: LanguageModel, drafter: Drafter) -> Any:
    """Shape and dtype of the target's features that the drafter asks for."""
    token = jnp.zeros((1, 1), jnp.int32)
    apply = functools.partial(lm.model.apply, feature_layers=drafter.feature_layers)
    return jax.eval_shape(lambda: apply(lm.params, token, token, None, lm.model.init_cache(1, 8))).features


def reads_late(lm: LanguageModel, drafter: Drafter) -> bool:
    """Whether what plain rounds commit is read many tokens at a time, see `specjax.drafters.late`."""
    return late(drafter, features_of(lm, drafter)) is not drafter


def _capacity(lm: LanguageModel, drafter: Drafter) -> int:
    """CAPACITY, or what the contexts allow, in steps of 8."""
    limits = [x for x in (lm.model.context_length, drafter.context_length) if x is not None]
    return -(-max(min([CAPACITY, *limits]), 4 * (2 + drafter.num_draft_tokens)) // 8) * 8


def _reader(lm: LanguageModel, drafter: Drafter, batch: int, size: int) -> Callable[[], Any]:
    """Calls the target on a window of 1 + size tokens, its cache half full and updated in place."""
    slots = _capacity(lm, drafter)
    tokens = jnp.zeros((batch, 1 + size), jnp.int32)
    positions = jnp.broadcast_to(slots // 2 + jnp.arange(1 + size, dtype=jnp.int32)[None], tokens.shape)
    apply = functools.partial(lm.model.apply, feature_layers=drafter.feature_layers)

    @functools.partial(jax.jit, donate_argnums=1)
    def read(params, cache):
        out = apply(params, tokens, positions, None, cache)
        return out.cache, jnp.argmax(out.logits, axis=-1)

    cache = lm.model.init_cache(batch, slots)
    held = [cache._replace(lengths=jnp.full(batch, slots // 2, jnp.int32))]

    def call():
        held[0], said = read(lm.params, held[0])
        return said

    return call


def _draftsman(lm: LanguageModel, drafter: Drafter, batch: int, size: int) -> Callable[[], Any]:
    """Calls the drafter as a round of size nodes does: a draft, then one committed token to read; without nodes, only
    to read, a window of tokens that waited if it reads late."""
    slots, vocab = _capacity(lm, drafter), lm.model.vocab_size
    lengths = jnp.full(batch, slots // 2, jnp.int32)
    words = np.random.default_rng(0).integers(0, vocab, (batch, slots))
    text = Text(jnp.asarray(words, jnp.int32), lengths, lengths)
    keys, sampling = noise.row_keys(range(batch)), make_sampling(batch, vocab)
    width = DELAY if not size and reads_late(lm, drafter) else 1 + size
    committed = _one_token(lm, drafter, text, width)

    @functools.partial(jax.jit, donate_argnums=1)
    def draft(params, state):
        said = ()
        if size:
            proposal, state = drafter.draft(params, keys, state, text, sampling, size)
            said = proposal.tokens
        return drafter.observe(params, state, committed), said

    held = [jax.tree.map(jnp.copy, drafter.init(drafter.params, batch, slots + DELAY))]  # parameters are not donated

    def call():
        held[0], said = draft(drafter.params, held[0])
        return held[0], said

    return call


def _one_token(lm: LanguageModel, drafter: Drafter, text: Text, width: int) -> Committed:
    """One committed token in a window of ``width``."""
    batch, features = text.lengths.shape[0], features_of(lm, drafter)
    tokens, window = text.tokens[:, :width], None
    if top := drafter.window_top:
        ids = jnp.broadcast_to(jnp.arange(top, dtype=jnp.int32)[None, None], (batch, width, top))
        law = Sparse(ids, jnp.full(ids.shape, 1 / (top + 1), jnp.float32))
        window = Window(tokens, None, jnp.ones(tokens.shape, bool), text.lengths - 1, law)
    zeros = jnp.zeros((batch, width, features.shape[-1]), features.dtype)
    return Committed(tokens, zeros, jnp.ones(batch, jnp.int32), text.lengths, window)


# --- the cache on disk


def _key(lm: LanguageModel, drafter: Drafter, batch: int, sizes: tuple[int, ...]) -> str:
    """What times depend on: shapes and settings, not the values of weights."""
    device = jax.devices()[0]
    facts = {
        "model": _name(tuple(lm.model)), "weights": _shapes(lm.params), "batch": batch, "sizes": sizes,
        "drafter": _name(tuple(drafter._replace(params=()))), "draft weights": _shapes(drafter.params),
        "device": f"{device.platform} {device.device_kind}", "cores": os.cpu_count(), "jax": jax.__version__,
        "capacity": _capacity(lm, drafter),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _shapes(tree: Any) -> list[str]:
    """Shapes, dtypes and the number of devices of the leaves, each kind once."""
    def kind(leaf: Any) -> str:
        return f"{np.shape(leaf)} {jnp.result_type(leaf)} {len(leaf.devices()) if isinstance(leaf, Array) else 1}"

    return sorted(set(map(kind, jax.tree.leaves(tree))))


def _name(value: Any) -> str:
    """Functions and settings by name: without addresses, which change from run to run."""
    if isinstance(value, Bound):
        return f"{_name(value.fn)}({', '.join(map(_name, value.args))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_name, value))})"
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value).split(" at 0x")[0]


def _read(path: pathlib.Path, sizes: tuple[int, ...]) -> CostModel | None:
    """None for a file that is not there or is not what was written: then costs are measured again."""
    try:
        stored = json.loads(path.read_text())
        found = CostModel(sizes, tuple(map(float, stored["verify"])), tuple(map(float, stored["draft"])))
        return _checked(found)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: pathlib.Path, costs: CostModel) -> None:
    """Under a temporary name first. A cache that cannot be written is no reason to fail."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            (written := pathlib.Path(scratch) / path.name).write_text(json.dumps(costs._asdict()))
            os.replace(written, path)
    except OSError:
        return
