"""GPU kernels for Native Hybrid Attention.

Only the dispatch in `nha_jax.ops` imports this package, and only when a kernel is about to run, so
that the library works where no GPU stack is installed.
"""
