"""TorchOpt's optimizers with a temperature: functions in ``functional``, classes in ``classes``."""
