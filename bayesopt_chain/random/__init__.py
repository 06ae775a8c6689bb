"""Random numbers without hidden state: every draw is a function of a key, a step, a leaf and an element."""
