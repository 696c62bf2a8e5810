"""Model families and loaders."""

from specjax.models.config import LlamaConfig, RopeScaling
from specjax.models.llama import Llama
from specjax.models.nnx import from_nnx

__all__ = ["Llama", "LlamaConfig", "RopeScaling", "from_nnx"]
