"""``python -m benchmarks.leaderboard``: one call against ensembles of equal cost and what else there is, on real tasks."""
