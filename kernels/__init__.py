"""Tensor operations behind one back-end interface; knows nothing of requests or of who owns a block."""
