"""Ops made of torch's batched matrix products, Cholesky and triangular solves, for CUDA tensors.

torch.linalg's QR, eigh and inverse loop over the matrices of a batch on GPUs, and wait for each; these products take
the whole batch at once, and the host never waits for the device: no branch depends on a number. The same code runs on
CPU tensors, where the tests prove it.
"""
