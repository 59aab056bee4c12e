# SPDX-License-Identifier: Apache-2.0
"""Entry: ``millpond``. Sets up Ctrl-C and the standard streams before it imports anything else."""

import signal


def main() -> None:
    """Load the command line, while Ctrl-C just ends the process, and run it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from millpond.host.cli import exits
    from millpond.host.terminal import streams

    streams.prepare()
    try:
        from millpond.host.cli import app
    except ModuleNotFoundError as error:
        exits.missing(error)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    app.main()


if __name__ == "__main__":
    main()
