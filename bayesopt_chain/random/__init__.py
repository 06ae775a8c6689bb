"""Keyed streams of noise: every draw is a function of a key, a count, a leaf and an element."""
