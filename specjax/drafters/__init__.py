"""Draft sources, one file each."""

from specjax.drafters.cascade import cascade
from specjax.drafters.host import host
from specjax.drafters.lookahead import lookahead
from specjax.drafters.model import model
from specjax.drafters.ngram import ngram
from specjax.drafters.recycling import recycling
from specjax.drafters.retokenize import retokenize
from specjax.drafters.suffix import Pool, remember, suffix, suffix_pool
from specjax.drafters.tables import Tables, build_tables, load_tables
from specjax.drafters.translate import translate

__all__ = [
    "Pool", "Tables", "build_tables", "cascade", "host", "load_tables", "lookahead", "model", "ngram", "recycling",
    "remember", "retokenize", "suffix", "suffix_pool", "translate",
]  # fmt: skip
