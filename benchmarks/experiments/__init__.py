"""The experiments: one command each, a record of settings, seeds and machine, and one page made of the records."""
