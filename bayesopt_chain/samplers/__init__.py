"""Named samplers: chains of links and nothing else, one family in each file."""
