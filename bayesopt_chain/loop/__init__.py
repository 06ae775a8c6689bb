"""The step of a training loop (``make_step``), many chains of it at once (``parallel``), its capture, gradient estimators."""
