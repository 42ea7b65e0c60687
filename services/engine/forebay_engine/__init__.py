"""Loads model versions and runs each in a process of its own."""
