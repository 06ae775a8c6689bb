"""``python -m bayesopt_chain.demo``: one network on scikit-learn's digits, four posteriors by changing one line each."""
