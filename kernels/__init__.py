"""Kernels: n-gram keys, gather, projection, gate, on the CPU (compiled) and the GPU (Triton), and their references."""
