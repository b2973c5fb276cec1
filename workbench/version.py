"""The version of the package, its one place."""

__version__ = "0.1.0"
