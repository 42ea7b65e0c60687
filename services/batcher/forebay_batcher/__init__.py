"""Sidecar of an engine: decides who goes next."""
