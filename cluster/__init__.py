"""The control plane: HTTP and gRPC front doors, routing, admission, configuration, CLI."""
