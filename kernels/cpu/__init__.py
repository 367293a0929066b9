"""The CPU back end: C++ behind a C interface, compiled for this machine's processor on first use."""
