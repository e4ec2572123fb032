"""From the name of a kernel to machine code that can be launched: generated text, nvcc, NVRTC, prepared launches."""
