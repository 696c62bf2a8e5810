"""Draft sources, one file each."""

from specjax.drafters.host import host
from specjax.drafters.model import model
from specjax.drafters.ngram import ngram
from specjax.drafters.recycling import recycling
from specjax.drafters.retokenize import retokenize
from specjax.drafters.tables import Tables, build_tables, load_tables
from specjax.drafters.translate import translate

__all__ = ["Tables", "build_tables", "host", "load_tables", "model", "ngram", "recycling", "retokenize", "translate"]
