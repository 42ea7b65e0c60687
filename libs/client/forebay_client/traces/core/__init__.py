"""What a trace says, decided without touching the world."""
