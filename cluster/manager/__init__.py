"""The global cache manager: who may run where with how many KV blocks, and whose blocks are given up first."""
