"""From a model's name to its spec, tokenizer and weights. Everything here but `weights.py` runs without torch."""
