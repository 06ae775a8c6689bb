"""What noise a chain needs so that it samples, computed from what its links do to the gradient.

The files are best read in this order:

* ``response`` has the words in which a link declares what it does to the gradient.
* ``law`` has the spectrum that the noise must have.
* ``filters`` turns independent draws into noise of that spectrum.
* ``noise_inputs`` decides where in a chain the noise enters, and refuses the chains for which no noise is right.

Nothing here knows the code of a link, a parameter or a state.
"""
