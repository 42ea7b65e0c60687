"""What the batcher decides: who goes next, which model is meant, whose orders count."""
