"""Speculative decoding for JAX: a drafter proposes, the target verifies, the text is the target's own."""

__version__ = "0.1.0"

from specjax import drafters, theory, tree
from specjax.accept import Typical, accept
from specjax.adaptive import Adaptive, Fixed, Heuristic
from specjax.autoregressive import plain
from specjax.drafters.checkpoint import load_drafter, save_drafter
from specjax.engine import Engine
from specjax.generate import Stream, generate, stream
from specjax.models.language_model import LanguageModel
from specjax.models.load import load
from specjax.models.nnx import from_nnx
from specjax.noise import row_keys
from specjax.options import make_sampling
from specjax.queued import Event
from specjax.result import Generation
from specjax.round import Limits, Round, State, no_limits, prefill, round
from specjax.stats import Counts, Stats
from specjax.types import (
    Acceptance,
    Committed,
    Drafter,
    KVCache,
    Model,
    ModelOutput,
    Proposal,
    Sampling,
    Sparse,
    Text,
    Window,
)
from specjax.warp import warp

__all__ = [
    "Acceptance",
    "Adaptive",
    "Committed",
    "Counts",
    "Drafter",
    "Engine",
    "Event",
    "Fixed",
    "Generation",
    "Heuristic",
    "KVCache",
    "LanguageModel",
    "Limits",
    "Model",
    "ModelOutput",
    "Proposal",
    "Round",
    "Sampling",
    "Sparse",
    "State",
    "Stats",
    "Stream",
    "Text",
    "Typical",
    "Window",
    "accept",
    "drafters",
    "from_nnx",
    "generate",
    "load",
    "load_drafter",
    "make_sampling",
    "no_limits",
    "plain",
    "prefill",
    "round",
    "row_keys",
    "save_drafter",
    "stream",
    "theory",
    "tree",
    "warp",
]
