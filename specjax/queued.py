"""Requests of an `Engine` on the host: their rows of the arrays, and what each has said so far."""

from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.accept import Typical
from specjax.request import Request
from specjax.result import Detokenizer, Generation, StopStrings, reasons
from specjax.round import RUNNING, STOP, Limits
from specjax.slots import Step
from specjax.stats import Counts, Stats
from specjax.types import Array, Sampling, Text


class Event(NamedTuple):
    """What a step added to one request."""

    id: int  # what `Engine.insert` returned
    tokens: list[int]  # new token ids
    text: str  # the text they complete, never half a character; "" for a model without tokenizer
    result: Generation | None  # of one row, if the request has finished


class Sizes(NamedTuple):
    """Room of an engine for a request and for what it may bring along."""

    width: int  # of the text's buffer
    capacity: int  # longest text
    eos_ids: int
    stop_sequences: int
    stop_tokens: int
    biases: int


class Row(NamedTuple):
    """What a request puts into a slot: numpy arrays of one row, of the engine's sizes."""

    text: Text
    key_data: Array  # [1, 2]
    sampling: Sampling  # with eos_ids [1, C]
    limits: Limits  # with stop_sequences [1, Q, W]


class Job:
    """A request: its row, and what it has said so far."""

    def __init__(self, id: int, row: Row, made: Request, truncated: bool, tokenizer: Any, counts: Counts):
        self.id, self.row = id, row
        self.prompt_length = int(row.text.lengths[0])
        self.finish = RUNNING
        self._tokens: list[int] = []
        self._text = ""
        self._truncated = truncated
        self._lossless = not isinstance(made.program.rule, Typical)
        self._logprobs: list[tuple[Any, Any]] | None = [] if made.program.logprobs else None
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopStrings(made.stop_strings)
        self._counts = counts

    def take(self, slot: int, info: Step) -> Event:
        """Appends what a step added in ``slot`` (numpy), up to a stop string."""
        before, shown = len(self._tokens), len(self._text)
        for i in range(int(info.count[slot])):
            self._tokens.append(int(info.tokens[slot, i]))
            if self._logprobs is not None and info.raw_logprobs is not None and info.warped_logprobs is not None:
                self._logprobs.append((info.raw_logprobs[slot, i], info.warped_logprobs[slot, i]))
            piece = "" if self._detokenizer is None else self._detokenizer.push(self._tokens[-1])
            self._text += self._stops.push(piece)
            if self._stops.found:
                break
        counts = jax.tree.map(lambda x: x[slot : slot + 1], info.counts)
        self.finish = int(info.finish[slot])
        if self._stops.found:
            self.finish = STOP
            counts = self._counts.cut(counts, np.asarray([len(self._tokens) - before]))
        elif self.finish != RUNNING:
            tail = "" if self._detokenizer is None else self._detokenizer.flush()
            self._text += self._stops.push(tail) + self._stops.flush()
        self._counts = counts
        return self.event(before, shown)

    def event(self, before: int = 0, shown: int = 0) -> Event:
        """What came after ``before`` tokens and ``shown`` characters."""
        result = None if self.finish == RUNNING else self.result()
        return Event(self.id, self._tokens[before:], self._text[shown:], result)

    def result(self) -> Generation:
        """What has been said so far; ``finish_reasons`` is [None] before the end."""
        raw = warped = None
        if self._logprobs is not None:
            raw, warped = ([np.asarray([pair[i] for pair in self._logprobs], np.float32)] for i in range(2))
        texts = None if self._detokenizer is None else [self._text]
        finish = reasons(np.asarray([self.finish]), np.asarray([self._truncated]))
        return Generation(texts, [list(self._tokens)], finish, raw, warped, Stats(self._counts), self._lossless)


def jobs(made: Request, first_id: int, sizes: Sizes, on_capacity: str, tokenizer: Any) -> list[Job]:
    """The rows of a checked request.

    Raises:
      ValueError: a text that may outgrow the engine (on_capacity="error"), a prompt that does; more end ids, stop
        sequences or biases than there is room for.
    """
    text, key_data, sampling, limits = jax.device_get(
        (made.text, jax.random.key_data(made.keys), made.sampling, made.limits)
    )
    lengths, budget = text.lengths.astype(np.int64), limits.max_new_tokens
    over = lengths + budget > sizes.capacity
    for row in np.flatnonzero(over & ((lengths > sizes.capacity) | (on_capacity == "error"))):
        remedy = "shorten the prompt" if lengths[row] > sizes.capacity else "lower max_new_tokens"
        raise ValueError(
            f"prompt {row} has {lengths[row]} tokens and max_new_tokens is {budget[row]}, but this engine holds texts "
            f"of {sizes.capacity} tokens: {remedy}, or make it with a larger capacity"
        )
    budget = np.where(over, sizes.capacity - lengths, budget).astype(np.int32)
    sampling, limits = own_sampling(sampling, sizes, made.program.model.vocab_size), own_limits(limits, sizes)
    tokens = np.zeros((len(lengths), sizes.width), np.int32)
    used = min(sizes.width, text.tokens.shape[1])  # what lies past the prompt is padding
    tokens[:, :used] = text.tokens[:, :used]
    all_rows = Row(text._replace(tokens=tokens), key_data, sampling, limits._replace(max_new_tokens=budget))
    counts = jax.device_get(Counts.zeros(1, made.program.drafter.num_draft_tokens))
    rows = (jax.tree.map(lambda x, i=i: x[i : i + 1], all_rows) for i in range(len(lengths)))
    cut = made.truncated | over
    return [Job(first_id + i, row, made, bool(cut[i]), tokenizer, counts) for i, row in enumerate(rows)]


def own_sampling(sampling: Sampling, sizes: Sizes, vocab_size: int) -> Sampling:
    """Sampling (numpy) with end ids per row, padded like the biases to the engine's sizes."""
    ids, bias, ends = sampling.bias_ids, sampling.bias, np.asarray(sampling.eos_ids)
    ends = ends[ends >= 0]
    used = int(np.max(np.sum(np.asarray(ids) < vocab_size, axis=1)))
    _check_room("eos_ids", len(ends), "max_eos_ids", sizes.eos_ids)
    _check_room("tokens in logit_bias and banned_tokens", used, "max_biases", sizes.biases)
    return sampling._replace(
        eos_ids=_padded(np.tile(ends, (len(ids), 1)), sizes.eos_ids, -1),
        bias_ids=_padded(ids[:, :used], sizes.biases, vocab_size),
        bias=_padded(bias[:, :used], sizes.biases, 0),
    )


def own_limits(limits: Limits, sizes: Sizes) -> Limits:
    """Limits (numpy) with stop sequences per row, left-padded to the engine's sizes."""
    table = np.asarray(limits.stop_sequences)
    table = table[np.any(table >= 0, axis=1)]
    longest = int(np.max(np.sum(table >= 0, axis=1), initial=0))
    _check_room("stop sequences", len(table), "max_stop_sequences", sizes.stop_sequences)
    _check_room("tokens in a stop sequence", longest, "max_stop_tokens", sizes.stop_tokens)
    own = np.full((sizes.stop_sequences, sizes.stop_tokens), -1, np.int32)
    if longest:
        own[: len(table), -longest:] = table[:, -longest:]
    return limits._replace(stop_sequences=np.tile(own, (len(limits.max_new_tokens), 1, 1)))


def _check_room(what: str, given: int, name: str, room: int) -> None:
    if given > room:
        raise ValueError(f"{given} {what}, but this engine has room for {room}: make it with {name}={given} or more")


def _padded(values: Any, width: int, fill: int) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=fill)


def joined(results: list[Generation], num_draft_tokens: int, logprobs: bool, texts: bool) -> Generation:
    """Results of one row each as one, in order."""
    none = jax.device_get(Counts.zeros(0, num_draft_tokens))
    counts = jax.tree.map(lambda *x: np.concatenate(x), none, *(result.stats.counts for result in results))

    def rows(name: str) -> list[Any]:
        return [row for result in results for row in getattr(result, name) or []]

    return Generation(
        rows("texts") if texts or not results else None, rows("tokens"), rows("finish_reasons"),
        rows("logprobs") if logprobs else None, rows("warped_logprobs") if logprobs else None, Stats(counts),
        all(result.lossless for result in results),
    )  # fmt: skip
