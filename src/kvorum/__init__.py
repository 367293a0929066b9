"""kvorum: distributed LLM inference whose KV cache is governed as one resource."""

__version__ = "0.1.0"
