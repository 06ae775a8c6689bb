"""Hand-written device kernels, each imported only where its compiler is."""
