"""The stream between routers and engines."""
