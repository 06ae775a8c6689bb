"""``python -m bayesopt_chain.demo``: the one call against a network, its ensemble and last-layer Laplace, on five tasks."""
