"""Model families and loaders."""

from specjax.models.config import LlamaConfig, RopeScaling
from specjax.models.export import save_safetensors
from specjax.models.llama import Llama
from specjax.models.nnx import from_nnx
from specjax.models.orbax import save

__all__ = ["Llama", "LlamaConfig", "RopeScaling", "from_nnx", "save", "save_safetensors"]
