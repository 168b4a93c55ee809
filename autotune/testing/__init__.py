"""Fakes with real behaviour, for this package's tests and for those of plug-ins."""
