"""The training loop's one step, and many chains of it at once."""
