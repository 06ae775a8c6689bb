"""The examples of the library ``posteriors``, each in both libraries side by side, with the numbers that must agree."""
