"""The fast path: neighbouring links of a chain computed together, in one pass over memory."""
