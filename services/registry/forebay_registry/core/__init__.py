"""What may be in the catalogue; pure."""
