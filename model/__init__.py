"""A Llama model and what it needs: checkpoints, tokenizers, kernels, ranks."""

import os

# Torch then asks for huge pages for large tensors on the CPU: the first touch of fresh memory, most of what loading
# costs, takes a fraction of the time. Here because torch reads it once, at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
