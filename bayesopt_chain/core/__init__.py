"""What a chain is: links, run one after the other over the leaves of a tree, and the noise between them.

To be read in this order: ``link`` and ``op`` say what a link is; ``state``, ``update`` and ``chain`` how all of it runs. What
noise a chain needs stands in :mod:`bayesopt_chain.matching`.
"""
