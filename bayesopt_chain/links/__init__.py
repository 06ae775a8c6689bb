"""Links: one idea of a gradient-transformation chain in each file."""
