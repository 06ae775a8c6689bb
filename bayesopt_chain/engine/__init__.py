"""The step of neighbouring links of a chain as one pass over memory: its numbers, and the kernels that make it."""
