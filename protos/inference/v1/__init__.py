"""Version 1 of the public gRPC API: kvorum.inference.v1."""
