"""Python client and the forebay command."""
