"""The first look at what was given as a drafter."""

import inspect
from typing import Any

from specjax.models.language_model import LanguageModel
from specjax.static import show
from specjax.types import Drafter

LONGEST_WINDOW = 65536  # tokens per forward pass: a prefill chunk or a window of draft tokens


def checked_drafter(drafter: Any, lm: LanguageModel, otherwise: str = "") -> Drafter:
    """The argument if it is a `Drafter` that may draft for this target.

    Raises:
      ValueError: if it is not; says how to get one, ``otherwise`` added.
    """
    if isinstance(drafter, Drafter):
        if drafter.num_draft_tokens > LONGEST_WINDOW:
            count = show(drafter.num_draft_tokens)
            raise ValueError(f"drafter has num_draft_tokens={count}: at most {LONGEST_WINDOW}; 3 to 16 is usual")
        if drafter.vocab_size not in (None, lm.model.vocab_size):
            raise ValueError(
                f"drafter was made for a target of {drafter.vocab_size} tokens and this one has "
                f"{lm.model.vocab_size}: make one for this model"
            )
        return drafter
    shown = show(drafter)
    if isinstance(drafter, LanguageModel):
        remedy = "a model drafts through specjax.drafters.model(draft, target)"
    elif inspect.isroutine(drafter):
        shown = name = getattr(drafter, "__name__", "it")
        remedy = f"this is a function: call it, as in specjax.drafters.{name}(...)"
    else:
        remedy = f"give a drafter such as specjax.drafters.ngram(){otherwise}"
    raise ValueError(f"drafter={shown}: {remedy}")
