"""Where the batcher touches the world."""
