"""Device backends: the only code that knows CUDA, MPS, XPU or the CPU's memory."""
