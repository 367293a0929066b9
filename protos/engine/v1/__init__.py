"""Version 1 of the router-engine stream: kvorum.engine.v1."""
