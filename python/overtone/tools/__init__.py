"""What the CUDA kernels of csrc/cuda take of a GPU: launches, registers (compile) and a model of their time (model)."""
