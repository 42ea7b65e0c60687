"""One runner: loads one model version, serves it on a Unix socket, and obeys its host.

Nothing heavy is imported before the host has been told that the process is up.
"""

import argparse
import importlib

from forebay_engine.core import link
from forebay_engine.runner.host_link import HostLink

_IMPORT_PHASE = 2


def main() -> None:
    """Run the runner that a host has started."""
    parser = argparse.ArgumentParser(prog="forebay_engine.runner")
    parser.add_argument("--link-fd", type=int, required=True)
    parser.add_argument("--model", required=True, help="only so that process lists show it")
    host = HostLink(parser.parse_args().link_fd)
    start = host.read_start()
    host.send(link.Phase(_IMPORT_PHASE))
    importlib.import_module("forebay_engine.runner.runner_loop").run(host, start)


if __name__ == "__main__":
    main()
