"""Speculative decoding for JAX: faster text, the same text."""

__version__ = "0.1.0"
