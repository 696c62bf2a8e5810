"""Model families and loaders."""

from specjax.models.config import LlamaConfig, RopeScaling

__all__ = ["LlamaConfig", "RopeScaling"]
