"""What a chain is: links, their responses, the law of matched noise, and the loop that runs them."""
