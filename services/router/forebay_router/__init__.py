"""Lets requests in, resolves and places them, relays their streams."""
