"""Draft sources, one file each."""

from specjax.drafters.model import model
from specjax.drafters.ngram import ngram

__all__ = ["model", "ngram"]
