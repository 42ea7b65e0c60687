"""Decides how many replicas each pool has."""
