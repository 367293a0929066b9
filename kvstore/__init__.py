"""The paged KV store: who holds which block, what a policy keeps, and what the tensors say."""
