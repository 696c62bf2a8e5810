"""The first look at what was given: a drafter, or a draft model and its target."""

import inspect
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from specjax import sharding
from specjax.models.language_model import LanguageModel, checked
from specjax.static import show, whole
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
        _check_together(drafter, lm)
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


def _check_together(drafter: Drafter, lm: LanguageModel) -> None:
    """Refuses a drafter that lies on other devices than a target on a mesh, where JAX would name neither.

    Raises:
      ValueError: naming both meshes.
    """
    theirs, placed = lm.model.layout and lm.model.layout.mesh, sharding.layout_of(drafter)
    if theirs is None:
        return
    lies = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(drafter.params))
    meshes = {each.mesh for each in lies if isinstance(each, NamedSharding) and isinstance(each.mesh, Mesh)}
    for mesh in meshes | ({placed.mesh} if placed else set()):
        if set(mesh.devices.flat) != set(theirs.devices.flat):
            raise ValueError(
                f"drafter lies on {sharding.shown(mesh)} and the target on {sharding.shown(theirs)}: place both on one "
                "with specjax.sharding.place and place_drafter"
            )


def checked_pair(
    draft: Any, target: Any, num_draft_tokens: Any, coupled: Any, max_length: Any
) -> tuple[LanguageModel, LanguageModel, int]:
    """Both models, and the number of draft tokens.

    Raises:
      ValueError: no language models, no whole numbers, or a draft model whose context is shorter than texts may be.
    """
    draft, target = checked("draft", draft), checked("target", target)
    num_draft_tokens = whole("num_draft_tokens", num_draft_tokens, 1, "; drafter=None decodes plainly")
    if not isinstance(coupled, bool):
        raise ValueError(f"coupled={show(coupled)}: must be True or False")
    if max_length is not None:
        max_length = whole("max_length", max_length, 1, "; None is the target's context")
    longest, context = max_length or target.model.context_length, draft.model.context_length
    if longest is not None and context is not None and context < longest:
        raise ValueError(
            f"the draft model's context is {context} tokens and texts may have {longest}: "
            f"pass max_length={context} if yours are no longer than that"
        )
    return draft, target, num_draft_tokens
