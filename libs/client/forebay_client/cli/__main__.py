"""`python -m forebay_client.cli`, where the command is not on PATH."""

from forebay_client.cli import main

if __name__ == "__main__":
    main()
