"""What a chain is: links, their responses, the law of matched noise, and the loop that runs them.

To be read in this order: ``response``, ``link`` and ``op`` say what a link is; ``law`` and ``filters`` what noise it needs;
``matching`` where that enters; ``state``, ``update`` and ``chain`` how all of it runs.
"""
