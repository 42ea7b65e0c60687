"""What a local fleet consists of and how it is told about, decided without touching the world."""
