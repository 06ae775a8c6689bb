"""The fast path: runs of links as one sweep over memory."""
