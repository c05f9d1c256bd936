"""Readers: ``reader.py`` has the interface and the registry."""
