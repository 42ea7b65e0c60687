"""The token path: relays streams between hops."""
