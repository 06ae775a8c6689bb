"""What a chain is: links, run one after the other over the leaves of a tree, and the noise between them.

Read the files in this order: ``link`` and ``op`` say what a link is; ``state``, ``update`` and ``chain`` say how a chain runs.
The law by which a chain's noise is found is in :mod:`bayesopt_chain.matching`.
"""
