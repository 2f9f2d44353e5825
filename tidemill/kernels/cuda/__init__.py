"""The ops in Triton, for NVIDIA GPUs. Imported only where a GPU is used (or interpreted, in tests):
Triton is optional.

Every kernel keeps the bits of a row whatever is computed with it: sums run in an order that depends
on the row alone, whichever tile, stage or warp count is chosen. Shape letters as in
kernels/__init__.
"""
