"""The version, for the package, its metadata and the files it writes."""

__version__ = "0.1.0"
