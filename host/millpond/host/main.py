# SPDX-License-Identifier: Apache-2.0
"""Entry: ``millpond``. Sets up Ctrl-C before it imports anything else."""

import signal


def main() -> None:
    """Load the command line, while Ctrl-C just ends the process, and run it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from millpond.host.cli import app

    signal.signal(signal.SIGINT, signal.default_int_handler)
    app.main()


if __name__ == "__main__":
    main()
