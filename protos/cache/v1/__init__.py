"""Version 1 of the control plane: kvorum.cache.v1."""
