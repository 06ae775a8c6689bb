"""What noise a chain needs: from what its links do to the gradient to the noise that makes it sample.

To be read in this order: ``response`` says what a link does, in a word or two; ``law`` what spectrum the noise must have;
``filters`` how draws get that spectrum; ``noise_inputs`` where in a chain the noise enters, and what is refused. Nothing here
knows a link's code, a parameter or a state.
"""
