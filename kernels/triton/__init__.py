"""The GPU back end: cuBLAS linears through torch, everything else in Triton, decode as captured CUDA graphs."""
