"""Ends what a supervisor leaves behind when it is killed: `python reaper.py STATE_DIR`.

Its standard input is a pipe that only its supervisor holds. A byte says that all is well; an end
without one, that the supervisor is gone and its processes are not. (A signal on the parent's death
would not do: Linux sends one for each of its threads, and the second one ends a service that is
draining.)

It is run as a file, not as a module, and imports nothing until it is needed: it waits all day.
"""

import sys


def main() -> None:
    """Wait for the supervisor's end, then clean up after it where it could not."""
    if sys.stdin.buffer.read(1):
        return
    from pathlib import Path

    from forebay_client.fleet.directory import Directory
    from forebay_client.fleet.launch import end_leftovers

    directory = Directory(Path(sys.argv[1]))
    try:
        # Whoever holds it has begun a new fleet, after it has cleaned up itself.
        with directory.hold():
            end_leftovers(directory)
    except BlockingIOError:
        return


if __name__ == "__main__":
    main()
