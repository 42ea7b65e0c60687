"""What the router decides, as pure functions over values."""
